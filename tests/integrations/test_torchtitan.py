"""torchtitan with a recipe: its own llama3_debugmodel, converted, built on meta, sharded and trained on CPUs.

Its attention is torchtitan's `ScaledDotProductAttention` here: the ones in its registry have no backward on a CPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.torch.backends.gpu import device
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.fsdp.test_gather import MOST, MOST_OF_MX_AND_ROWS
from tests.torch.parallel.fsdp.training import Traffic, counted
from tests.two_ranks import RANKS

for name in ("torchtitan", "spmd_types", "torch_checkpointing", "torchdata", "datasets"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

from torchtitan.components.lora import LoRAConverter  # noqa: E402
from torchtitan.distributed import ParallelDims, parallel_dims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from quaver.integrations.torchtitan import QuaverConverter, QuaverLinear  # noqa: E402

TOKENS, STEPS = 32, 3


def job(**parallelism: Any) -> Any:
    """A job's configuration."""
    config = llama3_debugmodel()
    config.training.seq_len, config.training.disable_cuda_graphs = TOKENS, True
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.fsdp_reshard_after_forward = "always"
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def spec_of(*converters: Any, layers: int = 2) -> Any:
    """torchtitan's registry entry of the debugmodel with fewer layers and CPU attention."""
    spec = model_registry("debugmodel", converters=list(converters))
    for _, _, parent, attribute in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    spec.model.layers = spec.model.layers[:layers]
    return spec


def quantized(recipe: str, **options: Any) -> Any:
    return QuaverConverter.Config(recipe_name=recipe, **{"emulate": True, "filter_fqns": ["lm_head"]} | options)


def on_meta(spec: Any, config: Any) -> Any:
    """Build a model as torchtitan's trainer does."""
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    return model


def filled(model: Any) -> Any:
    """Allocate and initialize a model as torchtitan's trainer does."""
    model.to_empty(device="cpu")
    for each in model.parameters():
        # The values of uninitialized memory.
        (each.to_local() if hasattr(each, "to_local") else each).data.fill_(float("nan"))
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def data(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 2048, (2, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def trained(net: nn.Module, rank: int = 0, steps: int = STEPS) -> list[Tensor]:
    """Train with AdamW and return the losses."""
    optimizer, losses = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2), []
    for step in range(steps):
        x, y = data(step, rank)
        loss = cross_entropy(net(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert all(loss.isfinite() for loss in losses)
    return losses


def assert_alike(a: nn.Module, b: nn.Module, message: str) -> None:
    """Check that two models have equal weights, histories and counts."""
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys(), message
    for name, value in first.items():
        assert_bitwise(value, second[name], f"{message}: {name}")


def names(model: nn.Module) -> set[str]:
    return {name for name, part in model.named_modules() if isinstance(part, QuaverLinear)}


@pytest.mark.parametrize(
    ("recipe", "head"),
    [*((name, False) for name in RECIPES if name != "bf16"), ("delayed", True), ("nvfp4", True)],
)
def test_a_model_trains_like_one_passed_to_convert(recipe: str, head: bool) -> None:
    converter = quantized(recipe, filter_fqns=[] if head else ["lm_head"], seed=5)
    model, reference = filled(on_meta(spec_of(converter), job())), filled(on_meta(spec_of(), job()))
    qt.convert(reference, recipe, head=head, seed=5)
    assert len(names(model)) == 10 + head
    expected = trained(reference)
    for step, (loss, other) in enumerate(zip(trained(model), expected, strict=True)):
        assert_bitwise(loss, other, f"{recipe}, step {step}")
    assert_alike(model, reference, recipe)


def test_torchaos_name_of_a_recipe_is_ours() -> None:
    model = on_meta(spec_of(quantized("rowwise_with_gw_hp")), job())
    assert {part.recipe.name for part in model.modules() if isinstance(part, QuaverLinear)} == {"rowwise_bf16_wgrad"}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"filter_fqns": []}, {"layers.1.attention.wo"}),
        ({"filter_fqns": ["lm_head", "layers.0."]}, {"lm_head", "layers.1.attention.wo"}),
        ({"filter_fqns": ["attention", "w2"]}, set()),
        # Thresholds of tensorwise: K up to 4096 and N up to 1024.
        ({"filter_fqns": ["auto_filter_small_kn"]}, set()),
        # Of rowwise: N up to 2048.
        ({"recipe_name": "rowwise", "filter_fqns": ["auto_filter_small_kn"]}, None),
    ],
)
def test_the_filter_leaves_layers_alone(options: dict[str, Any], left: set[str] | None) -> None:
    config = spec_of().model
    config.layers[1].attention.wo.out_features += 8
    linears = {name for name, *_ in config.traverse(Linear.Config)}
    converter = QuaverConverter.Config(**{"recipe_name": "tensorwise", "emulate": True} | options).build()
    if left is None:
        with pytest.raises(ValueError, match="0 of 11 linear layers to rowwise"):
            converter.convert(config)
        return
    config = converter.convert(config)
    converted = {name for name, *_ in config.traverse(QuaverLinear.Config)}
    fragments = options["filter_fqns"]
    if "auto_filter_small_kn" in fragments:
        assert converted == {"lm_head"}
    else:
        by_name = {name for name in linears if any(part in name for part in fragments)}
        assert converted == linears - by_name - {"layers.1.attention.wo"}
    assert left <= linears - converted


