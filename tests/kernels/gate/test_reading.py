"""The readers of the gate: the path through a listing, layouts of accesses, programs of a multiprocessor, shares."""

import pytest

from tests.kernels.gate import flow, layouts
from tests.kernels.gate.floors import share
from tests.kernels.gate.occupancy import programs

#: A loop of three instructions, one loads 16 bytes; a call of a division's slow path; two branches.
LISTING = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0030*/              @!P0 BRA 0x10 ;
        /*0040*/               @P1 BRA 0x80 ;
        /*0050*/                   MOV R3, 0x70 ;
        /*0060*/                   CALL.REL.NOINC 0xd0 ;
        /*0070*/                   MOV R5, R6 ;
        /*0080*/                   BRA.U UP0, 0xb0 ;
        /*0090*/                   MOV R7, R8 ;
        /*00a0*/                   BRA 0xc0 ;
        /*00b0*/                   MOV R9, R10 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   RET.REL.NODEC R3 0x0 ;
        /*00e0*/                   BRA 0xe0;
        /*00f0*/                   NOP;
"""


def way(start: int = 0) -> list[flow.Block]:
    code = flow.instructions(LISTING, 16, start)
    return flow.blocks(code, [16 if at.name.startswith("LDG") else 0 for at in code])


def test_the_longest_path_takes_one_branch_and_repeats_loops() -> None:
    # Before the loop 1, three in it, the branch around the call, the branch after it, two of its longer side, the exit.
    assert flow.executed(way(), ()) == (1 + 3 + 1 + 1 + 2 + 1, 16)
    assert flow.executed(way(), (10,)) == (1 + 30 + 1 + 1 + 2 + 1, 160)


def test_a_listing_may_start_at_any_address() -> None:
    moved = LISTING.replace("0x10 ;", "0x110 ;").replace("0x80 ;", "0x180 ;").replace("0xb0 ;", "0x1b0 ;")
    code = flow.instructions(moved.replace("0xc0 ;", "0x1c0 ;").replace("0xe0;", "0x1e0;"), 16, 0x100)
    assert code == flow.instructions(LISTING, 16, 0)


def test_loops_in_loops_multiply() -> None:
    inner = flow.Block(10, 4, (0, 1), (2,))
    nest = [flow.Block(1, 0, (), (1,)), inner, flow.Block(5, 0, (0,), (3,)), flow.Block(1, 0, (), ())]
    assert flow.executed(nest, (3, 4)) == (1 + 120 + 15 + 1, 48)
    # Of two loops at the same depth, the second has five iterations.
    assert flow.executed(nest, (3, (4, 5))) == (1 + 150 + 15 + 1, 60)


def test_a_call_of_a_function_that_exits_is_a_branch() -> None:
    """As ptxas leaves loops on sm_89; listings for sm_120 have more behind a target."""
    listing = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/               @P3 CALL.REL.NOINC 0x30                  ?trans5;
        /*0020*/                   BRA.U !UP0, 0x10                     ?trans5;
        /*0030*/                   EXIT                                 ?trans5;
"""
    code = flow.instructions(listing, 16, 0)
    assert [(at.goes_on, at.target) for at in code] == [(True, None), (True, 3), (True, 1), (False, None)]
    assert flow.executed(flow.blocks(code, [0, 8, 0, 0]), (5,)) == (1 + 10 + 1, 40)


TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1], order = [1, 0]}>
#tall = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [32, 1], warpsPerCTA = [4, 1], order = [1, 0]}>
#wide = #ttg.blocked<{sizePerThread = [1, 16], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1], order = [1, 0]}>
#linear = #ttg.linear<{register = [[0, 1], [0, 2]], lane = [[0, 4], [0, 8], [1, 0]], warp = [[8, 0]], block = []}>
    %1 = tt.load %0 : tensor<64x64x!tt.ptr<bf16>, LAYOUT> loc(#loc3)
    tt.store %2, %3 : tensor<64x64x!tt.ptr<f32>, LAYOUT>
    %4 = tt.load %5, %6, %7 {cache = 1 : i32} : tensor<64x!tt.ptr<i8>, #ttg.slice<{dim = 0, parent = LAYOUT}>>
"""


@pytest.mark.parametrize(
    ("layout", "loads", "stores"),
    [
        # Eight threads with eight bf16 each, or with eight float32, where a thread stores four at once.
        ("#blocked", {128: 8192, 64: 64}, {16: 16384}),
        ("#tall", {16: 8192, 8: 64}, {16: 16384}),
        # The gaps of a thread's first load are filled by its second; those of stores are not.
        ("#wide", {128: 8192, 64: 64}, {16: 16384}),
        ("#linear", {32: 8192, 16: 64}, {64: 16384}),
    ],
)
def test_runs_are_the_contiguous_elements_of_a_warp(layout: str, loads: dict[int, int], stores: dict[int, int]) -> None:
    assert layouts.runs(TTGIR.replace("LAYOUT", layout)) == (loads, stores)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "arch", "expected"),
    [
        # By registers: 72 a thread are 2304 a warp, and seven warps fit the 16384 of each part.
        (72, 8192, 4, 90, 7),
        (128, 16384, 8, 90, 2),
        (80, 0, 8, 90, 3),
        # By shared memory, by warps, by programs.
        (32, 100 * 1024, 8, 90, 2),
        (32, 60 * 1024, 8, 120, 1),
        (16, 0, 32, 100, 2),
        (16, 0, 32, 89, 1),
        (10, 0, 1, 90, 32),
    ],
)
def test_resident_programs_are_limited_by_the_scarcest_resource(
    registers: int, shared: int, warps: int, arch: int, expected: int
) -> None:
    assert programs(registers, shared, warps, arch) == expected


def test_a_share_is_issue_time_over_copy_time() -> None:
    # 132 multiprocessors issue 128 at 1.755 GHz: 29.65e12 a second, which is 6.9 for each of 4.3e12 bytes a second.
    assert share(6.9, "H200") == pytest.approx(29.65 / 6.9 / 4.3, rel=1e-3)
    assert share(3.45, "H200") == 2 * share(6.9, "H200")
    assert share(6.9, "H100") > share(6.9, "H200") > share(6.9, "B200")
