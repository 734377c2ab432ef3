"""Tokens, by which the machines of a launch know each other.

A proof of a token can also be used to try guesses at it, by anybody who intercepts it or answers in the master's place.
So the token itself is never used for proofs, only a key that takes long to derive from it.
"""

from __future__ import annotations

import functools
import os

VARIABLE = "MLAUNCH_TOKEN"
ADVICE = "draw one: python -c 'import secrets; print(secrets.token_hex(16))'"
SHORTEST = 16  # characters that take long enough to guess
_DRAWN = "drawn:"  # mlaunch drew a token that begins so: nobody guesses it, and stretching it would only take time
_COST, _BLOCKS = 1 << 14, 8  # 16 MiB and some hundredths of a second for each guess


def draw() -> str:
    """Return a new token for a launch whose machines receive it."""
    return _DRAWN + os.urandom(16).hex()


@functools.lru_cache(maxsize=8)  # the calls of a sweep have the same token
def key_of(token: str) -> str:
    """Return the key that the launch's machines prove to each other that they have."""
    if token.startswith(_DRAWN):
        return token
    import hashlib  # most commands do not need it

    return hashlib.scrypt(token.encode(), salt=b"mlaunch token", n=_COST, r=_BLOCKS, p=1, dklen=32).hex()


def check(token: str | None, source: str) -> None:
    """Raise ValueError, without the token in it, for a token that is not valid UTF-8: no machine could prove it."""
    try:
        (token or "").encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{source} is not valid UTF-8, so the machines of a launch could not compare it; give them a token in "
            f"UTF-8, best of ASCII letters"
        ) from None
