"""The formulas of `quaver.torch.optim.rules` inside a kernel: the same operations, each rounded, in the same order."""

import triton
import triton.language as tl

#: Adam with decoupled decay, Adam with coupled decay, Lion, SGD, and SGD with Nesterov's momentum.
ADAMW, ADAM, LION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SGD, NESTEROV = tl.constexpr(3), tl.constexpr(4)
#: What a bound is raised by, above what float32 rounds; and the ulps of 1 by which a decay is.
_ABOVE, _ULPS = tl.constexpr(1.0 + 2.0**-20), tl.constexpr(2.0**-22)
#: The largest float32.
_LARGEST = tl.constexpr(2.0**128 - 2.0**104)
#: 1 + 1e-6 in float32.
_BEYOND = tl.constexpr(1.00000095367431640625)


@triton.jit
def averaged(old, new, share):
    """β old + (1 - β) new; share: 1 - β, or -β where β is below one half. Exact."""
    return (new - old) * share + tl.where(share > 0, old, new)


@triton.jit
def adam(
    w, g, m, v, share1, share2, eps, lr, decay, grow1, grow2, limit,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """The weight, both moments, and whether an update was beyond its bound. Exact."""
    if MAXIMIZE:
        # Of +0 `-g` is +0.
        g = g * -1.0
    if RULE == ADAM:
        g = g + w * decay
    m = averaged(m, g, share1)
    # A NaN has no sign then, as a GPU has it, and is above all numbers.
    # A square beyond float32 would be infinite, and infinity less infinity is NaN at the next step.
    v = averaged(v, tl.minimum(tl.abs(g * g), _LARGEST, propagate_nan=tl.PropagateNan.ALL), share2)
    update = tl.div_rn(m * grow1, tl.sqrt_rn(v) * grow2 + eps)
    beyond = tl.abs(update) > limit * _BEYOND
    if CLAMP:
        update = tl.maximum(update, -limit, propagate_nan=tl.PropagateNan.ALL)
        update = tl.minimum(update, limit, propagate_nan=tl.PropagateNan.ALL)
    if RULE == ADAMW:
        w = w - w * decay
    return w - update * lr, m, v, beyond


@triton.jit
def lion(w, g, m, share1, share2, lr, decay, MAXIMIZE: tl.constexpr):
    """The weight and the moment. Exact."""
    if MAXIMIZE:
        # Of +0 `-g` is +0.
        g = g * -1.0
    mixed = averaged(m, g, share1)
    sign = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, tl.where(mixed == mixed, 0.0, mixed)))
    return (w - w * decay) - sign * lr, averaged(m, g, share2)


@triton.jit
def sgd(w, g, m, lr, decay, momentum, new, RULE: tl.constexpr, MOMENTUM: tl.constexpr, MAXIMIZE: tl.constexpr):
    """The weight, and the moment if there is one, else what came. Exact."""
    if MAXIMIZE:
        # Of +0 `-g` is +0.
        g = g * -1.0
    g = g + w * decay
    update = g
    if MOMENTUM:
        m = m * momentum + g * new
        update = g + m * momentum if RULE == NESTEROV else m
    return w - update * lr, m


@triton.jit
def reach(amax, lr, decay, limit, RULE: tl.constexpr):
    """What no weight exceeds after a step of weights of at most `amax`, float32. Exact."""
    kept = tl.abs(1.0 - decay) + tl.abs(decay) * _ULPS
    if RULE == LION:
        most = amax * kept + tl.abs(lr)
    elif RULE == ADAMW:
        most = amax * kept + tl.abs(lr) * limit
    else:
        most = amax + tl.abs(lr) * limit
    return most * _ABOVE


@triton.jit
def numbers_of(at, parameters, RULE: tl.constexpr):
    """What a step is told of its rule, a float32 each `parameters` apart: the learning rate, the decay and what bounds
    an update, then those that the rule alone has."""
    if (RULE == SGD) | (RULE == NESTEROV):
        lr, decay = tl.load(at), tl.load(at + parameters)
        numbers = lr, decay, lr, tl.load(at + 2 * parameters), tl.load(at + 3 * parameters)
    elif RULE == LION:
        share1, share2 = tl.load(at), tl.load(at + parameters)
        lr, decay = tl.load(at + 2 * parameters), tl.load(at + 3 * parameters)
        numbers = lr, decay, lr, share1, share2
    else:
        share1, share2 = tl.load(at), tl.load(at + parameters)
        eps, lr = tl.load(at + 2 * parameters), tl.load(at + 3 * parameters)
        decay, grow1 = tl.load(at + 4 * parameters), tl.load(at + 5 * parameters)
        grow2, limit = tl.load(at + 6 * parameters), tl.load(at + 7 * parameters)
        numbers = lr, decay, limit, share1, share2, eps, grow1, grow2  # type: ignore[assignment]
    return numbers


@triton.jit
def move(w, g, m, v, numbers, RULE: tl.constexpr, MOMENTUM: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr):
    """The weight and both moments of a rule, those that it has, and where an update of Adam was beyond its bound.
    Exact."""
    held = w
    if (RULE == SGD) | (RULE == NESTEROV):
        lr, decay, _, momentum, new = numbers
        w, m = sgd(w, g, m, lr, decay, momentum, new, RULE, MOMENTUM, MAXIMIZE)
    elif RULE == LION:
        lr, decay, _, share1, share2 = numbers
        w, m = lion(w, g, m, share1, share2, lr, decay, MAXIMIZE)
    else:
        lr, decay, limit, share1, share2, eps, grow1, grow2 = numbers
        w, m, v, held = adam(w, g, m, v, share1, share2, eps, lr, decay, grow1, grow2, limit, RULE, CLAMP, MAXIMIZE)
    return w, m, v, held
