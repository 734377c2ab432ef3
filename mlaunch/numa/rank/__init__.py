"""The rank's part of ``numa=``: it binds itself before it has threads or memory of its own."""

from mlaunch.numa.rank.bound_rank import part as part
