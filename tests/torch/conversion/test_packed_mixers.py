"""Test that packed sequences of a hybrid model equal single sequences, gradients included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

import quaver.torch as qt
from quaver.torch.conversion.replace.mixer import FusedMixer
from tests.close import assert_bitwise, assert_close
from tests.torch.conversion.families import tiny

#: Families with attention beside mixers.
HYBRIDS = ("bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid")
#: Tokens of the sequences: fewer than the convolution's taps, and more than a chunk of transformers.
LENGTHS = (5, 11, 3)


def model_of(family: str, **more: Any) -> Any:
    model = tiny(family, **more).train()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    for buffer in (b for name, b in model.named_buffers() if name.endswith("mup_vector")):
        buffer.mul_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, 90, (length,), generator=generator) for length in LENGTHS]


def packed(**how: bool) -> dict[str, Any]:
    """What transformers' collator makes of them."""
    batch: dict[str, Any] = DataCollatorWithFlattening(**how)([{"input_ids": s} for s in sequences()], "pt")
    del batch["labels"]
    return batch


def results(model: Any, logits: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Logits [tokens, vocabulary] and the gradients of a loss that weighs each differently."""
    model.zero_grad()
    y = logits()
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": y.detach(), "all gradients": torch.cat([g.flatten() for g in gradients.values()])}


def alone(model: Any) -> dict[str, Tensor]:
    return results(model, lambda: torch.cat([model(input_ids=s[None], use_cache=False)[0][0] for s in sequences()]))


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "seq_idx": lambda: packed(return_seq_idx=True),
    "seq_idx alone": lambda: packed(return_seq_idx=True, return_position_ids=False),
    "cu_seq_lens_q": lambda: packed(return_flash_attn_kwargs=True, return_position_ids=False),
    "position_ids": packed,
    "all": lambda: packed(return_seq_idx=True, return_flash_attn_kwargs=True),
    "a mask of ones": lambda: packed(return_seq_idx=True) | {"attention_mask": torch.ones(1, sum(LENGTHS))},
}


@pytest.mark.parametrize(
    ("family", "way"), [*((HYBRIDS[0], way) for way in WAYS), *zip(HYBRIDS[1:], WAYS, strict=False)]
)
def test_packed_sequences_equal_single_sequences(family: str, way: str) -> None:
    model = model_of(family)
    qt.convert(model, "bf16", blocks=True)
    assert any(isinstance(module, FusedMixer) for module in model.modules())
    expected, got = alone(model), results(model, lambda: model(**WAYS[way]()).logits[0])
    for name, value in expected.items():
        assert_close(name, got[name], value, 2e-6)


def test_a_single_sequence_matches_transformers() -> None:
    """Falcon-H1's mixers multiply the input and the output of their first projection."""
    model = model_of("falcon_h1", ssm_in_multiplier=0.7)
    expected = alone(model)
    qt.convert(model, "bf16", blocks=True)
    assert sum(isinstance(module, FusedMixer) for module in model.modules()) == 2
    for name, value in alone(model).items():
        assert_close(name, value, expected[name], 2e-6)


def test_rows_of_several_sequences_and_the_body_of_mamba2() -> None:
    model = model_of("mamba2").backbone
    qt.convert(model, "bf16", blocks=True)
    x = torch.randn(2, 12, 64)
    numbers = torch.tensor([[0] * 7 + [1] * 5, [4] * 2 + [5] * 10], dtype=torch.int32)
    y = model(inputs_embeds=x, seq_idx=numbers)[0]
    for row, start, stop in ((0, 0, 7), (0, 7, 12), (1, 0, 2), (1, 2, 12)):
        assert_close("a sequence", y[row, start:stop], model(inputs_embeds=x[row : row + 1, start:stop])[0][0], 2e-6)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q describes a batch of one row, and this batch has 2"):
        model.layers[0].mixer(x, cu_seq_lens_q=torch.tensor([0, 24]))
    with pytest.raises(ValueError, match=r"seq_idx has shape \[1, 12\], and the tokens \[2, 12\]"):
        model(inputs_embeds=x, seq_idx=numbers[:1])


def test_a_cache_continues_with_the_last_sequence() -> None:
    model = model_of("mamba2").backbone.eval()
    qt.convert(model, "bf16", blocks=True)
    one, two, last = sequences()
    with torch.no_grad():
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        numbers = torch.tensor([[0] * len(one) + [1] * len(two) + [2] * len(last)], dtype=torch.int32)
        together = torch.cat([one, two, last])[None]
        # A model that is given a cache goes on from it, and is not asked where sequences begin.
        hidden = model.embeddings(together)
        for layer in model.layers:
            hidden = layer(hidden, cache_params=caches[0], seq_idx=numbers)
        model(input_ids=last[None], cache_params=caches[1], use_cache=True)
        steps = [model(input_ids=one[None, :1], cache_params=cache, use_cache=True)[0] for cache in caches]
    assert_close("the next token", steps[0], steps[1], 2e-6)


def test_sequences_that_transformers_would_mix_are_refused() -> None:
    model = model_of("bamba")
    qt.convert(model, "bf16", blocks=True)
    mask = torch.ones(1, sum(LENGTHS))
    mask[0, -1] = 0
    given = packed(return_seq_idx=True)
    with pytest.raises(ValueError, match=r"attention_mask \[1, \d+\] hides tokens"):
        model(given.pop("input_ids"), mask, **given)
    whole = model_of("mamba2")
    qt.convert(whole, "bf16", blocks=True)
    with pytest.raises(ValueError, match=r"Mamba2ForCausalLM\.forward of transformers does not pass seq_idx on"):
        whole(**packed(return_seq_idx=True))
    positions = torch.arange(4)[None]
    whole(input_ids=positions, position_ids=positions)


def test_positions_that_do_not_start_again_change_nothing() -> None:
    model = model_of("bamba")
    qt.convert(model, "bf16", blocks=True)
    ids = sequences()[1][None]
    y = model(input_ids=ids).logits
    positions = torch.arange(ids.shape[1])[None]
    assert_bitwise(model(input_ids=ids, position_ids=positions).logits, y)
    assert_bitwise(model(ids, torch.ones(1, ids.shape[1]), positions).logits, y)
    assert model(input_ids=ids).past_key_values is not None, "a cache is made as before"


@pytest.mark.slow
def test_packed_sequences_compile_as_one_graph() -> None:
    model = model_of("bamba")
    qt.convert(model, "bf16", blocks=True)
    given = packed(return_seq_idx=True)
    expected = results(model, lambda: model(**given).logits[0])
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = results(model, lambda: compiled(**given, use_cache=False).logits[0])
    for name, value in expected.items():
        assert_close(name, got[name], value, 2e-6)


def test_eager_attention_recomputation_and_a_recipe() -> None:
    model = model_of("bamba")
    model.set_attn_implementation("eager")
    # Scales of rows: what a token is beside changes nothing.
    qt.convert(model, "rowwise", blocks=True)
    expected = torch.cat([model(input_ids=s[None]).logits[0] for s in sequences()])
    model.activation_checkpointing_enable()
    got = results(model, lambda: model(**packed()).logits[0])
    assert_close("logits", got["logits"], expected.detach(), 2e-6)
    model.activation_checkpointing_disable()
    again = results(model, lambda: model(**packed()).logits[0])
    assert_bitwise(got["all gradients"], again["all gradients"])
    qt.revert(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
