"""A suite as it is written for torch's own classes of tests and for decorators that spawn: on 2 ranks, by gloo.

Written anew after the kinds of tests that public suites have: PyTorch's of c10d, of DistributedDataParallel, of meshes
and of distributed tensors, those of torchmetrics' pool, and functions under a decorator as in fairscale. To port it,
the lines above classes and functions change: ``FORMS`` has both.
"""

from __future__ import annotations

SUITE = '''
import functools, os, unittest
import pytest, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

Continuous = getattr(common_distributed, "MultiProcContinuousTest", None) or common_distributed.MultiProcContinousTest

def start(rank, size, name, file):
    dist.init_process_group("gloo", init_method=f"file://{{file}}", rank=rank, world_size=size)
    globals()[name].body()
    dist.destroy_process_group()

def spawned(size):
    def decorate(function):
        def run(tmp_path):
            mp.spawn(start, (size, function.__name__, str(tmp_path / "store")), nprocs=size)
        run.body, run.__name__ = function, function.__name__
        return run
    return decorate

class Two(MultiProcessTestCase):
    """Two processes for each method."""

    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        try:
            os.remove(self.file_name)
        except OSError:
            pass

    def other(self):
        return 1 - self.rank

{process}
class BackendTest(Two):
    """The backend itself, without the default group."""

    def group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        group = dist.ProcessGroupGloo(store, self.rank, self.world_size, dist.default_pg_timeout)
        group.barrier().wait()  # else one may be done with it while the other is still making it
        return group

    def test_broadcast_from_each(self):
        group = self.group()
        for root in range(self.world_size):
            x = torch.full((4,), float(self.rank))
            group.broadcast(x, root).wait()
            self.assertEqual(x, torch.full((4,), float(root)))

    def test_allreduce_operations(self):
        group = self.group()
        wanted = {{"SUM": 5.0, "PRODUCT": 6.0, "MIN": 2.0, "MAX": 3.0}}
        for name, value in wanted.items():
            x, options = torch.tensor([self.rank + 2.0]), dist.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, name)
            group.allreduce([x], options).wait()
            self.assertEqual(x.item(), value)

    def test_allreduce_of_types(self):
        group = self.group()
        for dtype in (torch.int8, torch.int64, torch.float16, torch.float64):
            x = torch.ones(3, dtype=dtype)
            group.allreduce(x).wait()
            self.assertEqual(x, torch.full((3,), 2, dtype=dtype))

    def test_empty_tensor(self):
        self.group().broadcast(torch.empty(0), 0).wait()

    def test_scatter(self):
        group, x, options = self.group(), torch.zeros(1), dist.ScatterOptions()
        options.rootRank = 1
        pieces = [[torch.tensor([10.0]), torch.tensor([11.0])]] if self.rank == 1 else []
        group.scatter([x], pieces, options).wait()
        self.assertEqual(x.item(), 10.0 + self.rank)

    def test_gather(self):
        group, options = self.group(), dist.GatherOptions()
        options.rootRank = 0
        found = [[torch.zeros(2), torch.zeros(2)]] if self.rank == 0 else []
        group.gather(found, [torch.full((2,), float(self.rank))], options).wait()
        if self.rank == 0:
            self.assertEqual(found[0], [torch.zeros(2), torch.ones(2)])

    def test_allgather(self):
        found = [torch.zeros(1) for _ in range(self.world_size)]
        self.group().allgather([found], [torch.tensor([float(self.rank)])]).wait()
        self.assertEqual(found, [torch.zeros(1), torch.ones(1)])

    def test_stress(self):
        group, tensors = self.group(), [torch.tensor([float(i + self.rank)]) for i in range(50)]
        for work in [group.allreduce(x) for x in tensors]:
            work.wait()
        self.assertEqual([x.item() for x in tensors], [2.0 * i + 1 for i in range(50)])

    def test_sends_and_receives(self):
        group, x = self.group(), torch.zeros(1)
        works = [group.send([torch.tensor([float(self.rank)])], self.other(), 0), group.recv([x], self.other(), 0)]
        for work in works:
            work.wait()
        self.assertEqual(x.item(), float(self.other()))

    def test_wrong_root(self):
        group = self.group()
        with self.assertRaisesRegex(RuntimeError, "invalid root"):
            group.broadcast(torch.zeros(1), self.world_size)

{process}
class WorldTest(Two):
    """The default group, which each test makes."""

    def begin(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
        dist.barrier()

    def test_who_am_i(self):
        self.begin()
        self.assertEqual((dist.get_rank(), dist.get_world_size()), (self.rank, 2))

    def test_group_of_both_and_of_one(self):
        self.begin()
        both, one = dist.new_group([0, 1]), dist.new_group([1])
        x = torch.ones(1)
        dist.all_reduce(x, group=both)
        self.assertEqual(x.item(), 2.0)
        self.assertEqual(dist.get_rank(one), 0 if self.rank == 1 else -1)

    def test_objects(self):
        self.begin()
        found = [None, None]
        dist.all_gather_object(found, {{"rank": self.rank}})
        self.assertEqual(found, [{{"rank": 0}}, {{"rank": 1}}])
        given = ["a", 1] if self.rank == 0 else [None, None]
        dist.broadcast_object_list(given, src=0)
        self.assertEqual(given, ["a", 1])

    def test_scattered_objects(self):
        self.begin()
        mine = [None]
        dist.scatter_object_list(mine, ["zero", "one"] if self.rank == 0 else None, src=0)
        self.assertEqual(mine, [["zero", "one"][self.rank]])

    def test_monitored_barrier(self):
        self.begin()
        dist.monitored_barrier()

    def test_all_to_all(self):
        self.begin()
        found = torch.zeros(2)
        dist.all_to_all_single(found, torch.tensor([0.0, 1.0]) + 10 * self.rank)
        self.assertEqual(found, torch.tensor([0.0, 10.0]) + self.rank)

    def test_made_anew(self):
        self.begin()
        dist.destroy_process_group()
        self.assertFalse(dist.is_initialized())
        store = dist.FileStore(self.file_name + "-again", self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
        dist.barrier()

    def test_twice_is_refused(self):
        self.begin()
        with self.assertRaisesRegex(ValueError, "twice"):
            self.begin()

    @skip_if_lt_x_gpu(2)
    def test_accelerators(self):
        self.fail("there are some")

{process}
class ParallelTest(Two):
    """DistributedDataParallel."""

    begin = WorldTest.begin

    def model(self, **options):
        self.begin()
        torch.manual_seed(self.rank)
        return DistributedDataParallel(nn.Linear(3, 1), **options)

    def test_parameters_are_those_of_the_first(self):
        model = self.model()
        torch.manual_seed(0)
        self.assertEqual(model.module.weight, nn.Linear(3, 1).weight)

    def test_gradients_are_the_mean(self):
        model = self.model()
        model(torch.full((1, 3), self.rank + 1.0)).sum().backward()
        self.assertEqual(model.module.weight.grad, torch.full((1, 3), 1.5))

    def test_without_synchronization(self):
        model = self.model()
        with model.no_sync():
            model(torch.full((1, 3), self.rank + 1.0)).sum().backward()
        self.assertEqual(model.module.weight.grad, torch.full((1, 3), self.rank + 1.0))

    def test_uneven_inputs(self):
        model, steps = self.model(), 0
        with model.join():
            for _ in range(2 + 2 * self.rank):
                model(torch.ones(1, 3)).sum().backward()
                steps += 1
        self.assertEqual(steps, 2 + 2 * self.rank)

    def test_hook_of_communication(self):
        def hook(state, bucket):
            state.append(bucket.buffer().numel())
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
        model, seen = self.model(), []
        model.register_comm_hook(seen, hook)
        model(torch.ones(1, 3)).sum().backward()
        self.assertEqual(seen, [4])
        self.assertEqual(model.module.weight.grad, torch.full((1, 3), 2.0))

{continuous}
class MeshTest(Continuous):
    """Within one group: device meshes, functional collectives, distributed tensors."""

    world_size = 2
    device_type = "cpu"

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_mesh_of_one_dimension(self):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        self.assertEqual((mesh.get_local_rank("data"), mesh.size()), (self.rank, 2))

    def test_mesh_of_two_dimensions(self):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
        self.assertEqual(mesh["data"].size(), 2)
        self.assertEqual(mesh.get_coordinate(), [self.rank, 0])

    def test_functional_all_reduce(self):
        found = functional.all_reduce(torch.ones(2), "sum", list(range(2)))
        self.assertEqual(functional.wait_tensor(found), torch.full((2,), 2.0))

    def test_functional_all_gather(self):
        found = functional.all_gather_tensor(torch.full((1,), float(self.rank)), 0, list(range(2)))
        self.assertEqual(functional.wait_tensor(found), torch.tensor([0.0, 1.0]))

    def test_sharded_tensor(self):
        mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(8.0).reshape(4, 2)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual(sharded.to_local(), whole.chunk(2)[self.rank])
        self.assertEqual(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)

    def test_product_of_sharded_tensors(self):
        mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(16.0).reshape(4, 4)
        left, right = distribute_tensor(whole, mesh, [Shard(1)]), distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual((left @ right).full_tensor(), whole @ whole)

{function}
def test_metric_over_ranks():
    torch.manual_seed(1)
    told, right = torch.randint(3, (2, 40)), torch.randint(3, (2, 40))
    rank, counts = dist.get_rank(), torch.zeros(2)
    counts[0], counts[1] = (told[rank] == right[rank]).sum(), len(told[rank])
    dist.all_reduce(counts)
    assert counts[0] / counts[1] == (told == right).float().mean()

{function}
def test_states_of_unequal_length():
    mine = torch.arange(3 + dist.get_rank())
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    assert torch.cat(found).tolist() == [0, 1, 2, 0, 1, 2, 3]

{function}
def test_linear_in_columns():
    torch.manual_seed(2)
    whole, x = nn.Linear(4, 6), torch.randn(3, 4)
    mine = nn.functional.linear(x, whole.weight.chunk(2)[dist.get_rank()], whole.bias.chunk(2)[dist.get_rank()])
    found = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(found, mine.contiguous())
    assert torch.allclose(torch.cat(found, 1), whole(x))

{function}
def test_pipeline_of_two():
    x = torch.arange(4.0)
    if dist.get_rank() == 0:
        dist.send(x * 2, 1)
    else:
        dist.recv(x, 0)
        assert x.tolist() == [0.0, 2.0, 4.0, 6.0]

{function}
def test_checkpoint_of_the_first():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 2)
    state = [model.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    model.load_state_dict(state[0])
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(2, 2).weight)
'''

MARK = "@pytest.mark.ranks(2)"
FORMS = {
    "torch's": {"process": "", "continuous": "", "function": "@spawned(2)"},
    "ported": {"process": MARK, "continuous": MARK, "function": MARK},
}
