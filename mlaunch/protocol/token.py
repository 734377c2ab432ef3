"""Tokens, by which the machines of a launch know each other.

What proves a token also serves to try guesses at it, for whoever hears it or answers in the master's place. So nobody
uses the token itself: a key is made of it that takes long to make.
"""

from __future__ import annotations

import functools
import os

VARIABLE = "MLAUNCH_TOKEN"
ADVICE = "draw one: python -c 'import secrets; print(secrets.token_hex(16))'"
SHORTEST = 16  # characters that take long enough to guess
_DRAWN = "drawn:"  # what begins so was drawn by us: nobody guesses it, and to stretch it would only take time
_COST, _BLOCKS = 1 << 14, 8  # 16 MiB and some hundredths of a second for each guess


def draw() -> str:
    """Draw one for a launch whose machines are told it."""
    return _DRAWN + os.urandom(16).hex()


@functools.lru_cache(maxsize=8)  # a call for each step of a sweep has the same
def key_of(token: str) -> str:
    """Return what its machines prove to each other that they have."""
    if token.startswith(_DRAWN):
        return token
    import hashlib  # which most commands need not

    return hashlib.scrypt(token.encode(), salt=b"mlaunch token", n=_COST, r=_BLOCKS, p=1, dklen=32).hex()


def check(token: str | None, source: str) -> None:
    """Raise ValueError, which does not show the token, for a token that is not valid UTF-8: it cannot be proved."""
    try:
        (token or "").encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{source} is not valid UTF-8, so other machines could not be sure to have the same; "
            f"give the machines of a launch a token in UTF-8, of ASCII at best"
        ) from None
