"""Each case writes one checkpoint as a user would, and loads it into a fresh object for the next step."""

import io
import lzma
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch import optim
from tests.conftest import ROOT
from tests.golden.cases import optimizers
from tests.golden.cases.linear import fill
from tests.golden.inputs import values
from tests.golden.record import Record, array

FOLDER = Path(__file__).parent / "files"
DELAYED = recipes.delayed(history=4)
STEPS = 3


class Case(NamedTuple):
    """A checkpoint that `load` reads; it records what must not change.

    `write` writes the file, or names a module whose ranks save a folder "saved".
    """

    write: Callable[[Path], None] | str
    load: Callable[[Path, Record], None]


def cases() -> dict[str, Case]:
    found = {
        f"{name}.pt.xz": Case(partial(write_model, make), partial(load_model, make)) for name, make in MODELS.items()
    }
    for rule, preset, weights in optimizer_rows():
        given = (rule, preset, weights)
        found[f"{'-'.join(given)}.pt.xz"] = Case(partial(write_optimizer, given), partial(load_optimizer, given))
    found["dcp-one.tar.xz"] = Case(write_dcp, load_dcp)
    found["dcp-two.tar.xz"] = Case("tests.golden.checkpoints.ranks", load_dcp)
    found["trainer.tar.xz"] = Case(write_trainer, load_trainer)
    found["jax.npz"] = Case(write_jax, load_jax)
    found["linen.msgpack"] = Case(write_linen, load_linen)
    found["nnx.msgpack"] = Case(write_nnx, load_nnx)
    return found


def of_codes(recipe: str) -> nn.Module:
    """Layer with a weight stored only as codes."""
    with qt.quantized_init(recipe):
        layer = qt.Linear(48, 32, recipe=recipe)
    layer.set_weight(torch.from_numpy(values(32, 48, seed=3)))
    return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear-delayed": lambda: qt.Linear(48, 32, recipe=DELAYED),
    "linear-nvfp4": lambda: qt.Linear(48, 32, recipe="nvfp4"),
    **{
        f"stored-{name}": partial(of_codes, name)
        for name in ("delayed", "tensorwise", "blockwise", "mxfp8", "mxfp4", "nvfp4")
    },
    "grouped-delayed": lambda: qt.GroupedLinear(2, 48, 32, recipe=DELAYED),
    "mlp-delayed": lambda: qt.MLP(32, 48, "swiglu", recipe=DELAYED),
    "norm-mlp-delayed": lambda: qt.LayerNormMLP(32, 48, recipe=DELAYED),
    "moe-delayed": lambda: qt.MoE(32, 16, qt.MixtureConfig(experts=4, k=2, balance_bias=True), recipe=DELAYED),
    "mamba2-delayed": lambda: qt.Mamba2(32, head_dim=16, state=16, recipe=DELAYED),
    "layer-delayed": lambda: qt.TransformerLayer(32, 2, 48, normalization="RMSNorm", recipe=DELAYED),
}


def train(model: nn.Module, number: int) -> None:
    """A forward and backward; weights stay as they are."""
    width = 48 if isinstance(model, qt.Linear | qt.GroupedLinear) else 32
    x = torch.from_numpy(values(2, 16, width, seed=number)).requires_grad_()
    # Histories roll where it is entered: without it, the first layer of a process rolls a step later.
    with qt.autocast(DELAYED):
        if isinstance(model, qt.GroupedLinear):
            y = model(x.flatten(0, 1), torch.tensor([20, 32], dtype=torch.int32))
        else:
            y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.from_numpy(values(*y.shape, seed=50 + number)))


def write_model(make: Callable[[], nn.Module], path: Path) -> None:
    model = make()
    if not path.name.startswith("stored"):
        fill(model)
    for number in range(STEPS):
        train(model, number)
    save(model.state_dict(), path)


def load_model(make: Callable[[], nn.Module], path: Path, record: Record) -> None:
    saved = torch.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    model = make()
    model.load_state_dict(saved)
    same(model.state_dict(), saved, record)
    for number in range(STEPS, STEPS + 2):
        train(model, number)
        whole = isinstance(model, qt.Linear | qt.GroupedLinear)
        for name, buffer in model.named_buffers():
            kind = name.rpartition(".")[2]
            if kind == "count":
                record.exact(**{f"step {number} {name}": buffer})
            if kind in ("history", "factor"):
                # Inputs and gradients of inner layers follow sums; weights do not.
                record.exact(**{f"step {number} {name}": buffer if whole else buffer[..., 1]})


