"""The layers of Zamba 2: Mamba 2, and before some of them a block of attention and feed-forward that layers share.

A shared block reads the residual stream beside the embedding. The layers that use it have low-rank additions to its
matrices of their own, and a matrix for its result, which is added to what Mamba reads and not to the stream.
Source: Zamba2 (arXiv 2411.15242), and the published model's code.

Tensors of one use have its number among all uses.
"""

from localinfer.kernels.ops import Activation, Buffer
from localinfer.models.decoder.architecture import Mixer
from localinfer.models.decoder.attention import RopeTables, attention_shape, write_mixer_output
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.state_space import write_mamba2


def write_embedding_pair(graph: Graph, hidden: Buffer) -> None:
    """Write the half of what shared blocks read that is the same in all layers."""
    pair = _pair(graph, hidden)
    graph.tape.copy_heads(pair, hidden, 1, hidden.width, pair.width, hidden.width, out_offset=hidden.width)
    graph.carried.append(pair)


def write_zamba2_layer(graph: Graph, layer: int, hidden: Buffer, tables: RopeTables, *, selects_output: bool) -> Buffer:
    """Write one layer and return its result: `hidden` itself, or with selects_output the output rows only."""
    x = hidden
    if graph.config.num_kv_heads[layer]:
        x = graph.buffer("mamba_input", hidden.width, hidden.rows)
        shared = _write_shared_block(graph, layer, hidden, tables)
        graph.tape.matmul(shared, [graph.projection(f"blk.{layer}.shared_out", x, shared.width, residual=hidden)])
    x = graph.block_norm(layer, "attn_norm", x, "mixer_input")
    mixed = write_mamba2(graph, layer, x)
    if selects_output:
        hidden, mixed = graph.select_output(hidden), graph.select_output(mixed)
    write_mixer_output(graph, layer, hidden, mixed, Mixer.MAMBA2)
    return hidden


def _block_of_layer(graph: Graph, layer: int) -> tuple[int, int]:
    """Which use of a shared block a layer is, and the layer that has the block's tensors: the first of those that use
    it, or each of them in a model that shares nothing (without tied embeddings)."""
    sizes = graph.config.recurrent
    assert sizes is not None, "every layer has Mamba 2"
    layers = [index for index, count in enumerate(graph.config.num_kv_heads) if count]
    use = layers.index(layer)
    if not sizes.num_shared_blocks or graph.weights.has(f"blk.{layer}.shared_attn_q.weight"):
        return use, layer
    return use, layers[use % sizes.num_shared_blocks]


def _write_shared_block(graph: Graph, layer: int, hidden: Buffer, tables: RopeTables) -> Buffer:
    """Write a shared block over the residual stream and the embedding; the result has no residual connection."""
    config, tape = graph.config, graph.tape
    use, owner = _block_of_layer(graph, layer)
    block, width = f"blk.{owner}.shared", hidden.width
    pair = _pair(graph, hidden)
    tape.copy_heads(pair, hidden, 1, width, pair.width, width)
    x = graph.buffer("attention_input", pair.width, hidden.rows)
    graph.norm(x, pair, f"{block}_attn_norm")
    sizes = (config.num_heads[layer], config.num_kv_heads[layer], config.num_kv_heads[layer])
    queries, keys, values = (
        graph.buffer(name, count * config.head_dim, x.rows)
        for name, count in zip(("queries", "keys", "values"), sizes, strict=True)
    )
    for letter, out in (("q", queries), ("k", keys), ("v", values)):
        _project(graph, f"{block}_attn_{letter}", use, x, out)
    if config.rope.is_used:
        for buffer in (queries, keys):
            tape.rope(buffer, tables.for_layer(windowed=False), config.head_dim)
    tape.store_kv(layer, keys, values)
    attended = graph.buffer("attended", queries.width, x.rows)
    tape.attention(attended, queries, layer, attention_shape(graph, layer, 0, 0), None)
    branch = graph.buffer("branch", width, x.rows)
    tape.matmul(attended, [graph.projection(f"{block}_attn_output", branch, attended.width)])
    graph.norm(branch, branch, f"{block}_ffn_norm")

    size = graph.weights.shape(f"{block}_ffn_down.weight")[-1]
    together, gate, up = (graph.buffer(name, n * size, x.rows) for name, n in (("gate_up", 2), ("gate", 1), ("up", 1)))
    _project(graph, f"{block}_ffn_gate_up", use, branch, together)
    for index, part in enumerate((gate, up)):
        tape.copy_heads(part, together, 1, size, size, 2 * size, x_offset=index * size)
    tape.gated_activation(up, gate, up, Activation.GELU_ERF)
    result = graph.buffer("shared_result", width, x.rows)
    tape.matmul(up, [graph.projection(f"{block}_ffn_down", result, size)])
    return result


def _project(graph: Graph, name: str, use: int, x: Buffer, out: Buffer) -> None:
    """The product with a matrix of a shared block, and with the low-rank addition that a use of it may have."""
    graph.tape.matmul(x, [graph.projection(name, out, x.width)])
    first, second = f"{name}_adapter_a.{use}", f"{name}_adapter_b.{use}"
    if not graph.weights.has(f"{first}.weight"):
        return
    rank = graph.weights.shape(f"{first}.weight")[0]
    between = graph.buffer("adapter", rank, x.rows)
    graph.tape.matmul(x, [graph.projection(first, between, x.width)])
    graph.tape.matmul(between, [graph.projection(second, out, rank, residual=out)])


def _pair(graph: Graph, hidden: Buffer) -> Buffer:
    """The residual stream and the embedding, side by side."""
    return graph.buffer("stream_and_embedding", 2 * hidden.width, hidden.rows)
