"""``python -m mlaunch.launch``: as ``torch.distributed.launch``, which passes ``--local-rank=N`` to the script.

The package's name ``launch`` is the function; importing this module gives that function as well.
"""

import sys

if __name__ == "__main__":
    from mlaunch.cli.run import main

    sys.exit(main(sys.argv[1:], prog="python -m mlaunch.launch", of_launch=True))

from mlaunch.caller import launch

sys.modules[__name__] = launch.launch  # type: ignore[assignment]