def optimizer_rows() -> Iterator[tuple[str, str, str]]:
    """Rule, preset, weights: every preset with weights in codes, whose states have the preset's format at any size."""
    for preset in optim.PRESETS:
        yield "AdamW", preset, "tensorwise"
    yield from (("AdamW", "coat", "float32"), ("AdamW", "lean", "bfloat16"), ("AdamW", "exact", "float16"))
    yield from (("Lion", "lean", "tensorwise"), ("SGD", "balanced", "tensorwise"), ("Muon", "balanced", "tensorwise"))


def make_optimizer(given: tuple[str, str, str]) -> tuple[nn.Module, Any]:
    """Tensors of floats have 4096 elements, below which states stay in float32."""
    n_in, n_out = (48, 16) if given[2] == "tensorwise" else (64, 64)
    return optimizers.made(*given, n_in=n_in, n_out=n_out)


def write_optimizer(given: tuple[str, str, str], path: Path) -> None:
    model, optimizer = make_optimizer(given)
    for number in range(STEPS):
        optimizers.step(optimizer, number)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load_optimizer(given: tuple[str, str, str], path: Path, record: Record) -> None:
    saved = torch.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    model, optimizer = make_optimizer(given)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    same({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved, record)
    optimizers.step(optimizer, STEPS)
    for name, value in tensors({"model": model.state_dict(), "optimizer": optimizer.state_dict()}):
        if array(value).dtype.kind in "iu" and value.dtype not in (torch.bfloat16, torch.float16):
            record.exact(**{f"next {name}": value})


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    fill(model)
    qt.convert(model, DELAYED)
    return model


def write_dcp(path: Path) -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=2.0**-8, preset="exact")
    for number in range(STEPS):
        train(model, number)
        optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        qt.parallel.Checkpoint(model, optimizer).save(f"{folder}/saved")
        pack(Path(folder) / "saved", path)


def load_dcp(path: Path, record: Record) -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=2.0**-8, preset="exact")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = qt.parallel.Checkpoint(model, optimizer)
        checkpoint.load(unpack(path, folder))
    for name, value in tensors(checkpoint.state_dict()):
        record.exact(**{name: value})
    train(model, STEPS)
    for name, buffer in model.named_buffers():
        record.exact(**{f"next {name}": buffer[..., 1]})


def trainer_config(out: str) -> Any:
    from quaver.train import TrainConfig

    sizes = {"steps": 2, "batch": 2, "sequence": 16, "checkpoint_every": 1, "validation_batches": 1}
    text = Path(__file__).with_name("text.txt").relative_to(ROOT)
    return TrainConfig(
        model="nano",
        recipe="delayed(history=4)",
        optimizer="lean",
        text=(str(text),),
        out=out,
        device="cpu",
        **sizes,  # type: ignore[arg-type]
    )


def write_trainer(path: Path) -> None:
    from quaver.train import run_training

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_training(trainer_config(str(out)))
        for each in (*out.glob("step-000002/*"), *out.glob("*.png"), *out.glob(".quaver*")):
            each.unlink()
        (out / "step-000002").rmdir()
        pack(out, path)


