"""torchtitan over a recipe: a job's configuration converts its model, which trains as a loop's of one's own."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver.torch.linear.layer import Quantizable
from tests import two_ranks
from tests.close import assert_bitwise
from tests.two_ranks import RANKS

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

from torchtitan.components.loss import build_cross_entropy_loss  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims, parallel_dims  # noqa: E402
from torchtitan.protocols.model_converter import build_model_converters  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

TOKENS, STEPS = 16, 4

JOB = """
[job]
custom_config_module = "quaver.integrations.torchtitan"
[model]
name = "llama3"
flavor = "debugmodel"
converters = ["quaver"]
[training]
seq_len = 16
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "{checkpoints}"
selective_ac_option = "op"
[quaver]
recipe = "{recipe}"
skip = ["layers.1.*"]
"""


def configured(recipe: str, folder: Path, checkpoints: str = "none", **replaced: str) -> Any:
    """A job's configuration, as torchtitan reads it."""
    text = JOB.format(recipe=recipe, checkpoints=checkpoints)
    for old, new in replaced.items():
        text = text.replace(old, new)
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return ConfigManager().parse_args([f"--job.config_file={path}"])


def dimensions(world_size: int = 1, **degrees: int) -> Any:
    alone = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1)
    return ParallelDims(**alone | {"dp_shard": world_size} | degrees, world_size=world_size)


def llama(config: Any) -> tuple[Any, Any]:
    """A small Llama on meta, and torchtitan's specification of it."""
    spec = get_train_spec("llama3")
    args = spec.model_args["debugmodel"]
    args.dim, args.n_layers, args.n_heads, args.vocab_size = 64, 2, 4, 128
    args.update_from_config(config)
    with torch.device("meta"):
        return spec.model_cls(args), spec


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 128, (2, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def a_job_is_a_loop_of_ones_own(rank: int) -> None:
    """In torchtitan's order: made on meta, converted, sharded, given memory, initialized. Its own loop wants GPUs."""
    ways = ("delayed", "none"), ("delayed", "selective"), ("mxfp8", "full"), ("nvfp4", "selective")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_dims, "device_type", "cpu")
        for recipe, checkpoints in ways:
            config, parallel = configured(recipe, Path(folder), checkpoints), dimensions(RANKS)
            parallel.build_mesh()
            sharded, spec = llama(config)
            build_model_converters(config, parallel).convert(sharded)
            sharded = spec.parallelize_fn(sharded, parallel, config)
            for part in sharded.modules():
                if isinstance(part, FSDPModule):
                    # torchtitan divides in its loop; gloo takes no factor into a sum.
                    part.set_gradient_divide_factor(RANKS)
                    part.set_force_sum_reduction_for_comms(True)
            beside, _ = llama(config)
            for each in (sharded, beside):
                each.to_empty(device="cpu")
                with torch.no_grad():
                    each.init_weights()
            full = StateDictOptions(full_state_dict=True, ignore_frozen_params=False)
            state = get_model_state_dict(sharded, options=full)
            beside.load_state_dict({name: state[name] for name in beside.state_dict()})
            qt.convert(beside, recipe, skip=["layers.1.*"])
            trains(rank, config, [sharded, DistributedDataParallel(beside)], f"{recipe}, {checkpoints}")


def trains(rank: int, config: Any, nets: list[nn.Module], said: str) -> None:
    loss_of = build_cross_entropy_loss(config)
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in nets]
    for step in range(STEPS):
        x, y = data(rank, step)
        losses = [loss_of(net(x), y) for net in nets]
        assert_bitwise(losses[0].detach(), losses[1].detach(), f"{said}, step {step}")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_job_trains_as_a_loop_of_ones_own(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


def test_the_section_says_what_is_converted(tmp_path: Path) -> None:
    config = configured("mxfp8", tmp_path)
    model, _ = llama(config)
    build_model_converters(config, dimensions()).convert(model)
    converted = {name for name, part in model.named_modules() if isinstance(part, Quantizable)}
    assert len(converted) == 7 and all(name.startswith("layers.0.") for name in converted)
    config.quaver.head, config.quaver.skip = True, []
    build_model_converters(config, dimensions()).convert(model)
    assert isinstance(model.output, Quantizable) and isinstance(model.layers["1"].attention.wq, Quantizable)


@pytest.mark.parametrize(
    ("replaced", "degrees", "said"),
    [
        ({"mxfp8": "mxfp9"}, {}, "mxfp9"),
        ({"[quaver]": ""}, {}, "set job.custom_config_module"),
        ({'["quaver"]': '["quaver", "quantize.linear.float8"]'}, {}, "quantize.linear.float8"),
        ({}, {"tp": 2, "dp_shard": 1, "world_size": 2}, "tensor parallelism of degree 2"),
        ({}, {"ep": 2, "dp_shard": 2, "world_size": 2}, "expert parallelism of degree 2"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_changed(
    replaced: dict[str, str], degrees: dict[str, int], said: str, tmp_path: Path
) -> None:
    config = configured("mxfp8", tmp_path)
    if "[quaver]" in replaced:
        del config.quaver
    elif replaced:
        config = configured("mxfp8", tmp_path, **replaced)
    with pytest.raises(ValueError, match=said):
        build_model_converters(config, dimensions(**degrees))


if __name__ == "__main__":
    two_ranks.main([a_job_is_a_loop_of_ones_own])
