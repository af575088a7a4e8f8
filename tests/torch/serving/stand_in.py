"""Engines in another process that have the documented weight-update calls of vLLM and SGLang, and a model to load into.

They decode each layer by the formulas of its format, multiply, and load the result into a model of transformers in
float32. Calls arrive over a socket. The data arrive by broadcasts of gloo or as tensors in shared memory.
"""

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Client
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # Registers how tensors are pickled.
from torch import Tensor

from quaver.torch.conversion.export.operands import decoded
from tests.torch.serving.small import llama

#: Seconds after which a broadcast fails.
PATIENCE = 30.0


def group(port: int, rank: int) -> Any:
    """A process group of the trainer (0) and an engine (1), which is not the default one."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE))


def broadcast(group: Any, tensor: Tensor) -> None:
    """Broadcast from the trainer; gloo knows no float8."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor.flatten().view(torch.uint8)], options).wait()


class Model:
    """A model in float32, which loads checkpoint-format tensors as they come, layer by layer."""

    def __init__(self, trouble: str) -> None:
        self.trouble, self.buckets = trouble, 0
        self.begin("compressed-tensors")

    def begin(self, method: str) -> None:
        """Start with other weights, and read a format by its `quant_method`."""
        self.model, self.method = llama(None, seed=1).eval(), method

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        layers: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            for name, tensor in weights:
                if name in parameters and parameters[name].dtype is tensor.dtype:
                    parameters[name].copy_(tensor)
                else:
                    layer, _, suffix = name.rpartition(".")
                    layers.setdefault(layer, {})[suffix] = tensor
            for layer, tensors in layers.items():
                parameters[f"{layer}.weight"].copy_(decoded(tensors, self.method).dense())

    def next_bucket(self) -> None:
        self.buckets += 1
        if self.buckets == 2 and self.trouble == "dies":
            os._exit(1)
        if self.buckets == 2 and self.trouble == "hangs":
            time.sleep(60)

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.model(tokens).logits
        return found.clone()


class Vllm(Model):
    """As vllm/v1/worker/gpu_worker.py and vllm/distributed/weight_transfer/nccl_engine.py of 0.33, not packed."""

    active = False
    group: Any = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.group = group(init_info["master_port"], init_info["rank_offset"])

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.active = True
        # Layers are loaded when they are complete, as layerwise reloading does.
        self.waiting: list[tuple[str, Tensor]] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        assert set(update_info) == {"names", "dtype_names", "shapes"}
        self.next_bucket()
        for name, dtype, shape in zip(*update_info.values(), strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            self.waiting.append((name, tensor))

    def finish_weight_update(self) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.load_weights(self.waiting)
        self.active = False


class Sglang(Model):
    """As sglang/srt/entrypoints/engine.py of 0.5.23."""

    open = False
    flushed = 0
    group: Any = None

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> tuple[bool, str]:
        assert (world_size, group_name, backend) == (2, "weight_update_group", "gloo")
        self.group = group(master_port, rank_offset)
        return True, "Succeeded to initialize custom process group."

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        self.open = True
        self.waiting: list[tuple[str, Tensor]] = []
        return True, ""

    def update_weights_from_tensor(
        self, serialized: bytes, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        if not self.open:
            return False, "no session is open"
        self.next_bucket()
        named: list[tuple[str, Tensor]] = ForkingPickler.loads(serialized)
        assert load_format is None and not flush_cache and all(tensor.is_shared() for _, tensor in named)
        self.waiting += [(name, tensor.clone()) for name, tensor in named]
        return True, "Success"

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        load_format: str | None = None,
    ) -> tuple[bool, str]:
        if not self.open:
            return False, "no session is open"
        self.next_bucket()
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            self.waiting.append((name, tensor))
        return True, "Succeeded to update parameter online."

    def end_weight_update(self) -> tuple[bool, str]:
        if self.trouble == "refuses":
            return False, "no weight of this shape"
        self.load_weights(self.waiting)
        self.open = False
        return True, ""

    def flush_cache(self) -> None:
        self.flushed += 1

    def count_flushes(self) -> int:
        return self.flushed


class Remote:
    """An engine in another process: each method is a call there."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.connection.send((name, args, kwargs))
            good, answer = self.connection.recv()
            if not good:
                raise RuntimeError(answer)
            return answer

        return call

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None, flush_cache: bool = True) -> Any:
        """Pass tensors in shared memory, as SGLang's Engine does with its MultiprocessingSerializer."""
        serialized = bytes(ForkingPickler.dumps(named_tensors))
        return self.__getattr__("update_weights_from_tensor")(serialized, load_format, flush_cache=flush_cache)


def main(kind: str, address: str, key: str, trouble: str) -> None:
    # Shared memory is exchanged between processes with the same key.
    multiprocessing.current_process().authkey = bytes.fromhex(key)
    torch.set_num_threads(1)
    engine = {"vllm": Vllm, "sglang": Sglang}[kind](trouble)
    with Client(address, authkey=bytes.fromhex(key)) as connection:
        while True:
            try:
                name, args, kwargs = connection.recv()
            except EOFError:
                return
            try:
                answer = True, getattr(engine, name)(*args, **kwargs)
            except Exception as error:
                answer = False, str(error)
            connection.send(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
