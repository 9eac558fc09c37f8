"""The short convolution block of LFM2: a convolution over the last few rows between two gates."""

from localinfer.kernels.ops import Buffer, StateShape, short_convolution_state
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
    weight = graph.weights.vector(f"blk.{layer}.shortconv.conv.weight", (width, config.recurrent.kernel_size))
    before, behind, values = (graph.buffer(f"convolution_{part}", width, x.rows) for part in ("gate", "out_gate", "x"))
    thirds = [
        graph.projection(name, out, x.width, rows=(index * width, 3 * width))
        for index, out in enumerate((before, behind, values))
    ]
    tape.matmul(x, thirds)
    tape.multiply(values, before, values)
    convolved = graph.buffer("convolved", width, x.rows)
    graph.short_convolution(convolved, values, weight, has_silu=False)
    tape.multiply(convolved, behind, convolved)
    return convolved
