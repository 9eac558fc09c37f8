"""The short convolution block of LFM2: a convolution over the last few rows between two gates."""

from localinfer.kernels.ops import Buffer, Projection, StateShape
from localinfer.kernels.recurrent_ops import short_convolution_state
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import Graph


def short_convolution_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer."""
    assert config.recurrent is not None, "the model has recurrent layers"
    return [short_convolution_state(config.hidden_size, config.recurrent.kernel_size)]


def write_short_convolution(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's c * convolution(b * y) over x, which still needs its output projection.

    b, c and y are the thirds of one projection. Source: LFM2 (arXiv 2511.23404), section 2.
    """
    config, tape = graph.config, graph.tape
    assert config.recurrent is not None, "the model has recurrent layers"
    width, name = config.hidden_size, f"blk.{layer}.shortconv.in_proj"
    thirds = [
        graph.weights.linear(f"{name}.weight", 3 * width, x.width, slice(i * width, (i + 1) * width)) for i in range(3)
    ]
    weight = graph.weights.vector(f"blk.{layer}.shortconv.conv.weight", (width, config.recurrent.kernel_size))
    before, behind, values = (graph.buffer(f"convolution_{part}", width, x.rows) for part in ("gate", "out_gate", "x"))
    tape.matmul(x, [Projection(weight, out) for weight, out in zip(thirds, (before, behind, values), strict=True)])
    tape.multiply(values, before, values)
    convolved = graph.buffer("convolved", width, x.rows)
    graph.short_convolution(convolved, values, weight, has_silu=False)
    tape.multiply(convolved, behind, convolved)
    return convolved
