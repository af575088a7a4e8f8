"""How GPUs share a model: axes of a mesh, which of them are near one another, and what each holds."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks along each axis, the nearest first: tensor, context, sharded data, replicated data, pipeline."""

    #: Tensor and sequence parallelism, context parallelism.
    tp: int = 1
    cp: int = 1
    #: Ranks that a weight is sharded over, context's included, and how often those shards exist.
    fsdp: int = 1
    replicas: int = 1
    #: Stages of the pipeline.
    pp: int = 1
    #: Ranks of the sharded axis that share the experts.
    ep: int = 1

    def __post_init__(self) -> None:
        axes = {"tp": self.tp, "cp": self.cp, "fsdp": self.fsdp, "replicas": self.replicas, "pp": self.pp}
        for name, ranks in (axes | {"ep": self.ep}).items():
            if ranks < 1:
                raise ValueError(f"{name} is {ranks}; an axis has at least one rank")
        if self.fsdp % self.cp:
            raise ValueError(f"weights are sharded over context's {self.cp} ranks too; give fsdp a multiple of it")
        if self.fsdp % self.ep:
            raise ValueError(f"{self.ep} ranks of experts do not divide the {self.fsdp} that a weight is sharded over")

    @property
    def gpus(self) -> int:
        return prod((self.tp, self.fsdp, self.replicas, self.pp))

    @property
    def data(self) -> int:
        """Ranks that see other sequences."""
        return self.fsdp // self.cp * self.replicas


def over(gpus: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, fsdp: int = 0) -> Mesh:
    """The mesh of so many GPUs: what tp and pp leave is sharded over `fsdp` ranks, all of it if that is 0.

    Raises:
        ValueError: axes that do not multiply to `gpus`, with what divides it.
    """
    for name, ranks in (("gpus", gpus), ("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep)):
        if ranks < 1:
            raise ValueError(f"{name} is {ranks}; give 1 or more")
    if gpus % (tp * pp):
        raise ValueError(f"{gpus} GPUs cannot be tp {tp} x pp {pp} = {tp * pp} ranks a group; give divisors of {gpus}")
    rest = gpus // (tp * pp)
    fsdp = fsdp or rest
    if fsdp < 1 or rest % fsdp:
        raise ValueError(f"tp {tp} and pp {pp} leave {rest} of {gpus} GPUs; fsdp is {fsdp}, which does not divide them")
    return Mesh(tp=tp, cp=cp, fsdp=fsdp, replicas=rest // fsdp, pp=pp, ep=ep)
