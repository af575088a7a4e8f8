"""Call a single transformers layer as its model would, and record the modules that run."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.huggingface.roles import Choices, distance, is_norm, linear_of
from quaver.torch.conversion.probe import first_of

# ---- arguments of the layer's forward: rope, mask and positions ----


@dataclass(frozen=True)
class LayerArguments:
    """Context of a layer in its model, read from the layer itself."""

    #: Configuration of the model.
    config: Any
    #: Index of the layer in the model.
    index: int
    causal: bool
    #: Entry of transformers' layer_types, such as "sliding_attention".
    kind: str

    @property
    def window(self) -> tuple[int, int] | None:
        """Return the sliding window (left, right) as `TransformerLayer` takes it, or None."""
        return (self.config.sliding_window - 1, -1) if self.kind == "sliding_attention" else None

    @property
    def chunk(self) -> int | None:
        """Return the chunk size of chunked attention as `TransformerLayer` takes it, or None."""
        return self.config.attention_chunk_size if self.kind == "chunked_attention" else None


def surroundings(layer: nn.Module, config: Any, causal: bool | None) -> LayerArguments:
    """Return the layer's configuration, index, causality and kind of attention.

    Args:
        layer: the transformers layer.
        config: the model's configuration; None reads it from the layer.
        causal: True if the layer is causal; None reads it from the layer.
    Raises:
        ValueError: the configuration or causality is unknown, or the kind of attention is unsupported.
    """
    config = attribute(layer, "config") if config is None else config
    if config is None or not hasattr(config, "num_attention_heads"):
        raise ValueError(
            f"{type(layer).__name__} has no transformers configuration; give a decoder or encoder layer of a "
            "transformers model, such as model.model.layers[0], and config=model.config"
        )
    index = attribute(layer, "layer_idx") or 0
    causal = attribute(layer, "is_causal") if causal is None else causal
    if causal is None:
        raise ValueError(
            f"{type(layer).__name__} has no attribute that says if it is causal: give mask_type='causal' or 'none'"
        )
    types = getattr(config, "layer_types", None)
    if types:
        kind = types[index]
    elif getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    else:
        kind = "full_attention"
    if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
        raise ValueError(f"layer {index} has attention of kind {kind!r}, which a TransformerLayer does not support")
    if kind != "full_attention" and not causal:
        raise ValueError(
            f"layer {index} has attention of kind {kind!r} and is not causal; create a TransformerLayer with a "
            "window yourself"
        )
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{type(layer).__name__} receives ALiBi's bias with its own scale, which a TransformerLayer does not "
            "support"
        )
    clip = attribute(layer, "clip_qkv", getattr(config, "clip_qkv", None))
    if clip is not None:
        # Random test input may never reach the clamp, but real input does.
        raise ValueError(
            f"{type(layer).__name__} clamps queries, keys and values to ±{clip:g} (clip_qkv), which a TransformerLayer "
            "does not"
        )
    return LayerArguments(config, index, bool(causal), kind)


def attribute(layer: nn.Module, name: str, default: Any = None) -> Any:
    """Return the attribute of the first submodule that has it and where it is not None, else the default."""
    return next(
        (getattr(module, name) for module in layer.modules() if getattr(module, name, None) is not None), default
    )


def arguments(layer: nn.Module, layer_context: LayerArguments, x: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of the layer's forward besides x [B, S, dim].

    Raises:
        ValueError: the forward requires an unknown argument.
    """
    passed: dict[str, Any] = {}
    positions = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)[None]
    for name, parameter in list(inspect.signature(layer.forward).parameters.items())[1:]:
        if name == "position_embeddings":
            passed[name] = _rotated(layer, layer_context, x, positions)
        elif name == "position_ids":
            passed[name] = positions.expand(x.shape[0], -1)
        elif name == "attention_mask":
            passed.setdefault(name, _mask(layer_context, x))
        elif name == "alibi":
            passed[name] = None
        elif name == "position_bias" and asks_for_alibi(layer):
            build: Any = _function_in_module_of(layer, "build_mpt_alibi_tensor")
            passed[name] = build(layer_context.config.num_attention_heads, x.shape[1], device=x.device)
            passed["attention_mask"] = _mask(layer_context, x, boolean=True)
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            raise ValueError(f"{type(layer).__name__}.forward requires the argument {name!r}, which is unknown")
    return passed


