"""Looks for a learning rate with Optuna; each trial is one call on two ranks."""

import optuna
import torch

from mlaunch import Ranks, comm, device

STEPS = 5


def train(lr):
    weight = torch.ones(1, device=device(), requires_grad=True)
    for _ in range(STEPS):
        (weight**2).sum().backward()
        with torch.no_grad():
            weight -= lr * weight.grad
            weight.grad = None
    return comm.all_reduce_mean((weight.detach() ** 2).sum())


def objective(trial):
    lr = trial.suggest_float("lr", 0.01, 0.4)  # the trial stays in the caller
    return ranks.run(train, lr)[0]  # one value per trial


with Ranks(n_gpus=2) as ranks:  # all trials on the same ranks
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=4)
print(f"{len(study.trials)} trials, the best with lr {study.best_params['lr']:.2f}")
