"""Whole models whose layers differ, on the emulated GPU, against another runtime's logits."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.cuda.device import CudaTestDevice, EmulatedDevice
from tests.models.arch_models import build_model, normalized_error, run_logits


@pytest.mark.parametrize("name", ["deci-mixed", "minicpm3-mla"])
def test_logits_equal_those_of_the_reference_runtime(name: str, tmp_path: Path) -> None:
    model = build_model(tmp_path, name)
    first = replace(model, token_ids=model.token_ids[:3], logits=model.logits[:3])
    assert normalized_error(run_logits(first, CudaTestDevice(EmulatedDevice())), first.logits) <= 1e-6
