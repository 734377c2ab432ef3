"""Hangs, beside those of ``tests/contract/test_hangs.py``: what ranks do, and the sentence that says why.

Each function is run on the number of ranks beside it.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from mlaunch import comm

AT = r"at hang_scenes.py:\d+"


class Scene(NamedTuple):
    """``said``: how the sentence begins, a pattern. ``ranks``: how many."""

    function: Callable[[], object]
    said: str
    ranks: int = 3


SCENES: dict[str, Scene] = {}


def scene(said: str, ranks: int = 3) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Notes a scene; {AT} is a place in this file, {NOT} that rank 1 is behind in the default group."""

    def note(function: Callable[[], object]) -> Callable[[], object]:
        not_entered = r"rank 1 has not entered \w+ #\d+ of the default group"
        pattern = said.replace("{NOT}", not_entered).replace("{AT}", AT)
        SCENES[function.__name__] = Scene(function, pattern + "$", ranks)
        return function

    return note


def one() -> torch.Tensor:
    return torch.ones(1)


def rest() -> None:
    threading.Event().wait()


WORLD = r"{NOT} \(ranks 0, 2 wait for it, in all_reduce {AT}\); rank 1 is in "
LACKS = r"rank 1 has not sent to rank 0 \(rank 0 waits for it, in "


@scene(r"rank 0 has not entered all_reduce #\d+ of the default group \(ranks 1-2 wait for it, in all_reduce {AT}\); "
       r"rank 0 is in wait {AT}")  # fmt: skip
def after_messages() -> None:
    for _ in range(5):
        if dist.get_rank() == 0:
            dist.send(one(), 1)
        elif dist.get_rank() == 1:
            dist.recv(one(), 0)
    if dist.get_rank() == 0:
        rest()
    dist.all_reduce(one())


@scene(WORLD + "wait {AT}")
def who_has_sent_more_is_behind() -> None:
    if dist.get_rank() == 1:
        work = [dist.isend(one(), 0) for _ in range(5)]
        rest()
        del work
    if dist.get_rank() == 0:
        for _ in range(5):
            dist.recv(one(), 1)
    dist.all_reduce(one())


@scene(r"rank 2 has not sent to rank 0 \(rank 0 waits for it, in recv {AT}\); rank 2 is in wait {AT}", 4)
def recv_from_who_sleeps() -> None:
    if dist.get_rank() == 0:
        dist.recv(one(), 2)
    rest()


@scene(r"rank 2 has not sent to rank 1 \(rank 1 waits for it, in recv {AT}; rank 0 waits for rank 1, in recv {AT}\); "
       r"rank 2 is in wait {AT}")  # fmt: skip
def chain_of_receives() -> None:
    if dist.get_rank() < 2:
        dist.recv(one(), dist.get_rank() + 1)
    rest()


@scene(r"ranks wait for each other: rank 0 waits for a message of rank 2, in recv {AT}; rank 2 waits for a message of "
       r"rank 1, in recv {AT}; rank 1 waits for a message of rank 0, in recv {AT}")  # fmt: skip
def ring_of_receives() -> None:
    dist.recv(one(), (dist.get_rank() - 1) % dist.get_world_size())


@scene(r"ranks wait for each other: rank 0 waits for a message of rank 1, in recv {AT}; rank 1 waits for a message of "
       r"rank 0, in recv {AT}; rank 2 waits for rank 0, in all_reduce {AT}")  # fmt: skip
def two_receive_and_one_waits_for_them() -> None:
    if dist.get_rank() < 2:
        dist.recv(one(), 1 - dist.get_rank())
    dist.all_reduce(one())


@scene(r"rank 1 has not begun to receive from rank 0 \(rank 0 waits for it, in send {AT}\); rank 1 is in wait {AT}")
def send_to_who_sleeps() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(1 << 20), 1)
    rest()


@scene(r"ranks wait for each other: rank 0 waits for rank 1 to receive, in send {AT}; rank 1 waits for rank 0 to "
       r"receive, in send {AT}", 2)  # fmt: skip
def two_send() -> None:
    dist.send(torch.ones(1 << 20), 1 - dist.get_rank())


@scene(r"two ranks have different tags for what one sends and the other receives: rank 0 receives with tag 1, in recv "
       r"{AT}; rank 1 sends with tag 2, in send {AT}", 2)  # fmt: skip
