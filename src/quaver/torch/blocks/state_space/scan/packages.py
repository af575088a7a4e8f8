"""The scan of the package mamba-ssm, where it is installed: by name alone, and where it gives what ours gives.

Before its first use on a GPU and dtype a small scan of each is compared, outputs and gradients. It was never run here:
the package needs a GPU to be built.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quaver.torch.blocks.state_space.scan.recurrent import recurrence, steps_of
from quaver.torch.operations import ops

#: True if mamba-ssm can be imported.
INSTALLED = find_spec("mamba_ssm") is not None
#: How far its small scan may be from the recurrence in float32, relative RMS.
WITHIN = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def reason(x: Tensor, *others: Any) -> str:
    """ "" to take the call, else why not."""
    if not INSTALLED:
        return "mamba-ssm is not installed"
    if not x.is_cuda:
        return f"mamba-ssm runs on GPUs, and this is {x.device.type!r}"
    if others[7] is not None and others[6] is not None:
        return "mamba-ssm takes no initial states of sequences laid end to end"
    if x.dtype not in WITHIN:
        return f"mamba-ssm computes in {', '.join(map(str, WITHIN))}, not in {x.dtype}"
    return _differs(x.device, x.dtype)


def scan(
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
            x, dt, A, B, C, how.chunk, D=D, dt_bias=dt_bias, initial_states=initial, dt_softplus=how.softplus,
            dt_limit=limit, return_final_states=True, **packed,
        )  # fmt: skip
    return y, states[-1].float()


@cache
def _differs(device: torch.device, dtype: torch.dtype) -> str:
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
            y, _ = scan(*given)
            ours = [y, *torch.autograd.grad(y.float().sum(), leaves)]
        except Exception as error:
            return f"a small scan of mamba-ssm does not run: {str(error).partition(chr(10))[0][:100]}"
        exact, _ = recurrence(wide[0], steps_of(wide[1]), *wide[2:])
        expected = [exact, *torch.autograd.grad(exact.sum(), wide)]
    for one, other in zip(ours, expected, strict=True):
        if not (one.float() - other).norm() <= WITHIN[dtype] * other.norm():
            return f"a small scan of mamba-ssm gives other results in {dtype}"
    return ""
