"""Tensor-parallel styles for torch's `parallelize_module`: how a layer's weight and tokens are sharded."""

import gc
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Quantizable
from quaver.torch.nn.attention.multihead import MultiheadAttention
from quaver.torch.parallel.tensor import joined, symmetric_memory
from quaver.torch.parallel.tensor.gemms import ShardLayout
from quaver.torch.parallel.tensor.layers import TensorParallelLinear, layout_of, name_of
from quaver.torch.parallel.tensor.overlap import check_mesh
from quaver.torch.parallel.tensor.sequence import OTHER_DROPOUTS, SequenceLayout, TokenShardedModule
from quaver.torch.parallel.tensor.sharded_module import shard
from quaver.torch.parallel.tensor.vocab import VocabShard, VocabShardedEmbedding
from quaver.torch.state import weight_cache


class _ShardedLinear(ParallelStyle):
    """Common base of the column-parallel and row-parallel styles."""

    layout: ShardLayout
    #: Rows of each joined matrix. Each matrix is sharded over all ranks. Empty for a single matrix.
    parts: tuple[int, ...] = ()
    #: True lets the style choose between symmetric memory and one chunk; a number of chunks; False without overlap.
    overlap: bool | int = False
    #: True once ranks have checked that they can send tokens point to point.
    _overlap_checked = False
    #: True if `HeadParallel` applies this style and shards the heads too.
    of_heads = False

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        weight_placement = Shard(self.layout.weight_axis)
        bias_placement = Shard(0) if self.layout.column else Replicate()
        placements = {"weight": weight_placement, "bias": bias_placement}
        _check(module, self, device_mesh, placements)
        self._settle(device_mesh)
        if isinstance(module, Quantizable):
            weight_cache.free(module)
        matrices = joined.matrices_of(module, self.parts) if self.layout.column else {}
        if len(matrices) > 1:
            joined.divide(module, matrices, device_mesh, self.src_data_rank)
        else:
            _distribute(module, placements, device_mesh, self.src_data_rank)
        shard(module, TensorParallelLinear, self.layout)
        return module

    def _settle(self, mesh: Any) -> None:
        """Check once that ranks can send tokens point to point, and whether they have symmetric memory."""
        if self._overlap_checked:
            return
        check_mesh(mesh, type(self).__name__, self.layout.overlap)
        self.layout = replace(self.layout, symmetric=self.overlap is True and symmetric_memory.is_supported(mesh))
        self._overlap_checked = True

    def __repr__(self) -> str:
        options = ["sequence=True"] * self.layout.sequence + [f"parts={self.parts}"] * bool(self.parts)
        options += [f"overlap={self.overlap}"] * bool(self.overlap)
        return f"{type(self).__name__}({', '.join(options)})"


def _check_overlap(sequence: bool, overlap: bool | int) -> None:
    """Raise a ValueError unless `overlap` is a bool or a number of chunks, and tokens are sharded with it."""
    if not isinstance(overlap, int) or (overlap is not False and overlap < 1):
        raise ValueError(
            f"overlap is {overlap!r}: give True, or the number of chunks of a rank's tokens, 1 or more; or leave it out"
        )
    if overlap and not sequence:
        raise ValueError("overlap applies to sharded tokens: give sequence=True with it, or leave it out")


class ColwiseParallel(_ShardedLinear):
    """Shard the output features of a linear layer: q, k and v, gate and up, or the vocabulary of a head.

    Weight and bias become DTensors with placement Shard(0). In a joined weight such as an MLP's `gate_up_proj`, each
    matrix is sharded, so that a rank has rows of both. The layer takes and returns local tensors. Its input is the
    whole tensor on every rank, its output this rank's features, which must be whole heads if heads follow. The gradient
    of the input is all-reduced in float32.

    `quaver.torch.linear_cross_entropy(x, head, targets)` accepts a head of this style, and
    `quaver.torch.parallel.cross_entropy` accepts its logits.

    Args:
        sequence: True if each rank has some tokens of the input, its shard of the second-last axis. They are
            all-gathered, as codes if the recipe quantizes them, and each rank gets the gradient of its tokens.
        parts: rows of each matrix, in order, if a layer of another library joins several in one weight, for instance q,
            k and v of Phi-3's `qkv_proj`. Each matrix is sharded and becomes a parameter of its own, `weight.0`,
            `weight.1` and so on. A single number, that of all rows, declares that consecutive rows are right. A layer
            whose name suggests joined matrices raises an error without `parts`.
        overlap: with sequence=True, communicate while GEMMs run: number of chunks in which each rank's tokens are sent
            point to point, as codes if the recipe quantizes them. A chunk has at least 32 tokens. True is one chunk,
            and uses torch's operations on symmetric memory for GEMMs of bfloat16 or float16 operands on GPUs behind an
            NVLink switch; these round the input's gradient to its dtype on each rank before the sum. Not tested on
            GPUs.
    Raises:
        ValueError: on application, if the layer does not fit or ranks cannot overlap; overlap without sequence, or
            with fewer than one chunk.
    Exact: codes and scales are those of one process. Bounded: the order of sums over ranks.
    """

    def __init__(self, *, sequence: bool = False, parts: Iterable[int] = (), overlap: bool | int = False) -> None:
        _check_overlap(sequence, overlap)
        self.layout, self.overlap = ShardLayout(True, sequence, int(overlap)), overlap
        self.parts = tuple(parts)