def tags_that_differ() -> None:
    if dist.get_rank() == 0:
        dist.recv(one(), 1, tag=1)
    else:
        dist.send(torch.ones(1 << 20), 0, tag=2)


@scene(r"rank 0 receives from rank 1, in recv {AT}, which sends as many messages: their tags or sizes differ, or the "
       r"network is slow or stuck; rank 1 is in wait {AT}", 2)  # fmt: skip
def another_tag_and_on() -> None:
    if dist.get_rank() == 0:
        dist.recv(one(), 1, tag=1)
    work = dist.isend(one(), 0, tag=2)
    rest()
    del work


@scene(r"no rank has sent to rank 0 \(it waits for one of any rank, in recv {AT}\); ranks 1-2 are in wait {AT}")
def recv_from_anybody() -> None:
    if dist.get_rank() == 0:
        dist.recv(one())
    rest()


@scene(r"rank 2 has not entered barrier #1 of the default group \(rank 1 waits for it, in barrier {AT}; rank 0 waits "
       r"for a message of any rank, in recv {AT}\); rank 2 is in wait {AT}")  # fmt: skip
def recv_from_anybody_of_whom_one_is_left() -> None:
    if dist.get_rank() == 0:
        dist.recv(one())
    if dist.get_rank() == 2:
        rest()
    dist.barrier()


@scene(r"ranks wait for each other: rank 0 waits for a message of any rank, in recv {AT}; rank 1 waits for rank 0 in "
       r"the default group, in barrier {AT}; rank 2 waits for rank 0, in barrier {AT}")  # fmt: skip
def recv_from_anybody_while_all_are_in_a_barrier() -> None:
    if dist.get_rank() == 0:
        dist.recv(one())
    dist.barrier()


@scene(LACKS + r"wait {AT}\); rank 1 is in wait {AT}")
def irecv_and_wait() -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(one(), 1)
        assert work is not None
        work.wait()
    rest()


@scene(LACKS + r"wait {AT}; rank 2 waits for rank 1 in the default group, in barrier {AT}\); rank 1 is in wait {AT}")
def batch_of_messages() -> None:
    if dist.get_rank() == 0:
        ways = [dist.P2POp(dist.irecv, one(), peer) for peer in (2, 1)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
    if dist.get_rank() == 2:
        dist.send(one(), 0)
        dist.barrier()
    rest()


@scene(r"ranks wait for each other: rank 0 waits for rank 1 in the default group, in barrier {AT}; rank 1 waits for a "
       r"message of rank 0, in recv {AT}", 2)  # fmt: skip
def one_message_too_few() -> None:
    for number in range(4):
        if dist.get_rank() == 1:
            dist.recv(one(), 0)
        elif number < 3:
            dist.send(one(), 1)
    dist.barrier()


@scene(r"{NOT} \(ranks 0, 2 wait for it, in wait {AT}\); rank 1 is in wait {AT}")
def end_of_an_asynchronous_collective() -> None:
    if dist.get_rank() == 1:
        rest()
    work = dist.all_reduce(one(), async_op=True)
    assert work is not None
    work.wait()


@scene(r"{NOT} \(ranks 0, 2 wait for it, in wait {AT}\); rank 1 is in wait {AT}")
def the_second_of_three_asynchronous() -> None:
    works = [dist.all_reduce(one(), async_op=True) for _ in range(1 if dist.get_rank() == 1 else 3)]
    if dist.get_rank() == 1:
        rest()
    for work in works:
        assert work is not None
        work.wait()


@scene(r"rank 0 has not sent to rank 1 \(rank 1 waits for it, in recv {AT}\); rank 0 is in wait {AT}", 2)
def ahead_and_asleep() -> None:
    if dist.get_rank() == 0:
        work = dist.all_reduce(one(), async_op=True)
        rest()
        del work
    dist.recv(one(), 0)


@scene(r"rank 0 has not sent to rank 1 \(rank 1 waits for it, in recv {AT}\); rank 0 is in ahead_and_in_a_lock {AT}", 2)
def ahead_and_in_a_lock() -> None:
    lock = threading.Lock()
    if dist.get_rank() == 0:
        work = dist.all_reduce(one(), async_op=True)
        with lock, lock:
            del work
    dist.recv(one(), 0)


@scene(r"rank 1 has not entered new_group for ranks 0-2 \(ranks 0, 2 wait for it, in new_group {AT}\); rank 1 is in "
       r"wait {AT}")  # fmt: skip
def new_group_without_one() -> None:
    if dist.get_rank() == 1:
        rest()
    dist.new_group([0, 1, 2])


@scene(r"rank 1 has not entered new_group for ranks 0-1 \(rank 0 waits for it, in new_group {AT}\); rank 1 is in wait "
       r"{AT}")  # fmt: skip
def new_group_of_some() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0, 1], use_local_synchronization=True)
    rest()


