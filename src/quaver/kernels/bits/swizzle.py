"""Where the GEMMs of Blackwell look for the scales of narrow blocks: the order 32_4_4.

Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout".
"""

import triton
import triton.language as tl


@triton.jit
def swizzled(row, block, across):
    """The byte in which the scale of an operand's row [BM] and block of k [BK] lies: [BM, BK].

    Tiles of 128 rows and 4 blocks are 512 bytes each, `across` of them side by side; in a tile the rows r, r + 32,
    r + 64 and r + 96 are neighbours.
    """
    tile = (row // 128).to(tl.int64)[:, None] * across + (block // 4)[None, :]
    inside = ((row % 32) * 16 + (row % 128) // 32 * 4)[:, None] + (block % 4)[None, :]
    return tile * 512 + inside
