"""The fewest instructions that were reached for each kind of kernel before it was written for real, on sm_90.

They were counted on prototypes that held the arithmetic and little else; the library's kernels must not need more.
A row is the name of a launch, the figure it bounds ("per_element" or "instructions"), and its highest value.
"""

ARCHITECTURE = 90
Best = dict[str, tuple[str, float]]

BEST: Best = {
    "cast+transpose bf16: cast": ("per_element", 10.0),
    "cast+transpose bf16 E5M2: cast": ("per_element", 10.0),
    "cast+transpose fp32 scale: cast": ("per_element", 10.0),
    "cast+transpose+amax delayed: cast": ("per_element", 10.0),
    # 304 instructions for 64 elements a thread; a thread of ours has 128.
    "amax bf16: amax": ("per_element", 4.75),
    "rows 4096: rowwise": ("per_element", 10.0),
    "transpose: transpose": ("per_element", 3.75),
    "swiglu+cast+transpose: activate": ("per_element", 30.0),
    # The prototype rounded after a product with 1 / 448, lost NaN, and handled neither zeros nor non-finite numbers.
    "mxfp8 rows: mxfp8_rows": ("instructions", 744),
    # The prototype took one row and ended; ours loops over many rows, and the code around the loop counts too.
    "RMSNorm+rows: norm": ("instructions", 280),
}
#: Not reached yet. A row that is reached fails too, so that it is moved to BEST.
BEHIND: Best = {
    # Given up again (20): x is read three times instead of kept in registers, for three programs a multiprocessor.
    "1x128 dual: blockwise": ("per_element", 18.4),
}
