"""The file of ``profile=``, and the traces that it is made of."""

from mlaunch.profile.caller.trace_file import part as part
