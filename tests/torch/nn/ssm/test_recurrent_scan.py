"""The recurrence against its closed form: every token's share of every later one, by products of decays."""

import torch

from quaver.torch.nn.ssm.chunked_scan import recurrence, steps_of
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.ssm.drawn import tensors


def test_each_token_adds_its_decayed_value_to_later_ones() -> None:
    v = {name: value.double() for name, value in tensors((2, 9, 4, 3, 2, 5)).items()}
    dt = steps_of(v["dt"], v["dt_bias"])
    y, last = recurrence(v["x"], dt, v["A"], v["B"], v["C"], v["D"], v["initial_states"])
    B, C = (v[name].repeat_interleave(2, 2) for name in "BC")
    for t in range(9):
        expected = v["D"][:, None] * v["x"][:, t]
        state = v["initial_states"] * (v["A"] * dt[:, : t + 1]).exp().prod(1)[..., None, None]
        for s in range(t + 1):
            left = (v["A"] * dt[:, s + 1 : t + 1]).exp().prod(1)
            state = state + torch.einsum("bh,bhp,bhn->bhpn", left * dt[:, s], v["x"][:, s], B[:, s])
        expected = expected + torch.einsum("bhpn,bhn->bhp", state, C[:, t])
        assert_close(f"token {t}", y[:, t], expected, 1e-13)
    assert_close("last states", last, state, 1e-13)


def test_steps_are_softplus_clamped_to_the_limits() -> None:
    dt, bias = torch.tensor([[-3.0, 0.0, 50.0, torch.nan]]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    assert_bitwise(steps_of(dt, bias)[0, :3], torch.nn.functional.softplus(dt + bias)[0, :3])
    held = steps_of(dt, bias, limit=(0.25, 2.0))[0]
    assert held[:3].tolist() == [0.25, steps_of(dt, bias)[0, 1].item(), 2.0] and held[3].isnan()
    # What is no softplus is held to the limit too: no step goes back.
    assert steps_of(dt, softplus=False)[0, :3].tolist() == [0.0, 0.0, 50.0]


def test_transforms_of_torch_func_run_through_it() -> None:
    v = tensors((1, 4, 2, 3, 1, 5))

    def total(x: torch.Tensor) -> torch.Tensor:
        return recurrence(x[None], steps_of(v["dt"]), v["A"], v["B"], v["C"])[0].square().sum()

    x = v["x"].expand(3, 4, 2, 3)
    assert torch.func.vmap(torch.func.grad(total))(x).shape == x.shape
    assert torch.func.hessian(total)(v["x"][0]).shape == (4, 2, 3) * 2
