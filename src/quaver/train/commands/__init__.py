"""The command line: options and output of train, compare, plot, generate, export, doctor and plan."""
