"""The secrets with which clients of a server sign what they put there, and where clients find them.

Everybody on a machine can write to a store that listens on loopback, and what is read from it is unpickled, which runs
whatever code the writer likes. So nothing is unpickled that was not signed, for that very place, by someone who knows
the server's secret.
"""

from __future__ import annotations

import hmac
import os
import secrets

_SIGNATURE = 32  # bytes


def draw() -> str:
    """Draws a new secret."""
    return secrets.token_hex(16)


def variable(port: int) -> str:
    """Names the variable in which children of a server's process find its secret."""
    return f"MLAUNCH_SECRET_{port}"


def known(port: int) -> str | None:
    """Returns the secret of the server at a port, if our environment holds it."""
    return os.environ.get(variable(port))


class Signer:
    """Signs and checks with one secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def sign(self, place: str, data: bytes) -> bytes:
        """Returns the data with a signature that holds for this place alone."""
        return self._signature(place, data) + data

    def open(self, place: str, signed: bytes) -> bytes | None:
        """Returns the data; None if it was not signed for this place with this secret."""
        signature, data = signed[:_SIGNATURE], signed[_SIGNATURE:]
        return data if hmac.compare_digest(signature, self._signature(place, data)) else None

    def _signature(self, place: str, data: bytes) -> bytes:
        # The place is signed with the data: a value that is valid somewhere cannot be put somewhere else.
        return hmac.digest(self._secret, b"mlaunch value\0" + place.encode() + b"\0" + data, "sha256")