def load_trainer(path: Path, record: Record) -> None:
    """Resume for the second step."""
    from safetensors.torch import load_file

    from quaver.train import run_training

    with tempfile.TemporaryDirectory() as folder:
        out = unpack(path, folder)
        for file in sorted((out / "step-000001").glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                record.exact(**{f"{file.stem} {name}": tensor})
        run_training(trainer_config(str(out)), resume=True)
        for file in sorted((out / "step-000002").glob("*.safetensors")):
            saved = load_file(file)
            record.keys(saved, f"keys of {file.stem}")
            for name, tensor in saved.items():
                if name.endswith(("history", "factor")):
                    record.exact(**{f"next {file.stem} {name}": tensor[..., 1]})


def write_jax(path: Path) -> None:
    np.savez(path, **{name: np.asarray(value) for name, value in jax_steps(fresh_jax(), range(STEPS)).items()})


def load_jax(path: Path, record: Record) -> None:
    with np.load(path) as file:
        saved = dict(file)
    record.exact(**saved)
    record.exact(**{f"next {name}": value for name, value in jax_steps(saved, range(STEPS, STEPS + 2)).items()})


def fresh_jax() -> dict[str, Any]:
    import quaver.jax as qj

    return {
        f"{name}.{key}": value for name, recipe in jax_recipes().items() for key, value in qj.state.init(recipe).items()
    }


def jax_recipes() -> dict[str, Any]:
    return {"delayed": DELAYED, "nvfp4": recipes.get("nvfp4")}


def jax_steps(state: Mapping[str, Any], numbers: range) -> dict[str, Any]:
    """States of one layer of each recipe after steps on fixed inputs, weights and gradients."""
    import jax
    import jax.numpy as jnp

    import quaver.jax as qj

    after: dict[str, Any] = {}
    for name, recipe in jax_recipes().items():
        own = {key.partition(".")[2]: jnp.asarray(value) for key, value in state.items() if key.startswith(f"{name}.")}
        w = jnp.asarray(values(48, 32, seed=3))
        for number in numbers:
            x = jnp.asarray(values(16, 48, seed=number))
            _, back = jax.vjp(partial(jax_layer, x, recipe), w, own)
            _, own = back(jnp.asarray(values(16, 32, seed=50 + number)))
        qj.state.check(own, recipe)
        after |= {f"{name}.{key}": value for key, value in own.items()}
    return after


def jax_layer(x: Any, recipe: Any, w: Any, state: Any) -> Any:
    import quaver.jax as qj

    return qj.linear(x, w, recipe=recipe, state=state)


def linen_step(variables: Any, number: int) -> Any:
    """The variables after a step that leaves the weights."""
    import flax
    import jax
    import jax.numpy as jnp

    import quaver.jax as qj

    state, params = flax.core.pop(variables, "params")
    with qj.autocast(DELAYED):
        _, back = jax.vjp(
            lambda params, state: linen_layer().apply(
                {"params": params, **state}, jnp.asarray(values(16, 48, seed=number))
            ),
            params,
            state,
        )
        _, state = back(jnp.asarray(values(16, 32, seed=50 + number)))
    return {"params": params, **state}


def linen_layer() -> Any:
    import quaver.jax.linen as ql

    return ql.DenseGeneral(features=32)


def linen_fresh() -> Any:
    import jax
    import jax.numpy as jnp

    import quaver.jax as qj

    with qj.autocast(DELAYED):
        variables = linen_layer().init(jax.random.key(0), jnp.zeros((16, 48)))
    variables["params"] = jax.tree.map(lambda p: jnp.asarray(values(*p.shape, seed=p.ndim)), variables["params"])
    return variables


def write_linen(path: Path) -> None:
    import flax

    variables = linen_fresh()
    for number in range(STEPS):
        variables = linen_step(variables, number)
    path.write_bytes(flax.serialization.to_bytes(variables))


def load_linen(path: Path, record: Record) -> None:
    import flax
    import jax

    variables = flax.serialization.from_bytes(linen_fresh(), path.read_bytes())
    for step in ("", "next"):
        for place, leaf in jax.tree_util.tree_leaves_with_path(variables):
            record.exact(**{f"{step} {jax.tree_util.keystr(place)}".strip(): leaf})
        variables = linen_step(variables, STEPS)


def nnx_model() -> Any:
    import jax.numpy as jnp
    from flax import nnx

    import quaver.jax.nnx as qn

    model = nnx.Sequential(nnx.Linear(48, 32, rngs=nnx.Rngs(0)))
    qn.convert(model, DELAYED)
    for number, (_, p) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        p.set_value(jnp.asarray(values(*p.get_value().shape, seed=number)))
    return model


def nnx_step(model: Any, number: int) -> None:
    import jax.numpy as jnp

    import quaver.jax.nnx as qn

    x, g = (jnp.asarray(values(16, width, seed=seed + number)) for width, seed in ((48, 0), (32, 50)))
    # The gradient of the output is g, which no sum precedes.
    qn.value_and_grad(lambda model: (model(x) * g).sum())(model)


def write_nnx(path: Path) -> None:
    import flax
    from flax import nnx

    model = nnx_model()
    for number in range(STEPS):
        nnx_step(model, number)
    path.write_bytes(flax.serialization.to_bytes(nnx.to_pure_dict(nnx.state(model))))


def load_nnx(path: Path, record: Record) -> None:
    import flax
    import jax
    from flax import nnx

    model = nnx_model()
    state = nnx.state(model)
    saved = flax.serialization.from_bytes(nnx.to_pure_dict(state), path.read_bytes())
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(model, state)
    for step in ("", "next"):
        for place, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model))):
            record.exact(**{f"{step} {jax.tree_util.keystr(place)}".strip(): leaf})
        nnx_step(model, STEPS)


def tensors(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested state dicts, by path."""
    if isinstance(state, Mapping):
        for key in state:
            yield from tensors(state[key], f"{prefix}/{key}")
    elif isinstance(state, Tensor):
        yield prefix.removeprefix("/"), state


def same(loaded: Any, saved: Any, record: Record) -> None:
    """Record the loaded tensors; they are those of the file."""
    ours, theirs = dict(tensors(loaded)), dict(tensors(saved))
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    for name, value in ours.items():
        a, b = array(value), array(theirs[name])
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f"{name} is not that of the file"
        record.exact(**{name: value})


def save(state: Any, path: Path) -> None:
    """`torch.save`, compressed."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9))


def pack(folder: Path, path: Path) -> None:
    with tarfile.open(path, "w:xz") as archive:
        archive.add(folder, "saved")


def unpack(path: Path, folder: str) -> Path:
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return Path(folder) / "saved"
