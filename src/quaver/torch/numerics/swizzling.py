"""The order in which Blackwell's GEMMs read the scales of narrow blocks: 32_4_4.

Scales lie in tiles of 128 rows and 4 blocks of k, 512 bytes each; within a tile the rows r, r + 32, r + 64 and r + 96
are neighbours, 16 bytes for their four blocks. Rows and blocks that a tile has too many are zero.

Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout"; `torch.nn.functional.SwizzleType`.
"""

from torch import Tensor
from torch.nn.functional import pad

ROWS, BLOCKS = 128, 4


def swizzle(scale: Tensor) -> Tensor:
    """uint8 scales [rows, blocks of k] to the flat order of the GEMM, padded with zeros. Exact."""
    rows, blocks = scale.shape
    filled = pad(scale, (0, -blocks % BLOCKS, 0, -rows % ROWS))
    tiles = filled.view(-1, 4, 32, filled.shape[1] // BLOCKS, BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """What `swizzle` put in order, [rows, blocks of k]. Exact."""
    across = -(-blocks // BLOCKS)
    tiles = flat.view(-1, across, 32, 4, BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, across * BLOCKS)[:rows, :blocks]
