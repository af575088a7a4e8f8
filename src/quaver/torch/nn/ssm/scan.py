"""`ssd`: the scan of Mamba-2 with outputs, last states and all gradients, and its implementations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.recipes.text import check_instance
from quaver.torch.nn.activation import run_standalone
from quaver.torch.nn.attention.inputs import lengths_of
from quaver.torch.nn.ssm import chunked_scan
from quaver.torch.nn.ssm.chunked_scan import UNLIMITED, chunks_of, recurrence, skip, step, steps_of
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation

# ---- scans of mamba-ssm and fla, used only if selected by name ----
#
# Before its first use on a device and dtype, a small scan of the package is compared with the recurrence, outputs and
# gradients. Neither was tested here: they need a GPU, mamba-ssm even to be built.

#: Default chunk size for mamba-ssm, as in configurations of Mamba-2.
CHUNK = 256
#: Largest relative RMS difference of the package's small scan from the float32 recurrence, by dtype.
WITHIN = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def reason(name: str, x: Tensor, *others: Any) -> str:
    """Return why a package cannot run this call, or ""."""
    package = name.replace("_", "-")
    if find_spec(name) is None:
        return f"{package} is not installed"
    if not x.is_cuda:
        return f"{package} runs on GPUs, and this is {x.device.type!r}"
    if name == "mamba_ssm" and others[7] is not None and others[6] is not None:
        return "mamba-ssm does not support initial states of concatenated sequences"
    if x.dtype not in WITHIN:
        return f"{package} computes in {', '.join(map(str, WITHIN))}, not in {x.dtype}"
    return _differs(name, x.device, x.dtype)


def by_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, how: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `quaver.torch.nn.ssm.scan.ssd` with mamba-ssm, for x [B, T, H, P]."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    packed: dict[str, Any] = {}
    if cu_seqlens is not None:
        every = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
        numbers = torch.bucketize(every, cu_seqlens[1:].to(torch.int64), right=True)
        packed = {
            "seq_idx": numbers.to(torch.int32)[None],
            "cu_seqlens": cu_seqlens.to(torch.int32),
            "return_varlen_states": True,
        }
    with ops.without_autocast(x.device.type):
        y, *states = mamba_chunk_scan_combined(
            x, dt, A, B, C, how.chunk or CHUNK, D=D, dt_bias=dt_bias, initial_states=initial, dt_softplus=how.softplus,
            dt_limit=_limit(how.limit), return_final_states=True, **packed,
        )  # fmt: skip
    return y, states[-1].float()


def by_fla(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, how: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the scan with fla's gated linear attention, one decay per head: keys B, queries C, values dt x."""
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    with ops.without_autocast(x.device.type):
        bias = None if dt_bias is None else dt_bias.float()
        steps = steps_of(dt.float(), bias, how.softplus, _limit(how.limit))
        queries, keys = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (C, B))
        y, state = chunk_simple_gla(
            q=queries, k=keys, v=(steps[..., None] * x).to(x.dtype), g=steps * A.float(), scale=1.0,
            initial_state=None if initial is None else initial.float().mT.contiguous(), output_final_state=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
        )  # fmt: skip
        y = y if D is None else (y + skip(D) * x).to(x.dtype)
    return y, state.float().mT


#: Package scans by import name: functions with the arguments of `SSD` that return outputs and last states.
PACKAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"mamba_ssm": by_mamba_ssm, "fla": by_fla}


