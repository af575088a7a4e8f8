"""Receivers drive the documented calls of engines, in another process, and report engines that fail."""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import quaver.torch as qt
from quaver import recipes
from quaver.torch.conversion.export.check import HIGH_PRECISION, log_probabilities
from quaver.torch.conversion.export.layouts import FORMATS
from quaver.torch.serving import SglangReceiver, StreamLoader, TransformersReceiver, VllmReceiver, divergence
from tests import forked
from tests.conftest import ROOT
from tests.torch.serving import stand_in
from tests.torch.serving.small import assert_same, llama, tensors, tokens

#: Recipe and checkpoint format of each kind of scheme that the engine reads.
VLLM = [
    ("tensorwise", "compressed-tensors"),
    ("rowwise", "compressed-tensors"),
    ("blockwise", "deepseek"),
    ("mxfp8", "modelopt"),
    ("nvfp4", "compressed-tensors"),
]
SGLANG = [("rowwise", "compressed-tensors"), ("tensorwise", "deepseek"), ("nvfp4", "modelopt")]


@contextmanager
def engine(kind: str, folder: Path, trouble: str = "") -> Iterator[Any]:
    """An engine in another process."""
    key = bytes(multiprocessing.current_process().authkey)
    folder.mkdir(exist_ok=True)
    address = str(folder / "socket")
    with Listener(address, authkey=key) as listener:
        command = [sys.executable, "-m", "tests.torch.serving.stand_in", kind, address, key.hex(), trouble]
        program = forked.quick.Popen(command, cwd=ROOT)
        try:
            with listener.accept() as connection:
                yield stand_in.Remote(connection)
        finally:
            program.terminate()
            program.wait(30)


def joined(store: Any, call: Any) -> Any:
    """The trainer's side of a group that an engine joins inside a call."""
    from threading import Thread

    thread = Thread(target=call)
    thread.start()
    group = stand_in.group(store.port, 0)
    thread.join(stand_in.PATIENCE)
    return group


