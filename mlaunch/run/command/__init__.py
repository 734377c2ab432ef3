"""In the process of the command: its flags are read and checked, and the job is carried out."""

from mlaunch.run.command.entry import main as main
from mlaunch.run.command.flags import parser as parser
