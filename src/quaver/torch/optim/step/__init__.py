"""One optimizer step: eager, compiled, on a GPU and across ranks."""
