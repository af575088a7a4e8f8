"""What a run is told and what follows from it alone: options, sizes, schedule, memory; no framework."""
