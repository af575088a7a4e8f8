"""Training runs that decide whether a release is accepted: run, judged and reported, but not timed."""
