"""Send a stream to a running engine by the calls that it documents for weight updates.

Engines load a bucket when it arrives. If an update fails, a running vLLM or SGLang may have some layers of the new
weights and some of the old; transformers' `StreamLoader` keeps the old ones. In each case the trainer is unchanged, and
the next `changed()` sends everything.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
from torch import Tensor

from quaver.torch.serving.loader import StreamLoader
from quaver.torch.serving.stream import Bucket, ServingStream, StreamBytes
from quaver.torch.state.history.sync import check_agreement

#: Sends a tensor to all workers of an engine, for example by a broadcast from rank 0 of a process group.
Send = Callable[[Tensor], None]


class Receiver(ABC):
    """A running engine, as the trainer sees it.

    Args:
        timeout: seconds in which the engine must answer a call.
    """

    engine: str

    def __init__(self, timeout: float = 300.0) -> None:
        self.timeout = timeout
        #: True if an update has begun and not ended.
        self._open = False
        #: Calls that have not returned in time.
        self._late: list[Future[Any]] = []

    @abstractmethod
    def start(self) -> None:
        """Begin an update."""

    @abstractmethod
    def load(self, bucket: Bucket) -> None:
        """Have the engine load a bucket."""

    @abstractmethod
    def finish(self) -> None:
        """End an update, after which the engine generates with the new weights."""

    def close(self) -> None:
        """End an update that has failed, so that another one can start."""
        self.finish()

    def update_weights(self, stream: ServingStream, *, changed: bool = False) -> StreamBytes:
        """Send a stream's buckets to the engine; generation must be paused.

        On several ranks all of them call it; the rank whose `stream.sends` is True talks to the engine.

        Args:
            stream: a stream for this engine.
            changed: True sends `stream.changed()`, or everything if another receiver had the last one.
        Returns:
            Bytes that were sent.
        Raises:
            ValueError: the stream is for another engine.
            RuntimeError: the engine has failed, died or timed out; the message names the bucket. If the model is
                sharded, ValueError on all its ranks; else only the rank that sends knows of it.
        """
        if stream.engine.name != self.engine:
            raise ValueError(
                f"{type(self).__name__} got a stream for {stream.engine.name}: make it with serving_stream(model, "
                f"{self.engine!r})"
            )
        if stream.receiver is not self:
            stream.reset()
            stream.receiver = self
        groups, sends, number = stream.groups, stream.sends, 0
        where, error = "the start of the update", self._attempt(self._begin) if sends else None
        started = sends and error is None
        try:
            for bucket in stream.changed() if changed else stream:
                if error is not None and not groups:
                    break
                # Other ranks go on gathering, and so does this one.
                if sends and error is None:
                    number, where = number + 1, f"bucket {number + 1} ({bucket[0][0]} to {bucket[-1][0]})"
                    error = self._attempt(self.load, bucket)
            if started and error is None:
                where, error = "the end of the update", self._attempt(self._end, self.finish)
            elif started and not isinstance(error, TimeoutError):
                self._attempt(self._end, self.close)
        except BaseException:
            # The weights cannot be sent, and the engine waits for the end of the update.
            stream.reset()
            if started:
                self._attempt(self._end, self.close)
            raise
        self._raise(stream, groups, where, error)
        return stream.bytes

    def _begin(self) -> None:
        if self._open:
            # The engine may have answered the last update too late, and wait for its end; or it has restarted.
            self._attempt(self.close)
        self._open = True
        self.start()

    def _end(self, call: Callable[[], None]) -> None:
        call()
        self._open = False

    def _attempt(self, call: Callable[..., None], *args: Any) -> Exception | None:
        """Make a call and return its exception."""
        try:
            call(*args)
        except Exception as error:
            return error
        return None

    def _raise(self, stream: ServingStream, groups: Sequence[Any], where: str, error: Exception | None) -> None:
        """Raise on all ranks if the engine has failed."""
        if error is not None:
            stream.reset()
            error = RuntimeError(
                f"{self.engine} has failed at {where}: {type(error).__name__}: {error}. The trainer is unchanged; the "
                "engine may have some of the new weights: restart it or send everything again before it generates"
            )
        if groups:
            try:
                check_agreement(f"the update of {self.engine}", {}, *groups, error=error or "")
            except ValueError:
                stream.reset()
                raise
        elif error is not None:
            raise error

    def _answer(self, call: Callable[[], Any], during: Callable[[], None] | None = None) -> Any:
        """Call an engine in a thread, do in another one what must happen meanwhile, and return the answer in time."""
        if not all(future.done() for future in self._late):
            raise TimeoutError(
                "a call or a broadcast of an earlier update has not returned, and could mix its weights with new ones: "
                "restart the engine and make another receiver"
            )
        futures = [_in_thread(each) for each in (call, during) if each is not None]
        try:
            done = wait(futures, self.timeout, FIRST_EXCEPTION).done
        finally:
            self._late = [future for future in futures if not future.done()]
        # An engine that rejects a call never joins its broadcast.
        answers = [future.result() for future in futures if future in done]
        if len(answers) < len(futures):
            raise TimeoutError(f"no answer in {self.timeout:g} seconds")
        return answers[0]


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread that does not outlive the process, as threads of an executor would."""
    future: Future[Any] = Future()

    def target() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=target, daemon=True).start()
    return future


