"""Weights that fully_shard gathers as codes: their shards, the amaxes that ranks agree on, no wrapper of its own."""
