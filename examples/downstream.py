"""Train a tiny Llama in bf16 and in FP8, and compare what lm-eval measures. Needs pip install 'lm-eval[hf]'."""

import argparse
import json
import os
import random
import sysconfig
import tempfile
from itertools import pairwise
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import quaver.torch as qt

VOCABULARY, SEQUENCE, BATCH, CONTEXT = 1024, 64, 8, 48
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
NUDGED = "bf16, weights nudged by 1e-5"
RUNS = {"bf16": None, NUDGED: None, "tensorwise": "tensorwise", "mxfp8": "mxfp8"}


def write_task(folder: Path, tokenizer: PreTrainedTokenizerFast, train: list[int], held_out: list[int], n: int) -> None:
    """Write a task and n questions: which of four tokens that follow the last one somewhere follows here?"""
    followers: dict[int, set[int]] = {token: set() for token in range(VOCABULARY)}
    for last, token in pairwise(train):
        followers[last].add(token)
    draw, lines = random.Random(0), []
    while len(lines) < n:
        start = draw.randrange(len(held_out) - CONTEXT)
        *context, answer = held_out[start : start + CONTEXT + 1]
        wrong = sorted(followers[context[-1]] - {answer})
        choices = draw.sample([answer, *draw.sample(wrong, min(3, len(wrong)))], min(4, 1 + len(wrong)))
        text, texts = tokenizer.decode(context), [tokenizer.decode(token) for token in choices]
        # A question's text must give these tokens again; lm-eval moves spaces at the end of a context.
        exact = all(tokenizer.encode(text + t) == [*context, token] for t, token in zip(texts, choices, strict=True))
        if len(choices) == 4 and exact and text == text.rstrip():
            lines.append(json.dumps({"context": text, "choices": texts, "answer": choices.index(answer)}))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    task = Path(__file__).with_name("next_token.yaml").read_text()
    (folder / "next_token.yaml").write_text(task.replace("FOLDER", str(folder)))


def train(run: str, tokens: torch.Tensor, seed: int, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, **SHAPE))
    if run == NUDGED:
        for weight in model.parameters():
            weight.data *= 1 + 1e-5 * torch.randn(weight.shape)
    if RUNS[run] is not None:
        qt.convert(model, RUNS[run], seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    torch.manual_seed(seed)  # every run sees the same batches
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens) - SEQUENCE, (BATCH, 1)) + torch.arange(SEQUENCE)]
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    return model.eval()


parser = argparse.ArgumentParser(description=__doc__)
for option, default in {"--steps": 300, "--seeds": 3, "--questions": 1000}.items():
    parser.add_argument(option, type=int, default=default)
options = parser.parse_args()

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
held_out = "\n".join(texts[::10])
del texts[::10]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
accuracies: dict[str, list[float]] = {run: [] for run in RUNS}
with tempfile.TemporaryDirectory() as folder:
    bpe.save(f"{folder}/tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token="!")
    tokens = tokenizer.encode("\n".join(texts))
    write_task(Path(folder), tokenizer, tokens, tokenizer.encode(held_out), options.questions)
    tasks = TaskManager(include_path=folder, include_defaults=False)
    print("| run | accuracy | minus bf16 | by seed |\n|---|---|---|---|")
    for run, found in accuracies.items():
        for seed in range(options.seeds):
            model = train(run, torch.tensor(tokens), seed, options.steps)
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=64, max_length=SEQUENCE)
            results = simple_evaluate(lm, tasks=["next_token"], task_manager=tasks)["results"]["next_token"]
            found.append(results["acc,none"])
        changes = [mine - base for mine, base in zip(found, accuracies["bf16"], strict=True)]
        accuracy = f"{sum(found) / len(found):.3f} ± {results['acc_stderr,none']:.3f}"
        print(f"| {run} | {accuracy} | {sum(changes) / len(changes):+.4f} | {' '.join(f'{c:+.3f}' for c in changes)} |")
