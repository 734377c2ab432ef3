import mlaunch
from mlaunch import launcher


@launcher(n_gpus=2, device_type="cpu", concurrent=2)
def train(lr):
    weight, step = 1.0, 0
    while weight**2 > 1e-6 and not mlaunch.stopping():  # the same answer on both ranks
        weight -= lr * 2 * weight  # at a rate of 1 it never ends
        step += 1
        mlaunch.report(step, loss=weight**2)
    return step


runs = train.map([1.0, 0.1])
for run in runs:
    run.on_report(lambda reported, run=run: reported.step > 100 and reported["loss"] > 0.5 and run.stop())
for run in runs:
    steps = run.result()[0]
    print(run.arguments["lr"], "pruned" if run.report.stopped else "done", "after", steps, "steps")
