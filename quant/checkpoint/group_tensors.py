"""The small reads that all kinds of quantized checkpoints share, each with its check."""

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.checkpoint.folder import CheckpointFolder

_AGAIN = "Download the checkpoint again, or another one"


def words_of(folder: CheckpointFolder, name: str, dimensions: int) -> NDArray[np.int32]:
    """Return a tensor of 32-bit words. Raises: CorruptFileError if it is missing or of another type."""
    tensor = folder.tensor(name)
    if tensor.dtype not in ("I32", "U32") or len(tensor.shape) != dimensions:
        raise CorruptFileError(
            f"{name} is {tensor.dtype} of shape {tensor.shape}; wanted I32 of {dimensions} dimensions. {_AGAIN}"
        )
    array: NDArray[np.int32] = folder.array(name).view(np.int32)
    return array


def scales_of(folder: CheckpointFolder, name: str) -> NDArray[np.float32]:
    """Return a matrix of scales as float32. Raises: CorruptFileError if it is missing or of another type."""
    tensor = folder.tensor(name)
    if tensor.dtype not in ("F16", "BF16", "F32") or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CorruptFileError(
            f"{name} is {tensor.dtype} of shape {tensor.shape}; wanted a matrix of F16, BF16 or F32. {_AGAIN}"
        )
    array = folder.array(name)
    if tensor.dtype == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], why: str = "") -> CorruptFileError:
    """An error, to be raised by the caller, for tensors that do not fit each other."""
    return CorruptFileError(f"{name} has shape {found}; wanted {wanted}{why}, to fit its neighbours. {_AGAIN}")
