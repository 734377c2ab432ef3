"""Looks for a learning rate with several threads of Optuna, each of which waits for its own devices."""

import optuna

from mlaunch import launcher


@launcher(n_gpus=2, device_type="cpu", concurrent=2)  # on GPUs: n_gpus=2, devices=range(8)
def train(lr):
    return (lr - 0.1) ** 2


def objective(trial):
    return train(trial.suggest_float("lr", 0.0, 1.0))[0]  # waits until two devices are free


study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
study.optimize(objective, n_trials=6, n_jobs=4)
print(f"{len(study.trials)} trials, the best with lr {study.best_params['lr']:.2f}")
