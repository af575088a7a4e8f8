"""Models with replaced blocks equal transformers' own, and hooks, copies, checkpoints and caches still work."""

import copy
import functools
import io
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

import quaver.torch as qt
from quaver.torch.conversion.replace.fused_module import FusedModule
from tests.close import assert_bitwise, assert_close
from tests.torch.conversion import families
from tests.torch.conversion.coverage import PAGE
from tests.torch.conversion.families import tiny, tokens
from tests.torch.conversion.in_place import FAMILIES, converted, model_of, step, written

#: Largest allowed error in float32, relative to the largest element.
FLOAT32 = 1e-5
#: Largest allowed ratio of our bf16 error to that of transformers, both against float32.
BF16 = 1.1


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_matches_transformers(family: str) -> None:
    plain, (ours, report) = model_of(family), converted(family)
    names = list(plain.state_dict())
    assert all(row.block for row in report.blocks), str(report)
    assert list(ours.state_dict()) == names
    for padded in (False, True):
        expected, got = step(plain, padded), step(ours, padded)
        assert expected.keys() == got.keys()
        for name in expected:
            assert relative_error(got[name], expected[name]) <= FLOAT32, name


#: Route every token to every expert: otherwise one rounding could route a token to another expert.
TO_ALL = {family: {"num_experts_per_tok": 4} for family in ("deepseek_v3", "llama4_text", "gpt_oss")}
#: Number of steps if not two. A ReLU switched by a rounding makes the error of single T5 steps vary from 0.5 to 1.8.
STEPS = {"t5": 16, "zamba2": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bf16_family_is_as_close_to_float32_as_transformers(family: str) -> None:
    """Compares outputs, and all gradients together, each relative to its norm; single gradients vary by chance."""
    plain = model_of(family, torch.bfloat16, **TO_ALL.get(family, {}))
    exact, ours = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    assert all(row.block for row in qt.convert(ours, "bf16", blocks=True).blocks)
    squares = torch.zeros(2, 2)
    for seed in range(STEPS.get(family, 2)):
        expected = step(exact, seed=seed)
        for squared, model in zip(squares, (plain, ours), strict=True):
            results = step(model, seed=seed)
            for name in expected.keys() - {"loss"}:
                error = (results[name].float() - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)
                squared[int(name != "logits")] += error.square()
    their_error, our_error = squares.sqrt()
    assert (our_error <= BF16 * their_error).all(), our_error / their_error


def test_the_page_has_the_table_of_blocks() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.torch.conversion.in_place writes it anew"


def llama(dtype: torch.dtype = torch.float32) -> Any:
    return model_of("llama", dtype)


def mlp_of(model: Any) -> Any:
    return model.model.layers[0].mlp


def test_revert_restores_the_original_model() -> None:
    model, plain = llama(), llama()
    classes, state = [type(m) for m in model.modules()], {m: set(m.__dict__) for m in model.modules()}
    qt.convert(model, "tensorwise", blocks=qt.Blocks(loss=True))
    assert all(isinstance(m, type(p)) for m, p in zip(model.modules(), plain.modules(), strict=True))
    step(model)
    qt.revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert all(set(m.__dict__) == before for m, before in state.items())
    for name, value in step(plain).items():
        assert_bitwise(step(model)[name], value, name)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8", "bf16"])
def test_every_recipe_saves_less_for_backward(recipe: str) -> None:
    from benchmarks.cases.models.llama import saved_bytes

    x, plain, converted, ours = tokens(), *(llama(torch.bfloat16) for _ in range(3))
    qt.convert(converted, recipe)
    qt.convert(ours, recipe, blocks=True)
    assert saved_bytes(ours, x) < 0.85 * saved_bytes(converted, x) <= 0.86 * saved_bytes(plain, x)


def test_a_hook_on_an_activation_runs_and_is_reported() -> None:
    model, plain = llama(), llama()
    mlp = mlp_of(model)
    seen = []
    handle = mlp.act_fn.register_forward_hook(lambda *_: seen.append("act"))
    mlp.gate_proj.register_forward_hook(lambda *_: seen.append("gate"))
    report = qt.convert(model, "bf16", blocks=True)
    assert not seen, "recognizing a module ran the user's hooks"
    rows = {row.name: row for row in report.blocks}
    assert "act_fn" in rows["model.layers.0.mlp"].why and not rows["model.layers.1.mlp"].why
    # Two float32 tensors of 96 features: the activation's output and a second copy of its input.
    assert (
        "a hook on act_fn: while it is registered, the module's own forward runs and saves 384 more bytes per token"
        in str(report)
    )
    expected = step(plain)
    got = step(model)
    assert seen == ["gate", "act"]
    assert_bitwise(got["loss"], step(model)["loss"])
    handle.remove()
    seen.clear()
    for name, value in step(model).items():
        assert relative_error(value, expected[name]) <= FLOAT32, name
    assert seen == ["gate"]


def test_a_replaced_submodule_is_used() -> None:
    class Adapter(nn.Module):
        """Wraps a layer as PEFT does."""

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.more = base, nn.Linear(64, 96, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base_layer(x) + self.more(x)
            return y

    torch.manual_seed(5)
    model, plain = llama(), llama()
    qt.convert(model, "bf16", blocks=True)
    adapter = Adapter(plain.model.layers[0].mlp.gate_proj)
    plain.model.layers[0].mlp.gate_proj = adapter
    mlp = mlp_of(model)
    mlp.gate_proj = Adapter(mlp.gate_proj)
    mlp.gate_proj.more.load_state_dict(adapter.more.state_dict())
    for other in (plain, model):
        other.model.layers[1].mlp.act_fn = nn.Tanh()
    for name, value in step(plain).items():
        assert relative_error(step(model)[name], value) <= FLOAT32, name


def test_a_class_patched_later_computes_as_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    qt.convert(model, "bf16", blocks=True)
    norm = model.model.norm
    x = torch.randn(3, 64)
    before = norm(x)
    kind = type(norm)._original
    monkeypatch.setattr(kind, "forward", lambda self, x: x * 2)
    assert_bitwise(norm(x), x * 2)
    # A second convert leaves modules alone that compute something else.
    report = qt.convert(model, "bf16", blocks=True)
    assert not any(row.block for row in report.blocks if "Norm" in row.kind)
    monkeypatch.undo()
    assert_close("", kind.forward(norm, x), before, 1e-6)


@pytest.mark.parametrize(("copied", "family"), [("deepcopy", "llama"), ("pickle", "mamba2"), ("torch.save", "llama")])
def test_a_copy_is_placed_too(copied: str, family: str) -> None:
    model = model_of(family)
    qt.convert(model, "tensorwise", blocks=qt.Blocks(loss=True))
    if copied == "deepcopy":
        again = copy.deepcopy(model)
    elif copied == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, stream := io.BytesIO())
        stream.seek(0)
        again = torch.load(stream, weights_only=False)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert any(isinstance(m, FusedModule) for m in again.modules())
    for name, value in step(model).items():
        assert_bitwise(step(again)[name], value, name)
    plain = model_of(family)
    plain.load_state_dict(model.state_dict(), strict=True)


def test_checkpointing_gives_the_same_bits() -> None:
    model = llama(torch.bfloat16)
    qt.convert(model, "tensorwise", blocks=True)
    expected = step(model)
    for reentrant in (False, True):
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=reentrant)
        for name, value in step(model).items():
            assert_bitwise(value, expected[name], name)


