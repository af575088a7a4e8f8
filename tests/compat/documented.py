"""What other libraries' own pages show first, by the names of whichever module is given for theirs.

The calls are those of the pages, the sizes a part of theirs, and the device is whichever is there:

    torchao/float8/README.md of torchao 0.18             `torchao_training`, `torchao_checkpoint`
    README.rst of Transformer Engine 2                   `readme`, `readme_jax`
    docs/examples/quickstart.ipynb and quickstart_utils  `quickstart`
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small(first: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The pages' two layers, there in bfloat16, and their filter: not the second, and sizes that 16 divides alone."""
    torch.manual_seed(0)

    def module_filter_fn(module: nn.Module, name: str) -> bool:
        sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()
        return name != "1" and not any(size % 16 for size in sizes)

    model = nn.Sequential(nn.Linear(first, 2 * first), nn.Linear(2 * first, 128)).to(DEVICE, dtype)
    return model, torch.randn(64, first, device=DEVICE, dtype=dtype), module_filter_fn


def torchao_training(float8: Any, config: Any, dtype: torch.dtype) -> list[Tensor]:
    """Outputs of the pages' loop, step by step."""
    model, x, keep = small(128, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    float8.convert_to_float8_training(model, module_filter_fn=keep, config=config)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        y = model(x)
        y.sum().backward()
        optimizer.step()
        outputs.append(y.detach())
    return outputs


def torchao_checkpoint(float8: Any, file: Path) -> tuple[Any, Any, Tensor]:
    """A model that was trained, as the page saves it and loads it again, and an input."""
    model, x, keep = small(128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    float8.convert_to_float8_training(model, module_filter_fn=keep)
    loss = F.mse_loss(model(x), torch.ones(64, 128, dtype=x.dtype, device=DEVICE))
    loss.backward()
    optimizer.step()
    states = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save({"model": model, **states}, file)
    checkpoint = torch.load(file, weights_only=False)
    loaded = checkpoint["model"]
    loaded.load_state_dict(checkpoint["model_state_dict"])
    return model, loaded, x


def readme(te: Any, recipe: Any) -> tuple[Any, Tensor, Tensor]:
    """A layer with gradients, its input and its output."""
    model = te.Linear(192, 768, bias=True)
    inp = torch.randn(256, 192, device=DEVICE)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
    with te.autocast(enabled=True, recipe=fp8_recipe):
        out = model(inp)
    loss = out.sum()
    loss.backward()
    return model, inp, out


def readme_jax(te: Any, te_flax: Any, recipe: Any) -> list[float]:
    """Losses of ten steps with constant weights and changing scales, and losses without quantization."""
    import flax
    import jax
    import jax.numpy as jnp

    init_rng, data_rng = jax.random.split(jax.random.PRNGKey(0))
    inp = jax.random.normal(data_rng, [4, 16, 128], jnp.float32)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)
    with te.autocast(enabled=True, recipe=fp8_recipe):
        model = te_flax.DenseGeneral(features=128)

        def loss_fn(params: Any, other_vars: Any, inp: Any) -> Any:
            out = model.apply({"params": params, **other_vars}, inp)
            return jnp.mean(out**2)

        variables = model.init(init_rng, inp)
        other_variables, params = flax.core.pop(variables, "params")
        fwd_bwd_fn = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1)))
        losses = []
        for _ in range(10):
            loss, (_, other_grads) = fwd_bwd_fn(params, other_variables, inp)
            other_variables = other_grads
            losses.append(float(loss))
    return [*losses, float(loss_fn(params, {}, inp))]


class Core(nn.Module):
    """The notebook's own attention, with tokens first."""

    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhst,tbhd->sbhd", self.dropout(scores.softmax(-1)), v).flatten(2)


