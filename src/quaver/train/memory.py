"""Parameter shapes and initial values of a decoder, memory estimates, and Hugging Face names, for all frameworks.

The memory estimate is a lower bound. A run that it rejects cannot fit; a run that it accepts may still run out of
memory, which is then reported in one sentence.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from quaver.recipes.spec import Recipe
from quaver.reference.optimizer_state import NOTHING, PRESETS, SMALL, Footprint, matrix_footprint, plain
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train.config import TrainConfig
from quaver.train.model_config import MODELS, ModelConfig

# ---- parameters ----
# Names, shapes, order and initial values of a model's parameters.
#
# Both frameworks train the same decoder from the same weights under the same names, so that they can load each other's
# checkpoints.

#: Number of rows of the embedding is a multiple of this.
VOCAB_MULTIPLE = 32
#: Per-head parameters of a Mamba mixer: bias of its steps, logarithm of its decay, and skip weight of its input.
HEAD_PARAMETERS = ("dt_bias", "A_log", "D")
#: Ranges of a mixer's initial steps, uniform on a logarithmic scale, and decays (arXiv:2405.21060).
STEPS, DECAYS = (1e-3, 1e-1), (1.0, 16.0)
#: Matrices that write to the residual stream.
RESIDUAL_WRITERS = (".o_proj.weight", ".down_proj.weight", ".out_proj.weight")


def padded(vocab: int) -> int:
    """Return the number of embedding rows for a vocabulary."""
    return math.ceil(vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def flat_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns; the matrices of experts are stacked along rows."""
    *rows, columns = shape
    return math.prod(rows), columns


def matrices(config: ModelConfig, layer: int = 0) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the quantizable matrices of a layer by block: shapes [out, in] by name, in order of computation.

    The matrices of experts are [experts, out, in].
    """
    dim, parts = config.dim, dict[str, dict[str, tuple[int, ...]]]()
    kind = config.kind(layer)
    if kind.startswith("state"):
        assert config.state is not None
        inner, channels = config.state.inner, config.state.channels
        parts["mixer"] = {"in_proj": (inner + channels + config.state.heads, dim), "out_proj": (dim, inner)}
    else:
        parts["attention"] = _latent(config) if config.latent is not None else _attention(config)
    if kind == "experts":
        assert config.experts is not None
        number, hidden, shared = config.experts.number, config.experts.hidden, config.experts.shared
        first = "gate_up_proj" if config.gated else "up_proj"
        parts["mlp.experts"] = {
            first: (number, (1 + config.gated) * hidden, dim),
            "down_proj": (number, dim, hidden),
        }
        if shared:
            parts["mlp.shared"] = _mlp(config, shared)
    elif kind != "state":
        parts["mlp"] = _mlp(config, config.hidden)
    return parts


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    q_dim, kv_dim = config.heads * config.head_dim, config.groups * config.head_dim
    kv = dict.fromkeys(("k_proj", "v_proj"), (kv_dim, config.dim))
    return {"q_proj": (q_dim, config.dim), **kv, "o_proj": (config.dim, q_dim)}


def _latent(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    sizes, heads, dim = config.latent, config.heads, config.dim
    assert sizes is not None
    return {
        "q_down_proj": (sizes.q_rank, dim),
        "q_up_proj": (heads * (sizes.plain_dim + sizes.rope_dim), sizes.q_rank),
        "kv_down_proj": (sizes.kv_rank + sizes.rope_dim, dim),
        "kv_up_proj": (heads * (sizes.plain_dim + sizes.value_dim), sizes.kv_rank),
        "o_proj": (dim, heads * sizes.value_dim),
    }


def _mlp(config: ModelConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    wide = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
    return {**dict.fromkeys(wide, (hidden, config.dim)), "down_proj": (config.dim, hidden)}


def projections(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the quantizable matrices between embedding and head: shapes [out, in] by name, in order of computation.

    The matrices of experts are [experts, out, in].
    """
    return {
        f"layers.{layer}.{part}.{name}": shape
        for layer in range(config.layers)
        for part, own in matrices(config, layer).items()
        for name, shape in own.items()
    }


