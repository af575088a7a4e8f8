from dataclasses import replace

import pytest
import torch

from quaver import recipes
from quaver.train.memory import parameters
from quaver.train.model_config import MODELS
from quaver.train.torch.decoder import Decoder, build_decoder, loss_of, quantize_layers
from tests.close import assert_close

CPU = torch.device("cpu")
TINY = [name for name in MODELS if name.endswith("-tiny")]
GENERATOR = torch.Generator()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=GENERATOR.manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_every_feature_size_is_a_multiple_of_32(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(replace(MODELS[name], layers=2), 256)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 32 == 0 and module.out_features % 32 == 0


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_match_the_table_in_its_order(name: str) -> None:
    config = replace(MODELS[name], layers=2)
    with torch.device("meta"):
        model = Decoder(config, 256)
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == list(parameters(config, 250).items())


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build_decoder(MODELS["nano"], 256, 3, CPU).state_dict()
    torch.manual_seed(2)
    two = build_decoder(MODELS["nano"], 256, 3, CPU).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = build_decoder(MODELS["nano"], 256, 4, CPU)
    assert not torch.equal(one["embedding.weight"], other.embedding.weight)


@pytest.mark.parametrize("name", TINY)
def test_the_first_loss_is_near_that_of_chance(name: str) -> None:
    loss = loss_of(build_decoder(MODELS[name], 256, 0, CPU), ids(4, 33), "float32")
    assert 5.0 < loss.item() < 6.6 and loss.dtype == torch.float32


@pytest.mark.parametrize("name", TINY)
def test_a_token_sees_nothing_after_it(name: str) -> None:
    model = build_decoder(MODELS[name], 256, 0, CPU)
    given = torch.arange(32).reshape(1, 32)
    changed = given.clone()
    changed[0, 20] = 99
    one, two = model(given), model(changed)
    # Which rows an expert has decides how its products are summed.
    same = torch.isclose(one, two, rtol=0, atol=1e-5) if MODELS[name].experts else one == two
    same = same.all(dim=-1)[0]
    assert same[:20].all() and not same[20:].any()


def test_a_local_layer_sees_its_window_alone_and_gemma_2_alternates() -> None:
    def reach(name: str, layers: int) -> int:
        """How many tokens later a change is still seen."""
        model = build_decoder(replace(MODELS[name], layers=layers), 256, 0, CPU)
        given = ids(1, 64)
        changed = given.clone()
        changed[0, 0] = (changed[0, 0] + 1) % 256
        seen = (model(given) != model(changed)).any(dim=-1)[0]
        return int(seen.nonzero().max())

    assert reach("mistral-tiny", 1) == 15 and reach("mistral-tiny", 2) == 30
    assert reach("gemma2-tiny", 1) == 15 and reach("gemma2-tiny", 2) == 63
    assert reach("llama-tiny", 1) == 63


def test_logits_are_capped_and_the_embedding_scaled_where_the_family_says() -> None:
    model = build_decoder(MODELS["gemma2-tiny"], 256, 0, CPU)
    plain = replace(MODELS["gemma2-tiny"], logit_cap=None)
    other = build_decoder(plain, 256, 0, CPU)
    torch.testing.assert_close(model(ids(1, 8)), 30 * torch.tanh(other(ids(1, 8)) / 30))
    unscaled = build_decoder(replace(plain, scaled_embedding=False), 256, 0, CPU)
    scaled = build_decoder(plain, 256, 0, CPU)
    unscaled.embedding.weight.data *= 128**0.5
    scaled.norm.weight.data += 0.25
    unscaled.norm.weight.data += 0.25
    # The head is tied to the embedding: a factor of 128**0.5 there is also in the logits.
    torch.testing.assert_close(unscaled(ids(1, 8)), scaled(ids(1, 8)) * 128**0.5, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recompute", ["mlp", "full"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "nvfp4"])
def test_recomputation_changes_no_bit(recipe: str, recompute: str) -> None:
    found = recipes.get(recipe)
    grads = []
    for what in ("none", recompute):
        model = build_decoder(replace(MODELS["gemma2-tiny"], layers=2), 256, 0, CPU, what)
        quantize_layers(model, found, 0)  # random streams depend on its names
        for _ in range(2):
            loss_of(model, ids(2, 17), "bfloat16").backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("name", ["llama-tiny", "gemma2-tiny"])
def test_the_loss_in_chunks_matches_all_logits(name: str, dtype: str, bound: float) -> None:
    """Gemma's head is the embedding, and its logits are capped."""
    model = build_decoder(replace(MODELS[name], layers=1), 256, 0, CPU)
    batch, runs = ids(2, 17), []
    for chunk in (0, 5, 1000):
        model.zero_grad()
        loss = loss_of(model, batch, dtype, chunk)
        loss.backward()
        runs.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    for loss, grad in runs[1:]:
        assert_close("loss", loss, runs[0][0], bound)
        assert_close("gradient", grad, runs[0][1], bound)
