"""What the parts of ``numa=`` send each other."""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record

MODES = ("node", "socket", "exclusive", "core-complex")


@frozen_record
class PciDevice:
    """An accelerator of a machine.

    Attributes:
        runtime: "cuda" or "rocm".
        address: On the PCI bus, as /sys/bus/pci/devices has it: "0000:dc:00.0".
        names: Its UUID and those of its MIG instances, as far as they are known.
        model: What sets it apart from devices of another kind.
    """

    runtime: str
    address: str
    names: tuple[str, ...] = ()
    model: str = ""


@frozen_record
class NumaOrder:
    """How to bind the ranks of a machine.

    Attributes:
        mode: One of ``MODES``, or CPUs by local rank: "0-7;8-15".
        memory: "preferred", "bind" or None.
        asked: The option as the user gave it.
        devices: The machine's, in the order in which their runtime counts them.
        allowed: The CPUs that the caller may use; none: it is on another machine.
        root: Where its /sys is.
    """

    mode: str
    memory: str | None
    asked: str
    devices: tuple[PciDevice, ...] = ()
    allowed: tuple[int, ...] = ()
    root: str = "/"

    @property
    def lists(self) -> list[str]:
        """The CPUs of each local rank, if they were given."""
        return [] if self.mode in MODES else self.mode.split(";")
