"""Trains with several rates by joblib's threads, each of which waits for its own devices."""

from joblib import Parallel, delayed

from mlaunch import launcher


# On GPUs: n_gpus=2, devices=range(8).
@launcher(n_gpus=2, device_type="cpu", concurrent=2)
def train(lr):
    return 2 * lr


values = Parallel(n_jobs=4, prefer="threads")(delayed(train)(lr) for lr in (1, 2, 3, 4))
print(values)
