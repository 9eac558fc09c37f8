"""The device of a model: a GPU if there is one, with as many layers as fit.

The number of layers is computed from the file before loading: the weights in the device's layout, the KV cache of the
requested context, and working buffers. The last layers are placed on the device, with the output head, so that tokens
are sampled there; the embeddings too if all layers are.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from localinfer.errors import BackendUnavailableError, LocalinferError, OutOfMemoryError, RequestError
from localinfer.kernels.cuda.device import CudaDevice, find_device, has_driver
from localinfer.kernels.cuda.self_check import check_device
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import CUDA_LAYOUTS, SIZES
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.types import TensorRecord
from localinfer.quant.pipeline.conversion import layout_of
from localinfer.types import ProgressCallback

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

USUAL_TOKENS = 8192
"""Positions of the KV cache to plan for, if no context length is given."""

MARGIN_BYTES = 256 << 20
"""Reserve for what is not counted: library workspace, captured graphs, other programs."""

RECURRENT_ON_CPU = (
    "this model has recurrent layers, whose states this version keeps on the CPU only; take device 'cpu' (--device cpu)"
)

_BATCH_ROWS = 1024
_OUTPUT_ROWS = 64
_LIBRARY_BYTES = 128 << 20
"""Dequantized weights for prompts."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a device needs for the parts of a model.

    layers: weights, keys and values of each. output: the norm and the matrix after the last layer. embedding: the
    table, 0 if it is tied to that matrix. working: buffers, for any number of layers.
    """

    layers: Sequence[int]
    output: int
    embedding: int
    working: int

    def bytes_of(self, num_layers: int) -> int:
        """Bytes of the last `num_layers` layers, the output head and buffers, without embeddings."""
        return self.working + self.output + sum(self.layers[len(self.layers) - num_layers :])


@dataclass(frozen=True)
class Placement:
    """The parts of a model on a device: its last layers, and the embeddings or not."""

    num_gpu_layers: int
    num_layers: int
    has_embedding: bool
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether the whole model is on the device."""
        return self.has_embedding and self.num_gpu_layers == self.num_layers

    def describe(self, device_name: str, free_bytes: int) -> str:
        """One line: the placement and the memory it needs."""
        counts = f"{self.num_gpu_layers} of {self.num_layers} layers on the GPU"
        memory = f"{self.num_bytes / 1e9:.1f} GB of the {free_bytes / 1e9:.1f} GB free on {device_name}"
        if self.is_whole:
            return f"{counts}: they need {memory}"
        rest = "embeddings" if self.num_gpu_layers == self.num_layers else "the others"
        return f"{counts}: they need {memory}; {rest} on the CPU"


