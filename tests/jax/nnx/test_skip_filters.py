"""`convert(..., skip=)` of NNX takes filters, alone or among names."""

import jax
from flax import nnx

import quaver
import quaver.jax.nnx as qn


def model() -> nnx.Module:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        sizes = {"up": (4096, 8192), "down": (8192, 4096), "small": (64, 64), "head": (4096, 4096)}
        return nnx.Dict({name: nnx.Linear(k, n, rngs=rngs) for name, (k, n) in sizes.items()})

    return nnx.eval_shape(lambda: build(nnx.Rngs(jax.random.key(0))))


def test_names_and_filters_mix_and_the_report_gives_the_reasons() -> None:
    report = qn.convert(model(), "rowwise", skip=["head", quaver.rules.unprofitable("h100")])
    assert set(report.converted) == {"up", "down"}
    assert report.skipped["head"] == "skip pattern 'head'"
    assert report.skipped["small"].startswith("predicted 0.")


def test_a_filter_alone() -> None:
    report = qn.convert(model(), "tensorwise", skip=quaver.rules.auto_filter_small_kn("tensorwise"))
    assert set(report.skipped) == {"small"} and "torchao" in report.skipped["small"]
