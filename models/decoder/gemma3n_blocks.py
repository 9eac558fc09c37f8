"""The layers of Gemma 3n: residual streams that are predicted and corrected, and a low-rank branch beside attention.

Sources: AltUp, arXiv 2301.13310 (streams: a layer computes one, the others follow by small matrices); LAuReL, arXiv
2411.07501 (the branch); Gemma 3n as published. Streams lie side by side in one buffer, the active one first.
"""

import math

from localinfer.kernels.ops import Activation, Buffer
from localinfer.models.decoder.attention import RopeTables
from localinfer.models.decoder.gemma_blocks import (
    input_branch,
    is_windowed,
    layer_input,
    source_layer,
    write_shared_attention,
)
from localinfer.models.decoder.graph import Graph, refuse

_TINY = 1e-12
"""Instead of 0 below a square root that divides."""


def write_streams(graph: Graph, hidden: Buffer) -> Buffer:
    """Write the streams that the first layer reads, from the embeddings: themselves, and matrices times them.

    Every stream has the embedding's length.
    """
    tape, width = graph.tape, hidden.width
    num_others = _num_streams(graph) - 1
    repeated = graph.buffer("other_inputs", num_others * width, hidden.rows)
    for stream in range(num_others):
        tape.copy_heads(repeated, hidden, 1, width, num_others * width, width, out_offset=stream * width)
    streams = graph.buffer("streams", (num_others + 1) * width, hidden.rows)
    tape.copy_heads(streams, hidden, 1, width, streams.width, width)
    others = _resized_products(graph, "altup_proj.weight", repeated, hidden)
    tape.copy_heads(streams, others, 1, others.width, streams.width, others.width, out_offset=width)
    return streams


