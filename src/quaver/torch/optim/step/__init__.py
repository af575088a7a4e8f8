"""One optimizer step: eager, compiled, by GPU kernels, and across ranks."""
