"""Libraries that bring their own idea of a distributed process, unmodified, inside the decorator: on 2 CPU ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from mlaunch import comm, launcher

pytestmark = [pytest.mark.integration, pytest.mark.slow]
train_on_cpu = launcher(n_gpus=2, device_type="cpu")
HIDDEN = 16


def needs(*names: str) -> None:
    """Skips where a library is missing. It is not imported here: some change the environment when they are."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (extra: integration)")


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def assert_alike(results: list[Any], places: list[tuple[int, ...]]) -> None:
    """That the two ranks have the same weights, and stand where they should."""
    (first, *_), (second, *_) = results
    torch.testing.assert_close(first, second)
    assert [result[1:] for result in results] == places


def test_accelerate() -> None:
    needs("accelerate")

    @train_on_cpu
    def train() -> Any:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(data(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen = 0
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            seen += len(x)
        weight = accelerator.unwrap_model(model).weight.detach()
        return weight, accelerator.num_processes, accelerator.process_index, seen

    assert_alike(train(), [(2, 0, 16), (2, 1, 16)])


def test_transformers_trainer(tmp_path: Path) -> None:
    needs("transformers", "accelerate")

    @train_on_cpu
    def train() -> Any:
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=32, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, intermediate_size=HIDDEN
        )
        model = BertForSequenceClassification(config)
        rows = [{"input_ids": torch.arange(8) + i % 8, "labels": torch.tensor(i % 2)} for i in range(16)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        done = trainer.train()
        return model.classifier.weight.detach(), arguments.world_size, arguments.process_index, done.global_step

    assert_alike(train(), [(2, 0, 2), (2, 1, 2)])


def test_lightning_fabric() -> None:
    needs("lightning")

    @train_on_cpu
    def train() -> Any:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        model = linear()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in fabric.setup_dataloaders(torch.utils.data.DataLoader(data(), batch_size=4)):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
        return model.module.weight.detach(), fabric.world_size, fabric.global_rank

    assert_alike(train(), [(2, 0), (2, 1)])


def test_lightning_trainer(tmp_path: Path) -> None:
    """It makes no processes and no group of its own: it finds those that are there."""
    needs("lightning")

    @train_on_cpu
    def train() -> Any:
        import lightning

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = linear()

            def training_step(self, batch: Any, _index: int) -> torch.Tensor:
                return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=4))
        return module.layer.weight.detach(), trainer.world_size, trainer.global_rank, trainer.global_step

    assert_alike(train(), [(2, 0, 4), (2, 1, 4)])


def test_torchmetrics() -> None:
    needs("torchmetrics")

    @train_on_cpu
    def train() -> float:
        import torchmetrics

        metric = torchmetrics.classification.BinaryAccuracy()
        wanted = torch.tensor([1, 1, 1, 1])
        metric.update(wanted if comm.get_rank() == 0 else torch.tensor([0, 0, 1, 1]), wanted)
        return float(metric.compute())

    assert train() == [0.75, 0.75]
