"""Engines place the ranks of one call on several machines: ``train.options(engine=Hosts(["a", "b"]))(0.1)``."""

from mlaunch.engines.cluster import Cluster
from mlaunch.engines.command import Command
from mlaunch.engines.engine import Engine
from mlaunch.engines.hosts import Hosts
from mlaunch.engines.placement import Ends, Placement
from mlaunch.engines.ray import Ray
from mlaunch.engines.slurm import Slurm

__all__ = ["Cluster", "Command", "Ends", "Engine", "Hosts", "Placement", "Ray", "Slurm"]
