"""Looks for a learning rate with several threads of Optuna, each of which waits for its own devices."""

import optuna

from mlaunch import launcher


# On GPUs: n_gpus=2, devices=range(8).
@launcher(n_gpus=2, device_type="cpu", concurrent=2)
def train(lr):
    return (lr - 0.1) ** 2


def objective(trial):
    # Waits until two devices are free.
    return train(trial.suggest_float("lr", 0.0, 1.0))[0]


study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
study.optimize(objective, n_trials=6, n_jobs=4)
print(f"{len(study.trials)} trials, the best with lr {study.best_params['lr']:.2f}")
