"""A debugger in a rank, with its prompt in the caller's terminal or a visitor's."""

from mlaunch.debug.rank.debugged_rank import at_breakpoint as at_breakpoint
from mlaunch.debug.rank.debugged_rank import hear as hear
from mlaunch.debug.rank.debugged_rank import part as part
