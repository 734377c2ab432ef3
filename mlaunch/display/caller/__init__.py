"""Drawing in the calling process: changing lines, and what ranks display."""

from mlaunch.display.caller.areas import Notebook as Notebook
from mlaunch.display.caller.areas import Terminal as Terminal
from mlaunch.display.caller.areas import area as area
from mlaunch.display.caller.areas import is_piped as is_piped
from mlaunch.display.caller.launch_lines import status_lines as status_lines
from mlaunch.display.caller.published import clears as clears
from mlaunch.display.caller.published import publish as publish
from mlaunch.display.caller.published import show as show
from mlaunch.display.wire import STREAM as STREAM
from mlaunch.display.wire import LineCutter as LineCutter
from mlaunch.display.wire import line_of as line_of

SECTIONS = {"display": True}  # with which ranks make their part