class VllmReceiver(Receiver):
    """A vLLM engine with a weight transfer backend that receives one broadcast per tensor ("nccl" with packed=False).

    Args:
        client: object with vLLM's calls `start_weight_update()`, `update_weights(update_info)` and
            `finish_weight_update()`, such as its `HTTPVLLMWeightSyncClient`. `init_weight_transfer_engine` has been
            called.
        send: broadcasts a tensor in the group of that initialization.
        timeout: seconds in which the engine must answer a call.
    Source: docs.vllm.ai/en/v0.32.0/training/weight_transfer and its page base, "VLLMWeightSyncClient".
    """

    engine = "vllm"

    def __init__(self, client: Any, send: Send, timeout: float = 300.0) -> None:
        super().__init__(timeout)
        self.client, self.broadcast = client, send

    def start(self) -> None:
        self._answer(self.client.start_weight_update)

    def load(self, bucket: Bucket) -> None:
        info = _described(bucket, "dtype_names")
        # The workers wait for the broadcasts inside the call.
        self._answer(lambda: self.client.update_weights(info), _sending(bucket, self.broadcast))

    def finish(self) -> None:
        self._answer(self.client.finish_weight_update)


class SglangReceiver(Receiver):
    """An SGLang engine.

    Args:
        engine: `sglang.Engine`, or an object with its calls `begin_weight_update`, `update_weights_from_tensor` or
            `update_weights_from_distributed`, `end_weight_update` and `flush_cache`.
        send: broadcasts a tensor in the group of `init_weights_update_group`; None passes tensors to the engine, which
            must be on the same machine.
        group_name: name of that group.
        timeout: seconds in which the engine must answer a call.
    Source: docs.sglang.io/docs/advanced_features/sglang_for_rl; sglang/srt/entrypoints/engine.py of 0.5.23.
    """

    engine = "sglang"

    def __init__(
        self, engine: Any, send: Send | None = None, group_name: str = "weight_update_group", timeout: float = 300.0
    ) -> None:
        super().__init__(timeout)
        self.server, self.broadcast, self.group_name = engine, send, group_name

    def start(self) -> None:
        self._checked(self.server.begin_weight_update)

    def load(self, bucket: Bucket) -> None:
        send = self.broadcast
        if send is None:
            self._checked(lambda: self.server.update_weights_from_tensor(bucket, flush_cache=False))
            return
        info = _described(bucket, "dtypes") | {"group_name": self.group_name, "flush_cache": False}
        self._checked(lambda: self.server.update_weights_from_distributed(**info), _sending(bucket, send))

    def finish(self) -> None:
        self._checked(self.server.end_weight_update)
        self._checked(self.server.flush_cache)

    def _checked(self, call: Callable[[], Any], during: Callable[[], None] | None = None) -> None:
        """Call the engine and raise if it answers that it has failed."""

        def checked() -> None:
            answer = call()
            if isinstance(answer, tuple):
                good, message = answer[0], answer[1]
            elif isinstance(answer, dict):
                good, message = answer.get("success", True), answer.get("message", "")
            else:
                good, message = getattr(answer, "success", answer is not False), getattr(answer, "message", str(answer))
            if not good:
                raise RuntimeError(message)

        self._answer(checked, during)


class TransformersReceiver(Receiver):
    """A model of transformers in another process, or in this one.

    Args:
        client: `StreamLoader`, or an object that passes its calls `start_weight_update`, `update_weights` and
            `finish_weight_update` to the process that has it.
        timeout: seconds in which it must answer a call.
    """

    engine = "transformers"

    def __init__(self, client: Any, timeout: float = 300.0) -> None:
        super().__init__(timeout)
        self.client = client

    def _answer(self, call: Callable[[], Any], during: Callable[[], None] | None = None) -> Any:
        # Another thread would not see this one's autocast.
        return call() if isinstance(self.client, StreamLoader) else super()._answer(call, during)

    def start(self) -> None:
        self._answer(self.client.start_weight_update)

    def load(self, bucket: Bucket) -> None:
        self._answer(lambda: self.client.update_weights(bucket))

    def finish(self) -> None:
        self._answer(self.client.finish_weight_update)

    def close(self) -> None:
        """Do nothing: without `finish_weight_update` the model keeps its weights."""


def _described(bucket: Bucket, dtypes: str) -> dict[str, Any]:
    """Return names, dtypes and shapes of a bucket."""
    return {
        "names": [name for name, _ in bucket],
        dtypes: [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def _sending(bucket: Bucket, send: Send) -> Callable[[], None]:
    """Return a function that sends a bucket from another thread, on this thread's device and stream."""
    device = bucket[0][1].device
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def send_all() -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)
        for _, tensor in bucket:
            send(tensor.contiguous())

    return send_all
