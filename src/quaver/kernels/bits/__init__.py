"""What kernels do to the bits of numbers, as functions that other kernels call; nothing here is launched."""
