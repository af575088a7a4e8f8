"""Cases of two processes: several matrices in one weight, q, k and v for instance, of each of which a rank has rows."""

import copy
import pickle
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import ColwiseParallel, HeadParallel, RowwiseParallel, SequenceParallel
from quaver.torch.state.layer_state import state_of
from tests import two_ranks
from tests.close import assert_bitwise, assert_close
from tests.torch.parallel.tensor.split import SplitLinear, parts_of, tokens
from tests.two_ranks import RANKS


def mesh() -> Any:
    return two_ranks.mesh(RANKS)


def random_tensor(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


#: Steps under each recipe for several matrices in one weight, in the quick and in the slow tests.
STEPS, LONG = dict.fromkeys(recipes.RECIPES, 3), dict.fromkeys(recipes.RECIPES, 20)


def under_every_recipe(rank: int) -> None:
    under_recipes(rank, STEPS)


def under_every_recipe_for_long(rank: int) -> None:
    under_recipes(rank, LONG)


def under_recipes(rank: int, steps_of: Mapping[str, int]) -> None:
    """Outputs and gradients equal one process that splits the same sums, with matrices of different sizes."""
    for name, steps in steps_of.items():
        recipe = recipes.get(name)
        block = max([16, *(side for s in recipe.operands().values() if s for side in s.block if side is not None)])
        sizes = {"q_proj": 2 * RANKS * block, "k_proj": RANKS * block, "v_proj": RANKS * block}
        total = sum(sizes.values())
        for sequence in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(qt.Linear(block, total))
            qt.convert(model, recipe)
            split = SplitLinear(copy.deepcopy(model[0]), recipe, RANKS, True, sequence, [*sizes.values()])  # type: ignore[arg-type]
            state_of(model[0]).pieces = sizes
            style: Any = ColwiseParallel(sequence=sequence)
            style.of_heads = True
            parallel = parallelize_module(model, mesh(), {"0": style})
            assert [p.placements for p in parallel.parameters()] == [(Shard(0),)] * 6  # type: ignore[attr-defined]
            optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, foreach=False) for each in (parallel, split)]
            for step in range(steps):
                x = torch.randn(2, RANKS * block, block, generator=torch.Generator().manual_seed(step)) * (1 + step)
                g = torch.randn(
                    2, RANKS * block, sum(sizes.values()), generator=torch.Generator().manual_seed(9 + step)
                )
                given = (tokens(x, rank, RANKS) if sequence else x).clone().requires_grad_()
                whole = x.clone().requires_grad_()
                y, z = parallel(given), split(whole)
                label = f"{name}, sequence {sequence}, step {step}"
                assert_bitwise(y.detach(), parts_of(z.detach(), -1, RANKS, [*sizes.values()])[rank], label)
                y.backward(parts_of(g, -1, RANKS, [*sizes.values()])[rank])
                z.backward(g)
                assert whole.grad is not None
                assert_bitwise(given.grad, tokens(whole.grad, rank, RANKS) if sequence else whole.grad, f"{label}: x")
                for kind, q in (("weight", split.weight), ("bias", split.bias)):
                    assert q.grad is not None
                    each = q.grad.split([*sizes.values()])
                    for (what, p), of_piece in zip(parallel[0]._modules[kind].items(), each, strict=True):  # type: ignore[index, operator, union-attr]
                        assert_bitwise(p.grad.to_local(), of_piece.chunk(RANKS)[rank], f"{label}: {kind} of {what}")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                split.roll()


def block_of_transformer(recipe: str | None = "tensorwise") -> Any:
    torch.manual_seed(0)
    rope = qt.RotaryEmbedding(16)
    return qt.TransformerLayer(
        64, 4, hidden=96, groups=2, rope=rope, activation="swiglu", normalization="RMSNorm", recipe=recipe
    )


