"""Which device a model runs on: a GPU where there is one that it fits, and why not where it does not."""

import logging

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cuda.device import CudaDevice, find_device, has_driver

logger = logging.getLogger(__name__)

_WORKING_BYTES = 1 << 30
"""Memory of a GPU that a model needs besides its weights: buffers, products of long prompts, the shortest caches."""


def open_device(device: str, weight_bytes: int) -> CudaDevice | None:
    """The GPU to run a model on whose weights take so many bytes, or None for the CPU; device: "auto" or "cuda".

    Raises: BackendUnavailableError if "cuda" was asked for by name and cannot be had, with what is missing.
    """
    # Most machines without a GPU have no driver either, and nobody there asked.
    if device == "auto" and not has_driver():
        return None
    try:
        found = find_device()
        needed = weight_bytes + _WORKING_BYTES
        if needed > found.free_bytes:
            raise BackendUnavailableError(
                f"the model needs {needed / 1e9:.1f} GB on {found.name}, which has {found.free_bytes / 1e9:.1f} GB "
                "free; take a smaller model or quantization, or device 'cpu'"
            )
        return CudaDevice()
    except BackendUnavailableError as error:
        if device == "cuda":
            raise
        report_fallback(error)
        return None


def report_fallback(error: Exception) -> None:
    """Say that the CPU is taken, and why."""
    logger.warning("running on the CPU: %s", error)
