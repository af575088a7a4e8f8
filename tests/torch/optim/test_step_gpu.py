"""Test optimizers with kernels: the bits of plain torch, one launch per config, nothing read back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch import optim
from quaver.torch.backends.gpu import device
from quaver.torch.backends.gpu import optim as stepping
from quaver.torch.backends.gpu.buffers import CrossStream
from quaver.torch.optim import optimizer as optimizer_file
from quaver.torch.optim.step import ParameterTensors, StepConfig, step_parameter
from tests.torch.backends.gpu.launch_counts import _Kernels, _Operations
from tests.torch.backends.gpu.pretend import Driver, as_on_a_gpu
from tests.torch.backends.gpu.streams import GPU, stand_in

#: Allowed torch operations in a step, for any number of parameters: stacking step counts, computing the rule's
#: scalars from them, and stacking these.
MOST_OPERATIONS = 42


def model_of(layers: int = 1, recipe: Any = "tensorwise") -> nn.Sequential:
    torch.manual_seed(0)
    wide, narrow = ([qt.Linear(*sizes) for _ in range(layers)] for sizes in ((32, 128), (128, 32)))
    pairs = [layer for pair in zip(wide, narrow, strict=True) for layer in pair]
    model = nn.Sequential(*pairs, nn.LayerNorm(32))
    qt.quantize_weights(model, recipe)
    return model


def backward(model: nn.Module, seed: int, size: float = 1.0, recipe: Any = "tensorwise") -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    with qt.autocast(recipe):
        (model(x).square().mean() * size).backward()


def all_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    for name, p in model.named_parameters():
        tensors |= {f"{name}: {key}": value for key, value in optimizer.state[p].items()}
        tensors |= {f"{name}: held": optimizer.counted[p][0]} if p in optimizer.counted else {}
    return tensors


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def trained(rule: Any, preset: str, kernels: bool, recipe: Any = "tensorwise") -> tuple[dict[str, Tensor], Any]:
    model = model_of(recipe=recipe)
    groups = [
        {"params": list(model[:1].parameters()), "lr": torch.tensor(1e-3), "weight_decay": 0.1},
        {"params": list(model[1:].parameters()), "betas": (0.8, 0.97)},
    ]
    optimizer = rule(groups, lr=1e-2, preset=preset, seed=2**40 + 7, statistics=True)
    for seed in range(2):
        backward(model, seed, recipe=recipe)
        optimizer.clip_grad_norm_(0.05)
        with device.asking("triton" if kernels else "none"):
            optimizer.step()
        optimizer.zero_grad()
    return all_of(model, optimizer), optimizer


@pytest.mark.parametrize(
    ("rule", "preset"),
    [
        (optim.AdamW, "lean"),
        (optim.AdamW, "balanced"),
        (optim.AdamW, "exact"),
        (optim.Adam, "lean"),
    ],
)
def test_steps_by_the_kernel_match_plain_torch(rule: Any, preset: str) -> None:
    """With clipping and two groups; parameters without a kernel are stepped by torch operations."""
    ours, optimizer = trained(rule, preset, True)
    theirs, plain = trained(rule, preset, False)
    assert len(optimizer._kernels) == 1
    assert not plain._kernels
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert same(ours[name], value), name


@pytest.mark.parametrize(
    ("recipe", "rule", "preset"),
    [
        pytest.param(recipes.blockwise(), optim.AdamW, "lean", marks=pytest.mark.slow),
        (recipes.blockwise(), optim.Lion, "lean"),
        (recipes.mxfp8(weight_2d=True), optim.AdamW, "balanced"),
        pytest.param(recipes.mxfp8(weight_2d=True), optim.AdamW, "lean", marks=pytest.mark.slow),
        pytest.param(recipes.mxfp8(), optim.AdamW, "float32", marks=pytest.mark.slow),
        (recipes.mxfp8(), optim.AdamW, "lean"),
    ],
    ids=["blockwise-AdamW", "blockwise-Lion", "squares-balanced", "squares-lean", "rows-float32", "rows-lean"],
)
def test_weights_with_scales_of_blocks_step_by_the_kernel(recipe: Any, preset: str, rule: Any) -> None:
    """All parameters except one with scales per row of 32, which torch steps."""
    left: list[torch.Size] = []

    def counted(how: StepConfig, parts: ParameterTensors, *given: Any) -> Any:
        left.append(parts.weight[0].shape)
        return step_parameter(how, parts, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_file, "step_parameter", counted)
        ours, optimizer = trained(rule, preset, True, recipe)
    theirs, _ = trained(rule, preset, False, recipe)
    alone = recipe.fprop.b.block == (1, 32)
    assert left == [(128, 32)] * (2 * alone) and len(optimizer._kernels) == 1
    for name, value in theirs.items():
        assert same(ours[name], value), name


@pytest.mark.parametrize(
    ("recipe", "layout", "taken"),
    [
        (recipes.blockwise(), "nk", False),
        (recipes.mxfp8(weight_2d=True), "nk", True),
        (recipes.mxfp8(), "kn", False),
        (recipes.tensorwise(), "nk", False),
    ],
    ids=lambda x: str(getattr(x, "name", x)),
)
def test_stacks_of_whole_blocks_step_as_one_matrix(recipe: Any, layout: Any, taken: bool) -> None:
    """Three matrices of 64 features by 128, in which blocks of 128 rows end, and one scale is for one matrix."""
    both, left = [], list[int]()
    for kernels in (True, False):
        torch.manual_seed(0)
        layer = qt.GroupedLinear(3, 128, 64, bias=False, layout=layout)
        model = nn.Sequential(layer)
        qt.quantize_weights(model, recipe)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset="lean")
        draw = torch.Generator().manual_seed(1)
        for _ in range(2):
            with qt.autocast(recipe):
                y = layer(torch.randn(48, 128, generator=draw), torch.tensor([16, 32, 48], dtype=torch.int32))
            (y * torch.randn(48, 64, generator=draw)).sum().backward()
            with device.asking("triton" if kernels else "none"), pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    optimizer_file,
                    "step_parameter",
                    lambda *given, now=kernels: [left.append(now), step_parameter(*given)][1],
                )
                optimizer.step()
            optimizer.zero_grad()
        both.append(all_of(model, optimizer))
    assert left.count(True) == (0 if taken else 6)
    for name, value in both[1].items():
        assert same(both[0][name], value), name


def test_sgd_of_floats_steps_by_the_kernel_and_of_codes_without() -> None:
    """Vectors of float32, codes, and a bfloat16 matrix with a stochastically rounded bfloat16 buffer."""
    both = []
    for kernels in (True, False):
        model, draw = model_of(), torch.Generator().manual_seed(1)
        model.free = nn.Parameter(torch.randn(64, 128, generator=draw).bfloat16())
        optimizer = optim.SGD(
            model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, preset="exact"
        )
        for _ in range(2):
            x = torch.randn(16, 32, generator=draw)
            with qt.autocast("tensorwise"):
                loss = model(x).square().mean()
            (loss + (model.free * torch.randn(64, 128, generator=draw)).sum()).backward()
            with device.asking("triton" if kernels else "none"):
                optimizer.step()
            optimizer.zero_grad()
        assert bool(optimizer._kernels) == kernels
        assert optimizer.state[model.free]["momentum_buffer"].dtype is torch.bfloat16
        both.append(all_of(model, optimizer))
    for name, value in both[1].items():
        assert same(both[0][name], value), name


def test_steps_in_backward_use_the_kernel() -> None:
    """Whenever pending gradients reach the threshold, the kernel steps them, with the bits of plain steps."""
    both = []
    for kernels in (True, False):
        model = model_of()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset="lean")
        optimizer.step_in_backward(outstanding_bytes=1)
        with device.asking("triton" if kernels else "none"):
            for seed in range(2):
                backward(model, seed)
                optimizer.step()
        assert bool(optimizer._kernels) == kernels
        both.append(all_of(model, optimizer))
    for name, value in both[1].items():
        assert same(both[0][name], value), name


def test_a_step_on_another_stream_waits_for_the_table_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced table's memory is reused only after the streams that read it are done."""
    streams = stand_in(monkeypatch)
    monkeypatch.setattr(stepping, "CrossStream", lambda tensors, _: CrossStream(tensors, GPU))
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), preset="lean")

    def step(stream: int) -> tuple[list[tuple[Any, ...]], set[int]]:
        streams.now, streams.log = stream, []
        with device.asking("triton"):
            optimizer.step()
        (stepper,) = optimizer._kernels.values()
        made = stepper._table, stepper._work, *stepper._chunks.values()
        return streams.log, {t.data_ptr() for t in made if t is not None}

    backward(model, 0)
    assert step(1)[0] == [("recorded", 1)]
    assert step(1)[0] == []
    log, made = step(2)
    assert log[0] == ("waits", 2, 1) and streams.keeps(2) == made
    assert step(2)[0] == []
    optimizer.zero_grad()
    backward(model, 1)
    log, _ = step(3)
    assert [entry[:2] for entry in log if entry[0] != "keeps"] == [("waits", 3), ("recorded", 3)]
    assert streams.keeps(3) == made


