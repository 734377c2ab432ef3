"""Lightning's Trainer on two ranks; it starts no processes of its own."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import mlaunch


@mlaunch.launcher(n_gpus=2)
def train():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator=mlaunch.device().type, devices=2, strategy="ddp", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=8))
    return trainer.world_size, trainer.global_step, module.layer.weight.sum().item()


print(train())
