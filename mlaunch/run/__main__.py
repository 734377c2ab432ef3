"""``python -m mlaunch.run``."""

import sys

from mlaunch.run.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m mlaunch.run"))