@contextmanager
def vllm(folder: Path, timeout: float = 30.0, **options: Any) -> Iterator[tuple[Any, VllmReceiver]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with engine("vllm", folder, **options) as client:
        info = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
        group = joined(store, lambda: client.init_weight_transfer_engine(info))
        yield client, VllmReceiver(client, partial(stand_in.broadcast, group), timeout)


@contextmanager
def sglang(folder: Path, shared: bool = True, **options: Any) -> Iterator[tuple[Any, SglangReceiver]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with engine("sglang", folder, **options) as client:
        if shared:
            yield client, SglangReceiver(client, timeout=30.0)
            return
        arguments = ("127.0.0.1", store.port, 1, 2, "weight_update_group", "gloo")
        group = joined(store, lambda: client.init_weights_update_group(*arguments))
        yield client, SglangReceiver(client, partial(stand_in.broadcast, group), timeout=30.0)


def logits_of_stored_codes(trained: Any, recipe: str) -> torch.Tensor:
    """Logits of the trainer's codes, with unquantized inputs in float32."""
    stored = llama(None)
    stored.load_state_dict({name: value for name, value in trained.state_dict().items() if name in stored.state_dict()})
    qt.quantize_weights(stored, recipe)
    for layer in stored.modules():
        if isinstance(layer, qt.Linear):
            layer.recipe = HIGH_PRECISION
    stored.eval()
    with torch.no_grad():
        return stored(tokens()).logits


def assert_equal_logits(client: Any, trained: Any, recipe: str) -> None:
    expected, found = logits_of_stored_codes(trained, recipe), client.logits(tokens())
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-6


def step(model: Any) -> None:
    """A step of training that leaves the first layer as it is."""
    optimizer = torch.optim.SGD([*model.model.layers[1].parameters(), *model.lm_head.parameters()], 0.5)
    model.train()
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    model.zero_grad()


@pytest.mark.ranks
def test_vllm_gets_the_codes_of_every_step(tmp_path: Path) -> None:
    with vllm(tmp_path) as (client, receiver):
        for recipe, checkpoint_format in VLLM:
            client.begin(FORMATS[checkpoint_format].method)
            trained = llama(recipe)
            stream = qt.serving_stream(
                trained, "vllm", version="0.33.0", checkpoint_format=checkpoint_format, bucket_bytes=20_000
            )
            full = receiver.update_weights(stream, changed=True)
            assert_equal_logits(client, trained, recipe)
            step(trained)
            part = receiver.update_weights(stream, changed=True)
            assert_equal_logits(client, trained, recipe)
            assert 0 < part.codes < full.codes and 0 < part.other < full.other
            receiver.update_weights(stream)
            assert_equal_logits(client, trained, recipe)


@pytest.mark.ranks
@pytest.mark.parametrize("shared", [True, False])
def test_sglang_gets_the_codes_of_every_step(shared: bool, tmp_path: Path) -> None:
    with sglang(tmp_path, shared) as (client, receiver):
        for recipe, checkpoint_format in SGLANG:
            client.begin(FORMATS[checkpoint_format].method)
            trained = llama(recipe)
            stream = qt.serving_stream(trained, "sglang", checkpoint_format=checkpoint_format, bucket_bytes=20_000)
            for _ in range(2):
                receiver.update_weights(stream, changed=True)
                assert_equal_logits(client, trained, recipe)
                step(trained)
        assert client.count_flushes() == 2 * len(SGLANG)


@pytest.mark.parametrize("recipe", [name for name in recipes.RECIPES if name != "bf16"])
def test_rollout_computes_the_trainers_probabilities(recipe: str) -> None:
    """With the same recipe the KL of the next token is 0 at every step; delayed scaling has another input scale."""
    trained, rollout = llama(recipe), llama(recipe, seed=1)
    stream = qt.serving_stream(trained, "transformers")
    receiver = TransformersReceiver(StreamLoader(rollout))
    log = []
    for _ in range(3):
        receiver.update_weights(stream, changed=True)
        log.append(divergence(log_probabilities(trained, tokens()), log_probabilities(rollout, tokens())))
        step(trained)
    assert len(log) == 3 and all(each.largest < 1e-3 for each in log)
    assert recipe == "delayed" or all(each.largest == 0.0 for each in log)
    stale = divergence(log_probabilities(trained, tokens()), log_probabilities(rollout, tokens()))
    assert stale.mean > 1e-6


def test_experts_in_a_stack_are_received() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    def mixtral(seed: int) -> Any:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        net = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=4, vocab_size=128))
        qt.convert(net, "mxfp8")
        return net

    trained, rollout = mixtral(0), mixtral(1)
    loader = StreamLoader(rollout)
    TransformersReceiver(loader).update_weights(qt.serving_stream(trained, "transformers"))
    assert divergence(log_probabilities(trained, tokens()), log_probabilities(rollout, tokens())).largest == 0.0
    sent = tensors(qt.serving_stream(trained, "transformers"))
    before = tensors(qt.serving_stream(rollout, "transformers"))
    loader.start_weight_update()
    loader.update_weights([(name, tensor) for name, tensor in sent.items() if ".experts.2." not in name])
    with pytest.raises(ValueError, match=r"experts.* is incomplete: .*experts\.2\."):
        loader.finish_weight_update()
    assert_same(tensors(qt.serving_stream(rollout, "transformers")), before)


@pytest.mark.ranks
def test_an_engine_that_dies_is_one_error_and_nothing_is_lost(tmp_path: Path) -> None:
    trained = llama("nvfp4")
    step(trained)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    stream = qt.serving_stream(trained, "vllm", bucket_bytes=20_000)
    with vllm(tmp_path / "one", trouble="dies") as (_, receiver):
        message = r"vllm has failed at bucket 2 \(model\.layers\..* to model\..*\): .*The trainer is unchanged"
        with pytest.raises(RuntimeError, match=message):
            receiver.update_weights(stream, changed=True)
    assert_same(dict(trained.state_dict()), before)
    step(trained)
    with vllm(tmp_path / "two") as (client, receiver):
        receiver.update_weights(stream, changed=True)
        assert_equal_logits(client, trained, "nvfp4")


def test_an_engine_that_hangs_times_out(tmp_path: Path) -> None:
    stream = qt.serving_stream(llama("rowwise"), "sglang", bucket_bytes=20_000)
    message = r"sglang has failed at bucket 2 .*TimeoutError: no answer in 0.5 sec"
    with engine("sglang", tmp_path, trouble="hangs") as client, pytest.raises(RuntimeError, match=message):
        SglangReceiver(client, timeout=0.5).update_weights(stream)


