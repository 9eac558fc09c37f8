"""Whole models on the emulated GPU, against another runtime's logits: layers that differ, latents that are cached."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.cuda.device import CudaTestDevice, EmulatedDevice
from tests.models.arch_models import build_model, normalized_error, run_logits


@pytest.mark.parametrize("name", ["deci-mixed", "deepseek2-moe"])
def test_a_model_on_a_gpu_has_the_right_logits(name: str, tmp_path: Path) -> None:
    model = build_model(tmp_path, name)
    first = replace(model, token_ids=model.token_ids[:2], logits=model.logits[:2])
    assert normalized_error(run_logits(first, CudaTestDevice(EmulatedDevice())), first.logits) <= 1e-6