@pytest.mark.parametrize(
    ("layers", "recipe", "kernels"),
    [
        # Codes whose rows are whole blocks, codes whose rows end within a block, and vectors.
        (3, recipes.tensorwise(), {"step": 3}),
        (3, recipes.mxfp8(weight_2d=True), {"step": 1, "step_of_blocks": 2}),
    ],
    ids=["tensorwise", "mxfp8 squares"],
)
def test_a_step_takes_one_launch_per_config_for_any_parameters(
    layers: int, recipe: Any, kernels: dict[str, int]
) -> None:
    """With a stub of the driver: a capture launches the same kernels as its warm-up, without loads or reads."""
    model = model_of(layers, recipe)
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), preset="lean")
    launched: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        driver = Driver(patch, runs=False)
        for capturing in (False, False, True):
            backward(model, 0, recipe=recipe)
            launched.append([])
            driver.launched, driver.capturing = _Kernels(launched[-1]), capturing
            with _Operations(launched[-1]):
                optimizer.step()
            driver.launched, driver.capturing = [], False
            optimizer.zero_grad()
    # The first step creates the states.
    for of_step in launched[1:]:
        assert {name: of_step.count(name) for name in ("step", "step_of_blocks") if name in of_step} == kernels, of_step
        assert not {"torch._local_scalar_dense", "torch.item", "torch.nonzero"} & set(of_step)
        assert len(of_step) <= MOST_OPERATIONS, f"{len(of_step)}: {of_step}"
