"""A decoder as the costs see it: matrices of a block and how they are cut, attention's sizes, and the number of blocks.

No framework and no names of a library's classes: `quaver plan` makes one of a model's configuration.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight [out_features, in_features] of a block, or one such weight of each expert."""

    out_features: int
    in_features: int
    #: What tensor parallelism divides: "column" the outputs, "row" the inputs, None nothing.
    cut: Literal["column", "row"] | None = "column"
    #: How many there are, and how many of them a token meets.
    experts: int = 1
    chosen: int = 1

    @property
    def parameters(self) -> int:
        return self.out_features * self.in_features * self.experts

    @property
    def routed(self) -> bool:
        return self.experts > 1


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a decoder: attention, then an MLP or experts."""

    dim: int
    matrices: tuple[Matrix, ...]
    heads: int
    #: Features of a head that scores are made of, and of a head's values.
    score_features: int
    value_features: int
    #: Features of queries, keys and values together, which rope and attention read.
    attended: int
    #: Features between the matrices of the MLP that a token meets.
    hidden: int

    @property
    def parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices)

    @property
    def routed_parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices if matrix.routed)

    @property
    def chosen(self) -> int:
        """Experts that a token meets."""
        return max((matrix.chosen for matrix in self.matrices if matrix.routed), default=0)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Blocks with how often each stands, an embedding and a head of `vocab` rows."""

    name: str
    blocks: tuple[tuple[int, Block], ...]
    dim: int
    vocab: int
    tied: bool = False

    @property
    def layers(self) -> int:
        return sum(count for count, _ in self.blocks)

    @property
    def parameters(self) -> int:
        rows = self.vocab * self.dim * (1 if self.tied else 2)
        return rows + sum(count * block.parameters for count, block in self.blocks)


def llama(
    name: str, layers: int, dim: int, heads: int, groups: int, head_dim: int, hidden: int, vocab: int = 128_256
) -> Decoder:
    """A decoder with grouped queries and a gated MLP."""
    return Decoder(name=name, blocks=((layers, dense(dim, heads, groups, head_dim, hidden)),), dim=dim, vocab=vocab)


def dense(dim: int, heads: int, groups: int, head_dim: int, hidden: int, *, gated: bool = True) -> Block:
    """A block with grouped queries and one MLP."""
    q, kv = heads * head_dim, groups * head_dim
    wide = Matrix(out_features=hidden, in_features=dim)
    matrices = (
        Matrix(out_features=q, in_features=dim),
        *(Matrix(out_features=kv, in_features=dim),) * 2,
        Matrix(out_features=dim, in_features=q, cut="row"),
        *(wide,) * (2 if gated else 1),
        Matrix(out_features=dim, in_features=hidden, cut="row"),
    )
    return Block(
        dim=dim,
        matrices=matrices,
        heads=heads,
        score_features=head_dim,
        value_features=head_dim,
        attended=q + 2 * kv,
        hidden=hidden,
    )


def latent(
    dim: int, heads: int, q_rank: int, kv_rank: int, plain_dim: int, rope_dim: int, value_dim: int
) -> tuple[Matrix, ...]:
    """Latent attention: queries from q_rank features, keys and values from kv_rank, rope_dim of a head turned."""
    return (
        Matrix(out_features=q_rank, in_features=dim, cut=None),
        Matrix(out_features=heads * (plain_dim + rope_dim), in_features=q_rank),
        Matrix(out_features=kv_rank + rope_dim, in_features=dim, cut=None),
        Matrix(out_features=heads * (plain_dim + value_dim), in_features=kv_rank),
        Matrix(out_features=dim, in_features=heads * value_dim, cut="row"),
    )


def deepseek_v3_like() -> Decoder:
    """The sizes of DeepSeek-V3 (its config.json and arXiv:2412.19437, section 4.2): 61 blocks of 7168 features, latent
    attention of 128 heads, 3 dense blocks, then a shared expert and 256 routed ones of 2048 features, 8 for a token.
    Its prediction of a second token is left out."""
    dim, heads, width = 7168, 128, 2048
    attention = {"dim": dim, "heads": heads, "score_features": 192, "value_features": 128, "attended": heads * 448}

    def mlp(hidden: int, experts: int = 1, chosen: int = 1) -> tuple[Matrix, ...]:
        wide = Matrix(out_features=hidden, in_features=dim, experts=experts, chosen=chosen)
        down = Matrix(out_features=dim, in_features=hidden, cut="row", experts=experts, chosen=chosen)
        return wide, wide, down

    own = latent(dim, heads, 1536, 512, 128, 64, 128)
    first = Block(matrices=(*own, *mlp(18_432)), hidden=18_432, **attention)
    routed = (*own, *mlp(width), *mlp(width, 256, 8))
    rest = Block(matrices=routed, hidden=9 * width, **attention)
    return Decoder(name="deepseek-v3-like", blocks=((3, first), (58, rest)), dim=dim, vocab=129_280)
