"""What is decided in any framework: which module gets which recipe, and at which step; it touches no module."""
