"""The file of ``profile=``, and what it is made of."""

from mlaunch.profile.caller.trace_file import part as part
