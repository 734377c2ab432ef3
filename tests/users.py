"""What users have where the tests' own process has not: nothing is turned off."""

from __future__ import annotations

import os

# In the process that runs tests: what is prepared would be there when things are counted, and so would the processes in
# which the fork server tries an import; and without uvloop the loops are those of users who have not installed it. On
# terminals of a CI no line changes, and GitHub's jobs have lines of their own.
TURNED_OFF = {"MLAUNCH_PREPARE": "0", "MLAUNCH_UVLOOP": "0", "CI": "", "GITHUB_ACTIONS": ""}


def users_environ(**changes: str) -> dict[str, str]:
    """Returns the environment for a script or command that is run as users run it."""
    return {name: value for name, value in os.environ.items() if name not in TURNED_OFF} | changes
