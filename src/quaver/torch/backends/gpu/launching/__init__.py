"""What a device is, how a kernel is launched, and what CUDA graphs ask of both; no kernel is known here."""
