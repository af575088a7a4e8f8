"""`quaver.torch.serving_stream`: codes and scales of a model in training, under an inference engine's names.

A pass reads one fused group of layers at a time: the codes that fprop's GEMMs multiply by, gathered from the ranks if
the model is sharded. A pass needs memory for that group and one bucket.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.recipes.text import check_instance, check_name
from quaver.torch.conversion.export.check import Written, evaluating, recording_input_amaxes, run
from quaver.torch.conversion.export.layouts import FORMATS, FileFormat, fused_groups
from quaver.torch.conversion.export.operands import DisassembledModel, disassemble, unwrapped
from quaver.torch.conversion.export.plan import group_fused, plan_weights, tensors_of_group
from quaver.torch.serving.engines import ENGINES, Engine, check_schemes, check_version
from quaver.torch.serving.shards import gathered_operand, groups_of, reshard, unsharded
from quaver.torch.state.history.sync import check_agreement

#: Default maximum bytes of the tensors of a bucket.
BUCKET_BYTES = 256 * 1024**2
#: Suffixes of tensors of codes; other tensors of a quantized weight are scales.
CODES = ("weight", "weight_packed", "_blocks")
#: Names and tensors that are sent together.
Bucket = list[tuple[str, Tensor]]


@dataclass
class StreamBytes:
    """Bytes of a pass of a stream."""

    #: Codes and scales of converted weights.
    codes: int = 0
    scales: int = 0
    #: Bytes of the same weights in bfloat16.
    bf16: int = 0
    #: Tensors in high precision: embeddings, norms, biases, the head.
    other: int = 0

    @property
    def share(self) -> float:
        """Bytes of converted weights, divided by those in bfloat16; 0 if none was sent."""
        return (self.codes + self.scales) / self.bf16 if self.bf16 else 0.0

    def add(self, other: "StreamBytes") -> None:
        """Add the bytes of another pass."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    def __str__(self) -> str:
        return (
            f"{self.codes + self.scales:,} bytes of converted weights ({self.share:.1%} of bf16), {self.other:,} bytes "
            "of tensors in high precision"
        )


@dataclass
class _Layer:
    """Tensors that an engine loads into one of its layers; it needs all of them or none."""

    #: Tensors in high precision, by name.
    plain: dict[str, Tensor]
    #: Groups of quantized weights, from `group_fused`.
    groups: list[list[Written]]


