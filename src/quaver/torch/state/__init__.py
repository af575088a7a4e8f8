"""What outlives a call, and nothing else: recipe in force, histories, counts, kept weights, logs of recomputation."""