def merge_streams(graph: Graph, streams: Buffer) -> Buffer:
    """Write the mean of the streams after the last layer, each brought back by its matrix to the first one's length."""
    tape, width = graph.tape, graph.config.hidden_size
    first = graph.buffer("hidden", width, streams.rows)
    tape.copy_heads(first, streams, 1, width, width, streams.width)
    repeated = graph.buffer("other_inputs", streams.width - width, streams.rows)
    tape.copy_heads(repeated, streams, 1, repeated.width, repeated.width, streams.width, x_offset=width)
    others = _resized_products(graph, "altup_unembd_proj.weight", repeated, first)
    merged = graph.buffer("merged", width, streams.rows)
    tape.mix_slots(merged, others, others.width // width, residual=first)
    tape.scale(merged, width / streams.width)
    return merged


def _resized_products(graph: Graph, name: str, x: Buffer, like: Buffer) -> Buffer:
    """One matrix times each slot of x, every product of the length of the row of `like`."""
    tape, width = graph.tape, like.width
    out = graph.buffer("other_streams", x.width, x.rows)
    weight = graph.weights.experts(name, x.width // width, width, width)
    tape.head_matmul(out, x, weight, width, width)
    tape.rms_norm(out, out, None, _TINY, width)
    magnitude = graph.buffer("magnitude", 1, x.rows)
    tape.magnitude(magnitude, like)
    tape.multiply(out, out, magnitude)
    return out


def _num_streams(graph: Graph) -> int:
    """As many as the matrices of the others, and the active one."""
    shape = graph.weights.shape("altup_proj.weight")
    return (shape[0] if len(shape) == 3 else 1) + 1


def write_gemma3n_layer(graph: Graph, layer: int, streams: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer over the streams and return them, in the last layer the output rows only."""
    tape, config, block = graph.tape, graph.config, f"blk.{layer}"
    width = config.hidden_size
    num_streams = streams.width // width
    predicted = graph.buffer("predicted", streams.width, streams.rows)
    hidden = graph.buffer("hidden", width, streams.rows)
    tape.copy_heads(hidden, streams, 1, width, width, streams.width)
    modalities = _modalities(graph, layer, hidden)
    coefficients = _coefficients(graph, f"{block}.altup_predict_coef", num_streams**2, modalities)
    tape.mix_slots(predicted, streams, num_streams, coefficients, streams)
    tape.copy_heads(hidden, predicted, 1, width, width, streams.width)

    x = graph.block_norm(layer, "attn_norm", hidden, "attention_input")
    attended = write_shared_attention(graph, layer, x, tables, source_layer(config, layer, is_windowed(config, layer)))
    own_input = layer_input(graph, layer)
    if own_input is None:
        raise refuse(config, "has no per-layer inputs")
    if layer == config.num_layers - 1:
        hidden, attended, x = (graph.select_output(buffer) for buffer in (hidden, attended, x))
        predicted, own_input = graph.select_output(predicted), graph.select_output(own_input)
    active = _active_result(graph, layer, hidden, x, attended)

    # What the layer made of the active stream, less what was predicted of it, corrects every stream.
    first = graph.buffer("first_stream", width, active.rows)
    tape.copy_heads(first, predicted, 1, width, width, predicted.width)
    tape.add(first, active, first, -1.0)
    modalities = _modalities(graph, layer, active)
    coefficients = _coefficients(graph, f"{block}.altup_correct_coef", num_streams, modalities)
    corrected = graph.buffer("streams", predicted.width, predicted.rows)
    tape.mix_slots(corrected, first, 1, coefficients, predicted)
    tape.mix_slots(corrected, first, 1, None, corrected)

    tape.copy_heads(first, corrected, 1, width, width, corrected.width)
    tape.multiply(first, first, graph.weights.vector(f"{block}.altup_correct_scale.weight", (width,)))
    branch = input_branch(graph, layer, first, own_input)
    tape.mix_slots(corrected, branch, 1, residual=corrected, first_slot=1)
    return corrected


def _active_result(graph: Graph, layer: int, hidden: Buffer, x: Buffer, attended: Buffer) -> Buffer:
    """What the layer makes of the active stream, `hidden`: attention beside a low-rank branch, then feed-forward."""
    tape, block = graph.tape, f"blk.{layer}"
    # The low-rank branch and its input.
    rank = graph.weights.shape(f"{block}.laurel_l.weight")[0]
    low = graph.buffer("low_rank", rank, x.rows)
    tape.matmul(x, [graph.projection(f"{block}.laurel_l", low, x.width)])
    laurel = graph.buffer("laurel", x.width, x.rows)
    tape.matmul(low, [graph.projection(f"{block}.laurel_r", laurel, rank)])
    graph.norm(laurel, laurel, f"{block}.laurel_post_norm")
    tape.add(laurel, laurel, x)

    branch = graph.buffer("branch", hidden.width, hidden.rows)
    tape.matmul(attended, [graph.projection(f"{block}.attn_output", branch, attended.width)])
    graph.norm(branch, branch, f"{block}.post_attention_norm")
    tape.add(hidden, hidden, branch)
    tape.add(hidden, hidden, laurel)
    tape.scale(hidden, 1.0 / math.sqrt(2.0))

    ffn_input = graph.block_norm(layer, "ffn_norm", hidden, "ffn_input")
    size = graph.weights.shape(f"{block}.ffn_down.weight")[-1]
    gate, up = graph.buffer("gate", size, hidden.rows), graph.buffer("up", size, hidden.rows)
    parts = [graph.projection(f"{block}.ffn_{name}", out, hidden.width) for name, out in (("gate", gate), ("up", up))]
    tape.matmul(ffn_input, parts)
    deviations = graph.config.activation_sparsity[layer]
    if math.isfinite(deviations):
        tape.gaussian_top_k(gate, gate, deviations)
    tape.gated_activation(up, gate, up, graph.architecture.activation)
    tape.matmul(up, [graph.projection(f"{block}.ffn_down", branch, size)])
    graph.norm(branch, branch, f"{block}.post_ffw_norm")
    tape.add(hidden, hidden, branch)
    return hidden


def _modalities(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """tanh(router (norm(x) / width)): what the coefficients of predictions and corrections are computed from."""
    tape, name = graph.tape, f"blk.{layer}.altup_router"
    normed = graph.buffer("router_input", x.width, x.rows)
    graph.norm(normed, x, f"{name}_norm")
    count = graph.weights.shape(f"{name}.weight")[0]
    out = graph.buffer("modalities", count, x.rows)
    tape.matmul(normed, [graph.projection(name, out, x.width, scale=1.0 / x.width)])
    tape.activation(out, out, Activation.TANH)
    return out


def _coefficients(graph: Graph, name: str, count: int, modalities: Buffer) -> Buffer:
    out = graph.buffer("coefficients", count, modalities.rows)
    graph.tape.matmul(modalities, [graph.projection(name, out, modalities.width)])
    return out
