"""The scans of mamba-ssm and fla, where they are installed: by name alone, and where they give what ours gives.

Before its first use on a GPU and dtype a small scan of each is compared, outputs and gradients. None was ever run here:
they need a GPU, the first one to be built.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quaver.torch.blocks.state_space.scan.recurrent import recurrence, skip, steps_of
from quaver.torch.operations import ops

#: Tokens of a chunk where none are asked for: as configurations of Mamba-2 begin.
CHUNK = 256
#: How far its small scan may be from the recurrence in float32, relative RMS.
WITHIN = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    return find_spec(name) is not None


def reason(name: str, x: Tensor, *others: Any) -> str:
    """ "" for this package to take the call, else why not."""
    said = name.replace("_", "-")
    if not installed(name):
        return f"{said} is not installed"
    if not x.is_cuda:
        return f"{said} runs on GPUs, and this is {x.device.type!r}"
    if name == "mamba_ssm" and others[7] is not None and others[6] is not None:
        return "mamba-ssm takes no initial states of sequences laid end to end"
    if x.dtype not in WITHIN:
        return f"{said} computes in {', '.join(map(str, WITHIN))}, not in {x.dtype}"
    return _differs(name, x.device, x.dtype)


def by_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, how: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `quaver.torch.blocks.state_space.scan.op.ssd` of x [B, T, H, P]."""
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
    limit = tuple(map(float, how.limit.split(",")))
    with ops.without_autocast(x.device.type):
        y, *states = mamba_chunk_scan_combined(
            x, dt, A, B, C, how.chunk or CHUNK, D=D, dt_bias=dt_bias, initial_states=initial, dt_softplus=how.softplus,
            dt_limit=limit, return_final_states=True, **packed,
        )  # fmt: skip
    return y, states[-1].float()


def by_fla(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, how: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by gated linear attention with one decay a head: B are its keys, C its queries, dt x its values."""
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    least, most = map(float, how.limit.split(","))
    with ops.without_autocast(x.device.type):
        bias = None if dt_bias is None else dt_bias.float()
        steps = steps_of(dt.float(), bias, how.softplus, (least, most))
        queries, keys = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (C, B))
        y, state = chunk_simple_gla(
            q=queries, k=keys, v=(steps[..., None] * x).to(x.dtype), g=steps * A.float(), scale=1.0,
            initial_state=None if initial is None else initial.float().mT.contiguous(), output_final_state=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
        )  # fmt: skip
        y = y if D is None else (y + skip(D) * x).to(x.dtype)
    return y, state.float().mT


#: By the name that is imported: (as `quaver.torch.blocks.state_space.scan.op.SSD`) to outputs and last states.
PACKAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"mamba_ssm": by_mamba_ssm, "fla": by_fla}


@cache
def _differs(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why the package's scan is not taken, or ""."""

    class How:
        softplus, limit, chunk = True, "0.0,inf", 64

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
            given: list[Any] = [*leaves, None, None, None, How]
            y, _ = PACKAGES[name](*given)
            ours = [y, *torch.autograd.grad(y.float().sum(), leaves)]
        except Exception as error:
            return f"a small scan of {name} does not run: {str(error).partition(chr(10))[0][:100]}"
        exact, _ = recurrence(wide[0], steps_of(wide[1]), *wide[2:])
        expected = [exact, *torch.autograd.grad(exact.sum(), wide)]
    for one, other in zip(ours, expected, strict=True):
        if not (one.float() - other).norm() <= WITHIN[dtype] * other.norm():
            return f"a small scan of {name} gives other results in {dtype}"
    return ""
