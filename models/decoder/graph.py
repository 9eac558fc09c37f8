"""The arguments of every block function: sizes, weights, graph builder, and buffers shared by layers."""

import math
from itertools import accumulate

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, Projection, Rows, short_convolution_state
from localinfer.models.decoder.architecture import Architecture, Norm, SelfSight
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.types import FloatArray


class Graph:
    """The model being written. Buffers are reused by name, so each layer overwrites those of the one before."""

    def __init__(
        self, config: ModelConfig, architecture: Architecture, weights: CheckedWeights, tape: GraphBuilder
    ) -> None:
        self.config, self.architecture, self.weights, self.tape = config, architecture, weights, tape
        self.carried: list[Buffer] = []
        """Buffers that later layers read, beside the hidden states."""
        self._buffers: dict[tuple[str, int, Rows], Buffer] = {}

    def takes_ranges(self, *, windowed: bool) -> bool:
        """Return whether rows of a layer may be told what they see: later rows of their picture, or not the first."""
        sight = self.architecture.picture_sight
        return self.architecture.hides_start or (
            self.config.takes_media and (sight is SelfSight.ALL or (sight is SelfSight.WINDOWED and windowed))
        )

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
        self.norm(out, x, f"blk.{layer}.{name}", kind=self.architecture.of_layer(layer).norm)
        return out

    def norm(
        self,
        out: Buffer,
        x: Buffer,
        name: str,
        group_size: int = 0,
        *,
        epsilon: float | None = None,
        kind: Norm | None = None,
    ) -> None:
        """The model's norm over each row, or over each `group_size` elements of it.

        Its weight, if the model's norms have any, has the size of the row or of the group, or one row of `group_size`
        weights per group. epsilon, kind: if not the model's.
        """
        length = group_size or x.width
        shapes = ((length,), (x.width // length, length)) if group_size else ((length,),)
        weight = None
        if self.architecture.weighted_norms:
            # PLaMo 3's files name some norms without the usual ending.
            whole_name = f"{name}.weight" if self.weights.has(f"{name}.weight") or not self.weights.has(name) else name
            weight = _flat(self.weights.vector(whole_name, *shapes))
        config, is_rms = self.config, (kind or self.architecture.norm) is Norm.RMS
        if epsilon is None:
            epsilon = config.norm_epsilon if is_rms else config.layer_norm_epsilon or config.norm_epsilon
        if is_rms:
            self.tape.rms_norm(out, x, weight, epsilon, group_size)
        else:
            bias = self.weights.optional_vector(f"{name}.bias", *shapes)
            bias = None if bias is None else _flat(bias)
            self.tape.layer_norm(out, x, weight, bias, epsilon, group_size)

    def short_convolution(
        self, out: Buffer, x: Buffer, weight: FloatArray, bias: FloatArray | None = None, *, has_silu: bool = True
    ) -> None:
        """Write a causal convolution over the last rows of x, with a state of its own; weight [width, kernel size]."""
        state = self.tape.add_state(short_convolution_state(*weight.shape))
        self.tape.short_convolution(state, out, x, weight, bias, has_silu)

    def unit_length(self, x: Buffer, head_size: int, epsilon: float | None = None, length: float = 1.0) -> None:
        """Give heads of x a length, in place: length * x / sqrt(sum(x^2) + epsilon), epsilon by default the model's.

        That is a root-mean-square norm with weights length / sqrt(head_size).
        """
        epsilon = self.config.norm_epsilon if epsilon is None else epsilon
        weight = np.full(head_size, length / math.sqrt(head_size), np.float32)
        self.tape.rms_norm(x, x, weight, epsilon / head_size, head_size)

    def bias(self, name: str, length: int) -> FloatArray | None:
        """The bias beside the weight of this name, if the file has one."""
        return self.weights.optional_vector(f"{name}.bias", (length,))

    def sum_norm(self, layer: int, name: str | None, hidden: Buffer) -> None:
        """Norm the residual stream in place by a block's named norm, if the model has it."""
        if name is not None:
            self.norm(hidden, hidden, f"blk.{layer}.{name}")

    def weigh_stream(self, hidden: Buffer, normed: Buffer) -> None:
        """hidden = weight * normed, in the models whose branches are added to a norm of the residual stream."""
        weight = self.architecture.stream_weight
        if weight:
            self.tape.add(hidden, normed, normed, weight - 1.0)

    def projection(
        self,
        name: str,
        out: Buffer,
        num_columns: int,
        *,
        rows: tuple[int, int] | None = None,
        residual: Buffer | None = None,
        scale: float = 1.0,
    ) -> Projection:
        """The product with a named matrix, its bias if there is one, and the factor beside it (`.scale`, BitNet's).

        rows: the first of a part of the matrix, and how many the whole has; None for all of it.
        """
        first, num_rows = (0, out.width) if rows is None else rows
        part = slice(first, first + out.width)
        weight = self.weights.linear(f"{name}.weight", num_rows, num_columns, None if rows is None else part)
        bias = self.bias(name, num_rows)
        factor = self.factor(name)
        bias = bias if bias is None or rows is None else bias[part]
        bias = divided(bias, factor)
        return Projection(weight, out, bias, residual, scale * factor)

    def product(self, name: str, x: Buffer, out_name: str, width: int, scale: float = 1.0) -> Buffer:
        """Write the product of x with a named matrix, and return its buffer."""
        out = self.buffer(out_name, width, x.rows)
        self.tape.matmul(x, [self.projection(name, out, x.width, scale=scale)])
        return out

    def row_parts(self, name: str, x: Buffer, *outs: Buffer) -> list[Projection]:
        """Products of x with the rows of one matrix: those of the first result, then those of the next."""
        ends = list(accumulate((out.width for out in outs), initial=0))
        return [
            self.projection(name, out, x.width, rows=(first, ends[-1])) for out, first in zip(outs, ends, strict=False)
        ]

    def cut_heads(self, together: Buffer, num_heads: int, *outs: Buffer) -> None:
        """Copy the parts that lie side by side in every head of a buffer."""
        offset = 0
        for out in outs:
            size = out.width // num_heads
            self.tape.copy_heads(out, together, num_heads, size, size, together.width // num_heads, x_offset=offset)
            offset += size

    def factor(self, name: str) -> float:
        """The factor beside the weight of this name (`.scale`: BitNet's, or the second scale of NVFP4); 1 without.

        Raises: UnsupportedFormatError for 0, and for what is no number.
        """
        found = self.weights.optional_vector(f"{name}.scale", (1,), ())
        factor = 1.0 if found is None else float(found.reshape(-1)[0])
        if not math.isfinite(factor) or factor == 0.0:
            raise refuse(self.config, f"has a scale of {factor} beside {name}")
        return factor

    def expert_product(
        self,
        name: str,
        out: Buffer,
        x: Buffer,
        expert_ids: Buffer,
        num_columns: int,
        *,
        rows: tuple[int, int] | None = None,
        input_per_slot: bool = False,
    ) -> None:
        """Multiply by the chosen experts' matrices of a named stack, with the biases and factors (`.scale`, one for
        each expert) beside it.

        rows: the first of a part of each matrix, and how many the whole has; None for all of it.
        Raises: UnsupportedFormatError for factors of 0, and for what is no number.
        """
        experts = self.config.experts
        assert experts is not None, "the model has experts"
        size = out.width // expert_ids.width
        first, num_rows = (0, size) if rows is None else rows
        part = None if rows is None else slice(first, first + size)
        weight = self.weights.experts(f"{name}.weight", experts.num_experts, num_rows, num_columns, part)
        bias = self.weights.optional_vector(f"{name}.bias", (experts.num_experts, num_rows))
        if bias is not None and part is not None:
            bias = np.ascontiguousarray(bias[:, part])
        factors = self.weights.optional_vector(f"{name}.scale", (experts.num_experts,))
        if factors is not None:
            for factor in factors[~np.isfinite(factors) | (factors == 0.0)]:
                raise refuse(self.config, f"has a scale of {factor} beside {name}")
            bias = divided(bias, factors[:, None])
        self.tape.expert_matmul(out, x, weight, expert_ids, bias, input_per_slot)
        if factors is not None:
            self.tape.expert_factors(out, expert_ids, factors)

    def add_branch(self, hidden: Buffer, x: Buffer, name: str, post_norm: str | None, scale: float = 1.0) -> None:
        """hidden += residual_scale * norm(scale * (weight x + bias)): the end of a branch, with its last matrix."""
        if post_norm is None:
            scale *= self.architecture.residual_scale
            self.tape.matmul(x, [self.projection(name, hidden, x.width, residual=hidden, scale=scale)])
            return
        branch = self.buffer("branch", hidden.width, hidden.rows)
        self.tape.matmul(x, [self.projection(name, branch, x.width, scale=scale)])
        self.add_normed(hidden, branch, post_norm)

    def add_normed(self, hidden: Buffer, branch: Buffer, post_norm: str) -> None:
        """hidden += residual_scale * norm(branch); `branch` is overwritten."""
        self.norm(branch, branch, post_norm, epsilon=self.architecture.post_norm_epsilon)
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


def divided(bias: FloatArray | None, factor: float | FloatArray) -> FloatArray | None:
    """A bias for an op that multiplies the sum of product and bias, where a file's factor is of the product alone."""
    if bias is None or np.all(factor == 1.0):
        return bias
    return np.divide(bias, factor, dtype=np.float32)


def _flat(weight: FloatArray) -> FloatArray:
    return np.ascontiguousarray(weight).reshape(-1)
