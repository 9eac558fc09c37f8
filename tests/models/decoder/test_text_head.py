"""Encoders and rerankers against another runtime's embeddings, on the oracle and on the CPU, alone and in company."""

from pathlib import Path

import numpy as np
import pytest

from localinfer.models.decoder.block_config import Pooling
from localinfer.types import FloatArray
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import (
    Device,
    TextModel,
    build_text_model,
    normalized_error,
    run_texts,
    skeletons,
    text_models,
)
from tests.models.numpy_device import NumpyDevice

POOLINGS = {1: Pooling.MEAN, 2: Pooling.FIRST, 4: Pooling.RANK}
# The reference runtime's GELU goes through a float16 table.
SCORE_TOLERANCE = 1e-3


def pooling_of(name: str) -> Pooling:
    skeleton = skeletons()[name]
    return POOLINGS[next(value for key, *_, value in skeleton["kv"] if key.endswith(".pooling_type"))]


def check(model: TextModel, device: Device) -> FloatArray:
    """Compare every row and what is pooled with the reference; returns the pooled vector or the scores."""
    (states,) = run_texts(model.path, device, [model.token_ids], Pooling.NONE)
    wanted = model.answers["embeddings"]
    assert normalized_error(states, wanted) <= 1e-6
    cosines = (states * wanted).sum(axis=1) / (np.linalg.norm(states, axis=1) * np.linalg.norm(wanted, axis=1))
    assert cosines.min() >= 1 - 1e-4
    return check_pooled(model, device)


def check_pooled(model: TextModel, device: Device) -> FloatArray:
    """Compare the pooled vector, or the scores, with the reference; returns them."""
    (pooled,) = run_texts(model.path, device, [model.token_ids], pooling_of(model.name))
    if "pooled" in model.answers:
        assert normalized_error(pooled[0], model.answers["pooled"]) <= 1e-6
    else:
        scores = pooled[0]
        if model.name == "qwen3-reranker":
            scores = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(scores, model.answers["scores"], rtol=0, atol=SCORE_TOLERANCE)
    return pooled


@pytest.mark.parametrize("name", text_models())
def test_embeddings_equal_those_of_the_reference_runtime(name: str, folder: Path) -> None:
    check(build_text_model(folder, name), NumpyDevice())


@pytest.mark.parametrize("name", text_models())
def test_cpu_embeddings_equal_those_of_the_reference_runtime_beside_any_texts(name: str, folder: Path) -> None:
    model = build_text_model(folder, name)
    ids, pooling = model.token_ids, pooling_of(name)
    pooled = check(model, CpuDevice(1))
    others = [ids[5:6], ids[::-1].copy(), ids, np.tile(ids, 4)[:133]]
    for threads in (1, 2):
        among = run_texts(model.path, CpuDevice(threads), others, pooling)
        np.testing.assert_array_equal(among[2].view(np.uint32), pooled.view(np.uint32))
        alone = run_texts(model.path, CpuDevice(3 - threads), others[3:], pooling)
        np.testing.assert_array_equal(among[3].view(np.uint32), alone[0].view(np.uint32))
