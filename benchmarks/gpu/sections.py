"""The registry of sections, in the order in which they run: a new one is a file and a line here."""

from benchmarks.gpu import ceilings, gemms, graph, host, kernels, layer, linears, memory, producers, training
from benchmarks.gpu.setting import Section

SECTIONS: dict[str, Section] = {
    module.SECTION.name: module.SECTION
    for module in (ceilings, kernels, producers, gemms, linears, layer, host, memory, graph, training)
}