def test_two_converters_share_a_model() -> None:
    first = quantized("nvfp4", filter_fqns=["lm_head", "layers.0."])
    model = filled(on_meta(spec_of(first, quantized("mxfp8", filter_fqns=["lm_head"])), job()))
    reference = filled(on_meta(spec_of(), job()))
    qt.convert(reference, {"layers.1.*": "nvfp4", "*": "mxfp8"})
    assert_bitwise(trained(model)[-1], trained(reference)[-1], "last loss")
    with pytest.raises(ValueError, match="differ in options of the whole model"):
        spec_of(first, quantized("mxfp8", filter_fqns=["lm_head"], seed=1))


def test_torchtitans_lora_trains_beside_quantized_weights() -> None:
    model = filled(on_meta(spec_of(quantized("mxfp8"), LoRAConverter.Config(rank=16, alpha=32.0)), job()))
    layer, x = model.layers["0"].feed_forward.w1, torch.randn(4, 256)
    assert isinstance(layer, QuaverLinear) and not layer.weight.requires_grad
    expected = qt.Linear(256, 768, bias=False, recipe="mxfp8")
    expected.load_state_dict({"weight": layer.weight})
    assert_bitwise(layer(x), expected(x), "with adapters that are zero")
    before = layer.weight.clone()
    trained(model)
    assert_bitwise(layer.weight, before, "a frozen weight")
    assert layer.lora_b.weight.abs().max() > 0


def changed(config: Any, **values: Any) -> Any:
    for path, value in values.items():
        buffer, name = path.split("__")
        setattr(getattr(config, buffer), name, value)
    return config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe_name": "mxfp9"}, "mxfp8"),
        ({"filter_fqns": ["output"]}, "no linear layer has 'output' of filter_fqns in its name"),
        ({"filter_fqns": ["auto_filter_small_kn"], "recipe_name": "mxfp8"}, "no thresholds for 'mxfp8'"),
        ({"filter_fqns": ["layers", "lm_head"]}, "0 of 31 linear layers"),
        ({"emulate": False}, "this machine would emulate GEMMs of tensorwise"),
        ({"precompute_float8_dynamic_scale_for_fsdp": True}, "set enable_fsdp_float8_all_gather"),
        *(
            (
                {
                    "recipe_name": recipe,
                    "enable_fsdp_float8_all_gather": True,
                    "precompute_float8_dynamic_scale_for_fsdp": True,
                },
                f"and {recipe} does not have that",
            )
            for recipe in ("rowwise", "delayed", "mxfp8")
        ),
        ({"enable_fsdp_float8_all_gather": True, "model_compile_enabled": True}, "leave out enable_fsdp"),
    ],
)
def test_options_that_contradict_are_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        model_registry("debugmodel", converters=[QuaverConverter.Config(**{"emulate": True} | options)])


