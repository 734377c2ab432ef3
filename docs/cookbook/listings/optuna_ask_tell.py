"""Looks for a learning rate with Optuna's ask and tell: two trials at a time, and those that diverge are pruned."""

import functools
from concurrent.futures import FIRST_COMPLETED, wait

import optuna
import torch

import mlaunch
from mlaunch import comm, device, launcher

AT_ONCE, TRIALS = 2, 6


@launcher(n_gpus=2, device_type="cpu", concurrent=AT_ONCE)
def train(lr):
    weight, step = torch.ones(1, device=device()), 0
    loss = 1.0
    while loss > 1e-3 and not mlaunch.stopping():  # at rates above 1 it never ends
        weight -= lr * 2 * weight
        loss = comm.all_reduce_mean((weight**2).sum())
        step += 1
        mlaunch.report(step, loss=loss)
    return step


def judge(trial, run, reported):
    """Decide in your process, by what the ranks report."""
    if reported.rank == 0 and not run.done():
        trial.report(reported["loss"], reported.step)
        if trial.should_prune():
            run.stop("pruned")  # on all ranks, after the same step


def tell(runs):
    for run in runs:
        steps, trial = run.result()[0], trials[run]
        if run.report.stopped is None:
            study.tell(trial, steps)
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)


sampler, pruner = optuna.samplers.RandomSampler(seed=1), optuna.pruners.ThresholdPruner(upper=100.0)
study = optuna.create_study(sampler=sampler, pruner=pruner)
trials, running = {}, set()
for _ in range(TRIALS):
    if len(running) == AT_ONCE:  # ask no sooner than somebody can run it
        done, running = wait(running, return_when=FIRST_COMPLETED)
        tell(done)
    trial = study.ask()
    run = train.submit(trial.suggest_float("lr", 0.1, 1.5))
    trials[run] = trial
    running.add(run)
    run.on_report(functools.partial(judge, trial, run))
tell(wait(running).done)
for trial in study.trials:
    print(f"lr {trial.params['lr']:.2f}: {trial.state.name.lower()}")
