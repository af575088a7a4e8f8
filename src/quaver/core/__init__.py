"""Numbers and decisions that both front ends share: formats, specs, reference, rules, costs; no framework."""
