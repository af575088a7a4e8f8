"""Streams of models that are sharded over two and four processes on gloo equal that of one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel import ColwiseParallel, RowwiseParallel, gather_quantized
from quaver.torch.serving import StreamLoader, TransformersReceiver
from tests import two_ranks
from tests.torch.serving.small import assert_same, llama, tensors, tokens

NAMES = [name for name in recipes.RECIPES if name != "bf16"]
ATTENTION, MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."
PLAN = {
    **{ATTENTION + name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    **{MLP + name: ColwiseParallel() for name in ("gate_proj", "up_proj")},
    ATTENTION + "o_proj": RowwiseParallel(),
    MLP + "down_proj": RowwiseParallel(),
}


def sharded(model: Any, mesh: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


class Gathers(TorchDispatchMode):
    """Bytes of all-gathers by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather_into_tensor" in str(function):
            x: Tensor = args[0]
            size = x.nbytes * dist.get_world_size()
            self.bytes[x.dtype] = self.bytes.get(x.dtype, 0) + size
        return function(*args, **(kwargs or {}))


def assert_stream(model: Any, whole: Any, label: str) -> None:
    """Check that all tensors of a sharded model are those of the whole model."""
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, q), f"{label}: {name}"
    stream = qt.serving_stream(model, "transformers")
    assert_same(tensors(stream), tensors(qt.serving_stream(whole, "transformers")), label)


def fully_sharded_models(rank: int) -> None:
    for name in NAMES:
        for prepared in (False, True)[: 2 if name in ("tensorwise", "blockwise", "nvfp4") else 1]:
            # Rows of q, k, v and o are 16 on four ranks: a block of nvfp4, and a part of one of blockwise.
            model, whole = llama(name), llama(name)
            if prepared:
                gather_quantized(model)
            assert_stream(sharded(model, two_ranks.mesh(two_ranks.world())), whole, f"{name} prepared={prepared}")


def rows_that_no_number_of_ranks_divides(rank: int) -> None:
    for name in NAMES:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 131), nn.Linear(131 - 3, 5, bias=False))
        qt.convert(whole, name)
        model = fully_shard(copy.deepcopy(whole), mesh=two_ranks.mesh(two_ranks.world()))
        expected = tensors(qt.serving_stream(whole, "transformers"))
        assert_same(tensors(qt.serving_stream(model, "transformers")), expected, name)


