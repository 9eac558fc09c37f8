"""gpt-oss's own MXFP4: the matrices of all experts of a layer in two tensors.

NAME_blocks uint8[experts, rows, columns / 32, 16], two neighbouring codes to a byte, the first in its lower half;
NAME_scales uint8[experts, rows, columns / 32], powers of two (E8M0). Expert e of the module NAME is NAME#e here.
Source: the model card of gpt-oss (arXiv 2508.10925, section 2.1).
"""

from collections.abc import Mapping
from typing import Any

from localinfer.quant.checkpoint import fp4
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.module_reader import ModuleReader
from localinfer.quant.checkpoint.module_tensors import wrong_shape, wrong_type
from localinfer.quant.checkpoint.stored_matrix import StoredMatrix

_BLOCK_BYTES = 16


class Mxfp4Reader(ModuleReader):
    """Reads stacks of experts, one matrix of them at a time."""

    leaves = ("blocks", "scales")

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and what of it the tensor is."""
        for leaf in self.leaves:
            if name.endswith(f"_{leaf}"):
                return name.removesuffix(f"_{leaf}"), leaf
        return super().split_name(name)

    def codes_leaf(self, module: str) -> str | None:
        """Return `blocks` for a quantized stack, None for plain numbers."""
        return "blocks" if f"{module.partition('#')[0]}_blocks" in self._folder.tensors else None

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of one expert's matrix."""
        return self.matrix(module).shape

    def matrix(self, module: str) -> StoredMatrix:
        """Return one expert's matrix. Raises: CorruptFileError if the tensors do not fit each other."""
        stack, _, expert = module.partition("#")
        blocks, scales = self._folder.tensor(f"{stack}_blocks"), self._folder.tensor(f"{stack}_scales")
        for tensor, dimensions in ((blocks, 4), (scales, 3)):
            if tensor.dtype != "U8" or len(tensor.shape) != dimensions or 0 in tensor.shape:
                raise wrong_type(self._folder, tensor.name, f"U8 of {dimensions} dimensions")
        if blocks.shape != (*scales.shape, _BLOCK_BYTES):
            raise wrong_shape(blocks.name, blocks.shape, (*scales.shape, _BLOCK_BYTES))
        index = int(expert or 0)
        if index >= len(self._folder.array(scales.name)):
            raise wrong_shape(scales.name, scales.shape, (index + 1, *scales.shape[1:]), " for its experts")
        data = self._folder.array(blocks.name)[index].reshape(scales.shape[1], -1)
        return fp4.mx_matrix(module, data, self._folder.array(scales.name)[index])
