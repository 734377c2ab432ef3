"""The messages between the parts of ``numa=``."""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record

MODES = ("node", "socket", "exclusive", "core-complex")


@frozen_record
class PciDevice:
    """An accelerator of a machine.

    Attributes:
        runtime: "cuda" or "rocm".
        address: Its address on the PCI bus, as in /sys/bus/pci/devices: "0000:dc:00.0".
        names: Its UUID and those of its MIG instances, as far as they are known.
        model: Its model; devices of another kind have another one.
    """

    runtime: str
    address: str
    names: tuple[str, ...] = ()
    model: str = ""


@frozen_record
class NumaOrder:
    """An order to bind the ranks of a machine.

    Attributes:
        mode: One of ``MODES``, or CPUs by local rank: "0-7;8-15".
        memory: "preferred", "bind" or None.
        asked: The option as the user gave it.
        devices: The machine's devices, in the order of their runtime.
        allowed: The CPUs that the caller may use; none: the caller is on another machine.
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