def memory_needs(file: ModelFile, config: ModelConfig, kv_layout: KVLayout, num_tokens: int) -> MemoryNeeds:
    """The bytes of each part of a model, with a KV cache of `num_tokens` positions."""
    weights = [0] * config.num_layers
    output = embedding = 0
    widest = config.hidden_size
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None:
            # Further layers are for next-token prediction, which is not run.
            if int(block[1]) < config.num_layers:
                weights[int(block[1])] += num_bytes
                widest = max(widest, *tensor.shape[-2:])
        elif name in ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight"):
            embedding += num_bytes
        elif name.startswith(("output", "per_layer_", "altup_")):
            output += num_bytes
    is_tied = "output.weight" not in file.tensors
    if is_tied:
        output, embedding = output + embedding, 0
    num_pages = -(-num_tokens // kv_layout.page_tokens)
    layers = [
        num_bytes + num_pages * shape.num_kv_heads * kv_layout.head(layer).num_bytes
        for layer, (num_bytes, shape) in enumerate(zip(weights, kv_layout.layers[: config.num_layers], strict=True))
    ]
    slots = 1 if config.experts is None else config.experts.num_selected
    rows = _BATCH_ROWS * 4 * (8 * config.hidden_size + (3 + slots) * widest)
    working = rows + _OUTPUT_ROWS * 4 * config.vocab_size + _LIBRARY_BYTES
    return MemoryNeeds(layers, output, embedding, working)


def bytes_per_token(file: ModelFile, config: ModelConfig) -> int:
    """Bytes of weights that decoding one token reads on a device: of experts the selected ones, of tables one row."""
    total = 0
    is_tied = "output.weight" not in file.tensors
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None and int(block[1]) >= config.num_layers:
            continue
        if name.endswith("_embd.weight") and not (is_tied and name == "token_embd.weight"):
            num_bytes //= tensor.shape[0]
        elif "_exps." in name and config.experts is not None:
            num_bytes = num_bytes * config.experts.num_selected // config.experts.num_experts
        total += num_bytes
    return total


def choose_placement(needs: MemoryNeeds, free_bytes: int, wanted: int | None) -> Placement | None:
    """As many layers as fit, or `wanted` ones (at most all); None if not one fits.

    If `wanted` is None, MARGIN_BYTES are kept free. Raises: RequestError if `wanted` layers do not fit.
    """
    num_layers = len(needs.layers)
    room = free_bytes - MARGIN_BYTES
    fitting = max((count for count in range(1, num_layers + 1) if needs.bytes_of(count) <= room), default=0)
    if wanted is None:
        count = fitting
    else:
        count, room = min(wanted, num_layers), free_bytes
        if needs.bytes_of(count) > room:
            raise RequestError(
                f"gpu_layers is {wanted}, and {count} layers need {needs.bytes_of(count) / 1e9:.1f} GB of a GPU that "
                f"has {free_bytes / 1e9:.1f} GB free, where {fitting} of {num_layers} fit; give that or less, "
                "a smaller context_length, or leave gpu_layers out"
            )
    if not count:
        return None
    total = needs.bytes_of(count)
    has_embedding = count == num_layers and total + needs.embedding <= room
    return Placement(count, num_layers, has_embedding, total + (needs.embedding if has_embedding else 0))


def _device_bytes(file: ModelFile, tensor: TensorRecord) -> int:
    """Bytes of a tensor in its layout on a GPU; vectors are float32."""
    if file.grouped(tensor.name) is not None:
        return tensor.num_bytes
    if len(tensor.shape) < 2:
        return 4 * prod(tensor.shape)
    sizes = SIZES[layout_of(tensor.type, CUDA_LAYOUTS)]
    return prod(tensor.shape) // sizes.unit * sizes.file_bytes


def check_gpu_layers(device: str, gpu_layers: int | None) -> None:
    """Raise RequestError if gpu_layers is invalid or contradicts the device."""
    if gpu_layers is None:
        return
    if not isinstance(gpu_layers, int) or isinstance(gpu_layers, bool) or gpu_layers < 0:
        raise RequestError(
            f"gpu_layers is {gpu_layers!r}; give how many layers run on the GPU, or None for as many as fit"
        )
    if device == "cpu" and gpu_layers:
        raise RequestError(f"gpu_layers is {gpu_layers}, but the device is 'cpu'; take device 'cuda' or 'auto'")
    if device == "cuda" and not gpu_layers:
        raise RequestError("gpu_layers is 0, but the device is 'cuda'; take device 'cpu' for a model without a GPU")


def open_device(
    device: str,
    needs: Callable[[], MemoryNeeds],
    gpu_layers: int | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[CudaDevice, Placement] | None:
    """The GPU and the placement of a model on it, or None for the CPU; device: "auto" or "cuda".

    A GPU that fails the self-check is not used. needs: called only if there is a GPU. gpu_layers: None for all that
    fit. Raises: BackendUnavailableError if device is "cuda" and not available, with the reason; RequestError if the
    requested layers do not fit.
    """
    # Without a driver there is nothing to report.
    if gpu_layers == 0 or (device == "auto" and gpu_layers is None and not has_driver()):
        return None
    try:
        found = _with_gpu_errors(find_device)
        counted = needs()
        placement = choose_placement(counted, found.free_bytes, gpu_layers)
        if placement is None:
            needed = counted.bytes_of(1) + MARGIN_BYTES
            raise BackendUnavailableError(
                f"a single layer and the output need {needed / 1e9:.1f} GB on {found.name}, which has "
                f"{found.free_bytes / 1e9:.1f} GB free; take a smaller model, quantization or context_length, or "
                "device 'cpu'"
            )
        opened = _with_gpu_errors(lambda: _open_checked(progress))
        level = logging.INFO if placement.is_whole else logging.WARNING
        logger.log(level, "%s", placement.describe(found.name, found.free_bytes))
        return opened, placement
    except (BackendUnavailableError, OutOfMemoryError) as error:
        if device == "cuda":
            raise
        report_fallback(error)
        return None


def _open_checked(progress: ProgressCallback | None) -> CudaDevice:
    """The GPU, after its self-check."""
    opened = CudaDevice()
    try:
        check_device(opened, progress)
    except Exception:
        # After a failed check closing may fail too.
        with contextlib.suppress(Exception):
            opened.close()
        raise
    return opened


def _with_gpu_errors(ask: Callable[[], Answer]) -> Answer:
    """The result of `ask`; errors of drivers and compilers become BackendUnavailableError."""
    try:
        return ask()
    except LocalinferError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        raise BackendUnavailableError(
            f"the GPU, or what is installed for it, failed before it was used ({type(error).__name__}: {reason}); "
            "take device 'cpu'"
        ) from error


def calibration_device(device: str) -> str | None:
    """torch's name of the GPU to calibrate on, or None for the CPU; device: "auto", "cpu" or "cuda".

    Raises: BackendUnavailableError if device is "cuda" and torch finds no GPU.
    """
    if device == "cpu" or (device == "auto" and not has_driver()):
        return None
    try:
        import torch

        if torch.cuda.is_available():
            return "cuda"
        reason = "torch finds no GPU"
    except ImportError:
        reason = "torch is not installed"
    if device == "cuda":
        raise BackendUnavailableError(
            f"calibration cannot run on a GPU: {reason}; install 'localinfer[cuda]' with an NVIDIA driver, or take "
            "device 'cpu'"
        )
    return None


def stay_on_cpu(
    device: str,
    gpu_layers: int | None,
    reason: str,
    refusal: type[LocalinferError] = BackendUnavailableError,
) -> None:
    """Log why a model is not placed on an available GPU.

    Raises: `refusal` if device is "cuda", or layers on a GPU are wanted.
    """
    if device == "cuda" or gpu_layers:
        raise refusal(reason)
    if device == "auto" and has_driver():
        report_fallback(refusal(reason))


def report_fallback(error: Exception) -> None:
    """Log that the CPU is used, and why."""
    logger.warning("running on the CPU: %s", error)
