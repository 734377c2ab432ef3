"""What the caller's part says to the agent's."""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class Begun:
    """A call has begun."""
