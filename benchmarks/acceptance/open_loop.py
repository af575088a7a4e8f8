"""Error of an update by the format of the optimizer states, with the same gradients for all formats.

A small GPT is trained by AdamW in float32. Every scheme has its own moments: it decodes them, adds the gradient,
computes the update that it would make, and encodes them again. Nothing of it changes the run, so schemes differ by
their formats alone, and differences far below the scatter of two runs become visible.

    error = ‖u' - u‖ / ‖u‖, of the last steps       bias = mean of ln √(v' / v)       u = m̂ / (√v̂ + ε)

A second test draws random gradients, every second of which becomes 0, and measures how far such a weight still moves,
relative to float32 states.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.measuring import machine, results
from quaver.reference import optim
from quaver.reference.optimizer_state import StateSpec
from quaver.torch.optim import codes
from quaver.train.data import join_bytes, read_text, split

PAGE = Path(__file__).parents[2] / "docs" / "design" / "optimizer.md"
MARKS = "<!-- python -m benchmarks open-loop writes from here -->", "<!-- to here, open loop -->"
BETA1, EPSILON, DECAY, PEAK, WARMUP = 0.9, 1e-8, 0.1, 3e-3, 30
BATCH, SEQUENCE, VOCABULARY = 16, 64, 256
#: Number of last steps over which the error is averaged.
LAST = 5
NOISE = 2**15
#: Steps before and after gradients become 0, and the number of gradients.
BEFORE, AFTER, ELEMENTS = 50, 1200, 4096


@dataclass(frozen=True)
class Scheme:
    """Formats of both moments, as `StateSpec.parse` reads them."""

    name: str
    first: str
    second: str
    #: True if the second moment's scale is that of the previous step's amax.
    delayed: bool = False

    @property
    def bytes(self) -> float:
        """Bytes of both moments per parameter of a large matrix."""
        many = 2**20
        return sum(StateSpec.parse(text).bytes((many,)) for text in (self.first, self.second)) / many


_MSAMP = "e4m3/tensor power_of_two"
_V = "uint8_root/64 stochastic floor"
#: Codes of kind "mitchell".
_M, _V4 = "int8_mitchell/64 stochastic", "uint8_mitchell4/64 stochastic floor"
SCHEMES = (
    Scheme("float32", "float32", "float32"),
    Scheme("bfloat16", "bfloat16", "bfloat16"),
    Scheme("bfloat16 at random: `exact`", "bfloat16 stochastic", "bfloat16 stochastic"),
    Scheme("MS-AMP O2: `msamp`", _MSAMP, "float16/tensor power_of_two"),
    Scheme("issue 99: √v in E5M2, last step's amax", _MSAMP, "root_e5m2/tensor float32", delayed=True),
    Scheme("√v in E5M2, this step's amax", _MSAMP, "root_e5m2/tensor float32"),
    Scheme("v in E5M2", _MSAMP, "e5m2/tensor float32"),
    Scheme("v in E4M3 (the control)", _MSAMP, "e4m3/tensor float32"),
    Scheme("√v in E4M3", _MSAMP, "root_e4m3/tensor float32"),
    Scheme("√v in E4M3, at random, floor", _MSAMP, "root_e4m3/tensor float32 stochastic floor"),
    Scheme("E4M3/128, as torchao's AdamWFp8", "e4m3/128", "e4m3/128"),
    Scheme("E4M3/128, floor", "e4m3/128", "e4m3/128 floor"),
    Scheme("E4M3/128, v in E5M2/128", "e4m3/128", "e5m2/128"),
    Scheme("E4M3/128, √v in E4M3/128", "e4m3/128", "root_e4m3/128"),
    Scheme("E4M3/128, √v in unsigned E4M4/128, floor", "e4m3/128", "root_e4m4/128 floor"),
    Scheme("the same, at random", "e4m3/128", "root_e4m4/128 stochastic floor"),
    Scheme(
        "the same, of 32, scales powers of two", "e4m3/32 power_of_two", "root_e4m4/32 power_of_two stochastic floor"
    ),
    Scheme("COAT's expansion, E4M3/128: `coat`", "e4m3_expanded/128 float32", "e4m3_expanded/128 float32"),
    Scheme("dynamic map /256: `bnb8`, `torchao8`", "int8_dynamic/256 float32", "uint8_dynamic/256 float32"),
    Scheme("int8 softsign/32, √v uint8/32: `flashoptim`", "int8_softsign/32", "uint8_root/32"),
    Scheme("the same, v at random, floor", "int8_softsign/32", "uint8_root/32 stochastic floor"),
    Scheme("int8 softsign/64, √v uint8/64, v at random, floor", "int8_softsign/64", _V),
    Scheme("int8 root/64, the same v", "int8_root/64", _V),
    Scheme("int8 near roots/64, v near roots/64, floor, both at random", _M, "uint8_mitchell/64 stochastic floor"),
    Scheme("int8 near roots/64, v near fourth roots/64, the same: `lean`, `balanced`", _M, _V4),
    Scheme("the same, m to nearest", "int8_mitchell/64", _V4),
    Scheme("E4M3/64, the same v", "e4m3/64", _V),
    Scheme("int8 softsign/64, √v in E4M4/64 at random, floor", "int8_softsign/64", "root_e4m4/64 stochastic floor"),
    Scheme("m alone: E4M3 per tensor", _MSAMP, "float32"),
    Scheme("m alone: E4M3/128", "e4m3/128", "float32"),
    Scheme("m alone: COAT's expansion /128", "e4m3_expanded/128 float32", "float32"),
    Scheme("m alone: int8 root/64", "int8_root/64", "float32"),
    Scheme("m alone: int8 near roots/64", "int8_mitchell/64", "float32"),
    Scheme("m alone: int8 near roots/64, at random", _M, "float32"),
    Scheme("m alone: int8 softsign/32", "int8_softsign/32", "float32"),
    Scheme("m alone: int8 softsign/64", "int8_softsign/64", "float32"),
    Scheme("m alone: int8 softsign/128", "int8_softsign/128", "float32"),
)


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Gpt(nn.Module):
    """A GPT of 0.39 million parameters on bytes."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4, hidden: int = 256) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding) or module is self.head:
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.7 * module.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


