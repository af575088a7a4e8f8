"""REINFORCE with a rollout process that generates with transformers from the trainer's codes, sent after each step.

python examples/reinforce_rollout.py nvfp4    # or mxfp8, rowwise

The reward is the share of even tokens among those that the model generates.
"""

import sys
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import quaver.torch as qt
from quaver.torch.serving import StreamLoader, TransformersReceiver, divergence

RECIPES = ("nvfp4", "mxfp8", "rowwise")
STEPS, SAMPLES, PROMPT, NEW = 12, 32, 4, 12
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def build(recipe: str) -> Any:
    torch.manual_seed(0)
    heads, ids = {"num_attention_heads": 4}, {"bos_token_id": None, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **heads, **ids, vocab_size=32))
    qt.convert(model, recipe)
    return model


def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities of the generated tokens' distributions, [samples, NEW, vocabulary]."""
    logits: Tensor = model(tokens).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1)


class Rollout:
    """The model that generates."""

    def __init__(self, recipe: str) -> None:
        self.model = build(recipe).eval()
        self.loader = StreamLoader(self.model)

    @torch.no_grad()
    def sample(self) -> tuple[Tensor, Tensor]:
        prompts = torch.randint(32, (SAMPLES, PROMPT))
        tokens = self.model.generate(prompts, max_new_tokens=NEW, do_sample=True, pad_token_id=32)
        return tokens, log_probabilities(self.model, tokens)


def serve(connection: Any, recipe: str) -> None:
    torch.set_num_threads(1)
    rollout = Rollout(recipe)
    while call := connection.recv():
        target = rollout if call[0] == "sample" else rollout.loader
        connection.send(getattr(target, call[0])(*call[1:]))


class Remote:
    """Calls methods of the rollout process."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.connection.send((name, *args))
            return self.connection.recv()

        return call


def main(recipe: str) -> None:
    own, other = torch.multiprocessing.Pipe()
    process = torch.multiprocessing.get_context("spawn").Process(target=serve, args=(other, recipe), daemon=True)
    process.start()
    other.close()
    remote, model = Remote(own), build(recipe)
    receiver, stream = TransformersReceiver(remote, timeout=60), qt.serving_stream(model, "transformers")
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for step in range(STEPS):
        sent = receiver.update_weights(stream, changed=True)
        tokens, rollout = remote.sample()
        own_values, generated = log_probabilities(model, tokens), tokens[:, PROMPT:]
        kl = divergence(own_values.detach().flatten(0, 1), rollout.flatten(0, 1))
        reward = (generated % 2 == 0).float().mean(-1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        chosen = own_values.gather(-1, generated.unsqueeze(-1)).squeeze(-1).sum(-1)
        (-(advantage * chosen).mean() / NEW).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: reward {reward.mean():.2f}, KL trainer to rollout {kl}, {sent}")
    own.send(None)
    process.join()


if __name__ == "__main__":
    main(next((name for name in sys.argv[1:] if name in RECIPES), "nvfp4"))
