"""State that outlives a call: current recipe, scaling histories, noise counters, weight cache, recomputation logs."""