def asks_for_alibi(layer: nn.Module) -> bool:
    """Return True if the layer's forward requires a position bias, as MPT's, which is ALiBi's."""
    parameter = inspect.signature(layer.forward).parameters.get("position_bias")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _rotated(layer: nn.Module, layer_context: LayerArguments, x: Tensor, positions: Tensor) -> Any:
    """Return cosines and sines of rope from the model's own rotary class, or None if it has no rope."""
    config = layer_context.config
    if getattr(config, "rope_parameters", None) is None:
        return None
    for rotary in _rotaries(layer):
        more = (
            {"layer_type": layer_context.kind} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
        )
        return rotary(config).to(x.device)(x, positions, **more)
    raise ValueError(f"the file of {type(layer).__name__} has no class that makes its rotary positions")


def _rotaries(layer: nn.Module) -> Iterator[Any]:
    members = vars(sys.modules[type(layer).__module__])
    classes = [c for name, c in members.items() if name.endswith("RotaryEmbedding") and isinstance(c, type)]
    # A file with several models has one class per model; prefer the text model's.
    yield from sorted(classes, key=lambda c: ("Vision" in c.__name__, "Text" not in c.__name__))


def _function_in_module_of(layer: nn.Module, name: str) -> Any:
    function = getattr(sys.modules[type(layer).__module__], name, None)
    if function is None:
        raise ValueError(
            f"{type(layer).__name__}.forward requires a position bias, but its file has no {name}; create a "
            "TransformerLayer with alibi=True yourself"
        )
    return function


def _mask(layer_context: LayerArguments, x: Tensor, boolean: bool = False) -> Tensor | None:
    """Return the attention mask from the transformers function that the model calls."""
    from transformers import masking_utils

    if not layer_context.causal:
        return None
    makers = {"sliding_attention": "sliding_window_causal", "chunked_attention": "chunked_causal"}
    make = getattr(masking_utils, f"create_{makers.get(layer_context.kind, 'causal')}_mask")
    mask = make(config=layer_context.config, inputs_embeds=x, attention_mask=None, past_key_values=None)
    if boolean and (mask is None or mask.dtype is torch.bool):
        every = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return every[None, None]
    return mask.bool() if boolean else mask


# ---- recording one call: order, inputs and outputs of norms, matrices and dropouts ----

#: Roles of the first modules of attention, and of an MLP.
ATTENTION, MLP = ("qkv", "q", "k", "v", "q_down", "kv_down"), ("gate_up", "gate", "up", "mixture")


#: Batch size and number of tokens of the input used for comparison.
SIZES = 2, 11


def random_input(module: nn.Module, inputs: bool) -> Tensor:
    """Return a random input [B, S, features] with as many features as a linear layer has inputs, or outputs."""
    weight = linear_of(module)[0]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(*SIZES, weight.shape[int(inputs)], generator=generator, dtype=torch.float32, device="cpu")
    return x.to(weight.device, weight.dtype)


