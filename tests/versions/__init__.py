"""What each version of torch and triton does on a machine without a GPU: `python -m tests.versions`, no single bug."""
