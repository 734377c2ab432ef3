import pickle
from collections.abc import Callable
from typing import IO, Any

__version__: str

class Pickler(pickle.Pickler):
    dispatch_table: Any
    def __init__(
        self,
        file: IO[bytes],
        protocol: int | None = ...,
        buffer_callback: Callable[[pickle.PickleBuffer], object] | None = ...,
    ) -> None: ...

def dumps(obj: object, protocol: int | None = ...) -> bytes: ...
