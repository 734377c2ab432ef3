"""``python -m mlaunch.launch``: like ``torch.distributed.launch``, it passes ``--local-rank=N`` to the script.

The package's name ``launch`` is the function; importing this module gives that function as well.
"""

import sys

if __name__ == "__main__":
    from mlaunch.core import load

    run = load.room("run", "command", "python -m mlaunch.launch")
    sys.exit(run.main(sys.argv[1:], prog="python -m mlaunch.launch", of_launch=True))

from mlaunch.compat import caller

sys.modules[__name__] = caller.launch  # type: ignore[assignment]
