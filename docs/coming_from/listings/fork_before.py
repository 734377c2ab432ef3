"""Estimates pi in two forked processes, which inherit the data and share a queue."""

import multiprocessing

import torch


def count(rank, points, queue):
    mine = points[rank::2]
    queue.put(int((mine.square().sum(dim=1) < 1).sum()))


points = torch.rand(200_000, 2, generator=torch.Generator().manual_seed(0))
context = multiprocessing.get_context("fork")
queue = context.Queue()
processes = [context.Process(target=count, args=(rank, points, queue)) for rank in range(2)]
for process in processes:
    process.start()
inside = sum(queue.get() for _ in processes)
for process in processes:
    process.join()
print(f"pi is about {4 * inside / len(points):.4f}")
