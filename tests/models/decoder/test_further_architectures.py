"""Architectures that are one record each: their logits against another runtime's, on the oracle and on the CPU."""

import numpy as np
import pytest

from localinfer.models.calibration.scale_groups import find_scale_groups
from localinfer.models.decoder.metadata_keys import unknown_keys
from localinfer.quant.gguf.reader import read_gguf
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import (
    ArchModel,
    build_further,
    further_skeletons,
    normalized_error,
    read_config,
    run_logits,
)
from tests.models.numpy_device import NumpyDevice

SKELETONS = further_skeletons()


@pytest.fixture(scope="module", params=SKELETONS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ArchModel:
    return build_further(tmp_path_factory.mktemp("further"), request.param)


def test_logits_equal_those_of_the_reference_runtime(model: ArchModel) -> None:
    assert normalized_error(run_logits(model, NumpyDevice()), model.logits) <= 1e-6


def test_cpu_logits_equal_those_of_the_reference_runtime_in_any_batch(model: ArchModel) -> None:
    found = run_logits(model, CpuDevice(1))
    assert normalized_error(found, model.logits) <= 1e-6
    again = run_logits(model, CpuDevice(2), 7)
    np.testing.assert_array_equal(again.view(np.uint32), found.view(np.uint32))


def test_every_setting_is_read_and_every_matrix_can_be_calibrated(model: ArchModel) -> None:
    with read_gguf(model.path) as file:
        assert unknown_keys(file.metadata, SKELETONS[model.name]["arch"]) == []
        shapes = {name: info.shape for name, info in file.tensors.items()}
    groups, unscalable = find_scale_groups(read_config(model.path), shapes)
    read = {reader for group in (*groups, *unscalable) for reader in group.readers}
    for_images = {name for name in shapes if ".vis_" in name}
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and name.startswith("blk.")}
    matrices = {name for name in matrices if "_norm" not in name and "conv1d" not in name}
    assert matrices - for_images - {"position_embd.weight"} <= read
