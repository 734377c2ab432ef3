"""Transformers' Trainer on two ranks."""

import tempfile
from pathlib import Path

import torch

import mlaunch


@mlaunch.launcher(n_gpus=2, seed=0, results="rank0")
def train(folder):
    import transformers

    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": torch.arange(8) + i % 8, "labels": i % 2} for i in range(32)]
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=mlaunch.device().type == "cpu", num_train_epochs=1,
        per_device_train_batch_size=4, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    done = trainer.train()
    trainer.save_model()  # rank 0 writes
    return arguments.world_size, done.global_step


with tempfile.TemporaryDirectory() as folder:
    world_size, steps = train(folder)[0]
    saved = sorted(path.name for path in Path(folder).glob("*.safetensors"))
    print(f"world size {world_size}, {steps} steps, {saved} saved")
