"""MegEngine's names: its scripts port by changing an import: ``import mlaunch as dist``.

As there, most functions also work without a process group, as in a world of one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from mlaunch.comm.rank import world
from mlaunch.compat.wire import Signer, known_secret, secret_variable
from mlaunch.protocol import this_rank
from mlaunch.rendezvous.store_client import Barrier, NotAllCameError, Turn, wait_for
from mlaunch.rendezvous.tcp_store import connect
from mlaunch.torch_parts.process_groups import default_store

_SPACE = "mlaunch/user"
_NOTHING = "nothing"  # neither a pickle nor a number
_KEPT = 2  # versions of a value, for readers that are about to read one
_SLICE = 10.0  # seconds
_LONGEST = 8 * 1024 * 1024 - 4096  # bytes of a value: torch's store hangs up beyond 8 MiB; less a signature
P = ParamSpec("P")
R = TypeVar("R")
_backends: list[str] = []  # of override_backend, the innermost last


class Client:
    """A connection to a ``Server``, or to the store of this process's group (``get_client()``).

    Several threads may use it.

    Args:
        master_ip: The server's address or host name.
        port: Its port.
        timeout: Limit in seconds for reaching the server, and for each operation that waits.
        store: An existing connection, instead of an address.
        secret: The server's (``Server.secret``), which signs values; nothing else is unpickled. None: from the
            environment, which children of the server's process inherit. Barriers need none.

    Raises:
        ConnectionError: The server could not be reached within ``timeout``.
    """

    def __init__(
        self,
        master_ip: str = "localhost",
        port: int = 0,
        *,
        timeout: float = 1800.0,
        store: dist.Store | None = None,
        secret: str | None = None,
    ) -> None:
        if store is None:
            if port == 0:
                raise ValueError("port=0: a client must know the port on which the server listens")
            store = _connect(master_ip.strip("[]"), port, timeout)
        self._store: Any = dist.PrefixStore(_SPACE, store)  # its annotations lack bytes and ``append``
        self._timeout = timeout
        self._seen: dict[str, int] = {}  # by place: the highest version
        secret = known_secret(port) if secret is None else secret
        self._signer = None if secret is None else Signer(secret)
        self._variable = secret_variable(port)

    def user_set(self, key: str, val: Any) -> None:
        """Set a picklable value under a name, in place of an earlier one. Does not wait."""
        place, signer = f"value/{key}", self._known_signer(f"user_set({key!r})")
        data = _pickled(val, f"user_set({key!r})")
        # The store can neither read without waiting nor compare and delete; so each value is a version, numbered and
        # claimed by counters, to which the store adds atomically.
        version = self._store.add(f"{place}/version", 1)
        self._store.set(f"{place}/{version}", signer.sign(f"{place}/{version}", data))
        # Not the last version: somebody may have read its number but not its value.
        for name in (f"{place}/{version - _KEPT}", f"{place}/{version - _KEPT}/taken"):
            self._store.delete_key(name)

    def user_get(self, key: str, timeout: float | None = None) -> Any:
        """Return the value under a name, which stays there; wait until there is one. TimeoutError after the limit."""
        return self._wait_for_value(key, f"user_get({key!r})", timeout, take=False)

    def user_pop(self, key: str, timeout: float | None = None) -> Any:
        """Return the value, as ``user_get``, and remove it: of several callers exactly one gets it."""
        return self._wait_for_value(key, f"user_pop({key!r})", timeout, take=True)

    def _wait_for_value(self, key: str, what: str, timeout: float | None, *, take: bool) -> Any:
        self._known_signer(what)
        place, limit = f"value/{key}", self._limit(timeout)
        deadline = time.monotonic() + limit
        while True:
            seen = self._seen.get(place, 0)  # before another thread sees a later one
            version = self._store.add(f"{place}/version", 0)
            if version < seen:
                raise ValueError(f"{what}: the store has gone back to version {version}: somebody else writes to it")
            self._seen[place] = version
            taken = self._peek(f"{place}/{version}/taken") is not None
            value = None if taken else self._peek(f"{place}/{version}")
            if value is not None and (not take or self._store.add(f"{place}/{version}/taken", 1) == 1):
                return self._unpack(f"{place}/{version}", value, what)
            awaited = version + 1 if taken or value is not None or version == 0 else version
            left = deadline - time.monotonic()
            # In slices: a version that others replace meanwhile never comes.
            if not wait_for(self._store, f"{place}/{awaited}", max(0.001, min(left, _SLICE))) and left <= _SLICE:
                raise TimeoutError(f"{what}: nobody has set it within {limit:g} s")

    def _peek(self, key: str) -> bytes | None:
        """Return the value if there is one now, else None; the store's own ``get`` would wait."""
        found: bytes = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found

    def group_barrier(self, key: str, size: int, timeout: float | None = None) -> None:
        """Return once ``size`` processes have called it with this key. The key may be used again.

        Raises:
            TimeoutError: After the limit; it names the ranks (or processes) that came, and how many did not.
        """
        self._meet(f"barrier/{key}", size, f"group_barrier({key!r})", timeout)

    def bcast_val(self, val: Any, key: str, size: int, timeout: float | None = None) -> Any:
        """Return to all ``size`` callers the value of the one that does not pass None.

        If all pass None, all get None. The key may be used again.

        Raises:
            TimeoutError: After the limit; it names the ranks (or processes) that came, and how many did not.
        """
        what = f"bcast_val(..., {key!r})"
        signer, data = self._known_signer(what), _pickled(val, what)

        def put(turn: Turn) -> None:
            if val is not None:
                self._store.set(f"{turn.place}/value", signer.sign(f"{turn.place}/value", data))

        value = f"{self._meet(f'bcast/{key}', size, what, timeout, put).place}/value"
        sent = self._peek(value)
        found = None if sent is None else self._unpack(value, sent, what)
        # The last reader deletes it: only that one knows that all have it.
        if self._store.add(f"{value}/read", 1) == size:
            self._store.delete_key(value)
            self._store.delete_key(f"{value}/read")
        return found

    def _meet(
        self, place: str, size: int, what: str, timeout: float | None, put: Callable[[Turn], None] | None = None
    ) -> Turn:
        try:
            return Barrier(self._store, place, size).meet(_name(), self._limit(timeout), put)
        except NotAllCameError as error:
            names = ", ".join(error.came) + _absent(place.partition("/")[2], error.came)
            raise TimeoutError(f"{what}: {len(error.came)} of {size} came within {error.limit} s: {names}") from None

    def _known_signer(self, what: str) -> Signer:
        if self._signer is None:
            raise ValueError(
                f"{what}: this client has no secret to sign values with; give it secret=server.secret, or start its "
                f"process with {self._variable} in the environment"
            )
        return self._signer

    def _unpack(self, place: str, signed: bytes, what: str) -> Any:
        pickled = self._known_signer(what).open(place, signed)
        # Before it is unpickled, which runs any code that the writer has chosen.
        if pickled is None:
            raise ValueError(f"{what}: the value has another signature: it was set by a client with another secret")
        return pickle.loads(pickled)

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout


