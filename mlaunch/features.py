"""The features of a launch: each has a folder of this package and one line here. ``core/parts.py`` has their hooks."""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class Feature:
    """A feature; a launch that has not asked for it imports nothing of it.

    Attributes:
        name: Its folder, and its section of a launch's spec.
        options: Those that are its own. The first one asks for it: any value but None.
        one_call: Why it is for one blocking call with ranks of its own; "": it goes with all calls.
        instead: What to do on ranks that it did not start.
    """

    name: str
    options: tuple[str, ...]
    one_call: str = ""
    instead: str = ""


# In the order in which they surround a call.
FEATURES = (
    Feature(
        "profile",
        ("profile", "profile_steps", "profile_ranks"),
        one_call="it would have steps of many calls; profile in the function, with torch.profiler",
        instead="torch.profiler in the function",
    ),
)
OPTIONS = frozenset(name for feature in FEATURES for name in feature.options)


def asked_for(options: object) -> list[Feature]:
    """Return the features that these options ask for."""
    return [feature for feature in FEATURES if getattr(options, feature.options[0]) is not None]
