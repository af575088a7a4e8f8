"""torch's nn.MultiheadAttention, whose projections q, k and v are parameters of its own, and its output one it reads.

The projections are linear layers of rows of `in_proj_weight`, or of three weights where keys have other features; the
output projection is called as the module that it is. Attention between them stays in high precision, as torch has it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.torch.linear.layer import Quantizable, recipe_of
from quaver.torch.model.reach.products import product
from quaver.torch.numerics.tracing import is_tracing


class Packed(Quantizable, nn.MultiheadAttention):
    """Stands above nn.MultiheadAttention and its subclasses without a forward of their own."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        recipe = recipe_of(self, is_tracing())
        if recipe is None or not recipe.quantizes or query.is_nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint at what attn_mask holds, and attn_mask is None; give both")
        batched, first = query.dim() == 3, self.batch_first and query.dim() == 3
        q, k, v = _same_objects(query, key, value, lambda x: x if batched else x.unsqueeze(1))
        q, k, v = _same_objects(q, k, v, lambda x: x.transpose(0, 1) if first else x)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        y, weights = self._attend(recipe, (q, k, v), key_padding_mask, attn_mask, need_weights, is_causal)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if first else y, weights

    def _attend(
        self,
        recipe: Recipe,
        inputs: tuple[Tensor, Tensor, Tensor],
        padding: Tensor | None,
        mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Of inputs [length, batch, features]: the output, and the weights [B, H, L, S] of each head or None."""
        length, batch, _ = inputs[0].shape
        heads, size, keys = self.num_heads, self.head_dim, inputs[1].shape[0]
        q, *kv = self._projections(recipe, *inputs)
        # torch takes the hint where nothing else hides anything, and the mask elsewhere.
        hinted = is_causal and padding is None and not need_weights
        if not hinted:
            _check("attn_mask", mask, [length, keys], [batch * heads, length, keys])
            _check("key_padding_mask", padding, [batch, keys])
        joined = None if hinted else _joined(mask, padding, batch, heads, q.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            kv = [
                torch.cat([t, b.to(t.dtype).repeat(1, batch, 1)])
                for t, b in zip(kv, (self.bias_k, self.bias_v), strict=True)
            ]
            joined = _seen(joined)
        if self.add_zero_attn:
            kv = [torch.cat([t, t.new_zeros((1, *t.shape[1:]))]) for t in kv]
            joined = _seen(joined)
        # [B, H, L, D]
        q, k, v = (t.reshape(t.shape[0], batch, heads, size).permute(1, 2, 0, 3) for t in (q, *kv))
        dropped = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / size)) @ k.transpose(-2, -1)
            weights = F.dropout((scores if joined is None else scores + joined).softmax(-1), dropped)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, joined, dropped, hinted)
        y = y.permute(2, 0, 1, 3).reshape(length, batch, heads * size)
        return self.out_proj(y), weights

    def _projections(self, recipe: Recipe, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v, in one product of what they share."""
        weight, bias, n = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is None:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            each = zip(
                (query, key, value), (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight), biases, strict=True
            )
            return [product(self, x, w, b, recipe) for x, w, b in each]
        parts = [(query, 0, 3)] if query is key is value else [(query, 0, 1), (key, 1, 3)]
        if key is not value:
            parts = [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
        outputs: list[Tensor] = []
        for x, start, end in parts:
            rows = slice(start * n, end * n)
            whole = end - start == 3
            w, b = (weight, bias) if whole else (weight[rows], None if bias is None else bias[rows])
            outputs += product(self, x, w, b, recipe).chunk(end - start, -1)
        return outputs


def why_not(module: nn.MultiheadAttention) -> str:
    """Why one cannot be converted, or ""."""
    if not isinstance(module, Packed) and type(module).forward is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward of its own"
    return ""


def _same_objects(query: Tensor, key: Tensor, value: Tensor, change: object) -> tuple[Tensor, Tensor, Tensor]:
    """Each changed once: what is one object stays one."""
    k = change(key)  # type: ignore[operator]
    v = k if value is key else change(value)  # type: ignore[operator]
    return (k if query is key else change(query)), k, v  # type: ignore[operator]


def _check(name: str, mask: Tensor | None, *shapes: list[int]) -> None:
    """Raise the ValueError of a mask that torch refuses: adding it would give other results in silence."""
    if mask is None:
        return
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} is {mask.dtype}; give bool, True where nothing is seen, or a float that is added")
    if list(mask.shape) not in shapes:
        raise ValueError(f"{name} is {list(mask.shape)}; give {' or '.join(map(str, shapes))}")


def _joined(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores [B, H, L, S], of a mask [L, S] or [B·H, L, S] and of keys that are padding [B, S]."""
    joined = None
    if mask is not None:
        joined = _added(mask, dtype)
        joined = joined[None, None] if mask.dim() == 2 else joined.view(batch, heads, *mask.shape[1:])
    if padding is not None:
        hidden = _added(padding, dtype)[:, None, None]
        joined = hidden if joined is None else joined + hidden
    return joined


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is True where nothing is seen, as what is added to scores."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _seen(mask: Tensor | None) -> Tensor | None:
    """The mask with one more key, which is seen."""
    return None if mask is None else F.pad(mask, (0, 1))