def _pickled(value: Any, what: str) -> bytes:
    data = pickle.dumps(value)
    if len(data) > _LONGEST:
        raise ValueError(
            f"{what}: the value takes {len(data)} bytes pickled, and the store takes {_LONGEST} at most; "
            f"exchange it by mlaunch.comm, or put it into a file and its path here"
        )
    return data


def _connect(address: str, port: int, timeout: float) -> dist.Store:
    try:
        socket.create_connection(
            (address, port), timeout
        ).close()  # torch would wait for the whole limit, and name nothing
        return connect(address, port, timedelta(seconds=timeout))
    except (OSError, dist.DistError) as error:
        raise ConnectionError(f"no rendezvous server answers at {address}, port {port}: {error}") from error


def _name() -> str:
    rank = os.environ.get("RANK")
    return f"rank {rank}" if rank is not None else f"{socket.gethostname()} pid {os.getpid()}"


def _absent(key: str, came: list[str]) -> str:
    """Return the ranks that did not come, if the key lists the ranks of a group, as MegEngine's do; else ""."""
    members = key.split(",")
    if not all(member.isdigit() for member in members):
        return ""
    absent = [member for member in members if f"rank {member}" not in came]
    return f"; missing: rank {', '.join(absent)}" if absent else ""


class Group:
    """Some of the ranks; ``new_group`` makes one."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """For torch's collectives. RuntimeError without a process group."""
        return self._process_group or world.group()

    @property
    def ranks(self) -> list[int]:
        """The members' ranks in the world, in the group's order."""
        return dist.get_process_group_ranks(self.process_group) if is_distributed() else [0]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self.ranks.index(get_rank())

    @property
    def key(self) -> str:
        """The ranks as the key of a barrier, such as "0,1,3"."""
        return ",".join(map(str, self.ranks))

    @property
    def is_single_machine(self) -> bool:
        """True if all members are on this machine. RuntimeError if that is not known (see ``get_local_rank``)."""
        return not is_distributed() or world.together(self.ranks)

    def __repr__(self) -> str:
        # torch's errors about a group show its repr: so people who pass this one read there what to pass.
        return f"<Group of ranks {self.key}; torch takes its .process_group>"


