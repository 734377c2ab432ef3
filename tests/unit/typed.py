"""Checked by mypy, never run: what a type checker makes of the decorator."""

from typing_extensions import assert_type

from mlaunch import launcher


@launcher
def bare(x: int) -> str:
    return str(x)


@launcher(n_gpus=2)
def with_options(x: int, *, y: float = 0.0) -> float:
    return x + y


class Model:
    @launcher(n_gpus=2)
    def fit(self, x: int) -> str:
        return str(x)


def check(model: Model) -> None:
    assert_type(bare(1), list[str])
    assert_type(with_options(1, y=2.0), list[float])
    assert_type(with_options.options(n_gpus=1)(1), list[float])
    assert_type(model.fit(3), list[str])
    assert_type(launcher(lambda: 1, 2)(), list[int])
    bare("one")  # type: ignore[arg-type]
    with_options(1, 2)  # type: ignore[call-arg]
    launcher(n_gpus="two")  # type: ignore[call-overload]
    with_options.options(n_gpu=1)  # type: ignore[call-arg]
    with_options.options(n_gpus="two")  # type: ignore[arg-type]
    launcher(n_gpu=1)  # type: ignore[call-overload]
    launcher(bare, 2, results="rank0", log_dir="logs", seed=None)
    launcher(2)  # type: ignore[call-overload]
