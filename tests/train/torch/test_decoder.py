import pytest
import torch

from quaver.train.sizes import MODELS
from quaver.train.torch.decoder import Decoder, build, loss_of, rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
def test_every_feature_size_is_a_multiple_of_32(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(MODELS[name], 256, 32)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 32 == 0 and module.out_features % 32 == 0


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build(MODELS["nano"], 256, 32, 3, CPU).state_dict()
    torch.manual_seed(2)
    two = build(MODELS["nano"], 256, 16, 3, CPU).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = build(MODELS["nano"], 256, 16, 4, CPU)
    assert not torch.equal(one["embedding.weight"], other.embedding.weight)


def test_the_first_loss_is_near_that_of_chance() -> None:
    model = build(MODELS["nano"], 256, 32, 0, CPU)
    loss = loss_of(model, torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0)), "float32")
    assert 5.0 < loss.item() < 6.5 and loss.dtype == torch.float32


def test_a_token_sees_nothing_after_it() -> None:
    model = build(MODELS["nano"], 256, 32, 0, CPU)
    ids = torch.arange(32).reshape(1, 32)
    changed = ids.clone()
    changed[0, 20] = 99
    same = (model(ids) == model(changed)).all(dim=-1)[0]
    assert same[:20].all() and not same[20:].any()


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    model = build(MODELS["nano"], 256, 32, 0, CPU)
    q, k = (torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(s)).expand(1, 1, 32, 32) for s in (0, 1))
    q, k = rotate(q, model.cos, model.sin), rotate(k, model.cos, model.sin)
    torch.testing.assert_close(q.norm(dim=-1), q[..., :1, :].norm(dim=-1).expand(1, 1, 32))
    scores = (q @ k.mT)[0, 0]
    torch.testing.assert_close(scores.diagonal(5), scores[0, 5].expand(27))
