"""The secrets with which clients of a server sign the values that they put there, and where clients find them.

Any user of a machine can write to a store that listens on loopback, and unpickling a value runs any code that its
writer likes. So a value is unpickled only if it was signed, for its own place, with the server's secret.
"""

from __future__ import annotations

import hmac
import os
import secrets

_SIGNATURE = 32  # bytes


def draw_secret() -> str:
    """Return a new random secret."""
    return secrets.token_hex(16)


def secret_variable(port: int) -> str:
    """Return the name of the variable in which children of a server's process find its secret."""
    return f"MLAUNCH_SECRET_{port}"


def known_secret(port: int) -> str | None:
    """Return the secret of the server at a port; None if this process's environment does not have it."""
    return os.environ.get(secret_variable(port))


class Signer:
    """A signer of values, which also checks signatures, with one secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def sign(self, place: str, data: bytes) -> bytes:
        """Return the data with a signature that is valid only for this place."""
        return self._signature(place, data) + data

    def open(self, place: str, signed: bytes) -> bytes | None:
        """Return the data; None if it was not signed for this place with this secret."""
        signature, data = signed[:_SIGNATURE], signed[_SIGNATURE:]
        return data if hmac.compare_digest(signature, self._signature(place, data)) else None

    def _signature(self, place: str, data: bytes) -> bytes:
        # The place is signed with the data, so that a value that is valid in one place is not valid in another.
        return hmac.digest(self._secret, b"mlaunch value\0" + place.encode() + b"\0" + data, "sha256")
