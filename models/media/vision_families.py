"""Families of picture encoders by the kind of their projector: records of what a file does not say itself.

The formulas are those of llama.cpp, which these files are made for. A projector gets the rows of a block of patches
joined, and writes rows as wide as the text model. To add a family, add its record here, and to
`mmproj.PICTURE_PROJECTORS` and `picture_layouts.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from localinfer.kernels.ops import Activation, Buffer
from localinfer.models.media.mmproj import PictureConfig
from localinfer.models.media.patch_positions import Resize, Rotary
from localinfer.models.media.row_graph import RowWriter, mean_of_parts
from localinfer.models.media.vision_blocks import ACTIVATIONS

_FIXED_EPSILON = 1e-5
"""Of norms of projectors that do not take the file's."""

Projector = Callable[[RowWriter, PictureConfig, Buffer], Buffer]
"""Writes a projector over joined rows, and returns its result."""


class Table(Enum):
    """Learned positions that are no table brought to the picture's size."""

    FIXED = "fixed"
    """One row for each patch of a picture of the one size."""
    AXES = "axes"
    """A table of columns and one of rows, which are added."""
    BUCKETS = "buckets"
    """A square of any size, of which each patch takes the entry that it lies in."""


@dataclass(frozen=True)
class VisionFamily:
    """Properties of a family's encoder that its files do not say."""

    project: Projector
    """Its projector."""
    table: Table | Resize | None = None
    """Its learned positions, where the file has `v.position_embd`."""
    rotary: Rotary = Rotary.NONE
    """Rotation of heads."""
    has_rms_norms: bool = False
    """True for norms without a mean."""
    may_swap_ffn: bool = False
    """True if old files have the two matrices of feed-forward layers swapped."""
    is_gemma4: bool = False
    """True if values are normalised, scores not scaled, and pixels within -1 and 1."""
    joins_transposed: bool = False
    """True if blocks of patches follow each other down."""
    has_windows: bool = False
    """True if most blocks see windows of the picture."""
    skips_last_block: bool = False
    """True if the last block is left out, unless the file names the blocks that are taken."""
    takes_class_row: bool = False
    """True if the class row is projected, in place of the others."""
    pools_rows: bool = False
    """True if a learned query attends to all rows, and its result is the picture's."""


def _activation(config: PictureConfig, usual: Activation) -> Activation:
    """Function between a projector's matrices."""
    return ACTIVATIONS[config.projector_activation] if config.projector_activation else usual


def _epsilon(config: PictureConfig, usual: float | None) -> float:
    """Epsilon of a projector's norms; usual: None for the encoder's."""
    return config.projector_epsilon or (config.norm_epsilon if usual is None else usual)