def parameters(config: ModelConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return every parameter's shape by name, in PyTorch's order."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (padded(vocab), config.dim)}
    for layer in range(config.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(config, layer).items()}
    shapes |= _norm(config, "norm")
    if not config.tied:
        shapes["head.weight"] = (padded(vocab), config.dim)
    return shapes


def _layer(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    shapes = _norm(config, "norm") if config.parallel is True else {}
    for part, own in matrices(config, layer).items():
        if part == "mlp.experts":
            assert config.experts is not None
            shapes |= _norm(config, "mlp.norm") | {"mlp.router.weight": (config.experts.number, config.dim)}
        elif part == "mixer":
            shapes |= _mixer(config)
        elif part != "mlp.shared" and config.parallel is not True:
            shapes |= _norm(config, f"{part}.norm")
        for name, shape in own.items():
            shapes[f"{part}.{name}.weight"] = shape
            if config.bias:
                shapes[f"{part}.{name}.bias"] = shape[:1]
            shapes |= _after(config, part, name)
    if config.norm_position == "sandwich":
        shapes |= _norm(config, "attention_post_norm") | _norm(config, "mlp_post_norm")
    return shapes


def _mixer(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a mixer's parameters before its first matrix."""
    assert config.state is not None
    own = {f"mixer.{name}": (config.state.heads,) for name in HEAD_PARAMETERS}
    return own | _norm(config, "mixer.norm")


def _after(config: ModelConfig, part: str, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of norms and a convolution that follow a matrix."""
    if name == "v_proj" and config.qk_norm:
        return {f"{part}.{which}.weight": (config.head_dim,) for which in ("q_norm", "k_norm")}
    if config.latent is not None and name in ("q_down_proj", "kv_down_proj"):
        which = name.partition("_")[0]
        return {f"{part}.{which}_norm.weight": (getattr(config.latent, f"{which}_rank"),)}
    if config.state is not None and name == "in_proj":
        channels = config.state.channels
        conv = {f"{part}.conv1d.weight": (channels, 1, config.state.taps), f"{part}.conv1d.bias": (channels,)}
        return conv | {f"{part}.gated_norm.weight": (config.state.inner,)}
    return {}


def _norm(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    names = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{part}": (config.dim,) for part in names}


def initial_values(config: ModelConfig, vocab: int, seed: int, nudge: float = 0.0) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every parameter's initial value in float32, a function of the arguments only.

    Args:
        nudge: standard deviation of a random factor around 1 of each value.
    """
    noise = np.random.default_rng((seed, 1))
    for name, value in _drawn_values(config, vocab, seed):
        factor = 1 + np.float32(nudge) * noise.standard_normal(value.shape, np.float32) if nudge else np.float32(1)
        yield name, value * factor


def _drawn_values(config: ModelConfig, vocab: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every parameter's initial value, a function of sizes and seed only.

    Norms are the identity and biases 0. Matrices are normal with variance 1 / dim; those that write to the residual
    stream are smaller by sqrt(number of residual blocks). An untied embedding has variance 1, so that the residual
    stream starts at the scale of the norms. Contributions of quantized layers, and their errors, are then small
    relative to it. A mixer's steps and decays are drawn as in Mamba-2.
    """
    random = np.random.default_rng(seed)
    for name, shape in parameters(config, vocab).items():
        last = name.rpartition(".")[2]
        if last in ("dt_bias", "A_log"):
            yield name, _initial_head_values(last, random.random(shape, np.float32))
        elif len(shape) > 1:
            deviates = np.float32(initial_std(name, shape, config))
            yield name, random.standard_normal(shape, np.float32) * deviates
        else:
            zero = config.zero_centered or name.endswith(".bias")
            yield name, np.full(shape, 0.0 if zero else 1.0, np.float32)


def _initial_head_values(name: str, drawn: np.ndarray) -> np.ndarray:
    """Return initial values of a mixer's heads from random numbers in [0, 1)."""
    if name == "A_log":
        low, high = DECAYS
        return np.log(low + (high - low) * drawn).astype(np.float32)
    low, high = map(math.log, STEPS)
    steps = np.exp(low + (high - low) * drawn)
    # Inverse of softplus, which is applied to get the step.
    return (steps + np.log(-np.expm1(-steps))).astype(np.float32)


def initial_std(name: str, shape: tuple[int, ...], config: ModelConfig) -> float:
    """Return the standard deviation of a matrix's initial values."""
    if name == "embedding.weight" and not config.tied:
        return 1.0
    if name.endswith(("conv1d.weight", "q_up_proj.weight", "kv_up_proj.weight")):
        # 1 / sqrt(fan-in).
        return float(shape[-1] ** -0.5)
    std = config.dim**-0.5
    if name.endswith(RESIDUAL_WRITERS):
        std /= math.sqrt(config.parts)
    return float(std)


# ---- memory ----

#: Linux files with a container's memory limit, for cgroup versions 2 and 1.
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
#: Phrases in framework errors that mean out of memory.
WORDS_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "RESOURCE_EXHAUSTED",
    "Cannot allocate memory",
)


def available() -> int:
    """Return the memory limit of this process in bytes: of the machine, its container and its own limit."""
    limits = [1 << 62]
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in CGROUPS:
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    with suppress(ImportError):  # not available on Windows
        import resource

        limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS)[:1] if limit != resource.RLIM_INFINITY]
    return min(limits)


def training_footprint(
    sizes: ModelConfig, vocab: int, optimizer: str, recipe: Recipe, dtype: str, codes: bool = True
) -> Footprint:
    """Return the memory of a model's weights, gradients and optimizer states in training; see `footprints`."""
    return sum((own for *_, own in footprints(sizes, vocab, optimizer, recipe, dtype, codes)), NOTHING)


def footprints(
    sizes: ModelConfig, vocab: int, optimizer: str, recipe: Recipe, dtype: str, codes: bool = True
) -> Iterator[tuple[str, tuple[int, ...], str, Footprint]]:
    """Yield the name, shape, preset and memory in training of each parameter.

    Args:
        sizes: architecture.
        vocab: size of the vocabulary.
        optimizer: name of the optimizer.
        recipe: recipe of the run.
        dtype: dtype of the run.
        codes: as in `OptimizerChoice.weights`.
    """
    chosen = optimizer_name.find_optimizer(optimizer)
    layers, stored_as = projections(sizes), chosen.weights(recipe, dtype, codes)
    for name, shape in parameters(sizes, vocab).items():
        number = math.prod(shape)
        in_layer = name.removesuffix(".weight") in layers
        moments = chosen.moments[0 if in_layer else 1]
        as_codes = in_layer and stored_as == "codes"
        # Routers and convolutions are not Linear layers.
        stays_float32 = name == "embedding.weight" or name.endswith(("router.weight", "conv1d.weight"))
        small = len(shape) < 2 or (number < SMALL and not as_codes) or name == "embedding.weight"
        if chosen.preset is None or small:
            # A small matrix of a layer or head is still stored in bfloat16.
            narrow = len(shape) > 1 and not stays_float32 and chosen.others(dtype) == "bfloat16"
            own = matrix_footprint(PRESETS["float32"], flat_shape(shape), "bfloat16", None, moments) if narrow else None
            yield name, shape, "float32", own or plain(number, moments)
        else:
            how = stored_as if in_layer else "float32" if stays_float32 else chosen.others(dtype)
            *stack, rows, columns = shape
            one = (rows, columns) if as_codes else flat_shape(shape)
            each = matrix_footprint(chosen.preset, one, how, recipe.fprop.b, moments)
            yield name, shape, chosen.preset.name, sum([each] * (math.prod(stack) if as_codes else 1), NOTHING)


def check_memory(config: TrainConfig, vocab: int, ranks: int = 1) -> None:
    """Raise a ValueError if training on a CPU needs more memory than there is.

    A micro-batch needs at least its ids, its logits and their gradient, and the input of every layer. Several ranks
    share this and the weights.
    """
    sizes = MODELS[config.model]
    first, *later = recipe_name.parse_phases(config.recipe)
    codes = optimizer_name.allows_codes(1 + len(later), config.tp)
    weights = training_footprint(sizes, vocab, config.optimizer, first.recipe, config.dtype, codes).total
    tokens = config.batch * config.sequence
    at_once = min(tokens, config.loss_chunk or tokens)
    batch = 8 * config.accumulate * tokens + 8 * at_once * padded(vocab) + 2 * tokens * sizes.dim * sizes.layers
    if (weights + batch) // ranks > available():
        raise ValueError(
            f"this run needs at least {size_text(weights)} for the weights of {config.model} with their gradients and "
            f"moments and {size_text(batch)} for {config.accumulate} x {config.batch} sequences of {config.sequence}, "
            f"and there are {size_text(available())} of memory; take a smaller --model, --batch, --accumulate "
            "or --sequence"
        )


def size_text(bytes: int) -> str:
    return f"{bytes / 1e9:.3g} GB" if bytes < 10**30 else "beyond all measure"


@contextmanager
def out_of_memory_hint(what: str) -> Iterator[None]:
    """Turn out-of-memory errors into a ValueError that suggests what to reduce."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in WORDS_MEMORY):
            raise ValueError(f"there is not enough memory; take a smaller {what}") from error
        raise


# ---- Hugging Face ----
# Names and configuration of a trained decoder as one of Hugging Face's models, which inference servers support.
#
# Llama, Mistral and Qwen3 have the same blocks. Other families keep the trainer's names.

#: Patterns of the trainer's names, and their replacements.
NAMES = (
    (r"^embedding\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^(layers\.\d+)\.attention\.norm\.", r"model.\1.input_layernorm."),
    (r"^(layers\.\d+)\.mlp\.norm\.", r"model.\1.post_attention_layernorm."),
    (r"^(layers\.\d+)\.attention\.", r"model.\1.self_attn."),
    (r"^(layers\.\d+)\.mlp\.", r"model.\1.mlp."),
)
#: Fields that must have these values for the three families; all else is sizes.
PLAIN = {
    "normalization": "RMSNorm",
    "zero_centered": False,
    "norm_position": "pre",
    "parallel": False,
    "activation": "swiglu",
    "bias": False,
    "soft_cap": None,
    "scale": None,
    "fraction": 1.0,
    "scaled_embedding": False,
    "logit_cap": None,
}


def hf_family(config: ModelConfig) -> str:
    """Return the model's type in Hugging Face's names, or "" if it is none of the three."""
    if (
        config.unusual
        or any(getattr(config, name) != value for name, value in PLAIN.items())
        or len(config.windows) > 1
    ):
        return ""
    if config.qk_norm is None:
        return "llama" if config.windows == (-1,) else "mistral"
    return "qwen3" if config.qk_norm == "RMSNorm" and config.windows == (-1,) else ""


def hf_name(name: str, config: ModelConfig) -> str:
    """Return a parameter's Hugging Face name, or the trainer's own if the family has none."""
    if not hf_family(config):
        return name
    for pattern, replacement in NAMES:
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    return name


def hf_config(config: ModelConfig, vocab: int, positions: int) -> dict[str, Any]:
    """Return the contents of config.json for a model.

    Args:
        config: architecture.
        vocab: size of the vocabulary.
        positions: maximum sequence length.
    """
    kind = hf_family(config)
    if not kind:
        return {"model_type": "quaver", "vocab_size": padded(vocab)}
    rope = {"rope_type": "default", "rope_theta": config.theta} | dict(config.scaling)
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    shared = {
        "architectures": [names[kind]],
        "model_type": kind,
        "vocab_size": padded(vocab),
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "max_position_embeddings": positions,
        "rope_theta": config.theta,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        # Token 0 separates texts.
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    # There, a window includes the query's own token.
    return shared | ({"sliding_window": config.windows[0] + 1} if kind == "mistral" else {})
