"""What the calling process draws: lines that change, where this process has a place for them."""

from mlaunch.display.caller.areas import Notebook as Notebook
from mlaunch.display.caller.areas import Terminal as Terminal
from mlaunch.display.caller.areas import area as area
from mlaunch.display.caller.areas import is_piped as is_piped
from mlaunch.display.caller.launch_lines import status_lines as status_lines
