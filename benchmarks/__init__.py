"""Benchmarks: ratios side by side in one run, and the training runs that a release is accepted by; no test.

    python -m benchmarks cpu                every case of `benchmarks.cases.CASES`, against nn.Linear and torchao
    python -m benchmarks.gpu                on a machine with an NVIDIA GPU: kernels, GEMMs, layers, memory, training
    python -m benchmarks accept             paired training runs under every recipe, with a control that must fail
    python -m benchmarks accept-attention   the same under the recipes that quantize attention too

All write what they found to `benchmarks/results/`, with the machine, the versions and the commit.
"""