class State:
    """One moment of all matrices under one spec; blocks may span rows."""

    def __init__(self, spec: StateSpec, sizes: list[int], delayed: bool) -> None:
        self.spec, self.sizes, self.delayed = spec, sizes, delayed
        pieces = sizes if spec.block is None else [sum(sizes)]
        self.encoded = [
            codes.encode(torch.zeros(n), spec, self._noise(torch.zeros(n, dtype=torch.int32))) for n in pieces
        ]
        self.amaxes: list[Tensor] | None = None

    def _noise(self, words: Tensor) -> Tensor | None:
        return words if self.spec.stochastic else None

    def read(self) -> Tensor:
        return torch.cat([codes.decode(*piece, self.spec) for piece in self.encoded])

    def write(self, x: Tensor, words: Tensor) -> None:
        if self.spec.block is not None:
            self.encoded = [codes.encode(x, self.spec, self._noise(words))]
            return
        parts = x.split(self.sizes)
        amaxes = [part.abs().max() for part in parts]
        used = self.amaxes if self.delayed and self.amaxes is not None else amaxes
        self.amaxes = amaxes
        noise = [self._noise(word) for word in words.split(self.sizes)]
        self.encoded = [codes.encode(p, self.spec, n, a) for p, n, a in zip(parts, noise, used, strict=True)]


@dataclass
class Seen:
    """Statistics of one scheme."""

    error: list[float] = field(default_factory=list)
    clamped_error: list[float] = field(default_factory=list)
    bias: float = 0.0
    largest: float = 0.0
    clamped: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        return {
            "error": statistics.mean(self.error[-LAST:]),
            "clamped error": statistics.mean(self.clamped_error[-LAST:]),
            "bias": self.bias,
            "largest": self.largest,
            "clamped": statistics.mean(self.clamped),
        }


