"""A whole model whose layers differ, on the emulated GPU, against another runtime's logits."""

from dataclasses import replace
from pathlib import Path

from tests.kernels.cuda.device import CudaTestDevice, EmulatedDevice
from tests.models.arch_models import build_model, normalized_error, run_logits


def test_layers_without_attention_or_keys_run_on_a_gpu(tmp_path: Path) -> None:
    model = build_model(tmp_path, "deci-mixed")
    first = replace(model, token_ids=model.token_ids[:3], logits=model.logits[:3])
    assert normalized_error(run_logits(first, CudaTestDevice(EmulatedDevice())), first.logits) <= 1e-6
