"""Cost model of a training step on many GPUs: time, communication and memory per GPU.

    a step           micro-batches x (forward + backward of the blocks of a stage), the pipeline's idle time, the head,
                     the optimizer
    a block          its kernels / REACHED, communication of tensor, context and expert parallelism, and the part of the
                     weights' all-gather and gradients' reduce-scatter that the block does not hide

Kernel costs come from `quaver.costs.ledger`, communication from `quaver.costs.hardware`. Weights are gathered for
forward and again for backward, and gradients are reduced in float32, all overlapped with the block's computation. This
is a roofline model with two constants fitted to published runs. benchmarks/pages/runs.py lists these and compares other
runs with their predictions. It ignores stragglers, failures and data loading.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quaver.costs import hardware, ledger
from quaver.costs.decoder import PLAIN, DecoderBlock, DecoderShape, WeightMatrix
from quaver.costs.hardware import Gpu, Interconnect, Mesh
from quaver.costs.ledger import WIDE, QuantizedCopy, written
from quaver.recipes.spec import Recipe

#: Fraction of the kernels' own rates that a training step reaches. Fitted: see benchmarks/pages/runs.py.
REACHED = 0.848
#: Largest fraction of tensor parallelism's communication that asynchronous tensor parallelism hides. Fitted in the same
#: way, on NVLink.
HIDDEN = 0.42
#: Fraction of the rate of large bf16 GEMMs that attention reaches: 333 of 788 TFLOP/s (FlashAttention-2, causal, 128
#: features, 8192 tokens, H100 SXM5: arXiv:2407.08608, figure 5).
ATTENTION = 333 / 788
#: Bytes of: a gradient as sent; a weight with its gradient and AdamW's two moments; the traffic of an AdamW step per
#: weight; the traffic of the loss per logit; the memory of the loss per logit.
REDUCED, TRAINED, STEPPED, LOSS, LOGIT = 4, 16, 28, 16, 10

Checkpoints = Literal["none", "selective", "full"]


class BlockSeconds(NamedTuple):
    """Seconds of a block, forward or backward, by part; communication counts only as far as it is not hidden."""

    gemms: float = 0.0
    attention: float = 0.0
    #: Norms, activations, rope, residual sums and losses.
    elementwise: float = 0.0
    #: Communication of tensor, context and expert parallelism.
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    #: All-gathers of weights and reductions of gradients.
    sharding: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def plus(self, other: "BlockSeconds", share: float = 1.0) -> "BlockSeconds":
        return BlockSeconds(*(a + share * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Model, hardware, parallelism and options of a training run."""

    decoder: DecoderShape
    recipe: Recipe
    gpu: Gpu
    mesh: Mesh
    interconnect: Interconnect
    #: Sequences per micro-batch of one data-parallel rank, and tokens per sequence.
    sequences: int = 1
    tokens: int = 8192
    micro_batches: int = 1
    #: Recomputation in backward: nothing; elementwise work and every second GEMM; everything.
    checkpoints: Checkpoints = "selective"
    #: True sends weights and activations in the recipe's format if it has per-tensor scales or square blocks.
    narrow_wire: bool = True
    #: True hides tensor-parallel communication behind GEMMs (`hidden_seconds`), and the all-to-all of experts behind
    #: another micro-batch.
    overlapped: bool = False
    #: Number of interleaved parts per stage, which divides the pipeline's idle time.
    interleaved: int = 1
    #: Bytes in training per parameter of the blocks' matrices, of the embedding and of the head.
    trained: tuple[float, float, float] = (TRAINED, TRAINED, TRAINED)

    @property
    def rows(self) -> int:
        """Tokens per micro-batch in the GEMMs of one GPU."""
        return self.sequences * self.tokens // self.mesh.cp

    @property
    def narrow(self) -> bool:
        return self.narrow_wire and self.recipe.reuse.weight

    def on_the_wire(self, parameters: float) -> float:
        """Return the bytes of `parameters` weights in an all-gather."""
        spec = self.recipe.fprop.b
        if not self.narrow or spec is None:
            return WIDE * parameters
        # Ratio for a square tile, including scales.
        return parameters * written(QuantizedCopy(spec), 4096, 4096) / 4096**2


