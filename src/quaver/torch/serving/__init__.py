"""Weights of a model in training for a running inference engine: streams, receivers, and a loader for transformers."""

from quaver.torch.conversion.export.check import Divergence, divergence
from quaver.torch.serving.loader import StreamLoader
from quaver.torch.serving.receivers import Receiver, SglangReceiver, TransformersReceiver, VllmReceiver
from quaver.torch.serving.stream import ServingStream, StreamBytes, serving_stream

__all__ = [
    "Divergence",
    "Receiver",
    "ServingStream",
    "SglangReceiver",
    "StreamBytes",
    "StreamLoader",
    "TransformersReceiver",
    "VllmReceiver",
    "divergence",
    "serving_stream",
]
