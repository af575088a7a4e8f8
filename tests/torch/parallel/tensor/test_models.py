"""Two processes on gloo: blocks and a model of transformers in parts are the whole one but for the order of sums."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver.torch.parallel import ColwiseParallel, HeadParallel, RowwiseParallel, SequenceParallel, VocabParallel
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.torch.parallel.tensor import matrices, vocabulary
from tests.torch.parallel.tensor.split import tokens
from tests.two_ranks import RANKS

#: Largest relative difference of gradients from one process: an ulp in a sum can change single codes.
GAPS = {None: 1e-5, "tensorwise": 2e-2, "mxfp8": 2e-2, "delayed": 2e-2}


def mesh() -> Any:
    return two_ranks.mesh(RANKS)


def whole_gradient(p: nn.Parameter) -> Tensor:
    g: Any = p.grad
    return g.full_tensor() if hasattr(g, "full_tensor") else g


def compare(model: nn.Module, reference: nn.Module, losses: list[Tensor], label: str, gap: float) -> None:
    assert_close(f"{label}: loss", losses[0].detach(), losses[1].detach(), 1e-6)
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    parameters = dict(model.named_parameters())
    for name, expected in gradients.items():
        # The matrices of a fused weight are separate parameters.
        each = [p for what, p in parameters.items() if what == name or what.startswith(f"{name}.")]
        assert expected is not None and each, name
        assert_close(f"{label}: gradient of {name}", torch.cat([whole_gradient(p) for p in each]), expected, gap)


def with_tokens(model: nn.Module, reference: nn.Module, x: Tensor, sequence: bool, label: str, gap: float) -> None:
    """Compare a model whose tokens are sharded over ranks with the unsharded model."""
    ours = tokens(x, dist.get_rank(), RANKS) if sequence else x
    loss, expected = model(ours).square().sum() / x.numel(), reference(x).square().sum() / x.numel()
    loss.backward()
    expected.backward()
    loss = loss.detach()
    if sequence:
        dist.all_reduce(loss)
    compare(model, reference, [loss, expected], label, gap)


def transformer_layers(rank: int) -> None:
    for recipe, gap in GAPS.items():
        for sequence, fused in itertools.product((False, True), (False, True)):
            torch.manual_seed(0)
            options: Any = {"fused": fused, "mask_type": "causal", "activation": "swiglu", "recipe": recipe}
            rope, norm = qt.RotaryEmbedding(32), "RMSNorm"
            layer = qt.TransformerLayer(
                128, 4, hidden=256, groups=2, rope=rope, normalization=norm, qk_norm="RMSNorm", **options
            )
            reference = copy.deepcopy(layer)
            style = {"sequence": sequence}
            columns = ["mlp.gate_up_proj"] if fused else ["mlp.gate_proj", "mlp.up_proj"]
            plan: Any = {"attention": HeadParallel(**style), "mlp.down_proj": RowwiseParallel(**style)}
            plan |= {name: ColwiseParallel(**style) for name in columns}
            if sequence:
                plan |= {"attention.norm": SequenceParallel(), "mlp.norm": SequenceParallel()}
            parallelize_module(layer, mesh(), plan)
            x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1))
            with_tokens(layer, reference, x, sequence, f"{recipe}, sequence {sequence}, fused {fused}", gap)


def norms_before_layers(rank: int) -> None:
    for recipe, gap in GAPS.items():
        torch.manual_seed(0)
        model: Any = nn.Sequential(
            qt.LayerNormMLP(64, 128, "swiglu", fused=False, recipe=recipe), qt.LayerNormLinear(64, 64, recipe=recipe)
        )
        reference = copy.deepcopy(model)
        plan: Any = {name: ColwiseParallel(sequence=True) for name in ("0.gate_proj", "0.up_proj")}
        plan |= {
            "0.down_proj": RowwiseParallel(sequence=True),
            "0.norm": SequenceParallel(),
            "1.norm": SequenceParallel(gather_output=True),
        }
        parallelize_module(model, mesh(), {**plan, "1.linear": ColwiseParallel()})
        x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
        y, z = model(tokens(x, rank, RANKS)), reference(x)
        assert_close(f"{recipe}: output", y.detach(), z.detach().chunk(RANKS, -1)[rank], gap)
        y.square().sum().backward()
        z.square().sum().backward()
        loss = y.detach().square().sum()
        dist.all_reduce(loss)
        compare(model, reference, [loss, z.square().sum()], str(recipe), gap)


def llama(sequence: bool) -> dict[str, Any]:
    """A plan for transformers' Llama, whose attention needs all tokens to compute their number."""
    attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    plan: dict[str, Any] = {attention + name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan |= {mlp + name: ColwiseParallel(sequence=sequence) for name in ("gate_proj", "up_proj")}
    plan |= {
        attention + "o_proj": RowwiseParallel(sequence=sequence),
        mlp + "down_proj": RowwiseParallel(sequence=sequence),
    }
    if sequence:
        plan |= {
            "model.embed_tokens": SequenceParallel(replicated_input=True),
            "model.layers.*.input_layernorm": SequenceParallel(gather_output=True),
            "model.layers.*.post_attention_layernorm": SequenceParallel(),
            "model.norm": SequenceParallel(gather_output=True),
        }
    return plan


def small_llama(**options: Any) -> Any:
    """A small Llama of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=96,
        **options,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def a_converted_transformers_model(rank: int) -> None:
    plain = small_llama(num_hidden_layers=2, attention_bias=True)
    ids = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(1))
    given = {"labels": ids, "position_ids": torch.arange(64)[None], "use_cache": False}
    for recipe, sequence in ((None, True), ("mxfp8", False), ("mxfp8", True)):
        model, reference = copy.deepcopy(plain), copy.deepcopy(plain)
        for each in (model, reference):
            qt.convert(each, "bf16" if recipe is None else recipe, skip=["lm_head"])
        parallelize_module(model, mesh(), llama(sequence))
        losses = [each(ids, **given).loss for each in (model, reference)]
        for loss in losses:
            loss.backward()
        compare(model, reference, losses, f"{recipe}, sequence {sequence}", GAPS[recipe])


def norms_of_heads(rank: int) -> None:
    """Norms between q_proj and o_proj get gradients of all heads, or raise an error with the plan entry to add."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 96, "num_hidden_layers": 2}
    ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    given = {"labels": ids, "position_ids": torch.arange(32)[None], "use_cache": False}
    norms = {f"model.layers.*.self_attn.{name}": SequenceParallel() for name in ("q_norm", "k_norm")}
    for family, more in (("Qwen3", {"head_dim": 32}), ("Gemma3Text", {"head_dim": 32}), ("Olmo2", {})):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes, **more)
        plain = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
        for recipe in (None, "mxfp8"):
            model, reference = copy.deepcopy(plain), copy.deepcopy(plain)
            for each in (model, reference):
                for name, p in each.named_parameters():
                    if "_norm" in name:
                        torch.nn.init.normal_(p, 1.0, 0.2, generator=torch.Generator().manual_seed(2))
                qt.convert(each, "bf16" if recipe is None else recipe, skip=["lm_head"])
            raises = copy.deepcopy(model)
            parallelize_module(raises, mesh(), llama(False))
            with pytest.raises(
                (ValueError, RuntimeError), match=r'"\.\.\.q_norm": SequenceParallel\(\)|size of tensor'
            ) as error:
                raises(ids, **given)
            if family == "Olmo2":
                # Its norm spans all heads, and no rank has them all.
                assert "size of tensor" in str(error.value)
                continue
            parallelize_module(model, mesh(), llama(False) | norms)
            losses = [each(ids, **given).loss for each in (model, reference)]
            for loss in losses:
                loss.backward()
            compare(model, reference, losses, f"{family}, {recipe}", GAPS[recipe])


