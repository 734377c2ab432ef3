"""``python -m mlaunch``: the command."""

from mlaunch.cli import command

if __name__ == "__main__":
    command()