def test_an_engine_that_refuses_weights_is_an_error(tmp_path: Path) -> None:
    stream = qt.serving_stream(llama("rowwise"), "sglang")
    with (
        engine("sglang", tmp_path, trouble="refuses") as client,
        pytest.raises(RuntimeError, match="failed at the end of the update: RuntimeError: no weight of this shape"),
    ):
        SglangReceiver(client, timeout=30.0).update_weights(stream)


@pytest.mark.ranks
def test_weights_that_cannot_be_sent_leave_the_engine_ready(tmp_path: Path) -> None:
    trained = llama("mxfp8")
    good = trained.model.layers[1].mlp.down_proj.weight.detach().clone()
    stream = qt.serving_stream(trained, "vllm", bucket_bytes=20_000)
    with vllm(tmp_path) as (client, receiver):
        trained.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("inf")
        with pytest.raises(ValueError, match=r"down_proj.weight contains infinities or NaN"):
            receiver.update_weights(stream, changed=True)
        trained.model.layers[1].mlp.down_proj.weight.data.copy_(good)
        receiver.update_weights(stream, changed=True)
        assert_equal_logits(client, trained, "mxfp8")


def test_loader_checks_what_it_receives() -> None:
    rollout = llama("mxfp8", seed=1)
    before = tensors(qt.serving_stream(rollout, "transformers"))
    loader = StreamLoader(rollout)
    with pytest.raises(ValueError, match="call start_weight_update first"):
        loader.update_weights([])
    with pytest.raises(ValueError, match="call start_weight_update first"):
        loader.finish_weight_update()
    other = llama("mxfp8", layers=3)
    with pytest.raises(RuntimeError, match=r"model\.layers\.2.* has no place in the model"):
        TransformersReceiver(loader).update_weights(qt.serving_stream(other, "transformers"))
    wide = llama("mxfp8", hidden=128)
    with pytest.raises(RuntimeError, match=r"model.embed_tokens.weight \(128, 128\) has no place in the model"):
        TransformersReceiver(loader).update_weights(qt.serving_stream(wide, "transformers"))
    assert_same(tensors(qt.serving_stream(rollout, "transformers")), before)
    with pytest.raises(ValueError, match="TransformersReceiver got a stream for vllm"):
        TransformersReceiver(loader).update_weights(qt.serving_stream(other, "vllm"))


