"""Two processes on gloo: layers in parts give the losses of one process that splits the same sums, bit for bit."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.tensor import page
from tests.torch.parallel.tensor.split import SplitLinear, tokens
from tests.torch.parallel.traffic import Traffic
from tests.two_ranks import RANKS

LOSSES = 20


def mesh() -> Any:
    return two_ranks.mesh(RANKS)


def block_of(recipe: Recipe | None) -> int:
    """The largest finite block side; each rank gets at least one block."""
    specs = [] if recipe is None else [spec for spec in recipe.operands().values() if spec is not None]
    return max([32, *(side for spec in specs for side in spec.block if side is not None)])


class Net(nn.Module):
    def __init__(self, width: int, extra: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width + extra)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


def net(recipe: Recipe | None, dtype: torch.dtype = torch.float32, extra: int = 0) -> Net:
    torch.manual_seed(0)
    model = Net(block_of(recipe), extra).to(dtype)
    qt.convert(model, "bf16" if recipe is None else recipe)
    return model


def batch(step: int, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two sequences of two blocks each, with a magnitude that changes at each step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 2 * block, block, generator=generator).to(dtype) * (1 + step % 3)


def split(model: Net, recipe: Recipe | None, sequence: bool) -> Net:
    """The same model in one process, with sums in the order of the ranks."""
    model.up = SplitLinear(model.up, recipe, RANKS, True, sequence)  # type: ignore[assignment]
    model.down = SplitLinear(model.down, recipe, RANKS, False, sequence)  # type: ignore[assignment]
    return model


def part(p: Tensor, placement: Any, rank: int) -> Tensor:
    return p.chunk(RANKS, placement.dim)[rank] if placement.is_shard() else p


def run(name: str, sequence: bool, dtype: torch.dtype, steps: int, rank: int, extra: int = 0) -> None:
    recipe = None if name == "none" else recipes.get(name)
    label = f"{name} {'sequence' if sequence else 'replicated'} {dtype}"
    parallel, plain = net(recipe, dtype, extra), net(recipe, dtype, extra)
    whole = split(net(recipe, dtype, extra), recipe, sequence)
    plan = {"up": ColwiseParallel(sequence=sequence), "down": RowwiseParallel(sequence=sequence)}
    parallelize_module(parallel, mesh(), plan)
    nets = parallel, whole, plain
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, foreach=False) for each in nets[:2]]
    for step in range(steps):
        x = batch(step, block_of(recipe), dtype)
        inputs = [x.clone().requires_grad_() for _ in nets]
        losses = []
        for each, given in zip(nets[: 3 if step == 0 else 2], inputs, strict=False):
            y = each(tokens(given, rank, RANKS) if sequence and each is parallel else given)
            if sequence and each is parallel:
                loss = y.float().square().sum()
            elif sequence:
                loss = sum(tokens(y, i, RANKS).float().square().sum() for i in range(RANKS))
            else:
                loss = y.float().square().sum()
            (loss / x.numel()).backward()
            losses.append(loss.detach())
        if sequence:
            dist.all_reduce(losses[0])
        assert_bitwise(losses[0], losses[1], f"{label}: loss {step}")
        if step == 0:
            gap = (losses[0] - losses[2]).abs() / losses[2]
            assert gap <= (1e-6 if dtype is torch.float32 else 1e-3), f"{label}: {gap} of one process's loss"
        if step in (0, steps - 1):
            for (what, p), q in zip(parallel.named_parameters(), whole.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                expected_grad = part(q.grad, p.placements[0], rank)
                assert_bitwise(p.grad.to_local(), expected_grad, f"{label}: gradient of {what} in step {step}")
            theirs = tokens(inputs[1].grad, rank, RANKS) if sequence else inputs[1].grad
            ours = tokens(inputs[0].grad, rank, RANKS) if sequence else inputs[0].grad
            assert_bitwise(ours, theirs, f"{label}: gradient of the input in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for layer in (whole.up, whole.down):
            layer.roll()


NAMES = ["none", *recipes.RECIPES]
#: Steps with sequence parallelism; more for recipes with histories or noise, whose state grows with steps.
STEPS = dict.fromkeys(NAMES, 2) | dict.fromkeys(("delayed", "nvfp4"), 5)


#: Steps of the slow tests.
LONG = dict.fromkeys(NAMES, LOSSES)


def every_recipe(sequence: bool, dtype: torch.dtype, steps: Mapping[str, int]) -> two_ranks.Case:
    """With sequence parallelism, or with all tokens on each rank."""

    def case(rank: int) -> None:
        for name, number in steps.items():
            run(name, sequence, dtype, number, rank)

    case.__name__ = f"every recipe, {'tokens in parts' if sequence else 'all tokens on each rank'}, {dtype}"
    return case


def odd_feature_counts(rank: int) -> None:
    """Of a `RowwiseParallel`'s output, which is whole on each rank: noise is that of rows that begin within four
    words.
    """
    for extra in (1, 2):
        run("nvfp4", True, torch.float32, 3, rank, extra)


def sharded_net(recipe: str | Recipe | None, sequence: bool = True, dtype: torch.dtype = torch.float32) -> Net:
    recipe = None if recipe is None else recipes.get(recipe)
    plan = {"up": ColwiseParallel(sequence=sequence), "down": RowwiseParallel(sequence=sequence)}
    return parallelize_module(net(recipe, dtype), mesh(), plan)  # type: ignore[return-value]


def hard_values(rank: int) -> None:
    """All ranks scale by values that only one rank has, such as NaN and infinity; also with no tokens."""
    for name in NAMES:
        recipe = None if name == "none" else recipes.get(name)
        parallel, whole = sharded_net(recipe), split(net(recipe), recipe, True)
        block = block_of(recipe)
        for value in (0.0, 1e-40, 3e38, torch.inf, torch.nan):
            x = batch(0, block)
            x[1, block + 3, 5] = value
            if value == 0.0:
                x[:] = 0
            ours, theirs = tokens(x, rank, RANKS).clone().requires_grad_(), x.clone().requires_grad_()
            y, z = parallel(ours), whole(theirs)
            assert_bitwise(y.detach(), tokens(z, rank, RANKS).detach(), f"{name}: output for {value}")
            y.sum().backward()
            z.sum().backward()
            assert_bitwise(ours.grad, tokens(theirs.grad, rank, RANKS), f"{name}: gradient for {value}")
            for layer in (whole.up, whole.down):
                layer.roll()
        empty = torch.zeros(2, 0, block, requires_grad=True)
        parallel(empty).sum().backward()
        assert empty.grad is not None and empty.grad.shape == empty.shape


def recomputed_activations(rank: int) -> None:
    for name in NAMES:
        for reentrant in (False, True) if name in ("none", "delayed", "nvfp4") else (False,):
            recipe = None if name == "none" else name
            plain, again = sharded_net(recipe), sharded_net(recipe)
            for step in range(2):
                x = tokens(batch(step, block_of(None if recipe is None else recipes.get(recipe))), rank, RANKS)
                given = [x.clone().requires_grad_() for _ in range(2)]
                # Reentrant checkpoints run the first pass without gradients, which does not roll histories.
                with qt.autocast("bf16" if recipe is None else recipe):
                    outputs = [plain(given[0]), checkpoint(again, given[1], use_reentrant=reentrant)]
                for y in outputs:
                    y.square().sum().backward()
                assert_bitwise(given[1].grad, given[0].grad, f"{name}, reentrant {reentrant}: input in step {step}")
                for (what, p), q in zip(again.named_parameters(), plain.parameters(), strict=True):
                    assert_bitwise(p.grad.to_local(), q.grad.to_local(), f"{name}, reentrant {reentrant}: {what}")


#: Largest size of codes and scales relative to bf16.
SHARES = {"bf16": 1.0, "delayed": 0.501, "tensorwise": 0.501, "rowwise": 0.52, "blockwise": 0.52, "nvfp4": 0.29}


def histories_record_what_ranks_agree_on(rank: int) -> None:
    """The factors of a layer are the same on all its ranks, whatever group rolls the histories."""
    groups = [dist.new_group([r]) for r in range(RANKS)]
    parallel: Any = sharded_net("delayed")
    for step in range(2):
        with qt.autocast("delayed", group=groups[rank]):
            parallel(tokens(batch(step, 32), rank, RANKS)).square().sum().backward()
        for layer in (parallel.up, parallel.down):
            assert layer.history[0].all()
            assert_bitwise(*two_ranks.gathered(layer.history), f"history in step {step}")
            assert_bitwise(*two_ranks.gathered(layer.factor), f"factor in step {step}")


def tokens_are_sent_in_eight_bits(rank: int) -> None:
    """Bytes gathered by column- and row-parallel layers, relative to bf16; reductions are in float32."""

    def gathered(recipe: str) -> int:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16()
        qt.convert(model, recipe)
        parallelize_module(model, mesh(), {"0": ColwiseParallel(sequence=True), "1": RowwiseParallel(sequence=True)})
        with Traffic() as traffic:
            model(torch.randn(256, 256).bfloat16().requires_grad_()).sum().backward()
        assert traffic.total("send") == 2 * 256 * 256 * 4, "parts of fprop's sums and dgrad's for the other rank"
        return traffic.total("gather")

    whole = gathered("bf16")
    # The input is gathered for fprop and for wgrad; the output's gradient once for both of its GEMMs.
    assert whole == 3 * 512 * 256 * 2
    for name, share in SHARES.items():
        # If no operand serves two GEMMs, the gradient is gathered for each of them.
        twice = not recipes.get(name).reuse.grad_output and name != "bf16"
        assert gathered(name) <= share * whole * (4 / 3 if twice else 1), f"{name}: {gathered(name) / whole}"


def under_autocast_and_without_a_recipe(rank: int) -> None:
    """The autocast's recipe applies, torch.autocast casts the input, and a plain nn.Linear is sharded too."""
    for own in (True, False):
        recipe = recipes.get("tensorwise")
        plain = net(None)
        up, down = (qt.Linear(*layer.weight.shape[::-1]) for layer in (plain.up, plain.down))
        model = Net(32)
        model.up, model.down = (up, down) if own else (nn.Linear(32, 64), nn.Linear(64, 32))
        model.load_state_dict(plain.state_dict())
        whole = split(net(recipe if own else None), recipe if own else None, True)
        parallelize_module(
            model, mesh(), {"up": ColwiseParallel(sequence=True), "down": RowwiseParallel(sequence=True)}
        )
        x = batch(0, 32)
        with qt.autocast("tensorwise", enabled=own), torch.autocast("cpu", torch.bfloat16):
            y = model(tokens(x, rank, RANKS))
        assert y.dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            hidden = nn.functional.gelu(whole.up(x.bfloat16()))
            z = whole.down(hidden)
        assert_bitwise(y.detach(), tokens(z, rank, RANKS).detach(), f"own {own}")
        y.float().square().sum().backward()
        z.float().square().sum().backward()
        for (what, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert_bitwise(p.grad.to_local(), part(q.grad, p.placements[0], rank), f"own {own}: {what}")


def under_a_compiler(rank: int) -> None:
    """The compiler skips these layers and compiles the code between them."""
    eager, compiled = sharded_net("mxfp8"), sharded_net("mxfp8")
    run_ = torch.compile(compiled, backend="eager")
    for number in range(2):
        x = tokens(batch(number, 32), rank, RANKS)
        y, z = run_(x), eager(x)
        assert_bitwise(y.detach(), z.detach())
        y.sum().backward()
        z.sum().backward()
    for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert_bitwise(p.grad.to_local(), q.grad.to_local())


def bad_input(rank: int) -> None:
    here = mesh()

    def raises(message: str, run: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=message):
            run()

    odd = qt.Linear(33, 35, recipe="tensorwise")
    raises("35 output features, which 2 ranks cannot share", lambda: parallelize_module(odd, here, ColwiseParallel()))
    raises("33 input features, which 2 ranks cannot share", lambda: parallelize_module(odd, here, RowwiseParallel()))
    raises("a style for linear layers", lambda: parallelize_module(nn.LayerNorm(8), here, ColwiseParallel()))
    in_bits = qt.Linear(32, 32)
    qt.quantize_weights(in_bits, "mxfp8")
    raises("dequantize_weights", lambda: parallelize_module(in_bits, here, ColwiseParallel()))
    parallel = sharded_net("mxfp8")
    raises(
        "is sharded by ColwiseParallel.sequence=True. already",
        lambda: parallelize_module(parallel.up, here, RowwiseParallel()),
    )
    flat = two_ranks.mesh(1, RANKS, names=("dp", "tp"))
    raises(r"a mesh of 2 dimensions.*mesh\['tp'\]", lambda: ColwiseParallel()._apply(qt.Linear(32, 32), flat))
    raises(r"its last axis must be 32: of the layer's 32 features", lambda: parallel.up(torch.zeros(64, 16)))
    raises("its last axis must be 32: of the layer's 64 .* a part of them", lambda: parallel.down(torch.zeros(64, 64)))
    raises("which has no axis of tokens", lambda: parallel.up(torch.zeros(32)))
    raises("2 ranks cannot share 33 tokens", lambda: parallel.down(torch.zeros(33, 32)))
    raises("16 tokens of each sequence of input.T on each of 2 ranks", lambda: parallel.up(torch.zeros(2, 16, 32)))
    raises("takes local tensors", lambda: parallel.up(DTensor.from_local(torch.zeros(32, 32), here, [Replicate()])))
    raises("has torch.float32 weights and got a torch.bfloat16", lambda: parallel.up(torch.zeros(32, 32).bfloat16()))
    narrow = qt.Linear(32, 64, recipe="blockwise")
    parallelize_module(narrow, here, ColwiseParallel())
    raises("32 features of grad_output on each of 2 ranks.*blocks of 128", lambda: narrow(torch.zeros(4, 32)))
    torchs = qt.Linear(32, 32, recipe="mxfp8")
    parallelize_module(torchs, here, torch_styles.ColwiseParallel())
    raises(r"use ColwiseParallel\(\) or RowwiseParallel\(\)", lambda: torchs(torch.zeros(4, 32)))


def reverted_pickled_and_parametrized(rank: int) -> None:
    """A class that replaces a layer's own class is found by revert and pickle."""
    x = tokens(batch(0, 32), rank, RANKS)
    model, plain = sharded_net("mxfp8"), sharded_net(None)
    assert qt.revert(model) == ["up", "down"]
    y, z = model(x), plain(x)
    assert_bitwise(y.detach(), z.detach())
    y.sum().backward()
    z.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bitwise(p.grad.to_local(), q.grad.to_local())
    norm = nn.Sequential(nn.LayerNorm(32))
    parallelize_module(norm, mesh(), {"0": SequenceParallel()})
    for each in (norm, sharded_net("mxfp8"), model):
        file = io.BytesIO()
        torch.save(each, file)
        file.seek(0)
        assert_bitwise(torch.load(file, weights_only=False)(x).detach(), each(x).detach())
    parallel = sharded_net("mxfp8")
    nn.utils.parametrizations.weight_norm(parallel.up)
    with pytest.raises(ValueError, match="leave a parametrized layer out of the plan"):
        parallel(x)


CASES = [
    every_recipe(True, torch.float32, STEPS),
    every_recipe(False, torch.float32, dict.fromkeys(NAMES, 2)),
    # In bfloat16, each recipe runs in one of the two modes.
    *(every_recipe(sequence, torch.bfloat16, dict.fromkeys(NAMES[sequence::2], 2)) for sequence in (False, True)),
    odd_feature_counts,
    hard_values,
    recomputed_activations,
    histories_record_what_ranks_agree_on,
    tokens_are_sent_in_eight_bits,
    under_autocast_and_without_a_recipe,
    under_a_compiler,
    reverted_pickled_and_parametrized,
    bad_input,
]


SLOW = [every_recipe(seq, dtype, LONG) for seq in (True, False) for dtype in (torch.float32, torch.bfloat16)]


def test_the_table_of_the_page_is_of_these_recipes_and_styles() -> None:
    text = page.PAGE.read_text()
    assert text == page.written(text), "python -m tests.torch.parallel.tensor.page writes it anew"
    assert set(NAMES) >= set(recipes.RECIPES), "every recipe is tested"


@pytest.mark.ranks
def test_two_ranks_are_one_process_that_splits_the_same_sums(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_twenty_losses(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, slow=True)


if __name__ == "__main__":
    two_ranks.main(CASES, slow=SLOW)
