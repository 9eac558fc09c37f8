"""What LLVM makes of kernels for targets this machine may not be: the right instructions, and no hidden calls."""

import re
import subprocess
import sys

import pytest

from localinfer.kernels.layouts import Layout, is_float
from tests.kernels.cpu.emit_assembly import PIECES, TARGETS
from tests.kernels.subprocesses import REPOSITORY, environment
from tests.limits import seconds

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
def listings(request: pytest.FixtureRequest) -> dict[str, str]:
    """Assembly by piece, for the target the test is about."""
    command = [sys.executable, "-m", "tests.kernels.cpu.emit_assembly", request.param]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=seconds(25)
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^== (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("listings", DOT_PRODUCTS, indirect=True)
def test_products_use_the_dot_product_of_their_instruction_set(
    listings: dict[str, str], request: pytest.FixtureRequest
) -> None:
    wanted = DOT_PRODUCTS[request.node.callspec.params["listings"]]
    for name in INTEGER_LAYOUTS:
        assert re.search(wanted, listings[name]), name
    assert re.search(wanted, listings["key codes 0"])
    assert re.search(wanted, listings["key codes 1"])


@pytest.mark.parametrize("listings", DOT_PRODUCTS, indirect=True)
def test_no_piece_of_a_vector_path_calls_a_function(listings: dict[str, str]) -> None:
    assert set(listings) == set(PIECES)
    for name, text in listings.items():
        assert not re.search(r"^\s+(call|callq|bl)\s", text, flags=re.MULTILINE), name


@pytest.mark.parametrize("listings", ["generic"], indirect=True)
def test_the_generic_path_calls_nothing_but_the_fused_multiply_add(listings: dict[str, str]) -> None:
    for name, text in listings.items():
        called = set(re.findall(r"\b(?:__\w+|fmaf?|rintf?|sqrtf?|expf?)\b", text))
        assert called <= {"fmaf", "rintf"}, name


def test_every_target_is_looked_at() -> None:
    assert set(TARGETS) == {*DOT_PRODUCTS, "generic"}