@dataclass(frozen=True)
class StepCost:
    """Predicted cost of one step."""

    plan: TrainingSetup
    seconds: float
    #: Seconds by part; they sum to `seconds`.
    parts: dict[str, float]
    #: Bytes that a GPU sends per step, by kind.
    wire: dict[str, float]
    #: Memory of a GPU in bytes, by kind.
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        plan = self.plan
        tokens = plan.sequences * plan.tokens * plan.micro_batches * plan.mesh.data
        return tokens / plan.mesh.gpus / self.seconds


def gemms(plan: TrainingSetup, block: DecoderBlock) -> tuple[float, float]:
    """Return seconds of a block's GEMMs and their quantization, forward and backward, on one GPU."""
    forward = backward = 0.0
    for matrix in block.matrices:
        cost, count = _layer(plan, matrix)
        each = {name: gemm.seconds + gemm.decoding.seconds for name, gemm in cost.gemms.items()}
        # The ranks that share a weight each quantize their shard.
        weight = cost.tensors["weight"].seconds / (plan.mesh.fsdp if plan.narrow else 1)
        forward += count * (each["fprop"] + cost.tensors["input"].seconds + weight)
        backward += count * (each["dgrad"] + each["wgrad"] + cost.tensors["grad_output"].seconds)
    return forward, backward


