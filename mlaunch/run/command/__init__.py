"""The process of the command: it reads and checks the flags, and carries out the job."""

from mlaunch.run.command.entry import main as main
from mlaunch.run.command.flags import parser as parser
