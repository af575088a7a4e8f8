"""Values of small integer tensors on the host, read from a GPU once for each version of the tensor."""

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from quaver.torch.numerics.versions import has_reliable_version

#: (version, values) of tensors on a device.
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()


def waits(t: Tensor) -> bool:
    """Whether reading the tensor waits for a device."""
    return not t.is_cpu


def host_values(t: Tensor) -> list[int]:
    """`t.tolist()` of a 1-D tensor of integers.

    The layers of a model that are given one `cu_seqlens` wait for the device once. A write through `.data` does not
    move a tensor's version, so it is not seen.
    """
    if not waits(t) or not has_reliable_version(t):
        values: list[int] = t.tolist()
        return values
    known = _read.get(t)
    if known is None or known[0] != t._version:
        known = _read[t] = t._version, t.tolist()
    return list(known[1])