def _layer(plan: TrainingSetup, matrix: WeightMatrix) -> tuple[ledger.LinearCost, int]:
    """Return the cost of a matrix's GEMM on one GPU, and the number of such GEMMs there."""
    mesh, rows, count = plan.mesh, plan.rows, 1
    n, k = matrix.out_features, matrix.in_features
    if matrix.routed:
        count = max(1, matrix.experts // mesh.ep)
        rows = max(1, rows * matrix.chosen * mesh.ep // matrix.experts)
    elif matrix.cut == "column":
        n = max(1, n // mesh.tp)
    elif matrix.cut == "row":
        k = max(1, k // mesh.tp)
    return ledger.layer(plan.recipe, rows, k, n, plan.gpu, produced=plan.recipe.quantizes), count


def attention(plan: TrainingSetup, block: DecoderBlock) -> tuple[float, float]:
    """Return seconds of causal attention, forward and backward."""
    seen = plan.tokens * (plan.tokens + 1) / 2 / plan.mesh.cp
    features = (block.score_features + block.value_features) / 2
    product = 2.0 * plan.sequences * block.heads / plan.mesh.tp * features * seen
    each = product / (plan.gpu.rates["bf16"].value * 1e12 * ATTENTION)
    return PLAIN[0] * each, PLAIN[1] * each


def elementwise(plan: TrainingSetup, block: DecoderBlock) -> float:
    """Return seconds of elementwise forward work: two norms, two residual sums, rope, activation, and permutation of
    experts.
    """
    streamed = 20 * block.dim + 3 * WIDE * block.hidden + 2 * WIDE * block.attended + 8 * block.chosen * block.dim
    return streamed * plan.rows / plan.mesh.tp / (plan.gpu.copy.value * 1e12)


def tensor_parallel(plan: TrainingSetup, block: DecoderBlock) -> tuple[float, float]:
    """Return seconds and bytes of tensor-parallel communication in forward; with overlap, what GEMMs do not hide.

    Token shards are all-gathered before attention and MLP, and sums reduce-scattered after them. With several
    sequences, their shards must also be copied into order.
    """
    mesh = plan.mesh
    if mesh.tp == 1:
        return 0.0, 0.0
    size = plan.rows * block.dim
    itemsize = plan.on_the_wire(1.0) if plan.narrow else float(WIDE)
    gathered, summed = size * itemsize, size * WIDE
    seconds = 0.0
    for sent, cut in ((gathered, "column"), (summed, "row")):
        each = 2 * plan.interconnect.gather(sent, mesh.tp, 1)
        if plan.overlapped:
            each -= hidden_seconds(each, _fprop_seconds(plan, block, cut), mesh.tp)
        seconds += each
    if plan.sequences > 1:
        copied = 2 * 2 * (gathered + summed) / (plan.gpu.copy.value * 1e12)
        seconds += copied * (1 - HIDDEN * plan.overlapped)
    return seconds, 2 * (gathered + summed) * (mesh.tp - 1) / mesh.tp


def hidden_seconds(communication: float, gemms: float, ranks: int) -> float:
    """Return the seconds of communication that run beside GEMMs, if each rank's tokens are one chunk.

    A rank multiplies its own tokens while others arrive, and computes the sums of others before its own. So the GEMMs
    of all chunks but one run beside the communication; at most the fraction `HIDDEN` is hidden.
    """
    return min(HIDDEN * communication, gemms * (ranks - 1) / ranks)


def _fprop_seconds(plan: TrainingSetup, block: DecoderBlock, cut: str) -> float:
    """Return seconds of fprop of a block's matrices of one cut ("column" or "row")."""
    seconds = 0.0
    for matrix in block.matrices:
        if matrix.cut == cut:
            cost, count = _layer(plan, matrix)
            seconds += count * cost.gemms["fprop"].seconds / REACHED
    return seconds


def context_parallel(plan: TrainingSetup, block: DecoderBlock) -> tuple[float, float]:
    """Return seconds and bytes of the all-gather of keys and values in forward."""
    mesh = plan.mesh
    if mesh.cp == 1:
        return 0.0, 0.0
    keys = block.attended - block.heads * block.score_features
    size = WIDE * plan.sequences * plan.tokens * keys / mesh.tp
    return plan.interconnect.gather(size, mesh.cp, mesh.tp), size * (mesh.cp - 1) / mesh.cp


def expert_parallel(plan: TrainingSetup, block: DecoderBlock) -> tuple[float, float]:
    """Return seconds and bytes of the all-to-alls of experts in forward."""
    mesh = plan.mesh
    if mesh.ep == 1 or not block.chosen:
        return 0.0, 0.0
    size = plan.rows / mesh.tp * block.chosen * block.dim
    itemsize = plan.on_the_wire(1.0) if plan.narrow else float(WIDE)
    there = plan.interconnect.all_to_all(size * itemsize, mesh.ep, mesh.tp)
    back = plan.interconnect.all_to_all(size * WIDE, mesh.ep, mesh.tp)
    return there + back, size * (itemsize + WIDE) * (mesh.ep - 1) / mesh.ep


class ShardingCost(NamedTuple):
    """Seconds and bytes for a block's weights: all-gather, and reduction of gradients."""

    gather: float
    reduction: float
    gathered_bytes: float
    reduced_bytes: float


def sharding(plan: TrainingSetup, block: DecoderBlock) -> ShardingCost:
    """Return the communication cost of a block's weights; routed experts have a separate sharding."""
    parameters, routed = block.parameters, block.routed_parameters
    mesh, link = plan.mesh, plan.interconnect
    gather = reduction = gathered = reduced = 0.0
    for own, ranks, stride in (
        ((parameters - routed) / mesh.tp, mesh.fsdp, mesh.tp),
        (routed / mesh.ep, mesh.fsdp // mesh.ep, mesh.tp * mesh.ep),
    ):
        if not own:
            continue
        wire, sums = plan.on_the_wire(own), REDUCED * own
        gather += link.gather(wire, ranks, stride)
        reduction += link.gather(sums, ranks, stride)
        gathered += wire * (ranks - 1) / ranks
        reduced += sums * (ranks - 1) / ranks
        if mesh.replicas > 1:
            # An all-reduce of shards is a reduce-scatter and an all-gather.
            reduction += 2 * link.gather(sums / ranks, mesh.replicas, mesh.tp * mesh.fsdp)
            reduced += 2 * sums / ranks * (mesh.replicas - 1) / mesh.replicas
    return ShardingCost(gather, reduction, gathered, reduced)


def _block(plan: TrainingSetup, block: DecoderBlock) -> tuple[BlockSeconds, dict[str, float]]:
    """Return seconds by part, and bytes sent, of a block's forward and backward of one micro-batch."""
    fprop, grads = gemms(plan, block)
    attended, attended_back = attention(plan, block)
    passes = elementwise(plan, block)
    (tensor, tensor_bytes), (context, context_bytes) = tensor_parallel(plan, block), context_parallel(plan, block)
    experts, experts_bytes = expert_parallel(plan, block)
    forward = BlockSeconds(fprop / REACHED, attended / REACHED, passes / REACHED, tensor, context, experts)
    backward = BlockSeconds(
        grads / REACHED, attended_back / REACHED, 2 * passes / REACHED, tensor, 2 * context, experts
    )
    # Number of times that forward's communication runs; keys and values also need that of their gradients.
    often = 3 if plan.checkpoints == "full" else 2
    sent = {"tensor": often * tensor_bytes, "context": (often + 1) * context_bytes, "experts": often * experts_bytes}
    if plan.checkpoints == "full":
        backward = backward.plus(forward)
    elif plan.checkpoints == "selective":
        backward = backward.plus(BlockSeconds(gemms=fprop / REACHED / 2, elementwise=passes / REACHED))
    shard_traffic = sharding(plan, block)
    # With a pipeline, weights stay gathered and gradients accumulate locally over all micro-batches of a step.
    gathers = 1 / plan.micro_batches if plan.mesh.pp > 1 else 1.0
    last = 1 / plan.micro_batches
    if plan.overlapped:
        both = forward.plus(backward)
        left = max(0.0, both.experts - both._replace(experts=0.0).seconds)
        forward, backward = forward._replace(experts=left), backward._replace(experts=0.0)
    shown = max(0.0, gathers * shard_traffic.gather - forward.seconds)
    shown += max(0.0, gathers * shard_traffic.gather + last * shard_traffic.reduction - backward.seconds)
    sent["weights"] = 2 * gathers * shard_traffic.gathered_bytes
    sent["gradients"] = last * shard_traffic.reduced_bytes
    return forward.plus(backward).plus(BlockSeconds(sharding=shown)), sent


def _ends(plan: TrainingSetup) -> tuple[float, float]:
    """Return seconds of head and loss per micro-batch, and of the optimizer and unhidden communication per step."""
    decoder, mesh, gpu = plan.decoder, plan.mesh, plan.gpu
    logits = plan.rows * decoder.vocab / mesh.tp
    flops = 6.0 * logits * decoder.dim
    head = flops / (gpu.rates["bf16"].value * 1e12) + LOSS * logits / (gpu.copy.value * 1e12)
    optimizer = STEPPED * decoder.parameters / mesh.gpus / (gpu.copy.value * 1e12)
    rows = decoder.vocab * decoder.dim / mesh.tp
    link = plan.interconnect
    first = link.gather(WIDE * rows, mesh.fsdp, mesh.tp)
    return head / REACHED, optimizer / REACHED + first + link.gather(REDUCED * rows, mesh.fsdp, mesh.tp)


def step(plan: TrainingSetup) -> StepCost:
    """Predict the cost of one step.

    Raises:
        ValueError: the mesh does not divide heads, features, tokens or blocks.
    """
    check(plan)
    mesh, total = plan.mesh, BlockSeconds()
    sent: dict[str, float] = {}
    for count, block in plan.decoder.blocks:
        each, bytes_of_block = _block(plan, block)
        # Blocks of each kind are spread evenly over the stages.
        total = total.plus(each, count / mesh.pp)
        for kind, size in bytes_of_block.items():
            sent[kind] = sent.get(kind, 0.0) + size * count / mesh.pp * plan.micro_batches
    head, once = _ends(plan)
    work = {name: plan.micro_batches * seconds for name, seconds in total._asdict().items()}
    # The stage with the head is assumed to have fewer blocks.
    work["head"] = plan.micro_batches * head / mesh.pp
    idle = sum(work.values()) * (mesh.pp - 1) / (plan.micro_batches * plan.interleaved)
    work["pipeline"] = idle
    work["optimizer"] = once
    wire = {kind: size for kind, size in sent.items() if size}
    return StepCost(plan, sum(work.values()), work, wire, memory(plan))


def memory(plan: TrainingSetup) -> dict[str, float]:
    """Return the memory in bytes of the fullest GPU, by kind: a lower bound, because allocators fragment."""
    decoder, mesh = plan.decoder, plan.mesh
    blocks = [(count / mesh.pp, block) for count, block in decoder.blocks]
    routed = sum(count * block.routed_parameters for count, block in blocks)
    others = sum(count * (block.parameters - block.routed_parameters) for count, block in blocks)
    matrix, table, head = plan.trained
    rows = decoder.vocab * decoder.dim * (table if decoder.tied or mesh.pp > 1 else table + head)
    own = (matrix * others + rows) / (mesh.tp * mesh.fsdp) + matrix * routed / mesh.fsdp
    largest = max(_here(plan, block) for _, block in blocks)
    activation_bytes = sum(count * saved_bytes_per_token(plan, block, plan.checkpoints) for count, block in blocks)
    again = max(saved_bytes_per_token(plan, block, "none") for _, block in blocks) * (plan.checkpoints != "none")
    tokens = plan.rows / mesh.tp
    # The first stage stores activations of as many micro-batches as there are stages.
    return {
        "weights and optimizer": own,
        "gathered weights": 2 * plan.on_the_wire(largest) + 2 * WIDE * largest,
        "activations": tokens * (activation_bytes * min(plan.micro_batches, mesh.pp) + again),
        "logits": LOGIT * plan.rows * decoder.vocab / mesh.tp,
    }


def _here(plan: TrainingSetup, block: DecoderBlock) -> float:
    """Return the number of weights of a gathered block on one GPU."""
    return (block.parameters - block.routed_parameters) / plan.mesh.tp + block.routed_parameters / plan.mesh.ep


def saved_bytes_per_token(plan: TrainingSetup, block: DecoderBlock, checkpoints: Checkpoints) -> float:
    """Return the bytes per token that a block saves for backward, before tensor parallelism divides them."""
    if checkpoints == "full":
        return WIDE * block.dim
    products = sum(matrix.out_features * matrix.chosen for matrix in block.matrices)
    if checkpoints == "selective":
        return WIDE * (block.dim + products / 2 + block.heads * block.value_features)
    inputs = sum(ledger.saved_bytes(plan.recipe, 4096, m.in_features) * m.chosen for m in _with_own_input(block)) / 4096
    return inputs + WIDE * (2 * block.dim + products + block.heads * block.value_features)


def _with_own_input(block: DecoderBlock) -> list[WeightMatrix]:
    """Return matrices without those that share the previous one's input: one of q, k and v, one of gate and up."""
    return [m for i, m in enumerate(block.matrices) if i == 0 or m.in_features != block.matrices[i - 1].in_features]


def check(plan: TrainingSetup) -> None:
    """Raise a ValueError if the mesh does not fit the model."""
    mesh, decoder = plan.mesh, plan.decoder
    for name, value in (("sequences", plan.sequences), ("tokens", plan.tokens), ("micro_batches", plan.micro_batches)):
        if value < 1:
            raise ValueError(f"{name} is {value}; give 1 or more")
    for _, block in decoder.blocks:
        if block.heads % mesh.tp:
            raise ValueError(f"{decoder.name} has {block.heads} heads, which tp {mesh.tp} does not divide")
        experts = max(matrix.experts for matrix in block.matrices)
        if block.chosen and experts % mesh.ep:
            raise ValueError(f"{decoder.name} has {experts} experts, which ep {mesh.ep} does not divide")
    if mesh.ep > 1 and not any(block.chosen for _, block in decoder.blocks):
        raise ValueError(f"{decoder.name} has no experts: leave ep at 1")
    if plan.tokens % (mesh.cp * mesh.tp):
        raise ValueError(f"{plan.tokens} tokens cannot be divided by cp {mesh.cp} x tp {mesh.tp}; take a multiple")
    if mesh.pp > decoder.layers:
        raise ValueError(f"{decoder.name} has {decoder.layers} blocks, fewer than pp {mesh.pp}")


def predict(
    decoder: DecoderShape, recipe: Recipe, gpu: str | Gpu, mesh: Mesh, interconnect: Interconnect, **how: object
) -> StepCost:
    """Build a `TrainingSetup` and return the cost of its step; `how` are further fields of it.

    Raises:
        ValueError: an unknown GPU, or a mesh that does not fit.
    """
    return step(
        TrainingSetup(
            decoder=decoder,
            recipe=recipe,
            gpu=hardware.get(gpu),
            mesh=mesh,
            interconnect=interconnect,
            **how,  # type: ignore[arg-type]
        )
    )
