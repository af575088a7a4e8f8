"""Load a stream into a model of transformers in the process that generates."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from quaver.recipes.text import check_instance, check_name
from quaver.torch.conversion.export.check import Written, store_exported_weights
from quaver.torch.conversion.export.layouts import FORMATS, FileFormat
from quaver.torch.conversion.export.operands import (
    Decoded,
    DisassembledModel,
    decoded,
    disassemble,
    unwrapped,
)
from quaver.torch.conversion.export.plan import plan_weights, tensors_of_group
from quaver.torch.serving.stream import Bucket
from quaver.torch.state import weight_cache


class StreamLoader:
    """Receives a stream's buckets and puts their codes and scales into a model, all at once at the end.

    The model computes with the codes that the trainer has: under its recipe with the same arithmetic, and without one
    with the dequantized weights.

    Args:
        model: the trainer's model, built and converted in the same way.
        checkpoint_format: that of the stream.
        high_precision: that of the stream.
    Exact: decoded by the published formulas of the format, the weights have the trainer's codes and scales bit for bit.
    """

    def __init__(
        self, model: nn.Module, checkpoint_format: str = "compressed-tensors", high_precision: Iterable[str] = ()
    ) -> None:
        check_instance("StreamLoader", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
        check_name("checkpoint format", checkpoint_format, FORMATS)
        self.model, self.high_precision = unwrapped(model), tuple(high_precision)
        self.kind = FORMATS[checkpoint_format]
        self._received: dict[str, Tensor] | None = None

    def start_weight_update(self) -> None:
        """Begin an update; buckets of an unfinished one are dropped."""
        self._received = {}

    @torch.inference_mode(False)
    def update_weights(self, bucket: Bucket) -> None:
        """Receive a bucket, without changing the model.

        Raises:
            ValueError: no update has begun.
        """
        if self._received is None:
            raise ValueError("update_weights without an update: call start_weight_update first")
        # The trainer may write to shared memory after the call.
        self._received |= {name: tensor.detach().clone() for name, tensor in bucket}

    # A model can train on normal tensors only, and decoding needs no gradient.
    @torch.inference_mode(False)
    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Put the received tensors into the model; layers that are not among them keep their weights.

        Raises:
            ValueError: no update has begun, a tensor has no place in the model, a layer is incomplete, or its tensors
                are those of another recipe. Raised before the model changes.
        """
        if self._received is None:
            raise ValueError("finish_weight_update without an update: call start_weight_update first")
        received, parts = self._received, disassemble(self.model, self.high_precision)
        plain, weights = self._places(parts, received)
        for place, tensor in plain:
            place.copy_(tensor)
        read = _Received(weights, self.kind.method)
        chosen = [one for one in parts.collected if one.pieces[0].prefix in weights]
        store_exported_weights(chosen, read)
        for one in chosen:
            weight_cache.drop(one.layer)
        self._received = None

    def _places(
        self, parts: DisassembledModel, received: Mapping[str, Tensor]
    ) -> tuple[list[tuple[Tensor, Tensor]], dict[str, dict[str, Tensor]]]:
        """Return pairs of a tensor in the model and its new value, and the tensors of weights by prefix and suffix."""
        prefixes = sorted((piece.prefix for one in parts.collected for piece in one.pieces), key=len, reverse=True)
        memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(self.model)}
        plain: list[tuple[Tensor, Tensor]] = []
        weights: dict[str, dict[str, Tensor]] = {}
        for name, tensor in received.items():
            place = parts.plain.get(name)
            if place is not None:
                if place.untyped_storage().data_ptr() not in memory or place.shape != tensor.shape:
                    raise ValueError(
                        f"{name} {tuple(tensor.shape)} has no place in the model, which has {tuple(place.shape)} there "
                        "or joins it with others: convert this layer in the trainer and in this process"
                    )
                if place.is_floating_point() != tensor.is_floating_point():
                    raise ValueError(f"{name} is {tensor.dtype}, but {place.dtype} in the model: send it in that dtype")
                plain.append((place, tensor))
                continue
            prefix = next((p for p in prefixes if name.startswith(p) and "." not in name.removeprefix(p)), None)
            if prefix is None:
                raise ValueError(
                    f"{name} has no place in the model: build and convert the model in this process as in the trainer"
                )
            weights.setdefault(prefix, {})[name.removeprefix(prefix)] = tensor
        self._check_complete(parts, weights)
        # Scales of inputs matter to other engines only: any amax will do.
        amaxes: dict[tuple[nn.Module, str], float] = {(one.layer, one.last): 1.0 for one in parts.collected}
        for written in plan_weights(self.kind, parts, amaxes):
            if written[0].pieces[0].prefix in weights:
                _check_tensors(self.kind, written, weights)
        return plain, weights

    def _check_complete(self, parts: DisassembledModel, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise if only some pieces of a parameter were received, such as some experts of a stack."""
        by_parameter: dict[str, list[str]] = {}
        for one in parts.collected:
            by_parameter.setdefault(one.name, []).extend(piece.prefix for piece in one.pieces)
        for name, prefixes in by_parameter.items():
            missing = [prefix for prefix in prefixes if prefix not in weights]
            if missing and len(missing) < len(prefixes):
                raise ValueError(f"{name} is incomplete: {missing[0].rstrip('.')} was not received; send it again")


def _check_tensors(kind: FileFormat, written: Written, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise if the received tensors of a weight have other names, dtypes or shapes than the layer's recipe gives."""
    one = written[0]
    expected = {
        name: _described(tensor)
        for name, tensor in tensors_of_group(kind, [written], [one.zeros()], verified=False)
        if not name.endswith(INPUTS)
    }
    received = {
        piece.prefix + suffix: _described(tensor)
        for piece in one.pieces
        for suffix, tensor in weights[piece.prefix].items()
        if not suffix.endswith(INPUTS)
    }
    for name in sorted(expected.keys() | received.keys()):
        if expected.get(name) != received.get(name):
            raise ValueError(
                f"{name} was received as {received.get(name, 'nothing')}, but the model in this process needs "
                f"{expected.get(name, 'nothing')}: build and convert it as in the trainer, and send complete layers"
            )


#: Suffixes of scales of a layer's input, which this process does not load.
INPUTS = ("input_scale", "input_global_scale")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensors_of(model: nn.Module) -> list[Tensor]:
    every = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in every if type(tensor) in (Tensor, nn.Parameter)]


class _Received:
    """Reader of received tensors, in the place of `quaver.torch.conversion.export.operands.Reader`."""

    def __init__(self, weights: Mapping[str, Mapping[str, Tensor]], method: str) -> None:
        self.weights, self.method = weights, method

    def decoded(self, prefix: str) -> Decoded:
        """Decode the weight of a layer."""
        return decoded({name: tensor.cpu() for name, tensor in self.weights[prefix].items()}, self.method)