@scene(r"ranks wait for each other: rank 0 waits for rank 1, in new_group {AT}; rank 1 waits for rank 0 in the default "
       r"group, in all_reduce {AT}; rank 2 waits for rank 1, in new_group {AT}")  # fmt: skip
def new_group_beside_a_collective() -> None:
    if dist.get_rank() == 1:
        dist.all_reduce(one())
    dist.new_group([0, 1, 2])


@scene(r"{NOT} \(ranks 0, 2 wait for it, in all_reduce {AT} in its thread 'reducer'\); rank 1 is in wait {AT}")
def in_a_thread() -> None:
    if dist.get_rank() == 1:
        rest()
    thread = threading.Thread(target=lambda: dist.all_reduce(one()), name="reducer")
    thread.start()
    thread.join()


@scene(r"{NOT} \(ranks 0, 2 wait for it, in barrier in its thread 'saver_0'\); rank 1 is in wait {AT}")
def in_a_pool() -> None:
    if dist.get_rank() == 1:
        rest()
    with concurrent.futures.ThreadPoolExecutor(1, "saver") as pool:
        pool.submit(dist.barrier).result()


@scene(r"rank 1 has not entered all_reduce #1 of the group of ranks 0-1 \(rank 0 waits for it, in all_reduce {AT}; "
       r"rank 2 waits for rank 1 in the default group, in barrier {AT}\); rank 1 is in wait {AT}")  # fmt: skip
def group_of_some() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        rest()
    if dist.get_rank() == 0:
        dist.all_reduce(one(), group=group)
    dist.barrier()


@scene(r"rank 2 has not sent to rank 1 \(rank 1 waits for it, in recv {AT}\); rank 2 is in wait {AT}")
def message_in_a_group_of_some() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 1:
        dist.recv(one(), 2, group=group)
    rest()


@scene(r"the ranks are in different operations that stand for the same one: rank 0 is in all_reduce {AT}; rank 1 is in "
       r"broadcast {AT}; ranks 2-3 wait for rank 0, in barrier {AT}", 4)  # fmt: skip
def different_operations_in_a_group_of_some() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.all_reduce(one(), group=group)
    if dist.get_rank() == 1:
        dist.broadcast(one(), 0, group=group)
    dist.barrier()


@scene(r"the ranks are in different operations that stand for the same one: ranks 0, 2 are in all_reduce {AT}; rank 1 "
       r"has begun broadcast, and is in wait {AT}")  # fmt: skip
def another_operation_and_on() -> None:
    if dist.get_rank() == 1:
        work = dist.broadcast(one(), 1, async_op=True)
        rest()
        del work
    dist.all_reduce(one())


@scene(LACKS + r"recv_object_list {AT}\); rank 1 is in wait {AT}")
def objects_in_messages() -> None:
    if dist.get_rank() == 0:
        dist.recv_object_list([None], 1)
    rest()


@scene(r"{NOT} \(ranks 0, 2 wait for it, in all_gather_object {AT}\); rank 1 is in wait {AT}")
def objects() -> None:
    if dist.get_rank() == 1:
        rest()
    dist.all_gather_object([None] * 3, 1)


@scene(r"rank 1 has not entered monitored_barrier #\d+ of the default group \(ranks 0, 2 wait for it, in "
       r"monitored_barrier {AT}\); rank 1 is in wait {AT}")  # fmt: skip
def monitored_barrier() -> None:
    if dist.get_rank() == 1:
        rest()
    dist.monitored_barrier()


@scene(WORLD + "wait {AT}")
def after_a_monitored_barrier() -> None:
    dist.monitored_barrier()
    if dist.get_rank() == 1:
        rest()
    dist.all_reduce(one())