WORLD = Group(None)
"""All ranks, of the present process group."""


def is_distributed() -> bool:
    """True if there is a process group."""
    return world.is_grouped()


def get_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return world.get_rank()


def get_world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return world.get_world_size()


def get_local_device_id() -> int:
    """Return the number of this rank's device on its machine, as the rank sees it; on CPUs its local rank."""
    if is_distributed() and _accelerated():
        return torch.accelerator.current_device_index()
    return world.local_rank() if is_distributed() else 0


def get_backend() -> str | None:
    """Return the backend for this rank's device: "nccl", "gloo", ...; None without a process group."""
    if not is_distributed():
        return None
    offered = dict(part.split(":") for part in dist.get_backend_config(world.group()).split(","))
    accelerator = torch.accelerator.current_accelerator() if _accelerated() else None
    return offered.get(accelerator.type if accelerator else "cpu", next(iter(offered.values())))


def _accelerated() -> bool:
    """True if the world's group serves an accelerator that exists here."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and f"{accelerator.type}:" in dist.get_backend_config(world.group())


def new_group(proc_ranks: Sequence[int]) -> Group:
    """Make a group of these ranks. Collective only for them: the others need not call it.

    The order of ranks, which must be the same on all members, numbers the members: for ``Group.rank``, and for the root
    of ``bcast_list_``, which is the first.

    Raises:
        ValueError: A rank is there twice, or not in the world; this process is not a member; or the order is not
            ascending, and this torch cannot make such a group.
    """
    ranks, size = list(proc_ranks), get_world_size()
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(f"new_group({ranks}): allowed: different ranks from 0 to {size - 1}")
    if get_rank() not in ranks:
        raise ValueError(f"new_group({ranks}): this is rank {get_rank()}; only the group's members may call it")
    if not is_distributed():
        return WORLD
    backend = _backends[-1] if _backends else None
    return Group(world.subgroup(ranks, backend))


def group_barrier(group: Group = WORLD) -> None:
    """Return once every rank of the group has called it. Collective for the group; at once without one."""
    if is_distributed():
        dist.barrier(group=group.process_group)


def synchronized(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that every rank calls: it returns when all have finished it."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        value = func(*args, **kwargs)
        group_barrier()
        return value

    return wrapper


@contextlib.contextmanager
def override_backend(new_backend: str) -> Iterator[None]:
    """Return a context manager: groups that ``new_group`` makes inside have this backend."""
    _backends.append(new_backend)
    try:
        yield
    finally:
        _backends.pop()


def bcast_list_(inps: Iterable[torch.Tensor], group: Group = WORLD) -> None:
    """Overwrite tensors in place with those of the group's first rank. Collective; all pass tensors of equal shapes."""
    if not is_distributed():
        return
    source = group.ranks[0]
    work = [
        # Start all before waiting for one.
        dist.broadcast(tensor.detach(), source, group=group.process_group, async_op=True)
        for tensor in inps
    ]  # fmt: skip
    for pending in work:
        pending.wait()


def make_allreduce_cb(
    reduce_method: str, group: Group = WORLD
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]:
    """Return a callback that reduces a parameter's gradient over the group, in place.

    The callback takes ``(param, grad)`` and returns the gradient, as MegEngine's; or takes ``(param)`` and returns
    None, for ``param.register_post_accumulate_grad_hook``.

    Args:
        reduce_method: "mean" or "sum", in upper or lower case.

    Raises:
        ValueError: Another ``reduce_method``.
    """
    method = reduce_method.lower()
    if method not in {"mean", "sum"}:
        raise ValueError(f"reduce_method={reduce_method!r}: allowed: 'mean', 'sum'")

    def callback(param: torch.Tensor, grad: torch.Tensor | None = None) -> torch.Tensor | None:
        gradient = param.grad if grad is None else grad
        if gradient is not None and is_distributed():
            dist.all_reduce(gradient, group=group.process_group)
            if method == "mean":
                gradient /= group.size
        return grad

    return callback


def get_client() -> Client:
    """Return a client of the store that this launch's ranks share. RuntimeError without a process group."""
    world.group()
    # Ranks of other launchers share no secret: anybody who reaches their store is trusted, as torch itself does.
    secret = this_rank.this_rank.secret if this_rank.this_rank is not None else ""
    return Client(store=default_store(), secret=secret)


def get_py_server_addr() -> tuple[str, int]:
    """Return address and port of that store. RuntimeError if the launcher did not set them."""
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise RuntimeError(f"the address of the ranks' server is not known here: {error.args[0]} is not set") from None
