"""Trains on two ranks with a configuration of Hydra; -m runs several configurations, one after the other."""

import hydra
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from mlaunch import launcher

ConfigStore.instance().store(name="config", node={"lr": 0.1, "epochs": 2})


@launcher(n_gpus=2)
def train(config, folder):
    loss = config["lr"] * config["epochs"]
    if dist.get_rank() == 0:
        with open(f"{folder}/loss.txt", "w") as file:
            file.write(str(loss))
    return loss


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(config):
    # Asked in the caller, where Hydra has set it.
    folder = HydraConfig.get().runtime.output_dir
    losses = train(OmegaConf.to_container(config, resolve=True), folder)
    print(f"lr {config.lr}: loss {losses[0]:.2f}")
    return losses[0]  # what Hydra's sweepers compare


if __name__ == "__main__":
    main()
