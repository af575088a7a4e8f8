"""transformers' Trainer: train a converted model and log saturation. Needs pip install -e '.[integrations]'."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import quaver.torch as qt
from quaver.integrations.huggingface import ScalingCallback

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=64))
qt.convert(model, "delayed", blocks=True)
text = [{"input_ids": row, "labels": row} for row in torch.randint(128, (32, 32))]

with tempfile.TemporaryDirectory() as folder:
    often = {"max_steps": 8, "logging_steps": 4, "save_steps": 4}
    arguments = TrainingArguments(output_dir=folder, bf16=True, use_cpu=True, report_to=[], disable_tqdm=True, **often)
    trainer = Trainer(model=model, args=arguments, train_dataset=text, callbacks=[ScalingCallback()])
    trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print(f"step {row['step']}: loss {row['loss']}, saturated inputs {row['saturated_input']:.1%}")
