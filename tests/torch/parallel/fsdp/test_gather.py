"""fully_shard with weights gathered as codes is fully_shard with weights in high precision, bit for bit."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.optim import layout
from quaver.torch.parallel import check_consistency, gather_quantized, refresh_gather
from quaver.torch.parallel.fsdp import shards
from tests import two_ranks
from tests.pairs import pairs
from tests.torch.parallel.fsdp.live import Live
from tests.torch.parallel.fsdp.training import (
    RECIPES,
    SIZES,
    Case,
    adam,
    assert_same,
    compare,
    converted,
    counted,
    first_difference,
    network,
    sharded,
    step,
    train,
)

STEPS = 20
#: Number of steps by recipe, for layers whose weights are stored only as codes.
STORED = {name: 3 for name in recipes.RECIPES if name not in ("bf16", "mxfp6")}
#: The function that compares the weights that ranks prepared.
ONCE = 1
#: Bytes of an all-gather relative to bf16; codes without scales are 0.5, or 0.25 with four bits.
MOST = {"tensorwise": 0.505, "delayed": 0.505, "blockwise": 0.505, "nvfp4": 0.27, "mxfp4": 0.27}
MOST_OF_MX_AND_ROWS = 0.52
#: Recipes whose fprop and dgrad operands are sent in one all-gather.
BOTH = {"mxfp8": 1.04, "rowwise": 1.04, "rowwise_bf16_wgrad": 1.04, "mxfp6": 1.04, "mxfp4": 0.54}


def trains_under_recipe(name: str, steps: int = STEPS, **options: Any) -> Case:
    """Compares losses and weights of every step."""

    def case(rank: int) -> None:
        _, codes = assert_same(RECIPES[name](), steps=steps, **{"sizes": WHOLE.get(name, SIZES)} | options)
        assert codes.traffic.agreements <= steps + ONCE * (1 + options.get("hsdp", False))

    case.__name__ = f"{name} {options}"
    return case


def bytes_of_gathers(rank: int) -> None:
    for name in (*recipes.RECIPES,):
        if name == "bf16":
            continue
        options: dict[str, Any] = {"in_bf16": True, "bias": False, "steps": 1, "tokens": 2}
        for after_forward, most in (
            (True, MOST.get(name, MOST_OF_MX_AND_ROWS)),
            (False, BOTH.get(name, MOST.get(name))),
        ):
            runs = [
                train(name, (512, 256, 256), as_codes=each, after_forward=after_forward, **options)
                for each in (False, True)
            ]
            share = runs[1].traffic.gathered / runs[0].traffic.gathered
            assert runs[1].traffic.gathers == runs[0].traffic.gathers, name
            assert most is not None and share <= most, f"{name}, resharded {after_forward}: {share:.4f} of bf16's bytes"


def weights_whose_shards_cut_blocks(rank: int) -> None:
    """A weight whose shards cut blocks is gathered in high precision, with the same values; `explain` reports it."""
    for name, sizes, height in (
        ("mxfp8", (32, 48, 64), 32),
        ("blockwise", (32, 64, 256), 128),
        ("nvfp4", (32, 40, 32), 16),
    ):
        plain, codes = assert_same(name, sizes, steps=3, micro=2, after_forward=name != "mxfp8")
        assert codes.traffic.gathers == plain.traffic.gathers
        explained = qt.explain(codes.net, torch.ones(8, sizes[0]))
        message = f"not codes: ranks have {sizes[1] // 2} rows each, which is no multiple of {height}"
        assert message in repr(explained["0"]) and "not codes" not in repr(explained["2"])
        gathers = refresh_gather(codes.net)
        assert [*gathers.quantized] == ["2"] and "no multiple of" in gathers.in_high_precision["0"]


def micro_batches(rank: int) -> None:
    """Weights that stay gathered are gathered once a step, and their scales are reduced once."""
    for name, after_forward, keep in pairs(("tensorwise", "mxfp8", "delayed"), (True, False), (True, False)):
        plain, codes = assert_same(name, steps=2, micro=2, keep=keep, after_forward=after_forward)
        assert codes.traffic.agreements <= 2 + ONCE
        if name != "delayed":
            # Delayed factors roll between micro-batches, after which weights are gathered again.
            assert codes.traffic.gathers == plain.traffic.gathers, name


def policies(rank: int) -> None:
    """Every field of a `MixedPrecisionPolicy`, with replicas, units that stay gathered and micro-batches."""
    low, half, full = torch.bfloat16, torch.float16, torch.float32
    every = [
        MixedPrecisionPolicy(low, full),
        MixedPrecisionPolicy(low),
        MixedPrecisionPolicy(low, low, output_dtype=full),
        MixedPrecisionPolicy(low, full, cast_forward_inputs=False),
        MixedPrecisionPolicy(None, low),
        MixedPrecisionPolicy(full, None, low),
        MixedPrecisionPolicy(half, full),
        MixedPrecisionPolicy(full, full, full),
    ]
    for i, policy in enumerate(every):
        for hsdp in (i % 2 == 1,):
            name = ("tensorwise", "delayed", "mxfp8", "nvfp4")[(i + 2 * hsdp) % 4]
            micro, after_forward = 1 + hsdp, i % 2 == 0
            assert_same(name, steps=2, policy=policy, hsdp=hsdp, micro=micro, after_forward=after_forward)


def live_bytes(rank: int) -> None:
    """Besides its own rows, a rank holds only the units in flight, for any number of units."""
    width, tokens = 256, 2

    def peak(name: str, depth: int) -> int:
        torch.manual_seed(0)
        net: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        qt.convert(net, name)
        gather_quantized(net)
        for layer in net:
            fully_shard(layer)
        # A root is not resharded by default.
        fully_shard(net, reshard_after_forward=True)
        x = torch.randn(tokens, width)
        for _ in range(2):
            with Live([p.to_local().plain for p in net.parameters()]) as live:
                net(x).square().mean().backward()
            # Gradients and the codes of a rank's own rows are held until an optimizer step.
            net.zero_grad()
        return live.peak

    for name, codes, sides in (("tensorwise", 1.0, 1), ("mxfp8", 1.0, 2), ("nvfp4", 0.5, 1)):
        one, other = peak(name, 2), peak(name, 6)
        each = (other - one) / 4
        unit, own_gradient = codes * width * width, 4 * width * width / 2
        own = own_gradient + sides * unit / 2
        assert own <= each <= own + unit / 4, f"{name}: {each} bytes a layer, of which {own} are of a rank's own rows"


def optimizers(rank: int) -> None:
    for options in ({"fused": True}, {"foreach": False}):

        def use(net: nn.Module, options: dict[str, bool] = options) -> list[float]:
            optimizer = adam(sharded(net), **options)
            return [step(net, optimizer, i, clip=0.01) for i in range(3)]

        compare(lambda: converted("mxfp8"), use, f"AdamW {options}")


def evaluations(rank: int) -> None:
    """Evaluate other weights between two steps, written without changing any version."""

    def use(net: Any) -> list[float]:
        optimizer, values = adam(sharded(net)), []
        for i in range(2):
            values.append(step(net, optimizer, i))
            for change in (1.5, 1 / 1.5):
                with torch.no_grad():
                    values.append(net(torch.ones(4, 32)).sum().item())
                    net.reshard()
                    for p in net.parameters():
                        p.data.mul_(change)
        return values

    for name in ("mxfp8", "delayed"):
        compare(lambda name=name: converted(name), use, name)


def recomputation(rank: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)))

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = qt.checkpoint(self.inner, x)
            return y

    def inside(net: Any) -> list[float]:
        for i in range(2):
            net[i] = fully_shard(Checkpointed(net[i]))
        optimizer = adam(fully_shard(net))
        return [step(net, optimizer, i) for i in range(3)]

    def outside(net: Any) -> list[float]:
        for i in range(2):
            net[i] = Checkpointed(fully_shard(net[i]))
        optimizer = adam(fully_shard(net))
        return [step(net, optimizer, i) for i in range(3)]

    for name in ("mxfp8", "delayed"):
        for use in (inside, outside):
            compare(lambda name=name: converted(name, make()), use, f"{name}, {use.__name__} of fully_shard")


def blocks(rank: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(qt.TransformerLayer(32, 4, 64), qt.LayerNormMLP(32, 64), qt.LayerNormLinear(32, 32))

    def use(net: Any) -> list[float]:
        for block in net:
            fully_shard(block)
        optimizer, values = adam(fully_shard(net)), []
        for seed in range(2):
            x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(seed + 10 * rank))
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    for name in ("tensorwise", "mxfp8", "nvfp4"):
        compare(lambda name=name: converted(name, make()), use, name)


def weights_stored_only_as_codes(rank: int) -> None:
    frozen_codes(rank, STORED)


def weights_stored_only_as_codes_for_long(rank: int) -> None:
    frozen_codes(rank, dict.fromkeys(STORED, STEPS))


def frozen_codes(rank: int, of_steps: Mapping[str, int]) -> None:
    """Frozen, under trained biases: sharded, gathered, saved and loaded as codes, with the numbers of one process."""
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def build(name: str, bias: bool, on: str = "cpu") -> Any:
        torch.manual_seed(0)
        with torch.device(on), qt.quantized_init(name):
            net = nn.Sequential(qt.Linear(64, 97, bias), nn.GELU(), qt.Linear(97, 64, bias), nn.LayerNorm(64))
        # The noise depends on the layer's name.
        qt.convert(net, name)
        for i in (0, 2):
            net[i].weight.requires_grad_(False)
        return net

    def trained(net: Any, steps: int) -> list[float]:
        optimizer, losses = adam(net), []
        for seed in range(steps):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            y = net(x)
            loss = y.square().mean() + y[:, ::2].sum() / 100
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for name, steps in of_steps.items():
        for bias in (True, False) if name in ("mxfp8", "nvfp4") else (True,):
            net = build(name, bias)
            gathers = gather_quantized(net)
            assert gathers.stored == ["0", "2"] and not gathers.quantized, gathers
            with counted() as traffic:
                sharded(net)
                x = torch.ones(4, 64)
                assert torch.equal(net(x), build(name, bias)(x)), name
            assert traffic.gathered <= 4 * 1.3 * 2 * 97 * 64, "a byte an element, and biases"
            for i in (0, 2):
                # The last rank has one row less; 97 rows of 64 or of 32 bytes.
                own = layout.local(net[i].weight)
                rows = net[i].weight.shape[0]
                assert own.shape[0] == (-(-rows // 2) if rank == 0 else rows // 2) and own.element_size() == 1
            fresh = build(name, bias)
            gather_quantized(fresh)
            losses, expected = trained(sharded(fresh), steps), trained(build(name, bias), steps)
            assert losses == expected, f"{name}: {losses}, {expected}"
            low_net = build(name, bias)
            gather_quantized(low_net)
            y = sharded(low_net, mp_policy=low)(x)
            assert y.dtype is torch.bfloat16 and torch.equal(y, build(name, bias).bfloat16()(x.bfloat16())), name
            if bias:
                # No further codes are stored.
                continue
            folder = str(two_ranks.folder() / name)
            state = {"model": net.state_dict()}
            torch.distributed.checkpoint.save(state, checkpoint_id=folder)
            for on in ("meta", "whole"):
                other = build(name, bias, "meta" if on == "meta" else "cpu")
                if on == "meta":
                    gather_quantized(other)
                    sharded(other).to_empty(device="cpu")
                state = {"model": other.state_dict()}
                torch.distributed.checkpoint.load(state, checkpoint_id=folder)
                other.load_state_dict(state["model"])
                assert torch.equal(other(x), net(x)), f"{name}, {on}"
    net = build("nvfp4", True)
    net[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="stored in four bits has no gradient, because no optimizer"):
        gather_quantized(net)


def recipes_of_an_autocast(rank: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(qt.Linear(32, 48), nn.GELU(), qt.Linear(48, 32))

    def use(net: nn.Module) -> list[float]:
        optimizer, values = adam(sharded(net)), []
        for seed in range(3):
            with qt.autocast("delayed"):
                values.append(step(net, optimizer, seed))
        return values

    compare(make, use, "delayed", recipe="delayed")


def scales_computed_once(rank: int) -> None:
    """`precompute_scales` or the first forward computes scales, which are valid until any rank writes a weight."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    for name in ("tensorwise", "nvfp4"):
        net: Any = converted(name)
        gather_quantized(net)
        plain, net = sharded(converted(name)), sharded(net)
        optimizer = adam(net)

        def equal(written: int, label: str, net: Any = net, plain: Any = plain) -> None:
            for each in (plain, net):
                for part in each.modules():
                    if isinstance(part, FSDPModule):
                        part.reshard()
            with torch.no_grad():
                for p, q in zip(plain.parameters(), net.parameters(), strict=True):
                    p.to_local().copy_(layout.local(q))
                with counted() as traffic:
                    values = [net(x) for _ in range(3)]
                assert all(torch.equal(y, plain(x)) for y in values), label
            assert traffic.agreements == written, label

        def scale(p: Any, by: float) -> None:
            with torch.no_grad():
                p.mul_(by)

        equal(1, "the first forward")
        equal(0, "nothing was written")
        net(x).sum().backward()
        optimizer.step()
        with counted() as traffic:
            qt.parallel.precompute_scales(net)
        assert traffic.agreements == 1
        equal(0, "precompute_scales after a step")
        optimizer.step()
        equal(1, "a step")
        scale(net[0].weight.to_local(), 3.0)
        equal(1, "a write to a shard")
        if rank:
            scale(net[0].weight.to_local()[:1], 5.0)
        equal(1, "a write on one rank")
        with torch.no_grad():
            net[0].weight.to_local()[0, 3] = 5.0
            equal(1, "a write to an element")
            net[0].weight.to_local().transpose(0, 1).unsqueeze(0)[0, 1, 2] = 6.0
            equal(1, "a write to an element of a view")
            net[0].weight.to_local().unbind()[1].mul_(7.0)
            equal(1, "a write to a row")
        scale(net.state_dict()["2.weight"].to_local(), 7.0)
        equal(1, "a write to a tensor of the state dict")
        scale(net.state_dict()["2.weight"].to_local().data, 9.0)
        qt.parallel.precompute_scales(net)
        equal(0, "precompute_scales after a write without a trace")


