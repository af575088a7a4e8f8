"""A model's step or forward as one program: a recorded CUDA graph, a file of ONNX; no weights are converted here."""
