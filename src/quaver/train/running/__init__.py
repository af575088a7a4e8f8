"""What runs: training, resuming, comparing, generating; it shows nothing by itself."""