PLAN = {"attention": HeadParallel(), "mlp.gate_up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}


def sharded(layer: nn.Module) -> Any:
    return parallelize_module(layer, mesh(), dict(PLAN))


def checkpoints(rank: int) -> None:
    """Unsharded weights load and save; torch's state dicts name each parameter and its moments."""
    whole, layer = block_of_transformer(), sharded(block_of_transformer())
    with torch.no_grad():
        for p in whole.parameters():
            p.add_(0.125)
    layer.load_state_dict(whole.state_dict())
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-2)
    layer(x).square().sum().backward()
    norm: Any = nn.utils.clip_grad_norm_([p for p in layer.parameters() if hasattr(p, "device_mesh")], 1.0)
    assert norm.full_tensor() > 0
    optimizer.step()
    names = [name for name, _ in layer.named_parameters()]
    assert "attention.qkv_proj.weight.k_proj" in names and "mlp.gate_up_proj.weight.up_proj" in names
    moments: Any = get_optimizer_state_dict(layer, optimizer)
    assert set(moments["state"]) == set(names)
    full = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
    again = block_of_transformer()
    again.load_state_dict(full)
    for key, value in again.state_dict().items():
        if key.startswith("attention.qkv_proj.weight"):
            each = layer.attention.qkv_proj.weight
            assert_bitwise(value, torch.cat([each[n].full_tensor().detach() for n in ("q_proj", "k_proj", "v_proj")]))
    assert not torch.equal(again.attention.qkv_proj.weight, whole.attention.qkv_proj.weight), "the step is in it"
    y = layer(x).detach()
    other = sharded(again)
    assert_bitwise(other(x).detach(), y, "the whole one in parts again")
    third = sharded(block_of_transformer())
    third.load_state_dict(layer.state_dict())
    assert_bitwise(third(x).detach(), y, "in parts to in parts")
    assert_bitwise(copy.deepcopy(layer)(x).detach(), y, "a copy")
    saved = pickle.loads(pickle.dumps(layer))
    assert_bitwise(saved(x).detach(), y, "a pickle")
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(layer), checkpoint_id=folder[0])
    fourth = sharded(block_of_transformer())
    state = get_model_state_dict(fourth)
    dcp.load(state, checkpoint_id=folder[0])
    assert_bitwise(fourth(x).detach(), y, "through torch.distributed.checkpoint")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def phi_3(heads: int, groups: int) -> Any:
    """Phi-3 of transformers with random weights: one weight for q, k and v, and one for gate and up."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Phi3Config(
        hidden_size=64 * heads // 2,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=96,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    )
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(config)


def plan_of_phi_3(config: Any, sequence: bool, heads: int = 32) -> dict[str, Any]:
    layer, own = "model.layers.*.", {"sequence": sequence}
    q, k = config.num_attention_heads * heads, config.num_key_value_heads * heads
    plan: dict[str, Any] = {
        f"{layer}self_attn.qkv_proj": ColwiseParallel(parts=(q, k, k)),
        f"{layer}self_attn.o_proj": RowwiseParallel(**own),
        f"{layer}mlp.gate_up_proj": ColwiseParallel(parts=(config.intermediate_size,) * 2, **own),
        f"{layer}mlp.down_proj": RowwiseParallel(**own),
    }
    if sequence:
        plan |= {
            "model.embed_tokens": SequenceParallel(replicated_input=True),
            f"{layer}input_layernorm": SequenceParallel(gather_output=True),
            f"{layer}post_attention_layernorm": SequenceParallel(),
            "model.norm": SequenceParallel(gather_output=True),
        }
    return plan


def transformers_phi_3(rank: int) -> None:
    """Sharded Phi-3 equals the unsharded model up to the order of sums: converted or not, with sequence parallelism."""
    ids = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(1))
    given = {"labels": ids, "position_ids": torch.arange(64)[None], "use_cache": False}
    for recipe, sequence, gap in (
        ("", False, 1e-5),
        ("mxfp8", True, 2e-2),
        ("delayed", False, 2e-2),
    ):
        model = phi_3(4, 2)
        whole = copy.deepcopy(model)
        for each in (model, whole) if recipe else ():
            qt.convert(each, recipe, skip=["lm_head"])
        parallelize_module(model, mesh(), plan_of_phi_3(model.config, sequence))
        for layer in model.model.layers:
            # Its forward reads the number of query heads from the configuration.
            attention = layer.self_attn
            attention.config = copy.copy(attention.config)
            attention.config.num_attention_heads //= RANKS
            attention.num_key_value_heads //= RANKS
        losses = [each(ids, **given).loss for each in (model, whole)]
        for loss in losses:
            loss.backward()
        label = f"{recipe or 'plain'}, sequence {sequence}"
        assert_close(f"{label}: loss", losses[0].detach(), losses[1].detach(), 1e-6)
        ours = dict(model.named_parameters())
        for name, p in whole.named_parameters():
            each = [q for what, q in ours.items() if what == name or what.startswith(f"{name}.")]
            assert len(each) == (3 if "qkv" in name else 2 if "gate_up" in name else 1), name
            g: Any = torch.cat([q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad for q in each])
            assert p.grad is not None
            assert_close(f"{label}: gradient of {name}", g, p.grad, gap)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert "model.layers.0.self_attn.qkv_proj.weight.2" in full or rank
        if recipe and not rank:
            again = phi_3(4, 2)
            qt.convert(again, recipe, skip=["lm_head"])
            again.load_state_dict(full)
            for name, value in again.named_parameters():
                assert_bitwise(value.detach(), whole.get_parameter(name).detach(), f"{label}: {name} saved")
        loaded = parallelize_module(copy.deepcopy(whole), mesh(), plan_of_phi_3(whole.config, sequence))
        with torch.no_grad():
            for q in loaded.parameters():
                q.zero_()
        # A state dict of the unsharded model loads under its own names.
        loaded.load_state_dict(
            {name: value for name, value in whole.state_dict().items() if "_proj" in name}, strict=False
        )
        for name in ("0", "1", "2"):
            parameters = (each.model.layers[1].self_attn.qkv_proj.weight[name] for each in (loaded, model))
            assert_bitwise(*(p.to_local().detach() for p in parameters), f"{label}: part {name}")  # type: ignore[call-arg]


def fused_qkv_with_heads_stored_together(rank: int) -> None:
    """GPT-NeoX heads have adjacent q, k and v: rows are sharded in stored order."""
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=96, **options))
    whole, ids = copy.deepcopy(model), torch.arange(32)[None]
    layer = "gpt_neox.layers.*."
    plan: dict[str, Any] = {
        f"{layer}attention.query_key_value": ColwiseParallel(parts=(192,)),
        f"{layer}attention.dense": RowwiseParallel(),
    }
    plan |= {f"{layer}mlp.dense_h_to_4h": ColwiseParallel(), f"{layer}mlp.dense_4h_to_h": RowwiseParallel()}
    parallelize_module(model, mesh(), plan)
    losses = [each(ids, labels=ids).loss for each in (model, whole)]
    for loss in losses:
        loss.backward()
    assert_close("loss", losses[0].detach(), losses[1].detach(), 1e-6)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        g: Any = p.grad
        assert_close(name, g.full_tensor() if hasattr(g, "full_tensor") else g, q.grad, 1e-5)


def fused_weights_without_declared_parts(rank: int) -> None:
    """A weight whose name suggests several fused matrices raises an error, by its own or its parent's name."""
    model = phi_3(2, 2)
    for converted in (False, True):
        if converted:
            qt.convert(model, "mxfp8", skip=["lm_head"])
        for name, joined in (("self_attn.qkv_proj", "qkv_proj"), ("mlp.gate_up_proj", "gate_up_proj")):
            with pytest.raises(ValueError, match=rf"is called '{joined}'.*ColwiseParallel\(parts=\(q, k, v\)\)"):
                parallelize_module(model, mesh(), {f"model.layers.*.{name}": ColwiseParallel()})
    for parts, message in (
        ((64, 64), "ColwiseParallel(parts=(64, 64)) has 128 rows, and"),
        ((64, 65, 63), "has 65 output features, which 2 ranks cannot share"),
        ((192, 0), "give the rows of each of its matrices"),
    ):
        layer = nn.ModuleDict({"qkv_proj": nn.Linear(8, 192)})
        with pytest.raises(ValueError, match=re.escape(message)):
            parallelize_module(layer, mesh(), {"qkv_proj": ColwiseParallel(parts=parts)})
    with pytest.raises(ValueError, match="already declares that it joins gate_proj, up_proj"):
        parallelize_module(qt.MLP(64, 32, "swiglu"), mesh(), {"gate_up_proj": ColwiseParallel(parts=(32, 32))})
    again = {"mlp.gate_up_proj": ColwiseParallel()}
    twice = parallelize_module(block_of_transformer(), mesh(), again)
    with pytest.raises(ValueError, match=r"is sharded by ColwiseParallel.. already"):
        parallelize_module(twice, mesh(), again)
    for name in ("q_proj", "up_proj", "wi", "dense_h_to_4h", "lm_head"):
        parallelize_module(nn.ModuleDict({name: nn.Linear(8, 8)}), mesh(), {name: ColwiseParallel()})


CASES = [
    under_every_recipe,
    checkpoints,
    transformers_phi_3,
    fused_qkv_with_heads_stored_together,
    fused_weights_without_declared_parts,
]


if __name__ == "__main__":
    two_ranks.main(CASES)
