"""How torch's storages are pickled: as out-of-band buffers, and always back on the CPU.

Tensors, parameters, sparse and quantized tensors keep torch's own ``__reduce_ex__``, which takes every one of them
apart into storages. Only the storages are ours: torch's reducers for them either copy the bytes twice
(``torch.save``) or pass a file descriptor that is dead once the worker has exited (``torch.multiprocessing``).
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Reduction = tuple[Callable[..., Any], tuple[Any, ...]]
Reducers = dict[type, Callable[[Any], Reduction]]


def reducers(alive: list[object]) -> Reducers:
    """Returns the reducers of one pickling. They append to ``alive`` what must live until the buffers are written.

    Empty unless torch is imported: what never saw torch holds no tensors.
    """
    if "torch" not in sys.modules:
        return {}
    import torch

    def reduce_typed(storage: torch.storage.TypedStorage) -> Reduction:
        return _rebuild_typed, (storage._untyped_storage, storage.dtype)  # one object for all views of a storage

    def reduce_untyped(storage: torch.UntypedStorage) -> Reduction:
        on_cpu = storage if storage.device.type == "cpu" else _to_cpu(storage)
        # The buffer is an address: the memory must live until it is written.
        alive.extend((storage, on_cpu))
        return rebuild_storage, (_buffer(on_cpu),)

    def reduce_tensor(tensor: Any) -> Any:
        rebuild, args, *rest = tensor.__reduce_ex__(5)
        if args and isinstance(args[0], torch.UntypedStorage):
            # torch takes its newer dtypes apart into untyped storages, but can only rebuild them from typed ones.
            args = (_rebuild_typed(args[0], torch.uint8), *args[1:])
        return rebuild, args, *rest

    return {
        torch.Tensor: reduce_tensor,
        torch.storage.TypedStorage: reduce_typed,
        torch.UntypedStorage: reduce_untyped,
    }


def _to_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    import torch

    # Waited for: a copy that is still on its way would be pickled half.
    return torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage().copy_(storage, non_blocking=False)


def _buffer(storage: torch.UntypedStorage) -> pickle.PickleBuffer | bytearray:
    size = storage.nbytes()
    if size == 0:
        return bytearray()
    return pickle.PickleBuffer((ctypes.c_char * size).from_address(storage.data_ptr()))


def _rebuild_typed(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    import torch

    kind: Any = torch.storage.TypedStorage  # torch leaves it untyped
    typed: torch.storage.TypedStorage = kind(wrap_storage=untyped, dtype=dtype, _internal=True)
    return typed


def rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    """Returns a storage over a writable buffer, without a copy."""
    import torch

    if not memoryview(buffer).nbytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
