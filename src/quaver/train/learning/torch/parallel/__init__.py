"""How one run's learner is spread over the ranks of a process group; what a single process needs is not here."""
