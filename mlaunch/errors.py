"""What a failed launch raises: the names that users catch, and what programs read of it."""

from mlaunch.base.exceptions import LaunchError, LaunchTimeout, RankFailure, RanksLost, report_of
from mlaunch.base.misuse import as_dict

__all__ = ["LaunchError", "LaunchTimeout", "RankFailure", "RanksLost", "as_dict", "report_of"]
