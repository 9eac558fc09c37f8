"""What LLVM makes of kernels for targets this machine may not be: the right instructions, and no hidden calls."""

import re
import subprocess
import sys

import pytest

from localinfer.kernels.layouts import Layout, is_float
from tests.kernels.cpu.emit_assembly import PIECES, TARGETS
from tests.kernels.subprocesses import REPOSITORY, environment
from tests.support.limits import seconds

INTEGER_LAYOUTS = [layout.name for layout in Layout if not is_float(layout)]
DOT_PRODUCTS = {
    "avx512vnni": r"vpdpbusd\s.*%zmm",
    "avxvnni": r"vpdpbusd\s.*%ymm",
    "avx2": r"vpmaddubsw\s.*%ymm",
    "neon": r"sdot\s+v\d+\.4s, v\d+\.16b",
    "windows on arm": r"sdot\s+v\d+\.4s, v\d+\.16b",
    "apple": r"sdot\.4s\s+v\d+",
}


@pytest.fixture(scope="module")
def listings() -> dict[tuple[str, str], str]:
    """Assembly by target and piece."""
    command = [sys.executable, "-m", "tests.kernels.cpu.emit_assembly"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=seconds(100)
    )
    last = done.stdout.rpartition("== ")[2].partition("\n")[0]
    assert done.returncode == 0, f"{last}: {done.stderr}"
    parts = re.split(r"^== (.*): (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(zip(parts[::3], parts[1::3], strict=True), parts[2::3], strict=True))


@pytest.mark.parametrize("target", DOT_PRODUCTS)
def test_products_use_the_dot_product_of_their_instruction_set(
    listings: dict[tuple[str, str], str], target: str
) -> None:
    for name in (*INTEGER_LAYOUTS, "key codes 0", "key codes 1"):
        assert re.search(DOT_PRODUCTS[target], listings[target, name]), name


@pytest.mark.parametrize("target", DOT_PRODUCTS)
def test_no_piece_of_a_vector_path_calls_a_function(listings: dict[tuple[str, str], str], target: str) -> None:
    for name in PIECES:
        assert not re.search(r"^\s+(call|callq|bl)\s", listings[target, name], flags=re.MULTILINE), name


def test_the_generic_path_calls_nothing_but_the_fused_multiply_add(listings: dict[tuple[str, str], str]) -> None:
    for name in PIECES:
        text = listings["generic", name]
        called = set(re.findall(r"\b(?:__\w+|fmaf?|rintf?|sqrtf?|expf?)\b", text))
        assert called <= {"fmaf", "rintf"}, name


def test_every_target_is_looked_at(listings: dict[tuple[str, str], str]) -> None:
    assert set(TARGETS) == {*DOT_PRODUCTS, "generic"}
    assert set(listings) == {(target, piece) for target in TARGETS for piece in PIECES}