def scales_start_after_the_optimizers(rank: int) -> None:
    """The all-reduce begins in the step of the last optimizer, and the next forward waits for it.

    A rank that has not made the step joins there; a later write repeats it.
    """
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    for name in ("tensorwise", "rowwise"):
        net: Any = converted(name)
        gather_quantized(net)
        plain, net = sharded(converted(name)), sharded(net)
        first, second = (torch.optim.SGD([net[i].weight, net[i].bias], lr=0.5) for i in (0, 2))

        def step(optimizer: torch.optim.Optimizer, agreements: int, net: Any = net) -> None:
            with counted() as traffic:
                optimizer.step()
            assert traffic.agreements == agreements

        def forward(agreements: int, label: str, net: Any = net, plain: Any = plain) -> None:
            net[0].reshard()
            with torch.no_grad():
                for p, q in zip(plain.parameters(), net.parameters(), strict=True):
                    p.to_local().copy_(layout.local(q))
            with counted() as traffic:
                y = net(x)
            assert traffic.agreements == agreements, f"{label}: {traffic.agreements}"
            assert torch.equal(y, plain(x)), label
            y.sum().backward()

        forward(1, f"{name}, the first forward")
        step(first, 0)
        step(second, 1)
        forward(0, "both have stepped")
        step(first, 0)
        forward(1, "one has stepped")
        step(second, 0)
        step(first, 1)
        step(first, 0)
        forward(1, "a step after all have stepped")
        if rank:
            step(first, 0)
            step(second, 1)
        forward(0 if rank else 1, "one rank alone has stepped")
        step(first, 0)
        step(second, 1)
        if rank:
            with torch.no_grad():
                net[0].weight.to_local().mul_(3.0)
        forward(1, "one rank has written after the step")


