"""What shows that frames are the other side's: codes that take a secret of both, and each frame's place in the stream.

So nothing of who can write to the network between machines is read as ours: what was changed, left out, sent again or
turned back is refused before anything is made of it. Where nobody else can write there is no secret, and no code.
"""

from __future__ import annotations

import hmac
from typing import Protocol

_SIZE = 32  # bytes of a code


class NoiseError(OSError):
    """What came is not of mlaunch. ``hint``: what may be the reason."""

    hint = ": a profile that prints, or another program?"


class ForgedError(NoiseError):
    """What came does not bear the code that the other side would have put there."""

    hint = ": somebody on the network between the machines has changed or sent it; mlaunch has used nothing of it"


class Code(Protocol):
    """An authentication code of data that comes piece by piece."""

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class _None:
    def update(self, data: bytes, /) -> None:
        pass

    def digest(self) -> bytes:
        return b""


class FrameCodes:
    """Those of the frames that one side sends, in their order. ``size``: bytes of each; 0: there are none."""

    def __init__(self, secret: str, sender: str) -> None:
        self.size = _SIZE if secret else 0
        # A key for each direction: what this side has sent, turned back to it, has another code.
        self._key = hmac.digest(secret.encode(), b"mlaunch frames\0" + sender.encode(), "sha256")
        self._frame = 0
        self._forged = False

    def check(self, code: bytes | bytearray, expected: bytes) -> None:
        """Raises ForgedError, now and from then on, unless they are the same; in a time that tells nothing of them."""
        self._forged = self._forged or not hmac.compare_digest(code, expected)
        if self._forged:
            raise ForgedError("sent what does not bear its code")

    def of_record(self, data: bytes) -> bytes:
        """Returns that of the next frame's head and record."""
        # Counted on both sides and never sent: what is left out, sent twice or moved does not fit any more.
        self._frame += 1
        code = self._begin(b"record")
        code.update(data)
        return code.digest()

    def of_content(self) -> Code:
        """Begins that of the same frame's content."""
        return self._begin(b"content")

    def _begin(self, part: bytes) -> Code:
        if not self.size:
            return _None()
        return hmac.new(self._key, b"%d\0%b\0" % (self._frame, part), "sha256")
