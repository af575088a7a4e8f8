"""The registry of sections, in the order in which they run, by worth: a new one is a file and a line here.

What the card has comes first (its ceilings, which GEMMs are native, what the host takes), then what the library is
judged by; single kernels explain that, and training is slow to say little.
"""

from benchmarks.gpu.measuring.setting import Section
from benchmarks.gpu.sections.kernels import ceilings, gemms, optimizers, producers, quantizing
from benchmarks.gpu.sections.layers import attention, experts, host, layer, linears, memory, state_space
from benchmarks.gpu.sections.training import graph, runs

SECTIONS: dict[str, Section] = {
    module.SECTION.name: module.SECTION
    for module in (
        ceilings,
        gemms,
        host,
        linears,
        quantizing,
        layer,
        experts,
        producers,
        attention,
        state_space,
        optimizers,
        graph,
        memory,
        runs,
    )
}