class Shadows:
    """The states of all schemes; a state that two schemes share is stored once."""

    def __init__(self, schemes: tuple[Scheme, ...], sizes: list[int], beta2: float, seed: int) -> None:
        self.schemes, self.beta2 = schemes, beta2
        self.first = {s.first: State(StateSpec.parse(s.first), sizes, False) for s in schemes}
        self.second = {(s.second, s.delayed): State(StateSpec.parse(s.second), sizes, s.delayed) for s in schemes}
        self.noise = torch.Generator().manual_seed(seed)
        self.seen = {scheme.name: Seen() for scheme in schemes}
        self.steps = 0

    def take(self, gradient: Tensor) -> tuple[dict[str, Tensor], dict[tuple[str, bool], Tensor], dict[Any, Tensor]]:
        """Update moments with a flat gradient; return numerators and denominators of updates, and second moments."""
        self.steps += 1
        t, beta2 = self.steps, self.beta2
        squared = gradient.square().mul_(1 - beta2)
        # Both moments are rounded by the same noise, as the optimizers do.
        words = torch.randint(NOISE, gradient.shape, generator=self.noise, dtype=torch.int32)
        numerators, denominators, seconds = {}, {}, {}
        for key, state in self.first.items():
            m = state.read().mul_(BETA1).add_(gradient, alpha=1 - BETA1)
            numerators[key] = m / (1 - BETA1**t)
            state.write(m, words)
        for of, state in self.second.items():
            v = state.read().mul_(beta2).add_(squared)
            denominators[of] = (v / (1 - beta2**t)).sqrt_().add_(EPSILON)
            state.write(v, words)
            seconds[of] = v
        return numerators, denominators, seconds

    @property
    def bound(self) -> float:
        """Bound of this step's updates in exact arithmetic."""
        return optim.adam(self.steps, BETA1, self.beta2) * (1 + 1e-6)

    def step(self, gradient: Tensor) -> None:
        """Update the moments with a flat gradient, and record each scheme's update."""
        numerators, denominators, seconds = self.take(gradient)
        bound = self.bound
        true = numerators["float32"] / denominators["float32", False]
        norm, v = true.norm(), seconds["float32", False]
        for scheme in self.schemes:
            of, seen = (scheme.second, scheme.delayed), self.seen[scheme.name]
            u = numerators[scheme.first] / denominators[of]
            clamped = u.clamp(-bound, bound)
            seen.largest = max(seen.largest, u.abs().max().item())
            seen.clamped.append((clamped != u).float().mean().item())
            seen.error.append(((u - true).norm() / norm).item())
            seen.clamped_error.append(((clamped - true).norm() / norm).item())
            both = (v > 0) & (seconds[of] > 0)
            seen.bias = 0.5 * (seconds[of][both] / v[both]).log_().mean().item()


def measured(
    beta2: float, steps: int, seed: int, report: Callable[[str], None], schemes: tuple[Scheme, ...] = SCHEMES
) -> dict[str, dict[str, float]]:
    """Train in float32, and return the statistics of each scheme's updates."""
    torch.manual_seed(seed)
    model, text = Gpt(), _text()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=PEAK, betas=(BETA1, beta2), eps=EPSILON, foreach=False)
    shadows = Shadows(schemes, [p.numel() for p in matrices], beta2, seed + 77)
    drawn = np.random.default_rng(1000 + seed)
    for t in range(1, steps + 1):
        falling = 0.5 * (1 + math.cos(math.pi * max(0, t - WARMUP) / max(1, steps - WARMUP)))
        for group in adam.param_groups:
            group["lr"] = PEAK * min(1, t / WARMUP) * (0.01 + 0.99 * falling)
        starts = drawn.integers(0, len(text) - SEQUENCE - 1, BATCH)
        rows = torch.from_numpy(text[starts[:, None] + np.arange(SEQUENCE + 1)].astype(np.int64))
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            shadows.step(torch.cat([p.grad.flatten() for p in matrices if p.grad is not None]))
        adam.step()
        adam.zero_grad()
        if t % 50 == 0 or t == steps:
            report(f"β2 {beta2}, step {t}: loss {loss.item():.3f}")
    return {name: seen.row() for name, seen in shadows.seen.items()}


