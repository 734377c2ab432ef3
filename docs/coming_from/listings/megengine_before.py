import megengine as mge
import megengine.distributed as dist
import numpy as np
from megengine.autodiff import GradManager
from megengine.functional.nn import square_loss
from megengine.module import Linear
from megengine.optimizer import SGD


@dist.launcher(n_gpus=2)
def train(lr):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.random.default_rng(0).standard_normal((64, 3), dtype="float32")
    x = mge.tensor(x[rank::size])
    y = x.sum(1, keepdims=True)
    model = Linear(3, 1)
    dist.bcast_list_(model.parameters())
    average = dist.make_allreduce_cb("mean")
    manager = GradManager().attach(model.parameters(), callbacks=[average])
    optimizer = SGD(model.parameters(), lr=lr)
    for _ in range(100):
        with manager:
            manager.backward(square_loss(model(x), y))
        optimizer.step().clear_grad()
    return float(model.weight.numpy().sum())


if __name__ == "__main__":
    print("sum of weights on each rank:", [round(weights, 3) for weights in train(0.3)])