class ServingStream:
    """Codes and scales of a model, in buckets; each iteration reads the weights that the model has then.

    Create it with `serving_stream`. On several ranks all of them iterate, and each gets all buckets. Tensors may share
    memory with the model: use them before the next optimizer step.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        checkpoint_format: FileFormat,
        bucket_bytes: int,
        high_precision: Sequence[str],
        seen: Mapping[tuple[nn.Module, str], float],
    ) -> None:
        self.model, self.engine, self.checkpoint_format = model, engine, checkpoint_format
        self.bucket_bytes, self.high_precision, self._seen = bucket_bytes, tuple(high_precision), seen
        #: Bytes of the last pass, or of the current one.
        self.bytes = StreamBytes()
        #: Receiver of the last update; another one has none of its tensors.
        self.receiver: Any = None
        #: Digest of the tensors of each layer that the receiver has; empty if unknown.
        self._sent: dict[str, bytes] = {}

    @property
    def groups(self) -> list[Any]:
        """Process groups over which the model is sharded."""
        return groups_of(self.model)

    @property
    def sends(self) -> bool:
        """True on the rank that sends to the engine: the first one of every mesh, or rank 0 if nothing is sharded."""
        groups = self.groups
        if groups:
            return all(group.rank() == 0 for group in groups)
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

    @property
    def quantization_config(self) -> dict[str, Any]:
        """Entry `quantization_config` of the config.json with which the engine starts."""
        parts, plan = self._plan()
        schemes = {piece.prefix.rstrip("."): scheme for one, scheme, _ in plan for piece in one.pieces}
        kind = self.checkpoint_format
        return {"quant_method": kind.method} | kind.configuration(schemes, parts.matrices)

    def __iter__(self) -> Iterator[Bucket]:
        """Yield buckets of all tensors."""
        return self._pass(False)

    def changed(self) -> Iterator[Bucket]:
        """Yield buckets of the layers that changed since the last complete `changed()`; the first yields all.

        A layer changed if the BLAKE2b digest (128 bits) of its names, dtypes, shapes and bytes did. So every layer is
        quantized, gathered and read by the host in each pass, and only sending is saved. Layers that an engine fuses
        are sent together, with their biases. A pass over everything, one that is not finished, or `reset` makes the
        next one yield all.
        """
        return self._pass(True)

    def reset(self) -> None:
        """Forget what was sent, because a receiver has failed or restarted."""
        self._sent = {}

    def _plan(self) -> tuple[DisassembledModel, list[Written]]:
        model = unwrapped(self.model)
        reshard(model)
        parts = disassemble(model, self.high_precision, sharded=True)
        plan = plan_weights(self.checkpoint_format, parts, self._seen)
        check_schemes(self.engine, self.checkpoint_format.name, plan)
        return parts, plan

    def _layers(self, groups: Sequence[Any], changed_only: bool) -> dict[str, _Layer]:
        """Return the layers of the engine, or raise on all ranks if one of them fails or has another model."""
        layers, error = dict[str, _Layer](), None
        try:
            parts, plan = self._plan()
            layers = _layers_of(parts, group_fused(plan, parts.matrices))
        except Exception as raised:
            # The other ranks would wait for this one.
            error = raised
        if groups:
            # Ranks with other codes would gather other bytes, or wait for one another.
            plain = [[(n, t.dtype, t.shape) for n, t in layer.plain.items()] for layer in layers.values()]
            weights = [
                [(one.name, one.spec, one.dtype, scheme.name) for group in layer.groups for one, scheme, _ in group]
                for layer in layers.values()
            ]
            call = "changed()" if changed_only else "all layers"
            digest = hashlib.blake2b(f"{plain} {weights}".encode(), digest_size=8).hexdigest()
            check_agreement(
                "serving_stream", {"pass": call, "tensors": digest}, *groups, error=error or "", advice=SAME_MODEL
            )
        if error is not None:
            raise error
        return layers

    @torch.no_grad()
    def _pass(self, changed_only: bool) -> Iterator[Bucket]:
        before, unfinished, counted = self._sent, dict[str, bytes](), StreamBytes()
        self._sent, self.bytes = unfinished, counted
        digests: dict[str, bytes] = {}
        groups = self.groups
        bucket: Bucket = []
        size = 0
        for name, layer in self._layers(groups, changed_only).items():
            if changed_only:
                tensors = self._changed(name, layer, before, digests, groups, counted)
            else:
                tensors = self._tensors(layer, counted)
            for tensor_name, tensor in tensors:
                if bucket and size + tensor.nbytes > self.bucket_bytes:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((tensor_name, tensor))
                size += tensor.nbytes
        if bucket:
            yield bucket
        # Another pass or `reset` in the meantime: it is unknown which tensors the receiver has.
        if self._sent is unfinished:
            self._sent = digests

    def _changed(
        self,
        name: str,
        layer: _Layer,
        before: Mapping[str, bytes],
        digests: dict[str, bytes],
        groups: Sequence[Any],
        counted: StreamBytes,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield and count the tensors of a layer if their digest differs from the one that was sent."""
        read = StreamBytes()
        # The experts of a layer are many matrices, which are read twice, so that no pass needs memory for all.
        layer_tensors = list(self._tensors(layer, read)) if len(layer.groups) < 2 else None
        digest = hashlib.blake2b(digest_size=16)
        for tensor_name, tensor in self._tensors(layer, read) if layer_tensors is None else layer_tensors:
            digest.update(f"{tensor_name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
        digests[name] = digest.digest()
        changed = before.get(name) != digests[name]
        if groups:
            changed = bool(check_agreement("serving_stream's changed layers", {}, *groups, flag=changed))
        if changed and layer_tensors is not None:
            counted.add(read)
            yield from layer_tensors
        elif changed:
            yield from self._tensors(layer, counted)

    def _tensors(self, layer: _Layer, counted: StreamBytes) -> Iterator[tuple[str, Tensor]]:
        """Yield and count the tensors of a layer."""
        for name, tensor in layer.plain.items():
            full = unsharded(tensor)
            counted.other += full.nbytes
            yield name, full
        for group in layer.groups:
            operands = [gathered_operand(one) for one, _, _ in group]
            counted.bf16 += sum(2 * q.shape[0] * q.shape[1] for q in operands)
            for name, tensor in tensors_of_group(self.checkpoint_format, group, operands, verified=False):
                if name.endswith(CODES):
                    counted.codes += tensor.nbytes
                else:
                    counted.scales += tensor.nbytes
                yield name, tensor


SAME_MODEL = "build, convert and shard the model in the same way on all ranks"


def _layers_of(parts: DisassembledModel, groups: Sequence[list[Written]]) -> dict[str, _Layer]:
    """Return the layers of an engine by name: a module, the modules that it fuses, or all experts of a layer."""
    plain = {name: _owner(name.rpartition(".")[0]) for name in parts.plain}
    written = [[_owner(piece.prefix.rstrip(".")) for one, _, _ in group for piece in one.pieces] for group in groups]
    fused = fused_groups([*plain.values(), *(name for names in written for name in names)])
    first = {name: names[0] for names in fused for name in names}
    layers: dict[str, _Layer] = {}
    for name, owner in plain.items():
        layers.setdefault(first[owner], _Layer({}, [])).plain[name] = parts.plain[name]
    for group, names in zip(groups, written, strict=True):
        layers.setdefault(first[names[0]], _Layer({}, [])).groups.append(group)
    return layers


def _owner(name: str) -> str:
    """Return the name of the module that an engine loads a checkpoint's module into: experts share one."""
    before, experts, _ = name.partition(".experts.")
    return before + experts.rstrip(".")


def serving_stream(
    model: nn.Module,
    format: str = "vllm",
    *,
    version: str | None = None,
    checkpoint_format: str = "compressed-tensors",
    bucket_bytes: int = BUCKET_BYTES,
    high_precision: Sequence[str] = (),
    calibrate: Any = None,
) -> ServingStream:
    """Return a stream of a model's codes and scales for an inference engine; iterate over it after each optimizer step.

        stream = serving_stream(model, "vllm")
        for bucket in stream:             # lists of (name, tensor)
        for bucket in stream.changed():   # of layers that changed since the last time

    Names and tensors equal those of `quaver.torch.export`, bit for bit: the codes that fprop multiplies by, and other
    tensors in the model's dtype. The model and its training state are not changed.

    Args:
        model: a converted model, or one of `quaver.torch` layers inside the autocast that it trains under. It may have
            weights stored as codes, and be sharded by fully_shard, tensor parallelism, or both; then all ranks iterate
            together. Stacked experts and joined matrices of tensor parallelism must not be sharded.
        format: "vllm", "sglang" or "transformers".
        version: version of the engine, such as `vllm.__version__`; None if unknown.
        checkpoint_format: format of the checkpoint that the engine was started with, as for `quaver.torch.export`.
        bucket_bytes: maximum bytes of the tensors of a bucket; a larger tensor is a bucket of its own.
        high_precision: name patterns of layers to send in high precision although they are trained quantized.
        calibrate: inputs from which the amax of each layer's input is measured once, for formats that store its scale.
    Raises:
        ValueError: the engine, its version or the format is unknown. During an iteration, on all ranks: the format or
            the engine cannot read a layer's codes, or a weight is not finite.
    """
    check_instance("serving_stream", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    check_name("format of a serving stream", format, ENGINES)
    check_name("checkpoint format", checkpoint_format, FORMATS)
    check_version(ENGINES[format], version)
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; give the maximum bytes of a bucket, at least 1")
    seen: Mapping[tuple[nn.Module, str], float] = {}
    if calibrate is not None:
        inner = unwrapped(model)
        with evaluating(inner), recording_input_amaxes(inner) as seen:
            run(inner, calibrate)
    return ServingStream(model, ENGINES[format], FORMATS[checkpoint_format], bucket_bytes, high_precision, seen)