class Layer(nn.Module):
    """The notebook's layer of parts: torch's, Transformer Engine's, or its fused ones."""

    def __init__(self, te: Any, kind: str, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads, self.fused = heads, kind == "fused"
        linear, norm = (nn.Linear, nn.LayerNorm) if kind == "basic" else (te.Linear, te.LayerNorm)
        if self.fused:
            self.ln_qkv = te.LayerNormLinear(hidden, 3 * hidden, eps=1e-5, bias=True)
            self.ln_mlp = te.LayerNormMLP(hidden, ffn, eps=1e-5, bias=True)
        else:
            self.ln1, self.ln2 = norm(hidden, eps=1e-5), norm(hidden, eps=1e-5)
            self.qkv_projection = linear(hidden, 3 * hidden, bias=True)
            self.linear1, self.linear2 = linear(hidden, ffn, bias=True), linear(ffn, hidden, bias=True)
        self.attention, self.dropout = Core(heads, 0.1), nn.Dropout(0.1)
        self.projection = linear(hidden, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.ln_qkv(x) if self.fused else self.qkv_projection(self.ln1(x))
        q, k, v = qkv.view(*qkv.shape[:2], self.heads, -1).chunk(3, -1)
        x = x + self.dropout(self.projection(self.attention(q, k, v)))
        if self.fused:
            y: Tensor = x + self.ln_mlp(x)
            return y
        return x + self.linear2(F.gelu(self.linear1(self.ln2(x)), approximate="tanh"))


#: A parameter of the basic layer, in the fused one, and in Transformer Engine's own.
SHARED = {
    "ln1.weight": ("ln_qkv.layer_norm_weight", "self_attention.layernorm_qkv.layer_norm_weight"),
    "ln1.bias": ("ln_qkv.layer_norm_bias", "self_attention.layernorm_qkv.layer_norm_bias"),
    "qkv_projection.weight": ("ln_qkv.weight", "self_attention.layernorm_qkv.weight"),
    "qkv_projection.bias": ("ln_qkv.bias", "self_attention.layernorm_qkv.bias"),
    "projection.weight": ("projection.weight", "self_attention.proj.weight"),
    "projection.bias": ("projection.bias", "self_attention.proj.bias"),
    "ln2.weight": ("ln_mlp.layer_norm_weight", "layernorm_mlp.layer_norm_weight"),
    "ln2.bias": ("ln_mlp.layer_norm_bias", "layernorm_mlp.layer_norm_bias"),
    "linear1.weight": ("ln_mlp.fc1_weight", "layernorm_mlp.fc1_weight"),
    "linear1.bias": ("ln_mlp.fc1_bias", "layernorm_mlp.fc1_bias"),
    "linear2.weight": ("ln_mlp.fc2_weight", "layernorm_mlp.fc2_weight"),
    "linear2.bias": ("ln_mlp.fc2_bias", "layernorm_mlp.fc2_bias"),
}


def quickstart(te: Any, kind: str) -> nn.Module:
    """The notebook's layers, each with the parameters of the basic one: "basic", "te", "fused" or "transformer"."""
    hidden, ffn, heads = 128, 512, 4
    torch.manual_seed(1234)
    basic = Layer(te, "basic", hidden, ffn, heads)
    if kind == "basic":
        return basic.to(DEVICE)
    # The notebook's layer has parameters for query, key and value, and its helper adds a `weight` that is never read.
    own = {"hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads, "fuse_qkv_params": True}
    model = te.TransformerLayer(**own) if kind == "transformer" else Layer(te, kind, hidden, ffn, heads)
    model.to(DEVICE)
    for name, (fused, whole) in SHARED.items():
        place = {"te": name, "fused": fused, "transformer": whole}[kind]
        owner, _, last = place.rpartition(".")
        # As the notebook's helper does: one parameter replaces another.
        setattr(model.get_submodule(owner), last, basic.get_parameter(name))
    return model


def with_its_imports(folder: Path) -> None:
    """Run all examples with the import lines of the pages, after `install`, in a fresh process."""
    import quaver.compat

    for library in ("torchao", "transformer_engine"):
        quaver.compat.install(library)
    # ruff: isort: off
    import torchao.float8
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    import transformer_engine.jax as te_jax
    import transformer_engine.jax.flax as te_flax
    # ruff: isort: on

    for library in (torchao.float8, te, recipe, te_jax, te_flax):
        assert library.__name__.startswith("quaver.compat."), library
    outputs = torchao_training(torchao.float8, torchao.float8.Float8LinearConfig(), torch.float32)
    assert outputs[-1].sum() < outputs[0].sum()
    model, loaded, x = torchao_checkpoint(torchao.float8, folder / "checkpoint.pth")
    assert torch.equal(model(x), loaded(x))
    layer, inp, out = readme(te, recipe)
    assert out.shape == (256, 768) and torch.equal(layer.bias.grad, torch.full((768,), 256.0, device=DEVICE))
    losses = readme_jax(te_jax, te_flax, recipe)
    assert len(losses) == 11 and abs(losses[10] - losses[0]) < 0.02 * losses[10]
    basic, x = quickstart(te, "basic").eval(), torch.rand(16, 2, 128, device=DEVICE)
    for kind in ("te", "fused", "transformer"):
        call = {"self_attn_mask_type": "no_mask"} if kind == "transformer" else {}
        torch.testing.assert_close(quickstart(te, kind).eval()(x, **call), basic(x), rtol=1e-5, atol=1e-5)
    given = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    layer = quickstart(te, "transformer")
    for _ in range(3):
        with te.fp8_autocast(enabled=True, fp8_recipe=given):
            y = layer(x, attention_mask=None)
        y.backward(torch.ones_like(y))
    print(inp.shape, y.shape)


if __name__ == "__main__":
    with_its_imports(Path(sys.argv[1]))
