import lightning as L
import torch

from mlaunch import launcher


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@launcher(n_gpus=2, results="rank0")
def fit():
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = Line()
    trainer = L.Trainer(devices=2, strategy="ddp", max_epochs=1, barebones=True)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return model.state_dict()


model = Line()
model.load_state_dict(fit()[0])
print(f"sum of weights {model.layer.weight.sum():.4f}")
