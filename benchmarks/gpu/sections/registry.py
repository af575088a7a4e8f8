"""The registry of sections, in the order in which they run: a new one is a file and a line here."""

from benchmarks.gpu.measuring.setting import Section
from benchmarks.gpu.sections.kernels import ceilings, gemms, producers, quantizing
from benchmarks.gpu.sections.layers import host, layer, linears, memory
from benchmarks.gpu.sections.training import graph, runs

SECTIONS: dict[str, Section] = {
    module.SECTION.name: module.SECTION
    for module in (ceilings, quantizing, producers, gemms, linears, layer, host, memory, graph, runs)
}