def compiled_blocks(rank: int) -> None:
    """Blocks compiled around the layers give eager mode's losses and weights."""

    def train(name: str, as_codes: bool, compiles: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        block = (nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        net: Any = nn.Sequential(nn.Sequential(*block), nn.Linear(32, 64))
        qt.convert(net, name)
        if as_codes:
            gather_quantized(net)
        for part in net:
            fully_shard(part)
        fully_shard(net)
        if compiles:
            net[0].compile(backend="aot_eager")
        optimizer = adam(net)
        return [step(net, optimizer, i) for i in range(3)], [p.to_local() for p in net.parameters()]

    for name in ("mxfp8", "delayed"):
        losses, weights = train(name, True, True)
        expected, these = train(name, False, False)
        assert losses == expected, f"{name}: {first_difference(losses, expected)}"
        assert all(map(torch.equal, weights, these)), name


def compiled(rank: int) -> None:
    """A compiler would treat the operands of the first step as constants."""
    net: Any = converted("mxfp8")
    gather_quantized(net)
    sharded(net)
    net[0].compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="takes a weight that fully_shard gathers as codes for a constant"):
        net(torch.ones(4, 32))


#: Shards of uneven rows, ranks without rows, whole blocks of 32 and of 16, and blocks across all ranks.
UNEVEN = [(50, 127, 21), (40, 5, 63), (50, 36, 21)]
#: Sizes with whole blocks on each of two ranks.
WHOLE = {"blockwise": (32, 256, 256)}
_OF_BLOCKS = ["tensorwise", "blockwise", "mxfp8", "nvfp4"]
_OWN = [name for name in recipes.RECIPES if name != "bf16"]
#: Steps of the quick tests; more for recipes with histories or noise, whose state grows with steps.
QUICK = dict.fromkeys(_OWN, 3) | dict.fromkeys(("delayed", "nvfp4"), 5)


def shards_for_fewer_ranks(rank: int) -> None:
    net = converted("mxfp8")
    gather_quantized(net)
    sharded(net, reshard_after_forward=2)
    with pytest.raises(ValueError, match="reshard_after_forward=True or False"):
        net(torch.ones(4, 32))


def shards_along_columns(rank: int) -> None:
    for stored in (False, True):
        with qt.quantized_init("mxfp8") if stored else nullcontext():
            net = nn.Sequential(qt.Linear(64, 64, recipe="mxfp8"))
        gather_quantized(net)
        sharded(net, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        with pytest.raises(ValueError, match=r"0 is gathered as codes by rows.* Shard\(0\) or None"):
            net(torch.ones(4, 64))


def checkpoints(rank: int) -> None:
    """Checkpoints contain no class of ours, and load into models gathered in either mode."""
    folder = str(two_ranks.folder() / "checkpoint")

    def trained(as_codes: bool, seed: int) -> tuple[Any, torch.optim.Optimizer]:
        net = converted("tensorwise")
        if as_codes:
            gather_quantized(net)
        optimizer = adam(sharded(net))
        step(net, optimizer, seed)
        return net, optimizer

    net, optimizer = trained(True, 1)
    of_model, of_optimizer = get_state_dict(net, optimizer)
    for name, value in of_model.items():
        assert type(getattr(value, "_local_tensor", value)) is torch.Tensor, name
    torch.distributed.checkpoint.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    expected = [step(net, optimizer, seed) for seed in (2, 3)]
    for as_codes in (True, False):
        other, its = trained(as_codes, 7)
        states = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
        torch.distributed.checkpoint.load(states, checkpoint_id=folder)
        set_state_dict(other, its, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        assert [step(other, its, seed) for seed in (2, 3)] == expected, as_codes
    assigned, _ = trained(True, 7)
    assigned.load_state_dict(net.state_dict(), assign=True)
    with counted() as traffic, torch.no_grad():
        assert torch.equal(assigned(torch.ones(4, 32)), net(torch.ones(4, 32)))
    whole = sum(p.numel() for p in converted("tensorwise").parameters() if p.dim() == 2)
    assert traffic.gathered < 2 * 1.3 * whole, "of a byte an element, twice"


def models_made_on_meta(rank: int) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return converted("delayed", nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)))

    def use(net: Any) -> list[float]:
        sharded(net).to_empty(device="cpu")
        whole = network((32, 48, 32))
        options = StateDictOptions(full_state_dict=True, strict=False)
        values = []
        for seed in range(2):
            torch.manual_seed(seed)
            state = {key: torch.randn_like(value) for key, value in whole.state_dict().items()}
            set_model_state_dict(net, state, options=options)
            values.append(step(net, adam(net), seed))
        return values

    compare(make, use, "made on meta")


def other_recipes_than_the_weights(rank: int) -> None:
    net = converted("mxfp8")
    gather_quantized(net)
    sharded(net)
    with qt.autocast(enabled=False), pytest.raises(ValueError, match="0 runs under no recipe, and its weight was gath"):
        net(torch.ones(4, 32))
    rows = nn.Sequential(qt.Linear(32, 64))
    gather_quantized(rows, recipe="mxfp8")
    fully_shard(rows)
    with qt.autocast("rowwise"), pytest.raises(ValueError, match=r"runs under Recipe\(rowwise.*codes of .*mxfp8"):
        rows(torch.ones(4, 32))


def ranks_that_differ(rank: int) -> None:
    """All ranks report what differs before any weight is sent."""

    def prepare(change: Callable[[], Any], **options: Any) -> str:
        net: Any = network((32, 48, 64))
        if rank == 0:
            qt.convert(net, "mxfp8")
        else:
            net = change()
        with pytest.raises(ValueError, match=r"rank|gather_quantized") as refused:
            gather_quantized(net, **options)
        messages: list[Any] = [None] * 2
        torch.distributed.all_gather_object(messages, str(refused.value))
        return "; ".join(dict.fromkeys(messages))

    def under(recipe: Any, net: Any = None, **options: Any) -> Any:
        net = network((32, 48, 64)) if net is None else net
        qt.convert(net, recipe, **options)
        return net

    def reordered() -> Any:
        net = under("mxfp8")
        net._modules = OrderedDict(reversed([*net._modules.items()]))
        return net

    assert "rank 0: 0 under 'mxfp8'" in prepare(lambda: under("tensorwise"))
    assert "rank 1: 2 unknown" in prepare(lambda: under("mxfp8", network((32, 48, 64))[:2]))
    assert "0.weight (48, 32) torch.float32" in prepare(lambda: under("mxfp8", network((16, 48, 64))))
    assert "gather of 2 codes of mxfp8" in prepare(lambda: under("mxfp8"), skip=["0"] if rank == 0 else ["2"])
    assert "order of these names" in prepare(reordered)
    check_consistency(network((32, 48, 64)))
    # A mesh without the other rank is detected at the first all-gather.
    alone = two_ranks.mesh(2, 1, names=("replicas", "shards"))["shards"]
    net: Any = under("mxfp8" if rank == 0 else "tensorwise")
    gather_quantized(net, mesh=alone)
    sharded(net)
    with pytest.raises(ValueError, match="ranks differ at gather_quantized's first gather: rank 0: 0 "):
        net(torch.ones(4, 32))


def too_late(rank: int) -> None:
    net = sharded(converted("mxfp8"))
    with pytest.raises(ValueError, match="sharded by fully_shard before gather_quantized"):
        gather_quantized(net)
    mesh = two_ranks.mesh(2)
    layer = qt.Linear(32, 32, recipe="mxfp8")
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="weight is already sharded, over"):
        gather_quantized(nn.Sequential(layer))
    net = converted("mxfp8")
    gather_quantized(net)
    fully_shard(net[0])  # type: ignore[index]
    with pytest.raises(ValueError, match="2 was prepared by gather_quantized but is not managed by fully_shard"):
        net(torch.ones(4, 32))


