"""A rank binds itself, before it has a thread or memory of its own."""

from mlaunch.numa.rank.bound_rank import part as part
