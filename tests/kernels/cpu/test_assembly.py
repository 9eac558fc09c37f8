"""What LLVM makes of kernels for targets this machine may not be: right instructions, no hidden calls, equal bits."""

import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from localinfer.kernels.cpu.compiled import blocks
from localinfer.kernels.layouts import PAIRED_LAYOUTS, SHARED_PAIRED_LAYOUTS, Layout, is_float
from tests.bench.bench_assembly import COMMON, innermost, spills
from tests.kernels.cpu.emit_assembly import TARGETS, pieces_of, runs_here
from tests.kernels.cpu.stored_digests import stored
from tests.kernels.subprocesses import REPOSITORY, environment
from tests.support.limits import seconds

INTEGER_LAYOUTS = [layout.name for layout in Layout if not is_float(layout)]
DOT_PRODUCTS = {
    "avx512vnni": r"vpdpbusd\s.*%zmm",
    "avx512vbmi": r"vpdpbusd\s.*%zmm",
    "avxvnni": r"vpdpbusd\s.*%ymm",
    "avxvnni of avx512": r"vpdpbusd\s.*%ymm",
    "avx2": r"vpmaddubsw\s.*%ymm",
    "neon": r"sdot\s+v\d+\.4s, v\d+\.16b",
    "i8mm": r"(u?smmla|sdot)\s+v\d+\.4s, v\d+\.16b",
    "windows on arm": r"sdot\s+v\d+\.4s, v\d+\.16b",
    "apple": r"sdot(\.4s)?\s+v\d+",
}


_OF_REGISTERS = ("ldtilecfg", "tdpbssd", "tilerelease")

LONGEST = 100
"""Seconds of the program."""
Listings = dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def printed() -> tuple[Listings, Listings]:
    """Assembly, and digests of what it computes, by target and piece."""
    command = [sys.executable, "-m", "tests.kernels.cpu.emit_assembly"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=seconds(LONGEST)
    )
    last = done.stdout.rpartition("== ")[2].partition("\n")[0]
    assert done.returncode == 0, f"after {last}: {done.stderr}"
    parts = re.split(r"^== (.*): (.*): (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    names = list(zip(parts[::4], parts[1::4], strict=True))
    return dict(zip(names, parts[3::4], strict=True)), dict(zip(names, parts[2::4], strict=True))


@pytest.fixture
def listings(printed: tuple[Listings, Listings]) -> Listings:
    return printed[0]


@pytest.mark.parametrize("target", DOT_PRODUCTS)
def test_products_use_the_dot_product_of_their_instruction_set(listings: Listings, target: str) -> None:
    for name in (*INTEGER_LAYOUTS, "key codes 0", "key codes 1"):
        if name in pieces_of(target):
            assert re.search(DOT_PRODUCTS[target], listings[target, name]), name


def test_products_of_pairs_multiply_matrices_and_nothing_else(listings: Listings) -> None:
    for name in pieces_of("i8mm"):
        if name in Layout.__members__:
            instructions = {"smmla", "usmmla", "sdot"} & set(re.findall(r"\b[a-z]+\b", listings["i8mm", name]))
            if Layout[name] in PAIRED_LAYOUTS:
                wanted = {"usmmla" if Layout[name] in SHARED_PAIRED_LAYOUTS else "smmla"}
            else:
                wanted = set() if is_float(Layout[name]) else {"sdot"}
            assert instructions == wanted, name


def test_products_by_amx_configure_registers_multiply_and_release_them(listings: Listings) -> None:
    for name in pieces_of("amx"):
        lines = listings["amx", name].splitlines()
        used = re.findall(r"^\s+(\w+)\s.*%tmm", listings["amx", name], flags=re.MULTILINE)
        assert used and set(used) <= {"tilezero", "tileloadd", "tdpbssd", "tilestored"}, name
        places = [[i for i, line in enumerate(lines) if re.match(rf"\s+{one}\b", line)] for one in _OF_REGISTERS]
        configured, products, released = places
        assert len(configured) == len(released) == 1 and configured < products[:1] and products[-1:] < released, name
        assert not re.search(r"^\s+call", listings["amx", name], flags=re.MULTILINE), name
        multiplying = [loop for loop in map("\n".join, innermost(lines)) if "tdpbssd" in loop and "vfmadd" not in loop]
        assert len(multiplying) == 4, "sixteen rows and eight, two blocks at a time and one"
        assert not [loop for loop in multiplying if "(%rsp)" in loop], name


def test_totals_of_sixteen_rows_stay_in_registers(listings: Listings) -> None:
    assert not re.search(r"%zmm.*\(%rsp\)|\(%rsp\).*%zmm", listings["amx", "matrices of Q4_0"])


@pytest.mark.parametrize("target", ["neon", "i8mm"])
def test_no_product_of_a_common_layout_spills_in_its_innermost_loop(listings: Listings, target: str) -> None:
    """By four rows of activations, the most of dot products."""
    found = {name: spills(listings[target, name]) for name in COMMON}
    assert found == dict.fromkeys(COMMON, 0)


@pytest.mark.parametrize("target", DOT_PRODUCTS)
def test_no_piece_of_a_vector_path_calls_a_function(listings: Listings, target: str) -> None:
    for name in pieces_of(target):
        assert not re.search(r"^\s+(call|callq|bl)\s", listings[target, name], flags=re.MULTILINE), name


def test_the_generic_path_calls_nothing_but_the_fused_multiply_add(listings: Listings) -> None:
    for name in pieces_of("generic"):
        text = listings["generic", name]
        called = set(re.findall(r"\b(?:__\w+|fmaf?|rintf?|sqrtf?|expf?)\b", text))
        assert called <= {"fmaf", "rintf"}, name


@pytest.mark.parametrize("target", TARGETS)
def test_products_of_every_path_of_this_machine_are_those_that_are_stored(
    printed: tuple[Listings, Listings], target: str
) -> None:
    """Of weights in every layout and of codes; each path as compiled for a CPU that has no better one.

    Other machines are compared with what is stored.
    """
    if not runs_here(target):
        pytest.skip("this machine does not run it")
    digests = printed[1]
    products = [name for name in pieces_of(target) if name in Layout.__members__ or "codes" in name]
    compared = [name for name in products if not name.startswith("head")]
    wanted = stored()
    assert {name: digests[target, name] for name in compared} == {name: wanted[name] for name in compared}


def test_every_target_is_looked_at(listings: Listings) -> None:
    assert set(TARGETS) == {*DOT_PRODUCTS, "amx", "generic", "pairs", "shared bytes"}
    assert set(listings) == {(target, piece) for target in TARGETS for piece in pieces_of(target)}
    whole = ("avx512vnni", "avx2")
    assert all({*Layout.__members__} <= {*pieces_of(target)} for target in whole)


@pytest.mark.parametrize("target", ["avxvnni of avx512", "generic", "neon", "i8mm", "pairs"])
def test_every_function_of_products_is_compiled(target: str) -> None:
    def functions(names: Iterable[str]) -> set[object]:
        return {blocks.BODIES.get(Layout[name]) for name in names if name in Layout.__members__}

    assert functions(pieces_of(target)) == functions(Layout.__members__)
