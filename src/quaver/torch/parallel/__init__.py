"""What is applied to a model from outside so that many ranks train it; no layer knows a mesh."""
