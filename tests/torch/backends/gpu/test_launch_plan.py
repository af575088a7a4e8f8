"""Cached launches give the right results for every layout of their tensors."""

import pytest
import torch

from quaver.torch.backends.gpu import activation, norm


def test_a_pass_that_was_decided_by_one_tensor_twice_takes_two() -> None:
    x, g, gamma = (torch.randn(4, 64) for _ in range(3))
    _, mean, inverse = norm.forward(x, gamma[0], None, "RMSNorm", 1e-5)
    norm.backward(x, x, gamma[0], None, mean, inverse, "RMSNorm")
    of_x, of_gamma, _ = norm.backward(g, x, gamma[0], None, mean, inverse, "RMSNorm")
    wide = (x * inverse).double()
    torch.testing.assert_close(of_gamma.double(), (g * wide).sum(0), rtol=1e-5, atol=1e-5)
    along = g.double() * gamma[0].double()
    expected = (along - wide * (along * wide).mean(-1, keepdim=True)) * inverse.double()
    torch.testing.assert_close(of_x.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apart_first", [False, True])
def test_gradients_of_gate_and_value_have_the_layout_of_their_inputs(
    apart_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of one tensor, given as one or as two, have the same layout; the outputs do not."""
    monkeypatch.setattr(activation._backwards, "plans", {})
    h, g = torch.randn(6, 128), torch.randn(6, 64)
    read = [(h,), h.chunk(2, -1)]
    results = [activation.backward("swiglu", (), g, x) for x in (read[::-1] if apart_first else read)]
    (whole_one,), halves = results[::-1] if apart_first else results
    assert torch.equal(whole_one, torch.cat(halves, -1))
    x = h.clone().requires_grad_()
    gate, value = x.chunk(2, -1)
    (torch.nn.functional.silu(gate) * value).backward(g)
    torch.testing.assert_close(whole_one, x.grad)
