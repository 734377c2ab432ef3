"""What a failed launch raises; the names that users catch."""

from mlaunch.base.exceptions import LaunchError, LaunchTimeout, RankFailure, RanksLost

__all__ = ["LaunchError", "LaunchTimeout", "RankFailure", "RanksLost"]