def stopped(beta2: float, seed: int, schemes: tuple[Scheme, ...] = SCHEMES, after: int = AFTER) -> dict[str, float]:
    """Return the RMS movement of weights after their gradient became 0, over that with float32 states.

    Updates are clamped to their bound.
    """
    shadows = Shadows(schemes, [ELEMENTS], beta2, seed + 77)
    drawn = torch.Generator().manual_seed(seed)
    moved = {scheme.name: torch.zeros(ELEMENTS // 2) for scheme in schemes}
    for t in range(BEFORE + after):
        gradient = torch.randn(ELEMENTS, generator=drawn)
        if t >= BEFORE:
            gradient[::2] = 0
        numerators, denominators, _ = shadows.take(gradient)
        for scheme in schemes if t >= BEFORE else ():
            update = numerators[scheme.first] / denominators[scheme.second, scheme.delayed]
            moved[scheme.name] += update[::2].clamp(-shadows.bound, shadows.bound)
    norm = moved["float32"].norm()
    return {name: (moved[name].norm() / norm).item() for name in moved}


def _text() -> np.ndarray:
    return join_bytes(split(read_text(()))[0])


def table(figures: dict[str, dict[str, dict[str, float]]], schemes: tuple[Scheme, ...] = SCHEMES) -> list[str]:
    """Return the table: a row for each scheme, six columns for each β2."""
    columns = ["states", "bytes"]
    for beta2 in figures:
        columns += [f"β2 = {beta2}: error", "bias", "largest u", "clamped", "error, clamped", "gradient stops"]
    rows = []
    for scheme in schemes:
        row = [scheme.name, f"{scheme.bytes:.2f}"]
        for by_scheme in figures.values():
            one = by_scheme[scheme.name]
            row += [
                f"{one['error']:.3g}",
                f"{one['bias']:+.3f}",
                f"{one['largest']:.3g}",
                f"{one['clamped']:.1e}" if one["clamped"] else "0",
                f"{one['clamped error']:.3g}",
                f"{one['stopped']:.3g}",
            ]
        rows.append(row)
    return results.table(columns, rows)


def run(steps: int, seed: int, write: bool, console: Console) -> None:
    """Measure with β2 = 0.95 and 0.999, print the table, and optionally write results and docs/design/optimizer.md."""

    def report(line: str) -> None:
        console.print(line, highlight=False)

    figures = {}
    for beta2 in (0.95, 0.999):
        seen, rest = measured(beta2, steps, seed, report), stopped(beta2, seed)
        figures[str(beta2)] = {name: one | {"stopped": rest[name]} for name, one in seen.items()}
    lines = table(figures)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if not write:
        return
    of: dict[str, Any] = {"steps": steps, "seed": seed, "figures": figures}
    for path in results.write(
        results.FOLDER, "open-loop", machine.describe(), ["# States beside a run", "", *lines], of
    ):
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    limits = ", ".join(f"{optim.adam_limit(BETA1, float(beta2)):.3f} for β2 = {beta2}" for beta2 in figures)
    summary = (
        f"{steps} steps of a GPT of 0.39 million parameters on Python's standard library, AdamW in float32 with "
        f"β1 = {BETA1}, ε = {EPSILON:g}, norm of the gradient clipped to 1, learning rate {PEAK:g} falling to 1 %; "
        f"seed {seed}. Bytes are those of both moments, scales included. The bound ends at {limits}. "
        f"Where a gradient stops: RMS of how far its weight goes in {AFTER} more steps, over float32's; {ELEMENTS} "
        f"gradients at random, every second one 0 from step {BEFORE} on. "
        f"{machine.cpu()}, torch {torch.__version__}, {machine.today()}."
    )
    results.write_between(PAGE, *MARKS, [summary, "", *lines])
