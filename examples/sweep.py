"""Sweep examples/digits.py over learning rates and widths; print a table and the best trial.

As many trials run at a time as there are devices for: one per GPU, or two ranks each on the CPU. With the name of a
file, ``python examples/sweep.py sweep.jsonl``, it continues where it was ended.
"""

import sys

import torch
from digits import load, train

from mlaunch import launcher


@launcher(n_gpus=1 if torch.accelerator.is_available() else 2)
def accuracy(lr: float, width: int, epochs: int = 3) -> float:
    return train.__wrapped__(*load(), epochs=epochs, lr=lr, width=width)


if __name__ == "__main__":
    file = sys.argv[1] if len(sys.argv) > 1 else None
    runs = accuracy.options(output="none").grid(lr=[0.01, 0.001], width=[16, 128], resume=file)
    runs.results()
    print(runs)
    best = max(runs, key=lambda run: min(run.result()))
    print(f"the best: lr={best.arguments['lr']}, width={best.arguments['width']}")
