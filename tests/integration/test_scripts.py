"""Scripts as their libraries' documentation writes them, unchanged under torchrun and under ``mlaunch run``.

Both give the same numbers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.imported import IMPORTED
from tests.integration.libraries import needs
from tests.system.commands import LAUNCHERS, at_once, run, write

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TELL = """
def tell(*numbers):
    import json, os
    os.write(1, (json.dumps([int(os.environ["RANK"]), *numbers]) + chr(10)).encode())
"""

TUTORIAL = """
import os, sys, tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

def demo():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_fn(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
    tell(loss.item(), sum(p.sum().item() for p in model.parameters()))
    dist.destroy_process_group()

if __name__ == "__main__":
    demo()
"""

LOCAL_RANK = """
import argparse
import torch
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
dist.init_process_group("gloo")
value = torch.tensor([args.lr * (args.local_rank + 1)])
dist.all_reduce(value)
tell(args.local_rank, value.item())
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

def main():
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    model = torch.nn.Linear(4, 1)
    x = torch.randn(64, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    total = accelerator.reduce(loss.detach(), "mean").item()
    tell(accelerator.num_processes, loss.item(), total)
    accelerator.end_training()

main()
"""

LIGHTNING = """
import logging, warnings
import lightning as L
import torch

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

L.seed_everything(7, verbose=False)
x = torch.randn(64, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
model = Model()
trainer.fit(model, loader)
tell(trainer.world_size, model.layer.weight.sum().item())
"""

TRAINER = """
import os, tempfile
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(7)
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = BertForSequenceClassification(config)
ids = torch.randint(0, 50, (32, 8))
data = [{"input_ids": row, "labels": int(row[0] > 25)} for row in ids]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True,
                                  report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
    result = Trainer(model, arguments, train_dataset=data).train()
tell(arguments.world_size, result.training_loss)
"""


def numbers(cwd: Path, launcher: list[str], *args: str) -> list[list[float]]:
    done = run(cwd, "--nproc-per-node", "2", *args, command=launcher)
    found = [
        json.loads(text) for text in re.findall(r"\[\d[^][]*]", done.stdout)
    ]  # a library's print may share the line
    assert len(found) == 2, done.stdout + done.stderr
    return sorted(found)


@pytest.mark.nightly("tutorial")
@pytest.mark.parametrize(
    ("text", "libraries"),
    [
        pytest.param(TUTORIAL, [], id="tutorial"),
        pytest.param(ACCELERATE, ["accelerate"], id="accelerate", marks=pytest.mark.nightly),
        pytest.param(LIGHTNING, ["lightning"], id="Lightning", marks=pytest.mark.nightly),
        pytest.param(TRAINER, ["transformers", "accelerate"], id="Trainer", marks=pytest.mark.nightly),
    ],
)
def test_the_same_numbers(tmp_path: Path, text: str, libraries: list[str]) -> None:
    needs(*libraries)
    script = write(tmp_path, TELL + text)
    ours, theirs = at_once(lambda launcher: numbers(tmp_path, launcher, script), LAUNCHERS.values())
    assert ours == theirs


@pytest.mark.nightly
def test_a_script_that_takes_its_local_rank(tmp_path: Path) -> None:
    script = write(tmp_path, TELL + LOCAL_RANK)
    launchers = [[IMPORTED, "-m", "mlaunch.launch"], [IMPORTED, "-m", "torch.distributed.launch"]]
    ours, theirs = at_once(lambda launcher: numbers(tmp_path, launcher, script, "--lr", "0.5"), launchers)
    assert ours == theirs
