"""What is applied to a model from outside so that many ranks train it; no layer knows a mesh."""

from quaver.torch.parallel.alike.comparing import check_alike
from quaver.torch.parallel.checkpoint import Checkpoint, agree_histories
from quaver.torch.parallel.context.applying import ContextParallel, context_parallel
from quaver.torch.parallel.fsdp.agreeing import micro_batches
from quaver.torch.parallel.fsdp.gathering import Gathers, gather_again, gather_quantized
from quaver.torch.parallel.fsdp.watching import Traffic
from quaver.torch.parallel.pipeline.stages import stage
from quaver.torch.parallel.quantized.dispatch import Splits, exchange
from quaver.torch.parallel.quantized.experts import ExpertParallel
from quaver.torch.parallel.quantized.gradients import quantize_gradients
from quaver.torch.parallel.tensor.styles import Column, Heads, Row, Sequence, Vocabulary
from quaver.torch.parallel.tensor.words.loss import cross_entropy

__all__ = [
    "Checkpoint",
    "Column",
    "ContextParallel",
    "ExpertParallel",
    "Gathers",
    "Heads",
    "Row",
    "Sequence",
    "Splits",
    "Traffic",
    "Vocabulary",
    "agree_histories",
    "check_alike",
    "context_parallel",
    "cross_entropy",
    "exchange",
    "gather_again",
    "gather_quantized",
    "micro_batches",
    "quantize_gradients",
    "stage",
]
