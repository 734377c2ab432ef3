import torch

from mlaunch import comm, launch


def main(samples):
    device = f"cuda:{comm.get_local_rank()}" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(comm.get_rank())
    points = torch.rand(samples, 2, generator=generator).to(device)
    inside = (points.square().sum(1) < 1).float()
    found = comm.reduce_dict({"pi": 4 * inside.mean()})
    seen = comm.gather(samples)
    if comm.is_main_process():
        print(f"pi is about {found['pi']:.4f}, from {sum(seen)} samples")


if __name__ == "__main__":
    launch(main, num_gpus_per_machine=2, dist_url="auto", args=(100_000,))
