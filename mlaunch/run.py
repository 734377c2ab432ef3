"""``python -m mlaunch.run``: the command ``mlaunch run``, under the name that torch gives its own."""

import sys

from mlaunch.cli.run_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m mlaunch.run"))
