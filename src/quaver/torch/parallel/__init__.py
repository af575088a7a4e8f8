"""Public API to train a model on many ranks, applied to the model from outside; no layer stores a device mesh."""

from quaver.torch.parallel.checkpoint import Checkpoint, sync_amax_histories
from quaver.torch.parallel.comm_counter import CommCounter
from quaver.torch.parallel.consistency import check_consistency
from quaver.torch.parallel.context.context_parallel import ContextParallel, context_parallel
from quaver.torch.parallel.fsdp.gather import GatherReport, gather_quantized, refresh_gather
from quaver.torch.parallel.fsdp.scales import precompute_scales
from quaver.torch.parallel.moe.dispatch import AllToAllSplits, all_to_all
from quaver.torch.parallel.moe.expert_parallel import ExpertParallel
from quaver.torch.parallel.pipeline import pipeline_stage
from quaver.torch.parallel.quantized_gradients import quantize_gradients
from quaver.torch.parallel.tensor.styles import (
    ColwiseParallel,
    HeadParallel,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
)
from quaver.torch.parallel.tensor.vocab import cross_entropy

__all__ = [
    "AllToAllSplits",
    "Checkpoint",
    "ColwiseParallel",
    "CommCounter",
    "ContextParallel",
    "ExpertParallel",
    "GatherReport",
    "HeadParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "VocabParallel",
    "all_to_all",
    "check_consistency",
    "context_parallel",
    "cross_entropy",
    "gather_quantized",
    "pipeline_stage",
    "precompute_scales",
    "quantize_gradients",
    "refresh_gather",
    "sync_amax_histories",
]
