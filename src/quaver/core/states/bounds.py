"""How far one step can move a weight, known before the step: what clamps updates and predicts scales.

Adam. With m and v the averages of gradients and of their squares, Cauchy and Schwarz give, of exact states,

    |m̂ / √v̂| ≤ U_t = (1 - β1) / √(1 - β2) √((1 - rᵗ) / (1 - r)) √(1 - β2ᵗ) / (1 - β1ᵗ),     r = β1² / β2 < 1

A clamp at U_t changes nothing in exact arithmetic, and takes away every step that is large because v was rounded to
zero. A weight of at most A then is at most (1 - lr wd) A + lr U_t after the step.
"""

import math


def adam(step: float, beta1: float, beta2: float) -> float:
    """U_t of step 1, 2, ...; infinite where β1² ≥ β2, for which there is no such bound. Exact to 1e-12."""
    if beta1**2 >= beta2:
        return math.inf
    if beta2 == 1:
        return math.inf
    ratio = beta1**2 / beta2
    grown = (1 - ratio**step) / (1 - ratio)
    return (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(grown * (1 - beta2**step)) / (1 - beta1**step)


def adam_limit(beta1: float, beta2: float) -> float:
    """U_t of many steps: 1.165 of (0.9, 0.95), 7.27 of (0.9, 0.999)."""
    if beta1**2 >= beta2 or beta2 == 1:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
