"""The errors of a failed launch, for users to catch, and functions by which programs read them."""

from mlaunch.base.exceptions import LaunchError, LaunchTimeout, RankFailure, RanksLost, as_dict, report_of

__all__ = ["LaunchError", "LaunchTimeout", "RankFailure", "RanksLost", "as_dict", "report_of"]
