"""Delayed scaling's state, as pure functions: a window of amaxes a tensor, and the encode factor it implies.

A column of the window holds [being recorded, oldest … newest]. Source: Transformer Engine's delayed scaling.
"""

import numpy as np

from quaver.core.numbers.formats import Format
from quaver.core.numbers.scaling import FACTOR_EXPONENTS, FLT_MAX, encode_factor, exponent
from quaver.core.spec import Delayed


def record(history: np.ndarray, amax: float) -> np.ndarray:
    """Note the amax of one quantization; infinities and NaN are not noted. float32 [length] to [length]."""
    new = history.copy()
    if np.isfinite(amax):
        new[0] = max(new[0], np.float32(amax))
    return new


def roll(
    history: np.ndarray, factor: np.float32, delayed: Delayed, fmt: Format, power_of_two: bool = True
) -> tuple[np.ndarray, np.float32]:
    """End a step: what was recorded joins the window, and the factor follows from it.

    Args:
        history: float32 [length]; row 0 is what this step recorded, 0 if nothing.
        factor: the encode factor so far, 0 while unset.
        delayed: window length, margin, algorithm.
        fmt: format of the data.
        power_of_two: of the factor.
    Returns:
        history and factor; both unchanged where nothing was recorded.
    Exact.
    """
    newest = history[0]
    if newest == 0:
        return history, factor
    amax = newest if delayed.algorithm == "most_recent" else history.max()
    rolled = np.concatenate([[np.float32(0)], history[2:], [newest]])[: len(history)].astype(np.float32)
    return rolled, factor_from(amax, delayed, fmt, power_of_two)


def factor_from(amax: np.float32, delayed: Delayed, fmt: Format, power_of_two: bool) -> np.float32:
    """The encode factor of a window's amax, margin applied and held within bounds."""
    if power_of_two:
        p = int(exponent(np.asarray(amax), fmt.max)) - delayed.margin
        return np.float32(2.0 ** min(max(p, FACTOR_EXPONENTS[0]), FACTOR_EXPONENTS[1]))
    e = float(encode_factor(np.asarray(amax), fmt, power_of_two)) * 2.0**-delayed.margin
    return np.float32(min(max(e, float(np.finfo(np.float32).tiny)), float(FLT_MAX)))
