"""Products of bf16 matrices in float32, eager and compiled, where a processor has no instructions for them."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

#: Matrix products, and the index of their first operand, which follows an addend if there is one.
PRODUCTS = {"mm": 0, "mm.out": 0, "bmm": 0, "bmm.out": 0, "addmm": 1, "addmm.out": 1}


class WideProducts:
    """Context in which bf16 matrix products on a CPU run in float32 in preallocated memory, and are rounded once.

    torch's own take up to forty times as long where the processor has no instructions for them. Results have the same
    shapes and dtypes, and memory for operands in float32 is no event of a step. It holds for all threads, and for what
    compiled code calls; attention and what is no `PRODUCTS` stay as they are.
    """

    def __init__(self, elements: int) -> None:
        #: Both operands and the result, each of so many elements at most.
        self.held = [torch.empty(elements, dtype=torch.float32) for _ in range(3)]

    def __enter__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns once a process that a kernel is replaced, which is what is wanted.
            warnings.simplefilter("ignore")
            for name, first in PRODUCTS.items():
                self.library.impl(name, self._instead(name, first), "CPU", with_keyset=True)

    def __exit__(self, *raised: object) -> None:
        self.library._destroy()

    def _instead(self, name: str, first: int) -> Any:
        own = torch.library.get_kernel(f"aten::{name}", "CPU")

        def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
            a, b = args[first : first + 2]
            shape = (*a.shape[:-1], b.shape[-1])
            most = max(a.numel(), b.numel(), math.prod(shape))
            if a.dtype is not torch.bfloat16 or most > self.held[0].numel() or kwargs.keys() & {"alpha", "beta"}:
                return own.call_boxed(keys, *args, **kwargs)
            y = self._wide(a, b, shape)
            if first:
                y += args[0]
            out: Tensor | None = kwargs.get("out")
            return (a.new_empty(shape) if out is None else out).copy_(y)

        return product

    def _wide(self, a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
        left, right, y = (
            held[: math.prod(of)].view(of) for held, of in zip(self.held, (a.shape, b.shape, shape), strict=True)
        )
        return torch.matmul(left.copy_(a), right.copy_(b), out=y)
