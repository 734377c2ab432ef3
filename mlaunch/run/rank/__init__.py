"""A rank that runs a command in place of a function."""

from mlaunch.run.rank.script import ScriptRank

rank = ScriptRank