@dataclass(frozen=True)
class ModuleCallEvent:
    """One recorded module call."""

    #: Role from `roles_of`, "norm" or "dropout".
    role: str
    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class ObservedCall:
    """A recorded call of a layer, with the calls of its modules in order."""

    input: Tensor
    output: Tensor
    events: tuple[ModuleCallEvent, ...]

    def input_of(self, roles: tuple[str, ...]) -> Tensor:
        """Return the input of the first module with one of these roles."""
        return next(event.input for event in self.events if event.role in roles)

    def output_of(self, role: str) -> Tensor:
        """Return the output of the module with this role."""
        return next(event.output for event in self.events if event.role == role)

    def head_norms(self) -> list[ModuleCallEvent]:
        """Return the norms between the input projections and the output projection: of queries, then of keys."""
        first, last = self._span(ATTENTION, "o")
        return [event for event in self.events[first:last] if event.role == "norm"]

    def stream_norms(self) -> list[ModuleCallEvent]:
        """Return all norms outside of the attention, in order."""
        first, last = self._span(ATTENTION, "o")
        return [e for i, e in enumerate(self.events) if e.role == "norm" and not first < i < last]

    def hidden_dropouts(self) -> list[ModuleCallEvent]:
        """Return the dropouts on the MLP's hidden features: those before its last matrix whose input is as wide as
        its own.
        """
        last = next((i for i, event in enumerate(self.events) if event.role == "down"), None)
        if last is None:
            return []
        first = next(i for i, event in enumerate(self.events) if event.role in MLP)
        width = self.events[last].input.shape[-1]
        return [e for e in self.events[first:last] if e.role == "dropout" and e.input.shape[-1] == width]

    def order(self) -> str:
        """Return the order of norms ("n"), attention ("a") and MLP ("m"), such as "nanm"."""
        first, last = self._span(ATTENTION, "o")
        marks = []
        for i, event in enumerate(self.events):
            if event.role == "norm" and not first < i < last:
                marks.append("n")
            elif i == first:
                marks.append("a")
            elif event.role in MLP and "m" not in marks:
                marks.append("m")
        return "".join(marks)

    def _span(self, begin: tuple[str, ...], end: str) -> tuple[int, int]:
        roles = [event.role for event in self.events]
        return next(i for i, role in enumerate(roles) if role in begin), roles.index(end)


def watched(layer: nn.Module, roles: Mapping[str, str], x: Tensor, arguments: Mapping[str, Any]) -> ObservedCall:
    """Call the layer in evaluation mode without gradients and record its modules.

    Args:
        layer: the transformers layer.
        roles: module names by role, from `roles_of`.
        x: input [B, S, dim].
        arguments: further keyword arguments of its forward.
    Raises:
        ValueError: a module with a role did not run.
    """
    names = {name: role for role, name in roles.items()}
    events: list[ModuleCallEvent] = []
    was_training = [(module, module.training) for module in layer.modules()]
    with ExitStack() as stack:
        for name, module in layer.named_modules():
            role = names.get(name) or _kind(module)
            if role is not None and not any(name.startswith(f"{other}.") for other in names):
                hook = _recorded(events, role, name)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        stack.callback(_restore, was_training)
        layer.eval()
        stack.enter_context(torch.no_grad())
        output = layer(x, **arguments)
    missing = [name for name, role in names.items() if all(event.role != role for event in events)]
    if missing:
        raise ValueError(
            f"a call of {type(layer).__name__} does not run {', '.join(missing)}, so another code path computes it"
        )
    return ObservedCall(x, first_of(output), tuple(events))


def same(
    candidates: Any,
    observed: ObservedCall,
    begin: tuple[str, ...],
    end: str,
    choices: Choices,
    part: str,
    off: Any = distance,
) -> tuple[dict[str, Any], Any]:
    """Return the first candidate that maps a part's recorded input to its recorded output, within the bound for
    `off`.
    """
    x, expected = observed.input_of(begin), observed.output_of(end)
    message = f"the layer's {part} has other outputs than Quaver's with any options"
    taken: tuple[dict[str, Any], Any]
    # Some mixtures return tokens [B * S, dim] without a sequence axis.
    expected = expected.reshape(*x.shape[:-1], -1)
    taken = choices.first(candidates, lambda c: off(c[1].eval()(x), expected), x.dtype, message)
    return taken


def _kind(module: nn.Module) -> str | None:
    """Return "dropout" or "norm" for modules without a role by name, else None."""
    if isinstance(module, nn.Dropout):
        return "dropout"
    return "norm" if is_norm(module) else None


def _recorded(events: list[ModuleCallEvent], role: str, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        passed = args[0] if args else next(iter(options.values()))
        # Clone, because Falcon's layers add to their MLP's output in place.
        events.append(ModuleCallEvent(role, name, module, passed.clone(), first_of(output).clone()))

    return hook


def _restore(was_training: list[tuple[nn.Module, bool]]) -> None:
    for module, training in was_training:
        module.training = training