DOWN = "model.layers.1.mlp.down_proj."
#: Received tensors that a loader rejects: a change of a complete update, by recipe.
EDITS: dict[str, tuple[str, str, Any]] = {
    "no scale": ("mxfp8", "weight_scale", None),
    "no codes": ("nvfp4", "weight_packed", None),
    "no tensor factor": ("nvfp4", "weight_global_scale", None),
    "fewer rows": ("mxfp8", "weight", lambda x: x[:-1]),
    "fewer columns": ("nvfp4", "weight_packed", lambda x: x[:, :-16]),
    "other dtype of codes": ("tensorwise", "weight", lambda x: x.view(torch.int8)),
    "other dtype of scales": ("rowwise", "weight_scale", lambda x: x.double()),
    "other shape of scales": ("blockwise", "weight_scale", lambda x: x[:, :1]),
    "high precision": ("mxfp8", "weight", lambda x: x.float()),
    "unknown": ("mxfp8", "weight_zero_point", lambda x: torch.zeros(3)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_loader_rejects_incomplete_layers_and_leaves_the_model_as_it_was(edit: str) -> None:
    recipe, name, change = EDITS[edit]
    trained, rollout = llama(recipe), llama(recipe, seed=1)
    before, loader = dict(rollout.named_parameters()), StreamLoader(rollout)
    values = {key: value.clone() for key, value in rollout.state_dict().items()}
    good = tensors(qt.serving_stream(trained, "transformers"))
    edited = dict(good)
    old = edited.pop(DOWN + name, None)
    if change is not None:
        edited[DOWN + name] = change(old)
    loader.start_weight_update()
    loader.update_weights([*edited.items()])
    with pytest.raises(ValueError, match=f"{DOWN}{name} was received as .*send complete layers"):
        loader.finish_weight_update()
    assert all(value is before[key] for key, value in rollout.named_parameters())
    assert_same(dict(rollout.state_dict()), values)
    loader.start_weight_update()
    loader.update_weights([*good.items()])
    loader.finish_weight_update()
    assert_same(tensors(qt.serving_stream(rollout, "transformers")), good)


def test_loader_rejects_codes_of_another_recipe() -> None:
    names = ("tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp4", "nvfp4")
    sent = {name: tensors(qt.serving_stream(llama(name), "transformers")) for name in names}
    for name in names:
        loader = StreamLoader(llama(name, seed=1))
        for other in (*[each for each in names if each != name], name):
            loader.start_weight_update()
            loader.update_weights([*sent[other].items()])
            with (
                pytest.raises(ValueError, match="build and convert it as in the trainer")
                if other != name
                else nullcontext()
            ):
                loader.finish_weight_update()


def test_a_loader_in_this_process_sees_its_autocast() -> None:
    torch.manual_seed(0)
    trained = torch.nn.Sequential(qt.Linear(64, 64), torch.nn.GELU(), qt.Linear(64, 64))
    rollout = torch.nn.Sequential(qt.Linear(64, 64), torch.nn.GELU(), qt.Linear(64, 64))
    x = torch.randn(4, 64)
    with qt.autocast("mxfp8"):
        with torch.inference_mode():
            TransformersReceiver(StreamLoader(rollout)).update_weights(qt.serving_stream(trained, "transformers"))
        assert torch.equal(rollout(x), trained(x))


class Scripted:
    """An engine in this process whose calls answer, raise or wait as a dict says."""

    def __init__(self, **script: Any) -> None:
        self.script, self.calls = script, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            answer = self.script.get(name)
            return answer() if callable(answer) else answer

        return call


@pytest.mark.parametrize(
    "name", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache"]
)
def test_every_kind_of_failed_answer_is_an_error(name: str) -> None:
    stream = qt.serving_stream(llama("rowwise"), "sglang")
    answers = (
        False,
        (False, "busy"),
        {"success": False, "message": "busy"},
        SimpleNamespace(success=False, message="busy"),
    )
    for answer in answers:
        with pytest.raises(RuntimeError, match=r"sglang has failed at .*: (busy|False)"):
            SglangReceiver(Scripted(**{name: answer})).update_weights(stream, changed=True)
    SglangReceiver(Scripted(**{name: SimpleNamespace(success=True)})).update_weights(stream, changed=True)


def test_an_engine_that_rejects_a_bucket_leaves_no_broadcast_waiting() -> None:
    """The broadcast, which nobody joins, does not delay the error; later updates do not mix with it."""
    stream, go = qt.serving_stream(llama("mxfp8"), "vllm"), Event()

    def reject() -> None:
        raise ValueError("no such layer")

    def send() -> None:
        go.wait(30.0)

    engine = Scripted(update_weights=reject)
    receiver = VllmReceiver(engine, lambda tensor: send(), timeout=20.0)
    with pytest.raises(RuntimeError, match=r"vllm has failed at bucket 1 .*no such layer"):
        receiver.update_weights(stream)
    with pytest.raises(RuntimeError, match=r"start of the update: TimeoutError: .*earlier update has not returned"):
        receiver.update_weights(stream)
    go.set()
    engine.script.clear()
    while receiver._late and not all(future.done() for future in receiver._late):
        pass
    engine.calls.clear()
    receiver.update_weights(stream)
    # The failed update is ended first.
    assert engine.calls == ["finish_weight_update", "start_weight_update", "update_weights", "finish_weight_update"]


def test_a_second_receiver_of_a_stream_gets_everything() -> None:
    stream = qt.serving_stream(llama("mxfp8"), "transformers")
    for _ in range(2):
        rollout = llama("mxfp8", seed=1)
        TransformersReceiver(StreamLoader(rollout)).update_weights(stream, changed=True)
        assert_same(
            tensors(qt.serving_stream(rollout, "transformers")), tensors(qt.serving_stream(llama("mxfp8"), "vllm"))
        )


def test_an_interrupted_update_makes_the_next_one_send_everything() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    stream = qt.serving_stream(llama("mxfp8"), "transformers")
    for name in ("start_weight_update", "update_weights", "finish_weight_update"):
        engine = Scripted(**{name: interrupt})
        receiver = TransformersReceiver(engine)
        with pytest.raises(KeyboardInterrupt):
            receiver.update_weights(stream, changed=True)
        engine.script.clear()
        assert receiver.update_weights(stream, changed=True).codes > 0
        assert receiver.update_weights(stream, changed=True).codes == 0