@pytest.mark.parametrize(
    ("arch", "emulated"),
    [
        (80, {"tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"}),
        (90, {"mxfp8", "nvfp4"}),
        (100, set()),
    ],
)
def test_gpus_without_a_recipes_gemms_are_refused_unless_they_may_emulate(
    arch: int, emulated: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "recorded", [arch])
    for recipe in ("bf16", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"):
        if recipe in emulated:
            with pytest.raises(ValueError, match=rf"this machine would emulate GEMMs of {recipe}.*emulate=True"):
                quantized(recipe, emulate=False).build()
        else:
            quantized(recipe, emulate=False).build()
        quantized(recipe).build()


@pytest.mark.parametrize(
    ("changes", "gathers", "message"),
    [
        ({"parallelism__tensor_parallel_degree": 2}, False, "tensor_parallel_degree is 2"),
        ({"parallelism__pipeline_parallel_degree": 2}, False, "pipeline_parallel_degree is 2"),
        ({"parallelism__spmd_backend": "full_dtensor"}, False, "spmd_backend is full_dtensor"),
        ({"training__disable_cuda_graphs": False}, False, "set training.disable_cuda_graphs"),
        ({"compile__enable": True}, True, "leave out enable_fsdp_float8_all_gather"),
    ],
)
def test_incompatible_job_options_are_refused_before_a_model_is_made(
    changes: dict[str, Any], gathers: bool, message: str
) -> None:
    spec = spec_of(quantized("mxfp8", enable_fsdp_float8_all_gather=gathers))
    with pytest.raises(ValueError, match=message):
        spec.model.update_from_config(config=changed(job(), **changes))
    spec.model.update_from_config(config=job())


def test_a_recipe_without_codes_of_weights_cannot_gather_them() -> None:
    with pytest.raises(ValueError, match="no weight to gather as codes"):
        on_meta(spec_of(quantized("bf16", enable_fsdp_float8_all_gather=True)), job())


# Sharded, by torchtitan's own parallelization.


def sharded(spec: Any, config: Any, ranks: int) -> Any:
    """On meta, sharded, given memory, initialized."""
    set_spmd_backend(config.parallelism.spmd_backend)
    dimensions = ParallelDims.from_config(config.parallelism, ranks)
    dimensions.build_mesh()
    model = spec.parallelize_fn(
        on_meta(spec, config),
        parallel_dims=dimensions,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # torchtitan divides in its loop; gloo takes no factor into a sum.
            part.set_gradient_divide_factor(ranks)
            part.set_force_sum_reduction_for_comms(True)
    return filled(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The state of a sharded model; torch's own function for this does not know names that torchtitan's hooks make."""
    state = model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def weights_travel_as_codes(rank: int) -> None:
    """Losses and weights are those of a gather in high precision, and so is what else the models hold."""
    ways = ("tensorwise", FullAC.Config()), ("delayed", SelectiveAC.Config()), ("mxfp8", None), ("nvfp4", None)
    for recipe, checkpoints in ways:
        config = job()
        config.activation_checkpoint = checkpoints
        runs: list[tuple[list[Tensor], Traffic, nn.Module]] = []
        for gathers in (False, True):
            precompute = gathers and recipe == "tensorwise"
            options = {
                "enable_fsdp_float8_all_gather": gathers,
                "precompute_float8_dynamic_scale_for_fsdp": precompute,
            }
            model = sharded(spec_of(quantized(recipe, **options)), config, RANKS)
            with counted() as traffic:
                runs.append((trained(model, rank), traffic, model))
        for step, (loss, other) in enumerate(zip(runs[0][0], runs[1][0], strict=True)):
            assert_bitwise(loss, other, f"{recipe}, step {step}")
        plain, codes = runs[0][1].gathered, runs[1][1].gathered
        quantized_elements = sum(part.weight.numel() for part in model.modules() if isinstance(part, QuaverLinear))
        all_of_it = sum(p.numel() for p in model.parameters())
        share = 1 - (1 - codes / plain) * all_of_it / quantized_elements
        assert share <= MOST.get(recipe, MOST_OF_MX_AND_ROWS), f"{recipe}: {share:.4f} of bf16's bytes"
        assert runs[1][1].agreements <= STEPS + 1
        states = [whole(net) for _, _, net in runs]
        for name, value in states[0].items():
            assert_bitwise(value, states[1][name], f"{recipe}: {name}")


def a_job_is_a_loop_of_ones_own(rank: int) -> None:
    """The same model, converted by `convert`, under DistributedDataParallel."""
    for recipe in ("delayed", "mxfp8"):
        config = job()
        config.training.mixed_precision_param = "float32"
        model = sharded(spec_of(quantized(recipe, enable_fsdp_float8_all_gather=True)), config, RANKS)
        reference = filled(on_meta(spec_of(), config))
        state = whole(model)
        reference.load_state_dict({name: state[name] for name in reference.state_dict()})
        qt.convert(reference, recipe)
        pairs = zip(trained(model, rank), trained(DistributedDataParallel(reference), rank), strict=True)
        for step, (loss, other) in enumerate(pairs):
            assert_bitwise(loss, other, f"{recipe}, step {step}")


@pytest.mark.ranks
def test_sharded_by_torchtitan(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    dist.init_process_group("gloo", (tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield
    set_spmd_backend("partial_dtensor")
    dist.destroy_process_group()


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_torchtitan_backend_handles_recipe_state(recipe: str, gathers: bool, alone: None) -> None:
    """spmd_types, on one rank: with several it needs an option of fully_shard that torch 2.13 does not have."""
    config = job(spmd_backend="spmd_types")
    config.training.mixed_precision_param = "float32"
    model = sharded(spec_of(quantized(recipe, enable_fsdp_float8_all_gather=gathers)), config, 1)
    reference = filled(on_meta(spec_of(), job()))
    state = whole(model)
    reference.load_state_dict({name: state[name] for name in reference.state_dict()})
    qt.convert(reference, recipe)
    for step, (loss, other) in enumerate(zip(trained(model), trained(reference), strict=True)):
        assert_bitwise(loss, other, f"{recipe}, step {step}")


if __name__ == "__main__":
    parallel_dims.device_type = "cpu"
    two_ranks.main([weights_travel_as_codes, a_job_is_a_loop_of_ones_own])