def _names(first: str, second: str, activation: Activation) -> Projector:
    """Two matrices."""

    def project(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
        inner = writer.activation(writer.linear(x, first, "projected"), _activation(config, activation))
        return writer.linear(inner, second, "embeddings", config.output_size)

    return project


def _after_norm(
    name: str, project: Projector, epsilon: float | None = _FIXED_EPSILON, *, is_by_patch: bool = False
) -> Projector:
    """A layer norm, where the file has one, and then a projector. epsilon: None for the file's.

    is_by_patch: each patch's part of a row is normalised by itself.
    """

    def write(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
        if writer.weights.has(f"{name}.weight"):
            size = x.width // config.merge**2 if is_by_patch else 0
            x = writer.layer_norm(x, name, "normalised", _epsilon(config, epsilon), size)
        return project(writer, config, x)

    return write


def _by_config(project: Callable[[Activation], Projector]) -> Projector:
    """A projector with the encoder's own activation."""
    return lambda writer, config, x: project(ACTIVATIONS[config.activation])(writer, config, x)


def _mean_of_patches(writer: RowWriter, config: PictureConfig, x: Buffer, factor: float) -> Buffer:
    return mean_of_parts(writer, x, config.merge**2, factor)


def _gemma3(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    mean = _mean_of_patches(writer, config, x, 1.0)
    normed = writer.rms_norm(mean, "mm.soft_emb_norm", "normalised", _epsilon(config, None))
    # Its rows are inputs.
    name = "mm.input_projection.weight"
    weight = writer.weights.matrix(name, writer.weights.values(name, normed.width, config.output_size).T)
    return writer.linear(normed, "mm.input_projection", "embeddings", weight=weight)


def _gemma4(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    width = x.width // config.merge**2
    mean = _mean_of_patches(writer, config, x, width**0.5)
    shift, factors = (writer.weights.optional(f"v.std_{name}", width) for name in ("bias", "scale"))
    if shift is not None:
        writer.builder.add_vector(mean, -shift)
    if factors is not None:
        writer.builder.multiply(mean, mean, factors)
    return _gemma4_projection(writer, config, mean)


def _gemma4_projection(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    normed = writer.rms_norm(x, "", "normalised", _epsilon(config, None))
    return writer.linear(normed, "mm.input_projection", "embeddings", config.output_size)


def _idefics3(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    return writer.linear(x, "mm.model.fc", "embeddings", config.output_size)


def _class_row(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    return writer.linear(x, "mm.fc", "embeddings", config.output_size)


def _pixtral(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    name, count = "mm.patch_merger.weight", config.merge**2
    if writer.weights.has(name):
        width = x.width // count
        x = writer.rms_norm(x, "mm.input_norm", "normalised", _epsilon(config, None), width)
        # Its columns have the channel before the place in the block, rows here after it.
        merger = writer.weights.values(name, width, width * count).reshape(width, width, count).swapaxes(1, 2)
        weight = writer.weights.matrix(name, merger.reshape(width, count * width))
        x = writer.linear(x, "mm.patch_merger", "merged", weight=weight)
    return _names("mm.1", "mm.2", Activation.GELU_TANH)(writer, config, x)


def _llama4(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    activation = _activation(config, Activation.GELU_TANH)
    x = writer.activation(writer.linear(x, "mm.model.mlp.1", "inner"), activation)
    x = writer.activation(writer.linear(x, "mm.model.mlp.2", "projected"), activation)
    return writer.linear(x, "mm.model.fc", "embeddings", config.output_size)


def _glm4v(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    name, side = "mm.patch_merger.weight", config.merge
    width, shape = x.width // side**2, writer.weights.shape(name)
    kernel = writer.weights.values(name, shape[0], width, side, side).transpose(0, 2, 3, 1)
    weight = writer.weights.matrix(name, kernel.reshape(shape[0], -1))
    x = writer.linear(x, "mm.patch_merger", "merged", weight=weight)
    x = writer.linear(x, "mm.model.fc", "projected")
    x = writer.layer_norm(x, "mm.post_norm", "normalised", _epsilon(config, _FIXED_EPSILON))
    x = writer.activation(x, Activation.GELU_ERF)
    inner = writer.weights.width_of("mm.gate.weight")
    gates, ups = writer.linears(x, ["mm.gate", "mm.up"], ["gates", "inner"], [inner, inner])
    x = writer.gated(x, gates, ups, ACTIVATIONS[config.activation], config.swiglu_clamp)
    return writer.linear(x, "mm.down", "embeddings", config.output_size)


def _gated(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    inner = writer.weights.width_of("mm.gate.weight")
    gates, ups = writer.linears(x, ["mm.gate", "mm.up"], ["gates", "inner"], [inner, inner])
    return writer.linear(writer.gated(x, gates, ups, Activation.SILU), "mm.down", "embeddings", config.output_size)


def _qwen_linear(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    inner = writer.activation(writer.linear(x, "mm.0", "projected"), _activation(config, Activation.GELU_ERF))
    return writer.linear(writer.linear(inner, "mm.2", "merged"), "mm.4", "embeddings", config.output_size)


def _ovis2(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    scores = writer.linear(x, "mm.head", "scores")
    scores = writer.layer_norm(scores, "mm.head_norm", "scores", _epsilon(config, _FIXED_EPSILON))
    writer.builder.softmax(scores, scores)
    return writer.linear(scores, "mm.embd", "embeddings", config.output_size)


def _dots_ocr(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    width = x.width // config.merge**2
    x = writer.rms_norm(x, "mm.post_norm", "normalised", config.norm_epsilon, width)
    x = writer.layer_norm(x, "mm.input_norm", "normalised", _epsilon(config, 1e-6), width)
    return _names("mm.0", "mm.2", Activation.GELU_ERF)(writer, config, x)


def _gemma4_unified(writer: RowWriter, config: PictureConfig, x: Buffer) -> Buffer:
    """Patches themselves, with positions that the host gives in a second buffer."""
    positions = writer.input("positions", config.hidden_size)
    epsilon = _epsilon(config, _FIXED_EPSILON)
    x = writer.layer_norm(x, "v.patch_norm.1", "patch", epsilon)
    x = writer.linear(x, "v.patch_embd", "rows", config.hidden_size)
    x = writer.layer_norm(x, "v.patch_norm.2", "rows", epsilon)
    writer.builder.add(x, x, positions)
    return _gemma4_projection(writer, config, writer.layer_norm(x, "v.patch_norm.3", "rows", epsilon))


def write_deepstack(writer: RowWriter, config: PictureConfig, x: Buffer, layer: str, out: str) -> Buffer:
    """The part of a row that comes from a block inside the encoder: of joined rows x, by the tensors of its layer."""
    name = f"v.deepstack.{layer}"
    y = writer.layer_norm(x, f"{name}.norm", "normalised", _epsilon(config, None))
    y = writer.activation(writer.linear(y, f"{name}.fc1", "projected"), _activation(config, Activation.GELU_TANH))
    return writer.linear(y, f"{name}.fc2", out, config.output_size)


_TANH, _ERF = Activation.GELU_TANH, Activation.GELU_ERF
_QWEN = _names("mm.0", "mm.2", _TANH)
_KIMI = _names("mm.1", "mm.2", _TANH)

FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily(_gemma3, Table.FIXED, may_swap_ffn=True),
    "qwen2vl_merger": VisionFamily(_QWEN, rotary=Rotary.QWEN, may_swap_ffn=True),
    "qwen2.5vl_merger": VisionFamily(
        _QWEN, rotary=Rotary.QWEN, has_rms_norms=True, may_swap_ffn=True, has_windows=True
    ),
    "qwen3vl_merger": VisionFamily(_QWEN, Resize.CORNERS, Rotary.QWEN),
    "idefics3": VisionFamily(_idefics3, Table.FIXED, may_swap_ffn=True),
    "pixtral": VisionFamily(_pixtral, rotary=Rotary.PIXTRAL, has_rms_norms=True),
    "lightonocr": VisionFamily(_pixtral, rotary=Rotary.PIXTRAL, has_rms_norms=True),
    "internvl": VisionFamily(
        _after_norm("mm.model.mlp.0", _names("mm.model.mlp.1", "mm.model.mlp.3", _TANH)), Table.FIXED
    ),
    "gemma4v": VisionFamily(_gemma4, Table.AXES, Rotary.GEMMA, has_rms_norms=True, is_gemma4=True),
    "gemma4uv": VisionFamily(_gemma4_unified, Table.AXES),
    "mlp": VisionFamily(_QWEN, Table.FIXED, may_swap_ffn=True, skips_last_block=True),
    "lfm2": VisionFamily(_after_norm("mm.input_norm", _KIMI), Resize.ANTIALIAS),
    "llama4": VisionFamily(_llama4, Table.FIXED, Rotary.COLUMN_FIRST, joins_transposed=True),
    "glm4v": VisionFamily(_glm4v, Resize.BICUBIC, Rotary.QWEN, has_rms_norms=True),
    "glm5v": VisionFamily(_glm4v, Resize.BICUBIC, Rotary.QWEN, has_rms_norms=True),
    "kimivl": VisionFamily(
        _after_norm("mm.input_norm", _KIMI, is_by_patch=True), Resize.ANTIALIAS, Rotary.COLUMN_FIRST
    ),
    "kimik25": VisionFamily(
        _after_norm("mm.input_norm", _KIMI, None, is_by_patch=True), Resize.BICUBIC, Rotary.COLUMN_FIRST
    ),
    "phi4": VisionFamily(_QWEN, Resize.ANTIALIAS),
    "paddleocr": VisionFamily(
        _after_norm("mm.input_norm", _by_config(lambda kind: _names("mm.1", "mm.2", kind)), is_by_patch=True),
        Resize.ANTIALIAS,
        Rotary.QWEN,
    ),
    "dots_ocr": VisionFamily(_dots_ocr, rotary=Rotary.QWEN, has_rms_norms=True),
    "janus_pro": VisionFamily(_by_config(lambda kind: _names("mm.0", "mm.1", kind)), Table.FIXED),
    "gated": VisionFamily(_after_norm("mm.input_norm", _gated), Table.FIXED),
    "qwen2.5vl_linear": VisionFamily(_qwen_linear, rotary=Rotary.QWEN, has_rms_norms=True, has_windows=True),
    "ovis2": VisionFamily(_ovis2, Table.FIXED, has_rms_norms=True),
    "class_row": VisionFamily(_class_row, Table.FIXED, takes_class_row=True),
    "pooled": VisionFamily(_idefics3, Table.FIXED, pools_rows=True),
    "pooled_any_size": VisionFamily(_idefics3, Resize.ANTIALIAS, pools_rows=True),
    "minicpmv4_6": VisionFamily(_after_norm("mm.input_norm", _names("mm.up", "mm.down", _ERF), None), Table.BUCKETS),
    "resampler": VisionFamily(_QWEN, Table.BUCKETS, may_swap_ffn=True),
}
"""By `projector_type`."""
