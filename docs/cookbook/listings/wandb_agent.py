"""An agent of a sweep of Weights & Biases: start as many as you like; each waits for its own devices."""

import sys

import wandb

from mlaunch import launcher


@launcher(n_gpus=2, device_type="cpu", concurrent=1)  # on GPUs: n_gpus=2, lease=True
def train(lr):
    return (lr - 0.1) ** 2


def objective():
    with wandb.init() as run:  # the agent stays in the caller: no rank becomes one
        loss = train(run.config.lr)[0]
        run.log({"loss": loss})
        print(f"lr {run.config.lr}: loss {loss:.2f}")


wandb.agent(sys.argv[1], function=objective, count=2)
