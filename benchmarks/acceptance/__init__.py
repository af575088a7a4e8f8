"""The training runs that a release is accepted by: run, judged, reported; no timing."""