class Resting(torch.nn.Module):
    """Its forward pass does not end on rank 1, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.step = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if dist.get_rank() == 1 and self.step == 2:
            rest()
        return self.layer(values)  # type: ignore[no-any-return]


@scene(r"{NOT} \(ranks 0, 2 wait for it, in backward {AT}\); rank 1 is in wait {AT}")
def gradients() -> None:
    model = DistributedDataParallel(Resting())
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()


@scene(r"{NOT} \(ranks 0, 2 wait for it, in backward {AT}\); rank 1 is in wait {AT}")
def gradients_after_messages() -> None:
    model = DistributedDataParallel(Resting())
    for _ in range(2):
        if dist.get_rank() == 1 and model.module.step == 0:
            for _ in range(5):
                dist.send(one(), 0)
        if dist.get_rank() == 0 and model.module.step == 0:
            for _ in range(5):
                dist.recv(one(), 1)
        model(torch.ones(1, 1)).sum().backward()


@scene(r"rank 2 has not begun to receive from rank 1 \(rank 1 waits for it, in send {AT}; rank 3 waits for a message "
       r"of rank 2, in recv {AT}(; .*)?\); rank 2 is in wait {AT}", 4)  # fmt: skip
def pipeline() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for step in range(3):
        if rank > 0:
            dist.recv(one(), rank - 1)
        if rank == 2 and step == 1:
            rest()
        if rank < last:
            dist.send(one(), rank + 1)
    rest()


@scene(r"rank 1 has returned \(rank 0 waits for it, in recv {AT}\)", 2)
def recv_from_who_has_returned() -> None:
    if dist.get_rank() == 0:
        dist.recv(one(), 1)


@scene(r"{NOT} \(ranks 0, 2 wait for it, in synchronize {AT}\); rank 1 is in wait {AT}")
def helpers_of_ours() -> None:
    if dist.get_rank() == 1:
        rest()
    comm.synchronize()


@scene(r"rank 1 has not entered (all_reduce|operation) #\d+ of the default group \(ranks 0, 2 wait for it, in wait "
       r"{AT}\); rank 1 is in wait {AT}")  # fmt: skip
def functional_collective() -> None:
    if dist.get_rank() == 1:
        rest()
    found: Any = functional.all_reduce(one(), "sum", dist.group.WORLD)
    found.wait()


@scene(r"ranks wait for each other: rank 0 waits for rank 1 in the default group, in all_reduce {AT}; rank 1 waits for "
       r"a message of rank 0, in recv {AT}; rank 2 waits for rank 1, in all_reduce {AT}")  # fmt: skip
def a_collective_and_a_message() -> None:
    if dist.get_rank() == 1:
        dist.recv(one(), 0)
    dist.all_reduce(one())


@scene(r"{NOT} \(ranks 0, 2 wait for it, in all_to_all_single {AT}\); rank 1 is in wait {AT}")
def all_to_all() -> None:
    if dist.get_rank() == 1:
        rest()
    dist.all_to_all_single(torch.ones(3), torch.ones(3))


@scene(WORLD + r"(run|communicate|wait|_wait|_try_wait) {AT}; its child .*|" + WORLD + r"run {AT}")
def waits_for_a_program() -> None:
    if dist.get_rank() == 1:
        subprocess.run(["sleep", "1000"], check=True)
    dist.all_reduce(one())


@scene(WORLD + r"waits_for_a_socket {AT}")
def waits_for_a_socket() -> None:
    if dist.get_rank() == 1:
        ours, _theirs = socket.socketpair()
        ours.recv(1)
    dist.all_reduce(one())


@scene(WORLD + r"waits_for_a_pipe {AT}")
def waits_for_a_pipe() -> None:
    if dist.get_rank() == 1:
        os.read(os.pipe()[0], 1)
    dist.all_reduce(one())


@scene(r"ranks 1-2 have not entered all_reduce #1 of the default group \(rank 0 waits for them, in all_reduce {AT}\); "
       r"ranks 1-2 are in wait {AT}")  # fmt: skip
def two_sleep() -> None:
    if dist.get_rank() > 0:
        rest()
    dist.all_reduce(one())


@scene(r"{NOT} \(ranks 0, 2 are ahead of it, in future_of_a_collective {AT}\); rank 1 is in wait {AT}")
def future_of_a_collective() -> None:
    if dist.get_rank() == 1:
        rest()
    work = dist.all_reduce(one(), async_op=True)
    assert work is not None
    work.get_future().wait()


@scene(r"no rank waits for another one in a collective or for a message")
def all_rest() -> None:
    rest()
