"""What is typed: the command line, the doctor, the plan, and what must be installed; no training."""
