"""What `convert` decides in any framework: which module gets which recipe, and the report; it touches no module."""
