"""Operations: the first implementation without a reason to refuse runs, and the others say why they did not."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from quaver.core.registry import Impl, Op, Unsupported, only


def make(name: str = "double") -> Op:
    """Doubles ints by shifting and everything by adding, but no strings."""
    fast = Impl("fast", lambda x: ("fast", x << 1), lambda x: "" if isinstance(x, int) else "it is for ints")
    slow = Impl("slow", lambda x: ("slow", x + x), lambda x: "it is for numbers" if isinstance(x, str) else "")
    return Op(name, [fast, slow])


def test_the_first_that_takes_the_call_runs() -> None:
    double = make()
    assert double(3) == ("fast", 6)
    assert double(1.5) == ("slow", 3.0)
    assert double.pick(3)(3) == ("fast", 6)
    assert double.pick(1.5)(1.5) == ("slow", 3.0)


def test_explain_names_each_and_its_reason_in_order() -> None:
    assert make().explain(1.5) == [("fast", "it is for ints"), ("slow", "")]


def test_a_call_nobody_takes_is_refused_with_every_reason() -> None:
    double = make()
    with pytest.raises(Unsupported, match=r"double takes this call\. fast: it is for ints; slow: it is for numbers"):
        double("text")
    with pytest.raises(Unsupported):
        double.pick("text")("text")


def test_only_forces_one_and_puts_the_others_back_even_after_an_error() -> None:
    double = make()
    with pytest.raises(ZeroDivisionError), only([double], "slow"):
        assert double(3) == ("slow", 6)
        assert double.explain(3) == [("fast", "switched off by only()"), ("slow", "")]
        1 / 0  # noqa: B018
    assert double(3) == ("fast", 6)


def test_only_leaves_operations_without_that_implementation_with_none() -> None:
    double = make()
    other = Op("other", [Impl("slow", lambda x: x, lambda x: "")])
    with only([double, other], "fast"), pytest.raises(Unsupported, match="slow: switched off"):
        other(1)


def test_only_holds_for_the_process() -> None:
    """On a GPU a backward runs in a thread of autograd's."""
    double = make()
    with only([double], "slow"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(double, 3).result() == ("slow", 6)


def test_only_suggests_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="no implementation 'fsat'; did you mean 'fast'"), only([make()], "fsat"):
        pass
