"""The ledger assumes exactly those native GEMMs that the PyTorch front end requests from cuBLASLt."""

import pytest

from quaver.costs import ledger
from quaver.costs.hardware import GPUS, Gpu
from quaver.recipes import RECIPES, get
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import scaled_mm
from tests.operands import SPECS

#: The two names for the same role of an operand's scales.
SAME = {"nv": "nvfp4", "1x128": "block", "128x128": "block", "": "other"}
#: Recipes with an option that changes their blocks or scales.
GIVEN = {
    **{name: get(name) for name in RECIPES},
    "blockwise fp32": get("blockwise", power_of_two=False),
    "mxfp8 2d": get("mxfp8", weight_2d=True),
    "nvfp4 1d": get("nvfp4", weight_2d=False),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_role_of_a_spec_is_the_same(spec: QuantSpec) -> None:
    role = scaled_mm.role(spec)
    assert ledger.role(spec) == SAME.get(role, role)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("name", GIVEN)
def test_requested_native_gemms_are_native_in_the_ledger(name: str, gpu: Gpu) -> None:
    arch = gpu.capability[0] * 10 + gpu.capability[1]
    for which, spec in GIVEN[name].gemms.items():
        if spec.a is None or spec.b is None:
            continue
        roles = [scaled_mm.role(s) for s in (spec.a, spec.b)]
        if arch >= 100 and spec.a.power_of_two and spec.b.power_of_two:
            roles = ["mx" if r in ("1x128", "128x128") else r for r in roles]
        if set(roles) == {"tensor", "row"}:
            roles = ["row", "row"]
        native = any(kind.first <= arch <= kind.last for kind in scaled_mm.KINDS.get(tuple(roles), ()))
        assert ledger.gemm(spec, 256, 256, 256, gpu).native is native, which