def test_frozen_parameters_and_inputs_alone() -> None:
    plain, model = llama(), llama()
    for m in (plain, model):
        for i, p in enumerate(m.parameters()):
            p.requires_grad_(i % 2 == 0)
    qt.convert(model, "bf16", blocks=True)
    expected, got = step(plain), step(model)
    assert expected.keys() == got.keys()
    assert all(relative_error(got[name], value) <= FLOAT32 for name, value in expected.items())
    for m in (plain, model):
        m.requires_grad_(False)
    x = torch.randn(2, 3, 64)
    for part in ("norm", "layers.0.mlp"):
        theirs, ours = (x.clone().requires_grad_() for _ in range(2))
        plain.model.get_submodule(part)(theirs).square().sum().backward()
        model.model.get_submodule(part)(ours).square().sum().backward()
        assert_close(part, ours.grad, theirs.grad, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    plain, model = llama(dtype), llama(dtype)
    qt.convert(model, "bf16", blocks=True)
    expected, got = step(plain), step(model)
    bound = 1e-2 if dtype is torch.float16 else 1e-12
    assert all(relative_error(got[name], value) <= bound for name, value in expected.items())
    assert all(got[name].dtype is value.dtype for name, value in expected.items())


def test_autocast_gives_the_same_dtypes() -> None:
    for family in ("llama", "gpt_neox"):
        for dtype in (torch.float32, torch.bfloat16):
            plain, model = model_of(family, dtype), model_of(family, dtype)
            qt.convert(model, "bf16", blocks=True)
            with torch.autocast("cpu", torch.bfloat16):
                expected, got = step(plain), step(model)
            for name, value in expected.items():
                assert got[name].dtype is value.dtype and relative_error(got[name], value) <= 5e-2, name


def test_weights_of_another_dtype_than_the_input_promote_as_theirs() -> None:
    model = llama()
    qt.convert(model, "bf16", blocks=True)
    x = torch.randn(2, 64).bfloat16()
    assert model.model.norm(x).dtype is torch.float32


def test_torch_func_and_forward_mode_use_the_original_forward() -> None:
    model = llama()
    qt.convert(model, "bf16", blocks=True)
    x = torch.randn(3, 64)
    for module in (model.model.norm, mlp_of(model)):
        per_row = torch.func.vmap(torch.func.grad(lambda row, m=module: m(row).sum()))(x)
        leaf = x.clone().requires_grad_()
        module(leaf).sum().backward()
        assert_close("", per_row, leaf.grad, 1e-5)
        torch.func.jvp(module, (x,), (x,))


def results_for_hard_inputs(module: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 64)
    x[0, 0], x[1, 0], x[2] = torch.nan, torch.inf, 1e-40
    inputs = [
        x,
        torch.zeros(2, 64),
        torch.empty(0, 64),
        torch.empty(2, 0, 64),
        torch.randn(64),
        torch.randn(2, 2, 3, 64),
    ]
    results = []
    for value in inputs:
        leaf = value.clone().requires_grad_()
        y = module(leaf)
        results.append(y.detach())
        if y.isfinite().all():
            y.sum().backward()
            results.append(leaf.grad)
    return results


@pytest.mark.parametrize("part", ["norm", "layers.0.mlp"])
def test_nonfinite_and_empty_inputs(part: str) -> None:
    plain, model = llama(), llama()
    qt.convert(model, "bf16", blocks=True)
    for ours, theirs in zip(
        results_for_hard_inputs(model.model.get_submodule(part)),
        results_for_hard_inputs(plain.model.get_submodule(part)),
        strict=True,
    ):
        assert ours.shape == theirs.shape
        assert_close(part, ours, theirs, 1e-5)


def test_an_output_may_be_written_to_and_an_input_is_left_unchanged() -> None:
    model = llama()
    qt.convert(model, "tensorwise", blocks=True)
    for module in (model.model.norm, mlp_of(model)):
        x = torch.randn(4, 64, requires_grad=True)
        before = x.detach().clone()
        y = module(x)
        y += 1
        y.sum().backward()
        assert_bitwise(x.detach(), before)


def test_dropout_is_applied_at_its_original_position() -> None:
    for family, dropout in (("gpt2", {"resid_pdrop": 0.5}), ("t5", {"dropout_rate": 0.5})):
        plain, model = tiny(family, **dropout).train(), tiny(family, **dropout).train()
        report = qt.convert(model, "bf16", blocks=True)
        assert any("MLP" in row.block for row in report.blocks)
        results = []
        for m in (plain, model):
            torch.manual_seed(0)
            results.append(step(m))
        assert all(relative_error(results[1][name], value) <= FLOAT32 for name, value in results[0].items())


def test_an_unknown_activation_is_left_unchanged_and_reported() -> None:
    model = tiny("llama", hidden_act="mish")
    report = qt.convert(model, "bf16", blocks=True)
    whys = {row.why for row in report.blocks if row.kind == "LlamaMLP"}
    assert whys == {"no activation of Quaver reproduces its outputs"} and next(iter(whys)) in str(report)


def test_skip_leaves_a_module_alone() -> None:
    model = llama()
    report = qt.convert(model, "bf16", blocks=True, skip=["*.layers.0.*"])
    placed_rows = {row.name: row.block for row in report.blocks}
    assert not placed_rows["model.layers.0.mlp"] and placed_rows["model.layers.1.mlp"]
    assert not isinstance(mlp_of(model), FusedModule)


def test_chosen_parts_and_invalid_ones() -> None:
    model = llama()
    report = qt.convert(model, "bf16", blocks=qt.Blocks(mlp=False, attention=False))
    assert {row.kind for row in report.blocks} == {"LlamaRMSNorm"}
    qt.convert(model, "bf16", blocks=True)
    qt.convert(model, "tensorwise")
    assert isinstance(mlp_of(model), FusedModule), "a later convert removed a block"
    with pytest.raises(ValueError, match=r"give True, False, or a quaver\.torch\.Blocks"):
        qt.convert(model, "bf16", blocks="mlp")  # type: ignore[arg-type]


def test_torch_norms_of_torch() -> None:
    for norm in (
        nn.LayerNorm(16),
        nn.LayerNorm(16, bias=False),
        nn.RMSNorm(16),
        nn.LayerNorm(16, elementwise_affine=False),
    ):
        x = torch.randn(3, 16)
        expected = norm(x)
        report = qt.convert(norm, "bf16", blocks=True)
        assert report.blocks[0].block, report
        assert_close(str(norm), norm(x), expected, 1e-6)
    for other in (nn.GroupNorm(1, 16), nn.BatchNorm1d(16), nn.LayerNorm([4, 16])):
        assert not any(
            row.block for row in qt.convert(nn.Sequential(nn.Linear(2, 2), other), "bf16", blocks=True).blocks
        )


def test_a_training_step_with_the_fused_loss() -> None:
    x = tokens()
    labels = x.clone()
    labels[0, :5] = -100
    for family in ("llama", "gemma2", "granite", "cohere", "gpt2", "falcon", "mixtral"):
        plain, model = model_of(family), model_of(family)
        report = qt.convert(model, "bf16", blocks=qt.Blocks(norm=False, mlp=False, attention=False, loss=True))
        assert report.blocks[0].block, str(report)
        for options in ({}, {"num_items_in_batch": torch.tensor(11)}):
            results = []
            for m in (plain, model):
                m.zero_grad()
                outputs = m(input_ids=x, labels=labels, **options)
                outputs.loss.backward()
                results.append([outputs.loss, *(p.grad.clone() for p in m.parameters() if p.grad is not None)])
            assert outputs.logits is None and type(outputs) is type(plain(input_ids=x))
            for ours, theirs in zip(*reversed(results), strict=True):
                assert relative_error(ours.detach(), theirs.detach()) <= FLOAT32, family
        # Logits are returned where a caller may use them: without labels, without gradients, and in eval mode.
        assert model(input_ids=x).logits is not None
        assert model.eval()(input_ids=x, labels=labels).logits is not None
        with torch.no_grad():
            assert model.train()(input_ids=x, labels=labels).logits is not None


@pytest.mark.parametrize("family", ["llama", "mamba2", "zamba2"])
def test_generation_and_caches_keep_working(family: str) -> None:
    plain, model = model_of(family).eval(), model_of(family).eval()
    qt.convert(model, "bf16", blocks=qt.Blocks(loss=family == "llama"))
    x = tokens()[:1]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(x, **options), plain.generate(x, **options))


