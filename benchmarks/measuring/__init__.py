"""How anything is measured, told and kept: figures, clocks, machine, results; nothing that is measured."""