def weights_written_or_moved_before_sharding(rank: int) -> None:
    """Values written before sharding are used, also if fully_shard moves the weight to another device."""
    whole = converted("mxfp8")
    values = nn.utils.parameters_to_vector(whole.parameters()) * 2
    net: Any = converted("mxfp8")
    gather_quantized(net)
    nn.utils.vector_to_parameters(values, net.parameters())
    assert torch.equal(net[0].weight.plain, whole[0].weight * 2)  # type: ignore[index]

    def use(net: Any) -> list[float]:
        optimizer = adam(sharded(net.bfloat16()))
        values = []
        for seed in range(2):
            loss = net(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    compare(lambda: converted("mxfp8"), use, "bfloat16 after gather_quantized")


def parts_without_a_common_root(rank: int) -> None:
    """Each submodule is its own root, so the first one gathers before the other has run."""

    def use(net: Any) -> list[float]:
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        fully_shard(net[0], **options)
        fully_shard(net[2], **options)
        optimizer, values = adam(net), []
        for seed in range(2):
            loss = net(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    for name in ("tensorwise", "delayed"):
        compare(lambda name=name: converted(name), use, name)


def shards_on_the_cpu_raise(rank: int) -> None:
    """All ranks raise before anything is sent, also if only one has shards on the CPU."""
    for offloads in ((0, 1), (1,)):
        net = converted("mxfp8")
        gather_quantized(net)
        sharded(net, offload_policy=CPUOffloadPolicy(pin_memory=False) if rank in offloads else OffloadPolicy())
        with pytest.raises(ValueError, match=r"0 is gathered as codes.*CPUOffloadPolicy keeps its rows on the CPU"):
            net(torch.ones(4, 32))


def reverted_layers(rank: int) -> None:
    """A layer whose class fully_shard has wrapped gets its original class back; one without values raises."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    net = sharded(converted("mxfp8"))
    assert qt.revert(net) == ["0", "2"]
    assert torch.equal(net(x), sharded(network(SIZES))(x))
    net = converted("mxfp8")
    gather_quantized(net)
    qt.revert(sharded(net))
    with pytest.raises(ValueError, match="revert no layer after gather_quantized"):
        net(x)


OPTIONS: list[Callable[[int], None]] = [
    *(policies, live_bytes, compiled_blocks, weights_stored_only_as_codes),
    *(
        bytes_of_gathers,
        weights_whose_shards_cut_blocks,
        micro_batches,
        optimizers,
        evaluations,
        recomputation,
        blocks,
    ),
    *(checkpoints, models_made_on_meta, other_recipes_than_the_weights, ranks_that_differ, too_late),
    *(recipes_of_an_autocast, compiled, scales_computed_once, scales_start_after_the_optimizers),
    *(
        weights_written_or_moved_before_sharding,
        parts_without_a_common_root,
        reverted_layers,
        shards_along_columns,
    ),
    shards_on_the_cpu_raise,
]
CASES: dict[int, list[Case]] = {
    2: [
        *(trains_under_recipe(*of) for of in QUICK.items()),
        *(trains_under_recipe(name, 3) for name in RECIPES if name not in _OWN),
        *(trains_under_recipe("mxfp8", 3, in_bf16=True), *OPTIONS),
    ],
    4: [
        *(
            trains_under_recipe(name, 3 if name in _OF_BLOCKS else 2, sizes=UNEVEN[i % 3], tokens=8)
            for i, name in enumerate((*_OF_BLOCKS, *(name for name in _OWN if name not in _OF_BLOCKS)))
        ),
        trains_under_recipe("nvfp4", 2, hsdp=True, tokens=8),
        shards_for_fewer_ranks,
    ],
}


SLOW: dict[int, list[Case]] = {
    2: [
        *(trains_under_recipe(name) for name in RECIPES),
        *(trains_under_recipe(name, in_bf16=True) for name in RECIPES),
        *(trains_under_recipe(name, sizes=sizes, tokens=8) for name in RECIPES for sizes in UNEVEN),
        *(trains_under_recipe(name, micro=2, keep=True) for name in RECIPES),
        *(trains_under_recipe(name, after_forward=False) for name in RECIPES),
        weights_stored_only_as_codes_for_long,
    ],
    4: [
        *(trains_under_recipe(name, sizes=sizes, tokens=8) for name in RECIPES for sizes in UNEVEN),
        *(trains_under_recipe(name, hsdp=True, tokens=8) for name in RECIPES),
    ],
}


def test_a_report_says_how_each_weight_is_gathered() -> None:
    net = network((32, 48, 64))
    net.extend([nn.Linear(64, 32), nn.Linear(32, 32)])
    qt.convert(net, {"0": "mxfp8", "2": "mxfp8", "3": "bf16", "4": "mxfp8"})
    net.append(qt.Linear(32, 32))
    net.append(qt.Linear(32, 32, recipe=recipes.mxfp4(hadamard=True)))
    tied = qt.Linear(32, 32, recipe="mxfp8")
    tied.weight = net[4].weight
    net.extend([tied, qt.Linear(32, 32, recipe="mxfp8", dtype=torch.float64), qt.GroupedLinear(2, 32, 32)])
    gathers = gather_quantized(net, skip="2")
    assert list(gathers.quantized) == ["0"] and gathers.quantized["0"] is recipes.get("mxfp8")
    assert gathers.in_high_precision == {
        "2": "left out by name",
        "3": "bf16 quantizes nothing",
        "4": "another module shares it",
        "5": "it has no recipe of its own: give recipe=",
        "6": "mxfp4 rotates its rows, which ranks shard",
        "7": "another module shares it",
        "8": "it is torch.float64, which recipes do not quantize",
        "9": "a stack of matrices is gathered unchanged",
    }
    assert str(gathers).startswith("0: codes of mxfp8\n2: in high precision, left out by name\n")


def test_weights_that_cannot_be_gathered_as_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="gather_quantized has no weight to gather as codes; call quaver"):
        gather_quantized(network((32, 48, 64)))
    net: Any = converted("mxfp8")
    with pytest.raises(ValueError, match="no quantized layer has a name that matches 'head'"):
        gather_quantized(net, skip=["head"])
    with pytest.raises(ValueError, match="no recipe 'mxfp'"):
        gather_quantized(net, recipe="mxfp")
    with qt.quantized_init("mxfp8"):
        stack = nn.Sequential(net[0], qt.GroupedLinear(2, 32, 32))
    with pytest.raises(ValueError, match=r"1\.weight is a trainable stack of matrices stored as codes, which optim"):
        gather_quantized(stack)
    gather_quantized(net)
    with pytest.raises(ValueError, match="gather_quantized was called on 0 before; call it once"):
        gather_quantized(net)
    with pytest.raises(ValueError, match="0 was prepared by gather_quantized but is not managed by fully_shard"):
        net(torch.ones(4, 32))


def test_a_prepared_model_is_copied_and_written_as_any_other(tmp_path: Path) -> None:
    plain, net = converted("mxfp8"), converted("mxfp8")
    gather_quantized(net)
    copied = copy.deepcopy(net)
    x = torch.ones(4, 32)
    assert torch.equal(copied(x), plain(x)), "a copy is not prepared"
    state = net.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    torch.save(net.state_dict(keep_vars=True), tmp_path / "state.pt")
    for key, value in torch.load(tmp_path / "state.pt").items():
        assert torch.equal(value, plain.state_dict()[key]), key
    net.load_state_dict(plain.state_dict(), assign=True)
    assert all(isinstance(net[i].weight, shards.Shard) for i in (0, 2))  # type: ignore[index]


@pytest.mark.parametrize("ranks", CASES)
@pytest.mark.ranks
def test_gathered_codes_equal_gathered_high_precision(ranks: int, tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


@pytest.mark.parametrize("ranks", SLOW)
@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_losses(ranks: int, tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, ranks, slow=True)


if __name__ == "__main__":
    two_ranks.main(CASES[two_ranks.world()], slow=SLOW.get(two_ranks.world(), ()))
