"""Every architecture on the CPU's tape, against another runtime's logits, and its bits however a prompt is cut."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localinfer.types import FloatArray
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import ArchModel, ArchRun, architectures, build_model, normalized_error, run_logits
from tests.models.numpy_device import NumpyDevice


def check_bits(
    model: ArchModel, kv_type: str, cuts: Sequence[tuple[int, Sequence[int]]] = ((1, (0, 1)), (2, (7,)))
) -> FloatArray:
    """The logits, which are the same bits on every number of threads and in chunks of every number of rows (0: all)."""
    found = []
    for num_threads, chunks in cuts:
        with ArchRun(model, CpuDevice(num_threads, kv_type)) as run:
            found += [run.logits(chunk_rows) for chunk_rows in chunks]
    for again in found[1:]:
        np.testing.assert_array_equal(again.view(np.uint32), found[0].view(np.uint32))
    return found[0]


@pytest.mark.parametrize(("index", "name"), list(enumerate(architectures())), ids=architectures())
def test_cpu_logits_equal_those_of_the_reference_runtime_in_any_batch(index: int, name: str, folder: Path) -> None:
    """By turns in chunks of one row, or of seven on two threads."""
    model = build_model(folder, name)
    found = check_bits(model, "f32", ((1, (0, 1)),) if index % 2 else ((1, (0,)), (2, (7,))))
    assert normalized_error(found, model.logits) <= 1e-6


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3-gqa", "gpt-oss-moe", "gemma4-e2b", "glm-dsa-sparse"])
def test_cpu_logits_over_a_float16_cache_are_the_same_bits_in_any_batch(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    assert normalized_error(check_bits(model, "f16"), model.logits) <= 1e-4


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [
        ("llama-gqa", "q8_0"),
        ("llama-gqa", "q4_0"),
        ("gemma3-gqa", "q8_0/f16"),
        ("gpt-oss-moe", "q4_0"),
        ("gpt-oss-moe", "q8_0/f16"),
        ("deepseek2-moe", "q8_0"),
        ("deepseek2-moe", "q4_0"),
        ("gemma4-e2b", "q8_0"),
    ],
)
def test_cpu_logits_over_a_quantized_cache_are_the_same_bits_in_any_batch(
    name: str, kv_type: str, folder: Path
) -> None:
    model = build_model(folder, name)
    found = check_bits(model, kv_type)
    # A number on the edge between two codes may fall either way, so single codes differ from the oracle's.
    assert normalized_error(found, run_logits(model, NumpyDevice(kv_type))) <= 1e-4


@pytest.mark.parametrize("name", ["glm-dsa-sparse", "minimax-m3-sparse"])
def test_cpu_logits_of_chosen_positions_over_a_quantized_cache_are_the_same_bits_in_any_batch(
    name: str, folder: Path
) -> None:
    model = build_model(folder, name)
    found, wanted = check_bits(model, "q8_0"), run_logits(model, NumpyDevice("q8_0"))
    # One code that falls the other way may change a choice, and with it that row.
    errors = [normalized_error(one, other) for one, other in zip(found, wanted, strict=True)]
    assert np.quantile(errors, 0.75) <= 1e-4