class RowwiseParallel(_ShardedLinear):
    """Shard the input features of a linear layer: o after attention, down after gate and up.

    The weight becomes a DTensor with placement Shard(1), the bias one with Replicate(). The layer takes and returns
    local tensors. Its input is this rank's features, as a `ColwiseParallel` returns them. The outputs are all-reduced
    in float32, and every rank has the whole output.

    Args:
        sequence: True leaves each rank some tokens of the output, its shard of the second-last axis. Their gradients
            are all-gathered as codes.
        overlap: as for `ColwiseParallel`; symmetric memory rounds each rank's output to its dtype before the sum.
    Raises:
        ValueError: as for `ColwiseParallel`.
    Exact: codes and scales are those of one process. Bounded: the order of sums over ranks.
    """

    def __init__(self, *, sequence: bool = False, overlap: bool | int = False) -> None:
        _check_overlap(sequence, overlap)
        self.layout, self.overlap = ShardLayout(False, sequence, int(overlap)), overlap


class HeadParallel(ParallelStyle):
    """Shard the heads of a `quaver.torch.MultiheadAttention`.

    Its projections of queries, keys and values become `ColwiseParallel`, its o_proj `RowwiseParallel`, and the norms of
    queries and keys all-reduce their gradients over the ranks. In a joined `qkv_proj`, each rank has its heads' rows of
    q, k and v. They become separate parameters, for instance `qkv_proj.weight.q_proj`, while the layer remains one.

    Args:
        sequence: shard tokens at the input and output of the four layers; the attention itself sees all tokens.
        overlap: as for `ColwiseParallel`, of the four layers.
    """

    def __init__(self, *, sequence: bool = False, overlap: bool | int = False) -> None:
        _check_overlap(sequence, overlap)
        self.sequence, self.overlap = sequence, overlap

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        attention: Any = module
        _check_heads(attention, self, device_mesh)
        options: dict[str, Any] = {"sequence": self.sequence, "overlap": self.overlap}
        for name in (*attention._parts, "o_proj", "q_norm", "k_norm"):
            part, style = attention._modules[name], RowwiseParallel if name == "o_proj" else ColwiseParallel
            if part is not None:
                each: Any = SequenceParallel() if name.endswith("norm") else style(**options)
                each.of_heads = True
                each.src_data_rank = self.src_data_rank
                each._apply(part, device_mesh)
        attention.core.heads //= device_mesh.size()
        attention.core.groups //= device_mesh.size()
        ranks = device_mesh.size()
        attention._parts = {name: [rows // ranks for rows in sizes] for name, sizes in attention._parts.items()}
        return module

    def __repr__(self) -> str:
        options = ["sequence=True"] * self.sequence + [f"overlap={self.overlap}"] * bool(self.overlap)
        return f"HeadParallel({', '.join(options)})"


class SequenceParallel(ParallelStyle):
    """Shard the tokens of a module that processes each token independently, such as a norm or a dropout.

    Its parameters become DTensors with placement Replicate(), whose gradients are all-reduced in float32. It takes and
    returns local tensors, [..., tokens of this rank, features].

    Args:
        replicated_input: every rank passes the whole input and takes its tokens of it, such as an embedding of token
        ids
            [..., tokens].
        gather_output: all-gather the output in its own dtype, such as the last norm before a replicated head.

    Dropout draws different noise on each rank. Exact, except for the order of summing parameter gradients.
    """

    def __init__(self, *, replicated_input: bool = False, gather_output: bool = False) -> None:
        self.replicated_input, self.gather_output = replicated_input, gather_output

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        _check_free(module, repr(self), device_mesh)
        if isinstance(module, OTHER_DROPOUTS):
            raise ValueError(
                f"{self!r} of a {type(module).__name__} would drop the same elements on every rank: use "
                "nn.Dropout, or leave it out of the plan"
            )
        inside = next(
            (name for name, child in module.named_modules() if child is not module and child._parameters), None
        )
        if inside is not None:
            raise ValueError(
                f"{self!r} is a style for single modules, and {type(module).__name__} contains another one "
                f"with parameters, {inside!r}: name the norms and dropouts themselves in the plan"
            )
        _distribute(module, dict.fromkeys(module._parameters, Replicate()), device_mesh, self.src_data_rank)
        tokens = SequenceLayout(device_mesh, self.replicated_input, self.gather_output)
        shard(module, TokenShardedModule, tokens)
        return module

    def __repr__(self) -> str:
        options = [name for name in ("replicated_input", "gather_output") if getattr(self, name)]
        return f"SequenceParallel({', '.join(f'{name}=True' for name in options)})"


class VocabParallel(ParallelStyle):
    """Shard the vocabulary of an embedding; every rank passes all token ids.

    The weight becomes a DTensor with placement Shard(0). A head tied to it uses `ColwiseParallel()`, which has the same
    placement, and stays tied. For a model without a head layer, `quaver.torch.linear_cross_entropy(x, embedding,
    targets)` uses the embedding as the head. Output and gradient have the bits of one process.

    Args:
        sequence: True leaves each rank some tokens of the output, its shard of the second-last axis. Their gradients
            are all-gathered in their own dtype.

    Exact.
    """

    def __init__(self, *, sequence: bool = False) -> None:
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        placements = {"weight": Shard(0)}
        _check_embedding(module, self, device_mesh, placements)
        _distribute(module, placements, device_mesh, self.src_data_rank)
        shard(module, VocabShardedEmbedding, VocabShard(device_mesh, self.sequence))
        return module

    def __repr__(self) -> str:
        return VocabShard(None, self.sequence).name


def _distribute(module: nn.Module, placements: dict[str, Any], mesh: Any, source: int | None) -> None:
    """Replace parameters by DTensors in every module that shares them, so that tied modules stay tied."""
    for name, placement in placements.items():
        parameter = module._parameters[name]
        if parameter is None or hasattr(parameter, "device_mesh"):
            continue
        # Three references: the module's dict, the local name, and the argument. More mean that the parameter is tied.
        owners = [module] if sys.getrefcount(parameter) <= 3 else _owners(parameter)
        parts = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        in_parts = nn.Parameter(parts, requires_grad=parameter.requires_grad)
        for owner in owners:
            # A comprehension leaves no variable that would count as a reference to the next parameter.
            for key in [key for key, value in owner._parameters.items() if value is parameter]:
                owner._parameters[key] = in_parts


def _owners(parameter: nn.Parameter) -> list[nn.Module]:
    """Return all modules that share a parameter; only the garbage collector can find them."""
    every = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    return [each for each in every if any(p is parameter for p in each.__dict__.get("_parameters", {}).values())]


def _check_free(module: nn.Module, style: str, mesh: Any, placements: dict[str, Any] | None = None) -> None:
    """Raise a ValueError if a module is already sharded or the mesh is not one-dimensional.

    Args:
        module: module to shard.
        style: the style's text for the message.
        mesh: device mesh.
        placements: intended placements; a parameter tied to another module may already have its placement.
    """
    name = name_of(module)
    if mesh.ndim != 1:
        raise ValueError(
            f"{name} got a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give one of them, such as mesh['tp']"
        )
    before = layout_of(module)
    wanted, sharded = placements or {}, {key: p for key, p in module._parameters.items() if hasattr(p, "device_mesh")}
    tied: dict[str, Any] = {key: p for key, p in sharded.items() if key in wanted}
    as_wanted = {key for key, p in tied.items() if p.device_mesh == mesh and p.placements == (wanted[key],)}
    placed = next((f"{p.device_mesh} by {p.placements}" for key, p in sharded.items() if key not in as_wanted), None)  # type: ignore[union-attr]
    if placed is None and isinstance(module, TokenShardedModule | VocabShardedEmbedding):
        placed = f"{mesh}"
    if before is not None or placed is not None:
        of = f"is sharded by {before.name}" if before is not None else f"is on {placed}"
        raise ValueError(
            f"{name} {of} already, and {style} needs an unsharded module: name it in one style of the plan, "
            "and call parallelize_module before fully_shard"
        )


def _check_heads(attention: Any, style: HeadParallel, mesh: Any) -> None:
    """Raise a ValueError if the heads of an attention module cannot be sharded."""
    if not isinstance(attention, MultiheadAttention):
        raise ValueError(
            f"{style} is a style for quaver.torch.MultiheadAttention, and {type(attention).__name__} is none: name its "
            "linear layers, {'q_proj': ColwiseParallel(), 'o_proj': RowwiseParallel()}, if its forward takes "
            "any number of heads"
        )
    core = attention.core
    of_heads = {
        "alibi": core.alibi,
        "learnable sinks": getattr(core, "sinks", None) is not None and isinstance(core.sinks, nn.Parameter),
        "position_bias": attention.position_bias is not None,
        f"qk_norm_scope={attention.qk_norm_scope!r}": attention.q_norm is not None
        and attention.qk_norm_scope != "head",
        "layout='sbhd' and sequence=True": attention.layout == "sbhd" and style.sequence,
    }
    refused = [option for option, there in of_heads.items() if there]
    if refused:
        raise ValueError(
            f"{style} needs attention with independent heads, and this one has {', '.join(refused)}: build it "
            "without, or leave attention out of the plan"
        )
    if core.heads % mesh.size() or core.groups % mesh.size():
        raise ValueError(
            f"{style}: {mesh.size()} ranks cannot share {core.heads} heads and {core.groups} of keys and values; give "
            "multiples of the ranks"
        )


def _check_embedding(module: Any, style: VocabParallel, mesh: Any, placements: dict[str, Any]) -> None:
    """Raise a ValueError if the vocabulary of an embedding cannot be sharded."""
    name = name_of(module)
    if not isinstance(module, nn.Embedding) or "weight" not in module._parameters:
        raise ValueError(
            f"{style!r} is a style for nn.Embedding, and {name} is none, or its weight is parametrized: use "
            "ColwiseParallel() for a head"
        )
    _check_free(module, repr(style), mesh, placements)
    options = {name: getattr(module, name) for name in ("max_norm", "scale_grad_by_freq", "sparse")}
    refused = [f"{name}={value}" for name, value in options.items() if value]
    if refused:
        raise ValueError(
            f"{style!r} does not support an embedding with {', '.join(refused)}, which needs the whole "
            "vocabulary: build it without"
        )
    words, ranks = module.num_embeddings, mesh.size()
    if words % ranks:
        more = -words % ranks
        raise ValueError(
            f"{name} has {words} rows, which {ranks} ranks cannot share by {style!r}: pad the vocabulary by "
            f"{more} rows, as transformers' model.resize_token_embeddings(pad_to_multiple_of={ranks}) does, "
            "or do not shard it"
        )


def _check(module: nn.Module, style: _ShardedLinear, mesh: Any, placements: dict[str, Any]) -> None:
    """Raise a ValueError if a linear layer cannot be sharded."""
    name, layout = name_of(module), style.layout
    _check_free(module, layout.name, mesh, placements)
    if not isinstance(module, nn.Linear) or "weight" not in module._parameters:
        raise ValueError(
            f"{layout.name} is a style for linear layers, and {name} is none, or its weight is parametrized: name the "
            "linear layers in the plan, such as {'mlp.up_proj': ColwiseParallel(), 'mlp.down_proj': RowwiseParallel()}"
        )
    weight: Any = module._parameters["weight"]
    if stored_weight.holds_codes(weight):
        raise ValueError(
            f"{name} has a weight stored only as codes, and {layout.name} needs one in high precision: call "
            "quaver.torch.dequantize_weights(model) first"
        )
    matrices = joined.matrices_of(module, style.parts) if layout.column else {}
    if "k_proj" in matrices and not style.of_heads:
        raise ValueError(
            f"{name} has the matrices {', '.join(matrices)} of attention in one weight, whose heads must be "
            "sharded too: put HeadParallel() on the attention itself"
        )
    if layout.column:
        joined.check(module, name, repr(style), style.parts)
    number, features = mesh.size(), weight.shape[layout.weight_axis]
    features = next((rows for rows in matrices.values() if rows % number), features)
    if features % number:
        of = "output" if layout.column else "input"
        raise ValueError(
            f"{name} has {features} {of} features, which {number} ranks cannot share by {layout.name}: leave "
            f"it out of the plan, or make it a multiple of {number}; for a head pad the vocabulary"
        )