def after_a_step(rank: int) -> None:
    """Between forward and backward too; losses go on as without a stream."""
    losses = []
    for prepared, streaming in ((False, False), (False, True), (True, True)):
        model = llama("nvfp4")
        if prepared:
            gather_quantized(model)
        sharded(model, two_ranks.mesh(two_ranks.world()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        own = []
        for _ in range(2):
            loss = model(tokens(), labels=tokens()).loss
            if streaming:
                tensors(qt.serving_stream(model, "transformers"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        losses.append(own)
        values = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        whole = llama("nvfp4")
        whole.load_state_dict(values)
        assert_stream(model, whole, "after steps")
    assert losses[0] == losses[1] == losses[2]


def weights_that_a_forward_has_left_gathered(rank: int) -> None:
    model = sharded(llama("mxfp8"), two_ranks.mesh(two_ranks.world()), reshard_after_forward=False)
    model(tokens())
    assert qt.serving_stream(model, "vllm").sends == (rank == 0)
    model(tokens())
    assert_same(tensors(qt.serving_stream(model, "vllm")), tensors(qt.serving_stream(llama("mxfp8"), "vllm")))


def stored_codes(rank: int) -> None:
    for name in ("tensorwise", "rowwise", "mxfp8", "nvfp4"):
        model, whole = llama(name), llama(name)
        for each in (model, whole):
            qt.quantize_weights(each, name)
            each.requires_grad_(False)
        gather_quantized(model)
        sharded(model, two_ranks.mesh(two_ranks.world()))
        expected = tensors(qt.serving_stream(whole, "transformers"))
        with Gathers() as gathers:
            assert_same(tensors(qt.serving_stream(model, "transformers")), expected, name)
        high = sum(t.nbytes for key, t in expected.items() if t.dtype is torch.float32 and "scale" not in key)
        assert gathers.bytes.get(torch.float32, 0) <= high, name


def tensor_parallel_models(rank: int) -> None:
    for name in NAMES:
        if name == "blockwise" or (name == "mxfp4" and recipes.get(name).fprop.b.hadamard):
            continue
        model, whole = llama(name, hidden=128), llama(name, hidden=128)
        parallelize_module(model, two_ranks.mesh(two_ranks.world()), PLAN)
        assert_stream(model, whole, f"tensor parallel {name}")


def both_kinds_of_sharding(rank: int) -> None:
    if two_ranks.world() < 4:
        return
    mesh = two_ranks.mesh(2, 2, names=("dp", "tp"))
    for name in ("tensorwise", "rowwise", "mxfp8", "nvfp4"):
        model, whole = llama(name, hidden=128), llama(name, hidden=128)
        parallelize_module(model, mesh["tp"], PLAN)
        assert_stream(sharded(model, mesh["dp"]), whole, f"both {name}")
    replicated = sharded(llama("mxfp8"), two_ranks.mesh(2, 2, names=("replicas", "shards")))
    assert_stream(replicated, llama("mxfp8"), "replicated shards")


def converted_weights_travel_as_codes(rank: int) -> None:
    for name, share in {"tensorwise": 0.503, "rowwise": 0.52, "mxfp8": 0.516, "nvfp4": 0.282}.items():
        model = sharded(llama(name, hidden=256).bfloat16(), two_ranks.mesh(two_ranks.world()))
        stream = qt.serving_stream(model, "transformers")
        with Gathers() as gathers:
            tensors(stream)
        assert gathers.bytes[torch.uint8] <= share * stream.bytes.bf16, name
        assert gathers.bytes[torch.bfloat16] == stream.bytes.other, name


def changes_on_one_rank_are_sent_by_all(rank: int) -> None:
    model = sharded(llama("mxfp8"), two_ranks.mesh(two_ranks.world()))
    stream = qt.serving_stream(model, "transformers")
    assert stream.sends == (rank == 0)
    everything = tensors(stream.changed())
    assert not tensors(stream.changed())
    weight: Any = model.model.layers[1].mlp.down_proj.weight
    if rank == two_ranks.world() - 1:
        with torch.no_grad():
            weight.to_local()[0, 0] += 1.0
    sent = tensors(stream.changed())
    assert set(sent) == {f"model.layers.1.mlp.down_proj.{part}" for part in ("weight", "weight_scale")}
    changed = {name: tensor for name, tensor in everything.items() if name not in sent}
    assert_same(changed | sent, tensors(stream))


def raises(call: Callable[[], Any], words: str) -> None:
    """Check that a call raises on this rank, and that no rank is left in a collective."""
    with pytest.raises(ValueError, match=words):
        call()
    dist.barrier()


class Failing(StreamLoader):
    """Fails at its second bucket."""

    count = 0

    def update_weights(self, bucket: Any) -> None:
        self.count += 1
        if self.count == 2:
            raise ConnectionResetError("the other process has gone")
        super().update_weights(bucket)


def errors_are_raised_on_all_ranks(rank: int) -> None:
    mesh = two_ranks.mesh(two_ranks.world())
    other = sharded(llama("mxfp8"), mesh)
    if rank == 0:
        qt.convert(other, "mxfp6")
    raises(lambda: tensors(qt.serving_stream(other, "vllm")), "vllm does not read")
    model = sharded(llama("mxfp8"), mesh)
    if rank == 0:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.to_local()[0, 0] = float("nan")
    raises(lambda: tensors(qt.serving_stream(model, "vllm")), "up_proj.weight contains infinities or NaN")
    model = sharded(llama("mxfp8"), mesh)
    rollout = llama("mxfp8", seed=1)
    stream = qt.serving_stream(model, "transformers", bucket_bytes=9000)
    before = tensors(qt.serving_stream(rollout, "transformers"))
    failing = TransformersReceiver(Failing(rollout))
    raises(lambda: failing.update_weights(stream, changed=True), r"transformers has failed at bucket 2 \(model")
    assert_same(tensors(qt.serving_stream(rollout, "transformers")), before)
    # The next update sends everything, and training goes on.
    sent = failing.update_weights(stream, changed=True)
    assert sent.bf16 == 2 * 2 * (4 * 64 * 64 + 3 * 64 * 192)
    expected = tensors(stream)
    assert_same(tensors(qt.serving_stream(rollout, "transformers")), expected if rank == 0 else before)
    model(tokens(), labels=tokens()).loss.backward()


def ranks_with_other_models_or_passes_are_one_error(rank: int) -> None:
    mesh = two_ranks.mesh(two_ranks.world())
    # Both recipes have tensors of the same names.
    model = sharded(llama("rowwise" if rank else "mxfp8"), mesh)
    raises(lambda: tensors(qt.serving_stream(model, "vllm")), "shard the model in the same way on all ranks")
    model = sharded(llama("mxfp8").to(torch.bfloat16 if rank else torch.float32), mesh)
    raises(lambda: tensors(qt.serving_stream(model, "vllm")), "shard the model in the same way on all ranks")
    stream = qt.serving_stream(sharded(llama("mxfp8"), mesh), "vllm")
    raises(lambda: tensors(stream if rank else stream.changed()), r"pass.*changed\(\)")


def experts(rank: int) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    net = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, vocab_size=64))
    qt.convert(net, {"*.experts": "mxfp8", "*": None})
    sharded(net, two_ranks.mesh(two_ranks.world()))
    raises(lambda: tensors(qt.serving_stream(net, "vllm")), "experts.* is sharded across the ranks")


CASES = (
    fully_sharded_models,
    rows_that_no_number_of_ranks_divides,
    after_a_step,
    weights_that_a_forward_has_left_gathered,
    stored_codes,
    tensor_parallel_models,
    both_kinds_of_sharding,
    converted_weights_travel_as_codes,
    changes_on_one_rank_are_sent_by_all,
    errors_are_raised_on_all_ranks,
    ranks_with_other_models_or_passes_are_one_error,
    experts,
)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_streams_of_sharded_models(ranks: int, tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


if __name__ == "__main__":
    two_ranks.main(CASES, 60)
