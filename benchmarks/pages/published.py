"""Times that others published, and what the ledger predicts for what they ran.

The ledger is calibrated on two rows of Transformer Engine's H200 NVL table, bf16 and quantized beforehand; everything
here it has not seen. A benchmark moves bytes of its own around the layer: they are counted as its source says.
"""

from dataclasses import replace
from typing import NamedTuple

from quaver import recipes
from quaver.costs import hardware, ledger
from quaver.costs.hardware import FRACTION_BF16, FRACTION_FP8, GPUS, Gpu
from quaver.costs.ledger import moving, quantization, written
from quaver.recipes.spec import GemmSpec, Recipe


class Forecast(NamedTuple):
    """A published time in ms or speed-up, and its prediction."""

    what: str
    unit: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Error relative to the published figure."""
        return self.predicted / self.published - 1


#: Transformer Engine docs/examples/gemm_profiling: [out, in] of the layer's matrices, and the tokens.
TE_MATRICES = ((12_288, 4096), (4096, 4096), (16_384, 4096), (4096, 16_384))
TE_TOKENS = 15_872
#: Published ms by GPU and recipe, with quantization.
TE_TIMES = {
    "h200-nvl": {"tensorwise": 20.285, "delayed": 18.978, "blockwise": 22.882},
    "b300": {"tensorwise": 9.147, "delayed": 7.802, "mxfp8": 8.984, "nvfp4": 6.453},
}


def te_layer(recipe: Recipe, gpu: Gpu) -> float:
    """Return the seconds of Transformer Engine's table: twelve GEMMs, each the forward of a te.Linear of its shape.

    So each quantizes its first operand into both copies, for a backward that never comes, and its second, whose twin
    only an input with a gradient would need, into one (benchmarks/gemm/benchmark_gemm.py there).
    """
    seconds = 0.0
    wanted = ledger.copies(recipe, gpu)
    delayed = recipe.delayed is not None
    for n, k in TE_MATRICES:
        for rows, columns, others in ((TE_TOKENS, k, n), (TE_TOKENS, n, k), (n, TE_TOKENS, k)):
            first = quantization(wanted["input"], rows, columns, gpu, delayed=delayed)
            second = quantization(wanted["weight"][:1], others, columns, gpu, delayed=delayed)
            seconds += first.seconds + second.seconds + ledger.gemm(recipe.fprop, rows, others, columns, gpu).seconds
    return seconds


#: pytorch/ao#2185, rowwise, compiled, "tensorwise w/ rescale", use_fast_accum: (tokens, in, out) and the speed-up.
TORCHAO = {
    (16_384, 8192, 1280): 1.111733,
    (16_384, 1024, 8192): 1.426141,
    (16_384, 8192, 7168): 1.729502,
    (16_384, 3584, 8192): 1.711090,
}


def torchao_speedup(tokens: int, in_features: int, out_features: int, gpu: Gpu) -> float:
    """Speed-up of torchao's benchmarks/float8/bench_linear_float8.py: `linear(x).sum().backward()`, compiled.

    Around either layer: y is summed, and the gradients are added to those of the last call (read, read, write).
    The gradient of a sum is one number: bf16 writes it out as a matrix; quantizing it reads nothing.
    torchao makes each copy by kernels of its own, and in backward runs tensorwise GEMMs with scales of one and
    multiplies their results by the rows' scales afterwards (ao#2184: a kernel for each GEMM).
    """
    x, w, y = tokens * in_features, out_features * in_features, tokens * out_features
    around = moving(2 * y + 6 * (x + w), 3, gpu).seconds
    gradient = moving(2 * y, 1, gpu).seconds
    plain = ledger.layer(recipes.bf16(), tokens, in_features, out_features, gpu).seconds
    rowwise, tensorwise = recipes.rowwise(), recipes.tensorwise().dgrad
    copies = ledger.copies(rowwise, gpu)
    quantized = sum(
        sum(quantization([copy], rows, in_features, gpu).seconds for copy in copies[name])
        for name, rows in (("input", tokens), ("weight", out_features))
    )
    quantized += moving(sum(written(c, tokens, out_features) for c in copies["grad_output"]), 2, gpu).seconds
    rescaled = moving(4 * (x + w), 2, gpu).seconds
    gemms = _seconds(rowwise.fprop, tokens, out_features, in_features, gpu)
    gemms += _seconds(tensorwise, tokens, in_features, out_features, gpu)
    gemms += _seconds(tensorwise, out_features, in_features, tokens, gpu)
    return (plain + around + gradient) / (gemms + quantized + rescaled + around)


def _seconds(spec: GemmSpec, m: int, n: int, k: int, gpu: Gpu) -> float:
    return ledger.gemm(spec, m, n, k, gpu).seconds


def of_transformer_engine(gpu: str) -> list[Forecast]:
    """Return the rows of Transformer Engine's table for a GPU."""
    card = hardware.get(gpu)
    return [
        Forecast(f"Transformer Engine, {card.about}, {name}", "ms", ms, te_layer(recipes.get(name), card) * 1e3)
        for name, ms in TE_TIMES[gpu].items()
    ]


def of_torchao(gpu: str | Gpu = "h100-hbm2e") -> list[Forecast]:
    """Return torchao's four shapes."""
    card = hardware.get(gpu)
    return [
        Forecast(f"torchao rowwise, H100, {shape}", "speed-up", ratio, torchao_speedup(*shape, card))
        for shape, ratio in TORCHAO.items()
    ]


def other_cards() -> dict[str, Gpu]:
    """Return other descriptions of torchao's GPU, to see how much predictions depend on them."""
    card = GPUS["h100-hbm2e"]
    bf16, tensor = card.rates["bf16"], card.rates["tensor"]
    why = "the fraction of its peak that the H200 NVL reaches, of the published peak of the H100 SXM"
    scaled = {
        "bf16": bf16.times(989.5 * FRACTION_BF16 / bf16.value, why),
        "tensor": tensor.times(1979 * FRACTION_FP8 / tensor.value, why),
        "row": tensor.times(0.95 * 1979 * FRACTION_FP8 / tensor.value, why),
    }
    return {
        "the H100 SXM with HBM3": GPUS["h100"],
        "2.4 TB/s, GEMM rates scaled up to the peaks of the H100 SXM": replace(card, rates=scaled),
    }


def seven() -> list[Forecast]:
    """Return the figures that the ledger must predict: three of Transformer Engine's and torchao's four shapes."""
    return of_transformer_engine("h200-nvl") + of_torchao()
