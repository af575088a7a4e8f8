"""Numbers and decisions: formats, specs, the numpy reference, plan, rules, op registry. No framework is imported."""
