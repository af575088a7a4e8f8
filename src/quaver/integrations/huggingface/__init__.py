"""transformers' own seams: a quantization config, a quantizer and a Trainer's callback; no model of transformers."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    sentence = f"{__name__} needs transformers, which is not installed: pip install transformers"
    raise ModuleNotFoundError(sentence, name="transformers")

from quaver.integrations.huggingface.callback import ScalingCallback
from quaver.integrations.huggingface.config import QuaverConfig
from quaver.integrations.huggingface.quantizer import QuaverQuantizer

__all__ = ["QuaverConfig", "QuaverQuantizer", "ScalingCallback"]