def a_vocabulary_parallel_transformers_model(rank: int) -> None:
    """Vocabulary-parallel embedding and head, tied or not, with a loss that never holds all logits."""
    for sequence, ties in ((False, True), (True, False)):
        model = small_llama(num_hidden_layers=1, tie_word_embeddings=ties).train()
        reference = copy.deepcopy(model)
        ids = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(1))
        ids[0, :9] = -100
        given = {"labels": ids, "position_ids": torch.arange(64)[None], "use_cache": False}
        for each in (model, reference):
            qt.convert(each, "mxfp8", blocks=qt.Blocks(norm=False, mlp=False, attention=False, loss=True))
        plan = llama(sequence) | {"model.embed_tokens": VocabParallel(sequence=sequence), "lm_head": ColwiseParallel()}
        parallelize_module(model, mesh(), plan)
        outputs = [each(ids.clamp(min=0), **given) for each in (model, reference)]
        assert outputs[0].logits is None, "they never exist"
        for output in outputs:
            output.loss.backward()
        compare(model, reference, [output.loss for output in outputs], f"sequence {sequence}, tied {ties}", 2e-2)


def dropped_tokens_differ(rank: int) -> None:
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5)
    parallelize_module(dropout, mesh(), SequenceParallel())
    before = torch.get_rng_state()
    y = dropout(torch.ones(4, 64))
    one, other = two_ranks.gathered(y)
    assert not torch.equal(one, other) and 0.3 < float((y == 0).float().mean()) < 0.7
    assert_bitwise(*two_ranks.gathered(torch.get_rng_state()), "every rank's generator moves on alike")
    assert not torch.equal(before, torch.get_rng_state())
    nonzero = y[y != 0]
    assert_bitwise(nonzero, torch.full_like(nonzero, 2.0))
    assert_bitwise(dropout.eval()(torch.ones(4, 64)), torch.ones(4, 64))


