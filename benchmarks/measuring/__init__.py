"""Tools of measuring: figures, clocks, machine and results."""