@cache
def _differs(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the package's scan is not used after comparison with the recurrence, or ""."""
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    A = -torch.arange(1, 5, dtype=torch.float32, device=device) / 4
    values = [drawn(2, 96, 4, 64), drawn(2, 96, 4), A, drawn(2, 96, 2, 64) / 8, drawn(2, 96, 2, 64) / 8, drawn(4)]
    narrow = [v.to(dtype) if i in (0, 1, 3, 4) else v for i, v in enumerate(values)]
    with torch.enable_grad(), torch.inference_mode(False):
        leaves = [v.clone().requires_grad_() for v in narrow]
        wide = [v.float().requires_grad_() for v in narrow]
        try:
            y, _ = PACKAGES[name](*leaves, None, None, None, ScanOptions(True, "0.0,inf", 64))
            ours = [y, *torch.autograd.grad(y.float().sum(), leaves)]
        except Exception as error:
            return f"a small scan of {name} does not run: {str(error).partition(chr(10))[0][:100]}"
        exact, _ = recurrence(wide[0], steps_of(wide[1]), *wide[2:])
        expected = [exact, *torch.autograd.grad(exact.sum(), wide)]
    for one, other in zip(ours, expected, strict=True):
        if not (one.float() - other).norm() <= WITHIN[dtype] * other.norm():
            return f"a small scan of {name} gives other results in {dtype}"
    return ""


# ---- ssd ----

#: Default chunk size for states of at least `LARGE_STATE` elements, and for smaller ones.
SCAN_CHUNK, SMALL_CHUNK, LARGE_STATE = 64, 32, 4096
#: Largest chunk size for which the cumulative decays stay within the range that `chunked_scan.GRID` allows.
LARGEST = 256

NO_SECOND_DERIVATIVE = (
    "the scan supports first derivatives only (no second derivative, no torch.func), because its backward is "
    "written by hand: use quaver.torch.nn.ssm.chunked_scan.recurrence there"
)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = UNLIMITED,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan of a state space with one decay per head (state-space duality, Mamba-2), computed chunk by chunk.

        h_t = exp(A dt_t) h_(t-1) + dt_t x_t ⊗ B_t,    y_t = h_t C_t + D x_t,    dt clamped to dt_limit

    Args:
        x: [B, T, H, P]; with cu_seqlens [T, H, P].
        dt: [B, T, H], or [T, H]; the step is softplus(dt + dt_bias).
        A: [H], negative in all models.
        B, C: [B, T, G, N], or [T, G, N], in x's dtype; each group serves H / G heads.
        D: [H] or [H, P], or None for no skip connection.
        dt_bias: [H].
        dt_softplus: False uses dt + dt_bias without softplus.
        dt_limit: (least, most) of the step.
        initial_states: [B, H, P, N], or one per sequence; None is zeros.
        cu_seqlens: int [sequences + 1], boundaries of concatenated sequences; each starts with its own initial state.
        chunk_size: tokens per chunk, up to 256; None chooses. It affects results only by rounding.
    Returns:
        y in x's shape and dtype, and the state after each sequence, [B or sequences, H, P, N], float32 (float64 if x
        is).
    Raises:
        ValueError: shapes, dtypes, limits or cumulative lengths that do not fit.
    Bounded: in float32, relative RMS 9e-7 of the float64 recurrence, outputs and gradients. NaN makes all later tokens
        of its sequence NaN, and possibly its whole chunk, but no other sequence.
    Source: Dao and Gu 2024, arXiv:2405.21060.
    """
    for name, arguments in {"x": x, "dt": dt, "A": A, "B": B, "C": C}.items():
        check_instance("ssd", name, arguments, Tensor, "torch.randn(2, 48, 8, 64) of x")
    _check(x, dt, A, B, C)
    _check_parameters(x, D, dt_bias, dt_limit)
    check_chunk(chunk_size)
    packed = cu_seqlens is not None
    if packed:
        lengths_of(cu_seqlens, x.shape[0])  # type: ignore[arg-type]
        x, dt, B, C = (t.unsqueeze(0) for t in (x, dt, B, C))
    elif x.dim() != 4:
        raise ValueError(
            f"x is {list(x.shape)}, which is for concatenated sequences: give cu_seqlens with their boundaries"
        )
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, *x.shape[2:], B.shape[-1])
    if initial_states is not None and initial_states.shape != state:
        raise ValueError(f"initial_states is {list(initial_states.shape)}; give [sequences, H, P, N] = {list(state)}")
    how = ScanOptions(bool(dt_softplus), f"{float(dt_limit[0])!r},{float(dt_limit[1])!r}", chunk_size or 0)
    y, final = SSD(x, dt, A, B, C, D, dt_bias, initial_states, cu_seqlens, how)
    return (y.squeeze(0) if packed else y), final


@dataclass(frozen=True)
class ScanOptions:
    """Options of a scan that are not tensors; also the scan as an op with its own backward, which saves only its
    arguments.
    """

    softplus: bool
    #: Limits of the step as text: a compiler would turn numbers into symbols.
    limit: str
    #: Chunk size, 0 for the implementation's default.
    chunk: int

    def forward(self, *tensors: Tensor | None) -> tuple[tuple[Tensor, Tensor], Sequence[Tensor | None]]:
        return FORWARD(*tensors, self.softplus, self.limit, self.chunk), tensors

    def backward(self, g: Tensor, g_final: Tensor, saved: Sequence[Any]) -> Sequence[Tensor | None]:
        grads: list[Any] = list(BACKWARD(g, g_final, *saved, self.softplus, self.limit, self.chunk))
        return *(grad if t is not None else None for grad, t in zip(grads, saved[:-1], strict=True)), None


def check_chunk(size: int | None) -> None:
    """Raise ValueError for a chunk size that the scan does not support."""
    if size is not None and (isinstance(size, bool | float) or not 1 <= size <= LARGEST):
        raise ValueError(f"chunk_size is {size}; give 1 to {LARGEST} tokens, or None")


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
    if x.dim() not in (3, 4) or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; give floating-point [B, T, H, P], or [T, H, P]")
    *lead, heads, _ = x.shape
    if list(dt.shape) != [*lead, heads] or A.shape != (heads,):
        raise ValueError(f"dt is {list(dt.shape)} and A {list(A.shape)}; beside x {list(x.shape)} give one a head")
    if B.shape != C.shape or B.dim() != x.dim() or list(B.shape[:-2]) != lead:
        raise ValueError(
            f"B is {list(B.shape)} and C {list(C.shape)}; beside x {list(x.shape)} give both {[*lead, 'G', 'N']}"
        )
    if not x.shape[-1] or not B.shape[-1]:
        raise ValueError(
            f"heads of {x.shape[-1]} features and states of {B.shape[-1]} compute nothing; give both above 0"
        )
    if not B.shape[-2] or heads % B.shape[-2]:
        raise ValueError(f"{heads} heads cannot share {B.shape[-2]} groups of B and C evenly; give groups that divide")
    if not x.dtype is B.dtype is C.dtype:
        raise ValueError(f"x is {x.dtype}, B {B.dtype} and C {C.dtype}; convert them to one dtype")


def _check_parameters(x: Tensor, D: Tensor | None, dt_bias: Tensor | None, dt_limit: tuple[float, float]) -> None:
    heads, dim = x.shape[-2:]
    if D is not None and D.shape not in ((heads,), (heads, dim)):
        raise ValueError(f"D is {list(D.shape)}; give [H] = {[heads]} or [H, P] = {[heads, dim]}")
    if dt_bias is not None and dt_bias.shape != (heads,):
        raise ValueError(f"dt_bias is {list(dt_bias.shape)}; give [H] = {[heads]}")
    pair = isinstance(dt_limit, tuple | list) and len(dt_limit) == 2
    if not pair or not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit is {dt_limit}; give (least, most) of a step, such as (0.0, inf)")


# ---- one token without gradients: the recurrence ----


def _no_single_step(x: Tensor, *others: Any) -> str:
    if x.shape[1] != 1 or others[7] is not None:
        return "it computes one token of each sequence"
    tensors = (x, *others[:7])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return "it has no gradients"
    return ""


def _single_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: None, how: ScanOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    x1, dt1, A1, B1, C1, D1, bias, state = (
        None if t is None else t.to(wide) for t in (x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, dt_bias, initial)
    )
    assert x1 is not None and dt1 is not None and A1 is not None and B1 is not None and C1 is not None
    steps = steps_of(dt1, bias, how.softplus, _limit(how.limit))
    state = x1.new_zeros(*x1.shape, B1.shape[-1]) if state is None else state
    with ops.without_autocast(ops.autocast_device(x)):
        y, state = step(state, x1, steps, A1, B1, C1, D1)
    return y.to(x.dtype)[:, None], state


def _limit(text: str) -> tuple[float, float]:
    least, most = map(float, text.split(","))
    return least, most


# ---- many tokens, with a hand-written backward ----


def _in_chunks(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, how = arguments
    y, final = run_standalone(how, NO_SECOND_DERIVATIVE, *tensors)
    return y, final


def _plain_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, cu_seqlens, softplus, limit, size = arguments[0], *arguments[8:]
    with torch.no_grad(), ops.without_autocast(ops.autocast_device(x)):
        lengths, flat = _lengths(x, cu_seqlens), _flat(arguments, softplus, limit)
        y, final = chunked_scan.forward(flat, chunks_of(lengths, _size(size, flat, lengths), x.device), len(lengths))
    return y.view(x.shape), final


def _plain_backward(g: Tensor, g_final: Tensor, *arguments: Any) -> list[Tensor]:
    x, dt, bias, cu_seqlens, softplus, limit, size = arguments[0], arguments[1], arguments[6], *arguments[8:]
    with torch.no_grad(), ops.without_autocast(ops.autocast_device(x)):
        lengths, flat = _lengths(x, cu_seqlens), _flat(arguments, softplus, limit)
        chunks = chunks_of(lengths, _size(size, flat, lengths), x.device)
        grads = chunked_scan.backward(g.flatten(0, 1), g_final, flat, chunks, len(lengths))
        dx, dstep, dA, dB, dC, dD, initial = grads
        assert dstep is not None
        wide = dt.to(flat.wide) if bias is None else dt.to(flat.wide) + bias.to(flat.wide)
        dstep = _through(dstep, wide.flatten(0, 1), softplus, _limit(limit))
        dbias = None if bias is None else dstep.sum(0).to(bias.dtype)
        every = dx, dstep.to(dt.dtype), dA, dB, dC, dD, dbias, initial
        shapes = arguments[:8]
        return [
            x.new_empty(0) if grad is None or like is None else grad.view(like.shape)
            for grad, like in zip(every, shapes, strict=True)
        ]


def _through(g: Tensor, dt: Tensor, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """Convert the gradient of the step to that of dt. Comparisons with NaN are false, so a NaN gradient stays."""
    unclamped = F.softplus(dt) if softplus else dt
    g = g.masked_fill((unclamped < limit[0]) | (unclamped > limit[1]), 0)
    return g * torch.sigmoid(dt) if softplus else g


def _lengths(x: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    if cu_seqlens is None:
        return [x.shape[1]] * x.shape[0]
    lengths = lengths_of(cu_seqlens, x.shape[1])
    assert lengths is not None
    return lengths


def _size(size: int, flat: chunked_scan.ScanInputs, lengths: Sequence[int]) -> int:
    """Return the chunk size, at most the length of the longest sequence."""
    if not size:
        size = SCAN_CHUNK if flat.x.shape[-1] * flat.B.shape[-1] >= LARGE_STATE else SMALL_CHUNK
    return max(1, min(size, max(lengths, default=1)))


def _flat(arguments: Sequence[Any], softplus: bool, limit: str) -> chunked_scan.ScanInputs:
    x, dt, A, B, C, D, bias, initial = arguments[:8]
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = steps_of(dt.to(wide), None if bias is None else bias.to(wide), softplus, _limit(limit))
    x, steps, B, C = (t.flatten(0, 1) for t in (x, steps, B, C))
    return chunked_scan.ScanInputs(x, steps, A, B, C, D, initial)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, B, cu_seqlens = arguments[0], arguments[3], arguments[8]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty((sequences, *x.shape[2:], B.shape[-1]), dtype=wide)


def _fake_backward(g: Tensor, g_final: Tensor, *arguments: Any) -> list[Tensor]:
    return [g.new_empty(0) if t is None else t.new_empty(t.shape) for t in arguments[:8]]


_TENSORS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor? initial,"
    " Tensor? cu_seqlens, bool softplus, str limit, int chunk"
)
_KERNELS = f"{ops.GPU}.ssm"
#: For x [B, T, H, P], with cu_seqlens B is 1; returns outputs and last states.
FORWARD: Operation[tuple[Tensor, Tensor]] = Operation(
    f"ssd({_TENSORS}) -> (Tensor, Tensor)",
    [
        Implementation("triton", f"{_KERNELS}:forward_scan", f"{_KERNELS}:reason_scan", ops.no_kernels),
        Implementation("reference", _plain_forward),
    ],
    fake=_fake_forward,
)
#: (gradients of both, forward's arguments) to the gradients of the tensors, empty for absent ones.
BACKWARD: Operation[list[Tensor]] = Operation(
    f"ssd_backward(Tensor g, Tensor g_final, {_TENSORS}) -> Tensor[]",
    [
        Implementation("triton", f"{_KERNELS}:backward_scan", f"{_KERNELS}:reason_backward_scan", ops.no_kernels),
        Implementation("reference", _plain_backward),
    ],
    fake=_fake_backward,
)
#: The differentiable scan. Packages are used only if selected by name: `with quaver.torch.only("mamba_ssm")`.
SSD: Operation[tuple[Tensor, Tensor]] = Operation(
    "ssd_differentiably",
    [
        Implementation("recurrence", _single_step, _no_single_step),
        Implementation("chunked", _in_chunks),
        *(Implementation(name, scan, partial(reason, name)) for name, scan in PACKAGES.items()),
    ],
    traced=_in_chunks,
)
