"""The arguments of every block function: sizes, weights, graph builder, and buffers shared by layers."""

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, LinearWeight, Projection, Rows
from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.types import FloatArray


class Graph:
    """The model being written. Buffers are reused by name, so each layer overwrites those of the one before."""

    def __init__(
        self, config: ModelConfig, architecture: Architecture, weights: CheckedWeights, tape: GraphBuilder
    ) -> None:
        self.config = config
        self.architecture = architecture
        self.weights = weights
        self.tape = tape
        self._buffers: dict[tuple[str, int, Rows], Buffer] = {}

    def buffer(self, name: str, width: int, rows: Rows) -> Buffer:
        """The buffer of this name and shape, reserved on first use."""
        key = (name, width, rows)
        if key not in self._buffers:
            self._buffers[key] = self.tape.buffer(f"{name}.{rows.value}", width, rows)
        return self._buffers[key]

    def block_norm(self, layer: int, name: str | None, x: Buffer, out_name: str) -> Buffer:
        """Norm of x by a block's named norm, in a new buffer; x itself if the model has no such norm."""
        if name is None:
            return x
        out = self.buffer(out_name, x.width, x.rows)
        self.norm(out, x, f"blk.{layer}.{name}")
        return out

    def norm(self, out: Buffer, x: Buffer, name: str, group_size: int = 0) -> None:
        """The model's norm over each row, or over each `group_size` elements of it.

        Its weight has the size of the row or of the group, or one row of `group_size` weights per group.
        """
        length = group_size or x.width
        shapes = ((length,), (x.width // length, length)) if group_size else ((length,),)
        weight = _flat(self.weights.vector(f"{name}.weight", *shapes))
        if self.architecture.norm is Norm.RMS:
            self.tape.rms_norm(out, x, weight, self.config.norm_epsilon, group_size)
        else:
            bias = self.weights.optional_vector(f"{name}.bias", *shapes)
            bias = None if bias is None else _flat(bias)
            self.tape.layer_norm(out, x, weight, bias, self.config.norm_epsilon, group_size)

    def bias(self, name: str, length: int) -> FloatArray | None:
        """The bias beside the weight of this name, if the file has one."""
        return self.weights.optional_vector(f"{name}.bias", (length,))

    def sum_norm(self, layer: int, name: str | None, hidden: Buffer) -> None:
        """Norm the residual stream in place by a block's named norm, if the model has it."""
        if name is not None:
            self.norm(hidden, hidden, f"blk.{layer}.{name}")

    def add_branch(
        self, hidden: Buffer, x: Buffer, weight: LinearWeight, bias: FloatArray | None, post_norm: str | None
    ) -> None:
        """hidden += residual_scale * norm(weight x + bias): the end of a branch."""
        scale = self.architecture.residual_scale
        if post_norm is None:
            self.tape.matmul(x, [Projection(weight, hidden, bias, residual=hidden, scale=scale)])
            return
        branch = self.buffer("branch", hidden.width, hidden.rows)
        self.tape.matmul(x, [Projection(weight, branch, bias)])
        self.add_normed(hidden, branch, post_norm)

    def add_normed(self, hidden: Buffer, branch: Buffer, post_norm: str) -> None:
        """hidden += residual_scale * norm(branch); `branch` is overwritten."""
        self.norm(branch, branch, post_norm)
        self.tape.add(hidden, hidden, branch, self.architecture.residual_scale)

    def select_output(self, x: Buffer) -> Buffer:
        """The output rows of x."""
        out = self.buffer(x.name.removesuffix(f".{x.rows.value}"), x.width, Rows.OUTPUT)
        self.tape.select_output(out, x)
        return out


def refuse(config: ModelConfig, what: str) -> UnsupportedFormatError:
    """The error, to be raised by the caller, for an unsupported feature of a supported architecture."""
    return UnsupportedFormatError(
        f"this {config.architecture} model {what}, which this version cannot run. "
        "Update localinfer or choose another model."
    )


def _flat(weight: FloatArray) -> FloatArray:
    return np.ascontiguousarray(weight).reshape(-1)