def bad_input(rank: int) -> None:
    def raises(message: str, module: nn.Module, plan: Any) -> None:
        with pytest.raises(ValueError, match=message):
            parallelize_module(module, mesh(), plan)

    raises(
        "33 output features, which 2 ranks cannot share", qt.MLP(64, 33, "swiglu"), {"gate_up_proj": ColwiseParallel()}
    )
    raises(
        "put HeadParallel.. on the attention",
        copy.deepcopy(qt.MultiheadAttention(64, 4)),
        {"qkv_proj": ColwiseParallel()},
    )
    raises("this one has alibi", qt.MultiheadAttention(64, 4, fused=False, alibi=True), HeadParallel())
    raises("cannot share 3 heads", qt.MultiheadAttention(63, 3, fused=False), HeadParallel())
    raises("Linear is none", qt.Linear(8, 8), HeadParallel())
    raises("another one with parameters, '0'", nn.Sequential(nn.LayerNorm(8)), SequenceParallel())
    raises("would drop the same elements on every rank", nn.Dropout2d(), SequenceParallel())
    twice = nn.LayerNorm(8)
    parallelize_module(twice, mesh(), SequenceParallel(replicated_input=True))
    raises("already", twice, SequenceParallel())
    with pytest.raises(ValueError, match="2 ranks cannot share 5 tokens"):
        twice(torch.zeros(5, 8))
    column = parallelize_module(nn.ModuleDict({"up": qt.Linear(8, 8)}), mesh(), {"up": ColwiseParallel()})
    with qt.weight_gradients(later=True), pytest.raises(ValueError, match="does not support it; leave it out around"):
        column["up"](torch.zeros(4, 8))


CASES = [
    transformer_layers,
    norms_before_layers,
    a_converted_transformers_model,
    norms_of_heads,
    a_vocabulary_parallel_transformers_model,
    dropped_tokens_differ,
    bad_input,
    *matrices.CASES,
    *vocabulary.CASES,
]


SLOW = [matrices.under_every_recipe_for_long, vocabulary.quantized_heads_for_long]


@pytest.mark.ranks
def test_sharded_models_equal_whole_ones(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_steps(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, slow=True)


if __name__ == "__main__":
    two_ranks.main(CASES, slow=SLOW)