@pytest.mark.parametrize(
    ("family", "implementation"), [("mistral", "sdpa"), ("gemma3_text", "eager"), ("gpt_oss", "eager")]
)
def test_windows_padding_and_both_ways_to_attend(family: str, implementation: str) -> None:
    models = [tiny(family, sliding_window=4) for _ in range(2)]
    for model in models:
        model.set_attn_implementation(implementation)
    mask = torch.ones_like(tokens())
    mask[1, :5] = 0
    assert all(row.block for row in qt.convert(models[1], "bf16", blocks=True).blocks)
    results = []
    for model in models:
        outputs = model(input_ids=tokens(), attention_mask=mask, labels=tokens())
        outputs.loss.backward()
        results.append([outputs.logits[mask.bool()], *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*reversed(results), strict=True):
        assert relative_error(ours, theirs) <= FLOAT32


def test_attention_is_ours_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.conversion.replace import attention

    plain, model, x = llama(), llama(), tokens()
    qt.convert(model, "bf16", blocks=True)
    calls = []
    attend = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *a, **k: calls.append(1) or attend(*a, **k))
    model(input_ids=x)
    assert len(calls) == 2
    # Attention weights are requested; another implementation is configured; another rope function is installed.
    for m in (plain, model):
        m.set_attn_implementation("eager")
    expected, got = (m(input_ids=x, output_attentions=True).attentions for m in (plain, model))
    assert all(relative_error(a.detach(), b.detach()) <= FLOAT32 for a, b in zip(got, expected, strict=True))
    model(input_ids=x)
    for m in (plain, model):
        m.set_attn_implementation("sdpa")
    source = type(plain.model.layers[0].self_attn).forward.__globals__
    monkeypatch.setitem(source, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert_close("", model(input_ids=x).logits, plain(input_ids=x).logits, FLOAT32)
    assert len(calls) == 2
    monkeypatch.undo()
    eager = llama()
    eager.set_attn_implementation("eager")
    assert "computed as rope" in str(qt.convert(eager, "bf16", blocks=True))
    assert_close("", eager(input_ids=x).logits, plain(input_ids=x).logits, FLOAT32)
    flash = llama()
    flash.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in str(qt.convert(flash, "bf16", blocks=True))


def test_attention_functions_of_other_libraries_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = type(llama().model.layers[0].self_attn).forward.__globals__["ALL_ATTENTION_FUNCTIONS"]
    theirs = registry["sdpa"]
    for factor, block in ((1.0, "attention and rope"), (1.01, "rope")):
        model, x = llama(), tokens()

        def attend(*args: Any, factor: float = factor, **options: Any) -> Any:
            return theirs(*args, **options)[0] * factor, None

        monkeypatch.setattr(registry, "_local_mapping", registry._local_mapping | {"sdpa": attend})
        expected = model(input_ids=x).logits
        rows = qt.convert(model, "bf16", blocks=True).blocks
        assert {row.block for row in rows if row.kind == "LlamaAttention"} == {block}
        assert_close("", model(input_ids=x).logits, expected, FLOAT32)


@pytest.mark.parametrize("family", ["cohere2", "ministral3", "seed_oss"])
def test_attention_of_more_families_is_placed_and_equal(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbour tables, position-dependent query scales, dropout in the MLP."""
    monkeypatch.setitem(families.FAMILIES, family, AutoModelForCausalLM)
    plain = model_of(family, **({"residual_dropout": 0.0} if family == "seed_oss" else {}))
    ours = copy.deepcopy(plain)
    report = qt.convert(ours, "bf16", blocks=True)
    assert all(row.block for row in report.blocks), str(report)
    expected, got = step(plain), step(ours)
    for name in expected:
        assert relative_error(got[name], expected[name]) <= FLOAT32, name


def test_code_with_another_global_keeps_its_own_numbers() -> None:
    """Norms are recognized by their code, which may read something else."""
    kind: Any = type(llama().model.norm)
    names = types.SimpleNamespace(float32=torch.float32, rsqrt=lambda x: 2 * torch.rsqrt(x))
    forward = types.FunctionType(kind.forward.__code__, {"torch": names})
    norm, x = type("Doubled", (kind,), {"forward": forward})(64), torch.randn(3, 64)
    expected = norm(x)
    qt.convert(nn.Sequential(norm, nn.Linear(2, 2)), "bf16", blocks=True)
    assert_close("norm", norm(x), expected, 1e-6)
