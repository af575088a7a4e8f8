"""Numbers and decisions: formats, specs, the numpy reference, plan, rules and the op registry. No framework is imported."""
