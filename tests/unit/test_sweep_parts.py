"""The arguments of a sweep's trials, and what tells them apart."""

from __future__ import annotations

from mlaunch.caller.many import trial_arguments


def test_labels_say_what_differs() -> None:
    grid = trial_arguments.combinations({"lr": [0.1, 1e-05], "width": [[64, 64]], "seed": range(2)})
    assert trial_arguments.labels(grid) == [
        "lr=0.1 seed=0",
        "lr=0.1 seed=1",
        "lr=1e-05 seed=0",
        "lr=1e-05 seed=1",
    ]
    assert trial_arguments.labels([{"lr": 0.1}]) == ["lr=0.1"]
    assert trial_arguments.labels([{"path": "x" * 100 + name} for name in "ab"]) == [
        "#0",
        "#1",
    ]  # no label would tell them apart
    assert trial_arguments.labels([{"model": object()}, {"model": trial_arguments.labels}]) == [
        "model=<object>",
        "model=labels",
    ]
