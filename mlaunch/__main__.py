"""``python -m mlaunch``: the command."""

import sys

from mlaunch.cli import main

if __name__ == "__main__":
    sys.exit(main())
