"""Cases of two processes: several matrices in one weight, q, k and v for instance, of each of which a rank has rows."""

import copy
import pickle
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import Column, Heads, Row
from quaver.torch.parallel.tensor import pieces
from quaver.torch.state.layer import state_of
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.tensor.split import SplitLinear, parts_of, tokens
from tests.two_ranks import RANKS


def mesh() -> Any:
    return init_device_mesh("cpu", (RANKS,))


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def under_every_recipe(rank: int) -> None:
    """Output, gradients and three steps of one process that splits the same sums, with matrices of unlike sizes."""
    for name in recipes.RECIPES:
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
            style: Any = Column(sequence=sequence)
            style.of_heads = True
            parallel = parallelize_module(model, mesh(), {"0": style})
            assert [p.placements for p in parallel.parameters()] == [(Shard(0),)] * 6  # type: ignore[attr-defined]
            optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, foreach=False) for each in (parallel, split)]
            for step in range(3):
                x = torch.randn(2, RANKS * block, block, generator=torch.Generator().manual_seed(step)) * (1 + step)
                g = torch.randn(
                    2, RANKS * block, sum(sizes.values()), generator=torch.Generator().manual_seed(9 + step)
                )
                given = (tokens(x, rank, RANKS) if sequence else x).clone().requires_grad_()
                whole = x.clone().requires_grad_()
                y, z = parallel(given), split(whole)
                says = f"{name}, sequence {sequence}, step {step}"
                assert_bitwise(y.detach(), parts_of(z.detach(), -1, RANKS, [*sizes.values()])[rank], says)
                y.backward(parts_of(g, -1, RANKS, [*sizes.values()])[rank])
                z.backward(g)
                assert whole.grad is not None
                assert_bitwise(given.grad, tokens(whole.grad, rank, RANKS) if sequence else whole.grad, f"{says}: x")
                for kind, q in (("weight", split.weight), ("bias", split.bias)):
                    assert q.grad is not None
                    each = q.grad.split([*sizes.values()])
                    for (what, p), of_piece in zip(parallel[0]._modules[kind].items(), each, strict=True):  # type: ignore[index, operator, union-attr]
                        assert_bitwise(p.grad.to_local(), of_piece.chunk(RANKS)[rank], f"{says}: {kind} of {what}")
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


PLAN = {"attention": Heads(), "mlp.gate_up_proj": Column(), "mlp.down_proj": Row()}


def in_parts(layer: nn.Module) -> Any:
    return parallelize_module(layer, mesh(), dict(PLAN))


def checkpoints(rank: int) -> None:
    """A whole layer's weights go in and come out; torch names parameters and their moments."""
    whole, layer = block_of_transformer(), in_parts(block_of_transformer())
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
    other = in_parts(again)
    assert_bitwise(other(x).detach(), y, "the whole one in parts again")
    third = in_parts(block_of_transformer())
    third.load_state_dict(layer.state_dict())
    assert_bitwise(third(x).detach(), y, "in parts to in parts")
    assert_bitwise(copy.deepcopy(layer)(x).detach(), y, "a copy")
    saved = pickle.loads(pickle.dumps(layer))
    assert_bitwise(saved(x).detach(), y, "a pickle")
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(layer), checkpoint_id=folder[0])
    fourth = in_parts(block_of_transformer())
    state = get_model_state_dict(fourth)
    dcp.load(state, checkpoint_id=folder[0])
    assert_bitwise(fourth(x).detach(), y, "through torch.distributed.checkpoint")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def without_copies(rank: int) -> None:
    """A rank's rows of all matrices lie one behind the other, and a write to any is seen by the next forward."""
    layer = in_parts(block_of_transformer())
    layer = copy.deepcopy(layer)
    parts = [p.to_local().detach() for p in pieces.of(layer.attention.qkv_proj, "weight")]
    held = pieces.held(layer.attention.qkv_proj)
    assert held.data_ptr() == parts[0].data_ptr()
    assert_bitwise(held, torch.cat(parts))
    assert [part.untyped_storage().nbytes() for part in parts] == [4 * part.numel() for part in parts], "saved alone"
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))
    layer(x).sum().backward()
    for name in ("q_proj", "k_proj", "v_proj"):
        before = layer(x).detach()
        with torch.no_grad():
            layer.attention.qkv_proj.weight[name].mul_(1.5)
        after = layer(x).detach()
        assert not torch.equal(before, after), name
        assert_bitwise(copy.deepcopy(layer)(x).detach(), after, name)
    elsewhere = copy.deepcopy(layer).double().float()
    assert_bitwise(elsewhere(x).detach(), after, "where they lie apart")


def cross_attention(rank: int) -> None:
    """q in a weight of its own, and k and v in one of the memory."""
    torch.manual_seed(0)
    whole = qt.MultiheadAttention(64, 4, memory_dim=32, head_dim=(16, 32))
    attention: Any = parallelize_module(copy.deepcopy(whole), mesh(), Heads())
    x, memory = torch.randn(2, 6, 64), torch.randn(2, 10, 32)
    y, z = attention(x, memory), whole(x, memory)
    assert (y - z).abs().max() <= 1e-6 * z.abs().max()
    y.square().sum().backward()
    z.square().sum().backward()
    grads = [p.grad.full_tensor() for p in attention.kv_proj.weight.values()]
    wanted: Tensor = whole.kv_proj.weight.grad  # type: ignore[union-attr, assignment]
    assert (torch.cat(grads) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


CASES = [under_every_recipe, checkpoints, without_copies, cross_attention]


if __name__ == "__main__":
    two_ranks.main(CASES)
