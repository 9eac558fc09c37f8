"""Configuration of an mmproj file: what its `clip.*` keys say of the encoders and projectors of a model.

An mmproj file is a GGUF file of architecture `clip`, which holds what turns pictures or sounds into rows of a text
model's width. Its keys are those that llama.cpp's converter writes. Like every header it is untrusted: each number is
checked when read, and tensors are compared with it when an encoder is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.decoder.metadata import MetadataReader

ARCHITECTURE = "clip"
"""`general.architecture` of an mmproj file."""

_MAX_SIZE = 1 << 16
_MAX_HEAD = 1024
_MAX_PIXELS = 1 << 31
_MAX_ENTRIES = 1 << 10
_WAY_OUT = "convert the model's mmproj file again, or download another copy"


@dataclass(frozen=True)
class Projector:
    """Properties of a `projector_type` that are known before any tensor is read."""

    output: str
    """Tensor whose rows (of a transposed one, columns) are as wide as the text model."""
    is_transposed: bool = False
    """True if that tensor's rows are the projector's inputs."""
    merge_key: str = ""
    """Key of the merge factor: patches a side that become one row; none where it is fixed."""
    merge: int = 1
    """That factor where the file has no such key."""


PICTURE_PROJECTORS = {
    "gemma3": Projector("mm.input_projection.weight", True, "projector.scale_factor", 4),
    "qwen2vl_merger": Projector("mm.2.weight", merge_key="spatial_merge_size", merge=2),
    "qwen2.5vl_merger": Projector("mm.2.weight", merge_key="spatial_merge_size", merge=2),
    "qwen3vl_merger": Projector("mm.2.weight", merge_key="spatial_merge_size", merge=2),
    "idefics3": Projector("mm.model.fc.weight", merge_key="projector.scale_factor"),
    "pixtral": Projector("mm.2.weight", merge_key="spatial_merge_size"),
    "lightonocr": Projector("mm.2.weight", merge_key="spatial_merge_size"),
    "internvl": Projector("mm.model.mlp.3.weight", merge_key="projector.scale_factor"),
    "gemma4v": Projector("mm.input_projection.weight", merge_key="projector.scale_factor", merge=3),
    "gemma4uv": Projector("mm.input_projection.weight", merge_key="projector.scale_factor", merge=3),
    "mlp": Projector("mm.2.weight"),
    "lfm2": Projector("mm.2.weight", merge_key="projector.scale_factor", merge=2),
    "llama4": Projector("mm.model.fc.weight", merge_key="projector.scale_factor"),
    "glm4v": Projector("mm.down.weight", merge_key="spatial_merge_size", merge=2),
    "glm5v": Projector("mm.down.weight", merge_key="spatial_merge_size", merge=2),
    "resampler": Projector("resampler.proj.weight"),
    "kimivl": Projector("mm.2.weight", merge_key="projector.scale_factor", merge=2),
    "kimik25": Projector("mm.2.weight", merge_key="projector.scale_factor", merge=2),
    "phi4": Projector("mm.2.weight"),
    "paddleocr": Projector("mm.2.weight", merge=2),
    "dots_ocr": Projector("mm.2.weight", merge_key="projector.scale_factor", merge=2),
    "janus_pro": Projector("mm.1.weight"),
    "minicpmv4_6": Projector("mm.down.weight", merge_key="projector.scale_factor", merge=4),
}
"""Kinds that run, by `projector_type`."""

FOLDER_SOUND_PROJECTORS = {"granite_speech": Projector("mm.a.fc.weight")}
"""Kinds of sounds that folders alone have."""

FOLDER_PROJECTORS = {
    # Rows joined, a norm where there is one, and silu(gate) * up between two matrices.
    "gated": Projector("mm.down.weight"),
    # Qwen 2.5's, and one matrix more.
    "qwen2.5vl_linear": Projector("mm.4.weight"),
    # Rows joined, shares of a visual vocabulary, and their mean embedding.
    "ovis2": Projector("mm.embd.weight"),
    # One vector of a picture, beside those of texts: of the class row, and of a query that attends to all rows.
    "class_row": Projector("mm.fc.weight"),
    "pooled": Projector("v.head.ffn_down.weight"),
    "pooled_any_size": Projector("v.head.ffn_down.weight"),
}
"""Kinds of folders that no mmproj file has."""

SOUND_PROJECTORS = {
    "ultravox": Projector("mm.a.mlp.2.weight", merge_key="projector.stack_factor", merge=8),
    "voxtral": Projector("mm.a.mlp.2.weight", merge_key="projector.stack_factor", merge=4),
    "qwen2a": Projector("mm.a.fc.weight"),
    "qwen3a": Projector("mm.a.mlp.2.weight"),
    "gemma4a": Projector("mm.a.input_projection.weight"),
    "gemma4ua": Projector("mm.a.input_projection.weight"),
    "lfm2a": Projector("mm.a.mlp.3.weight"),
}
"""The same of sounds; their merge factor is of rows that follow each other."""

# They project patches, or samples, as they are.
_WITHOUT_BLOCKS = ("gemma4uv", "gemma4ua")
# Their limits of area have no values of their own.
_LIMITED_BY_FILE = ("phi4", "paddleocr", "dots_ocr", "glm5v")
# A file of both names one kind for both.
_NAMES_OF_BOTH = {"qwen2.5o": ("qwen2.5vl_merger", "qwen2a")}


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes that encoders of pictures and of sounds have alike."""

    projector: str
    """`projector_type`."""
    hidden_size: int
    """Width of the encoder's rows."""
    intermediate_size: int
    """Width inside its feed-forward blocks."""
    num_layers: int
    """Blocks; 0 in files without an encoder."""
    num_heads: int
    """Heads of attention."""
    norm_epsilon: float
    """Of its norms, where a family does not fix it."""
    merge: int
    """Patches a side, or rows of sound, that become one row."""
    output_size: int
    """Width of the projector's rows, without the parts of deepstack."""
    num_deepstack: int
    """Further parts of a row, which the decoder's first layers add to their outputs."""


@dataclass(frozen=True)
class PictureConfig(EncoderSizes):
    """Settings of an mmproj file for pictures."""

    image_size: int
    """Side of the square, or of a tile, in pixels; a filler in families of free sizes."""
    patch_size: int
    """Side of a patch in pixels."""
    mean: tuple[float, float, float]
    """Subtracted from each channel of 0..1."""
    std: tuple[float, float, float]
    """Divisors of the channels after that."""
    activation: str
    """`gelu` (its tanh form), `erf` (GELU as it is), `silu` or, where the file names neither, `quick`."""
    num_kv_heads: int
    """Heads of keys and values."""
    head_size: int
    """Columns of a head."""
    feature_layers: tuple[int, ...]
    """Blocks whose outputs are joined; 0 is the input of the first. Empty: the last one's."""
    window_pattern: int
    """Every block of this number sees the whole picture, others a window; 0: all do."""
    window_layer: int
    """Block after which MiniCPM-V 4.6 merges windows."""
    pinpoints: tuple[tuple[int, int], ...]
    """Widths and heights that tiles may fill together."""
    preproc_image_size: int
    """Longest side before tiling; 0: not given."""
    min_tiles: int
    """Fewest tiles."""
    max_tiles: int
    """Most tiles."""
    min_pixels: int
    """Least area; 0: not given."""
    max_pixels: int
    """Greatest area; 0: not given."""
    minicpmv_version: int
    """Version that chooses the layout of slices; 0: not given."""
    num_queries: int
    """Rows of a resampler."""
    swiglu_clamp: float
    """Limit inside gated products; 0: none."""
    has_image_break: bool
    """True if a row stands after each row of patches but the last."""
    # What follows differs in folders alone; no mmproj file says it.
    projector_activation: str = ""
    """Function between the projector's matrices, named as `activation`; empty: the family's."""
    projector_epsilon: float = 0.0
    """Epsilon of the projector's norms; 0: the family's."""
    is_class_first: bool = False
    """True if the class row stands before the patches, as its position does in the table."""
    has_rms_norms: bool | None = None
    """True for norms without a mean, False for those with one; None: the family's."""
    has_rms_query_norms: bool = False
    """True if norms of queries and keys are without a mean, whatever the others are."""
    rotary_base: float = 0.0
    """Base of the rotary frequencies; 0: the family's."""
    full_layers: tuple[int, ...] | None = None
    """Blocks that see the whole picture where others see a window; None: as `window_pattern` says."""
    window_size: int = 112
    """Side of a window in pixels."""
    joins_columns_first: bool = True
    """True if blocks of patches follow each other down in Llama 4, False if they do across."""
    table_resize: str = ""
    """Way to bring learned positions to another size, a value of `Resize`; empty: the family's."""
    num_marks: int = 0
    """Rows of the encoder's table that stand between pictures; 0: it has none."""
    rounds_pixels: bool = False
    """True if every step from bytes to normalised values is rounded to bfloat16."""


@dataclass(frozen=True)
class QueryConfig:
    """Settings of a projector in which queries read windows of rows."""

    num_queries: int
    """Queries of a window, each of which becomes an embedding."""
    size: int
    """Rows of a window."""
    num_layers: int
    """Layers of queries."""
    num_heads: int
    """Heads of their attention."""
    norm_epsilon: float
    """Of their norms."""
    activation: str
    """Of their feed-forward layers, named as in `PictureConfig`."""
    frequency: int
    """Layers of this step, from the first on, read the windows."""


@dataclass(frozen=True)
class SoundConfig(EncoderSizes):
    """Settings of an mmproj file for sounds."""

    num_mel_bins: int
    """Values of a frame."""
    # What follows differs in folders alone; no mmproj file says it.
    joins_pairs: bool | None = None
    """True if the mean of two rows each is taken before the last norm; None: as the family does."""
    piece_frames: int = 0
    """Frames that are convolved by themselves, and whose rows see each other alone; 0: all."""
    attended_pieces: int = 1
    """Pieces whose rows see each other."""
    block_rows: int = 0
    """Rows that see each other alone, in blocks from the first on; 0: all."""
    feature_layers: tuple[int, ...] = ()
    """Blocks before which rows are taken, and joined with the last ones."""
    queries: QueryConfig | None = None
    """Queries of the projector; None: it has none."""


@dataclass(frozen=True)
class MediaConfig:
    """Settings of an mmproj file; a part is None where the file has no such encoder."""

    picture: PictureConfig | None
    """Of pictures."""
    sound: SoundConfig | None
    """Of sounds."""
    has_mrope: bool = False
    """True if the text model has rotary positions in several dimensions; the text model says so, not this file."""
    is_bidirectional: bool | None = None
    """True if rows of one picture see each other in both directions, as a folder's text model says; None: the
    family's."""

    def sees_itself(self, text_size: int) -> bool:
        """Return whether rows of one picture see each other in both directions in a decoder of this width."""
        if self.picture is None:
            return False
        if self.is_bidirectional is not None:
            return self.is_bidirectional
        # The smallest Gemma 4 have the widths 1536 and 2560, and decode pictures as they decode text.
        is_small = self.picture.projector == "gemma4v" and text_size in (1536, 2560)
        return self.picture.projector in ("gemma3", "gemma4v", "gemma4uv") and not is_small


def read_media_config(
    metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], *, has_mrope: bool = False
) -> MediaConfig:
    """Read the configuration of an mmproj file.

    shapes: of all its tensors, rows first. has_mrope: whether the text model has positions in several dimensions.
    Raises: CorruptFileError naming a key or tensor, UnsupportedFormatError naming a projector that does not run.
    """
    reader = MetadataReader(metadata, ARCHITECTURE)
    sees = reader.optional_boolean("has_vision_encoder") or False
    hears = reader.optional_boolean("has_audio_encoder") or False
    if not (sees or hears):
        raise CorruptFileError(
            "clip.has_vision_encoder and clip.has_audio_encoder are both false or missing; wanted an mmproj file "
            f"with an encoder: {_WAY_OUT}"
        )
    return MediaConfig(
        _read_picture(metadata, shapes) if sees else None, _read_sound(metadata, shapes) if hears else None, has_mrope
    )


def _projector(metadata: Mapping[str, object], part: str, known: Mapping[str, Projector]) -> str:
    """The kind of projector for `vision` or `audio`."""
    key = "projector_type" if f"{ARCHITECTURE}.projector_type" in metadata else f"{part}.projector_type"
    found = MetadataReader(metadata, ARCHITECTURE).text(key, "")
    name = _NAMES_OF_BOTH[found][part == "audio"] if found in _NAMES_OF_BOTH else found
    if not found:
        raise CorruptFileError(f"clip.{key} is missing; wanted a kind of projector: {_WAY_OUT}")
    if name not in known:
        raise UnsupportedFormatError(
            f"clip.{key} is {found!r:.80}, which does not run here; wanted one of {', '.join(sorted(known))}: "
            "use a model of such a family, or update localinfer"
        )
    return name


def _sizes(
    reader: MetadataReader, name: str, projector: Projector, shapes: Mapping[str, tuple[int, ...]]
) -> EncoderSizes:
    shape = shapes.get(projector.output)
    if shape is None or len(shape) != 2:
        found = "missing" if shape is None else f"of shape {list(shape)}"
        raise CorruptFileError(f"tensor {projector.output!r} is {found}; wanted a matrix, the projector's: {_WAY_OUT}")
    merge = projector.merge
    if projector.merge_key:
        merge = reader.integer(projector.merge_key, merge, low=1, high=64)
    hidden_size = reader.integer("embedding_length", low=1, high=_MAX_SIZE)
    num_heads = reader.integer("attention.head_count", low=1, high=_MAX_SIZE)
    deepstack = {key.split(".")[2] for key in shapes if key.startswith("v.deepstack.") and key.count(".") > 2}
    return EncoderSizes(
        projector=name,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("feed_forward_length", low=1, high=1 << 20),
        num_layers=reader.integer("block_count", low=0 if name in _WITHOUT_BLOCKS else 1, high=1024),
        num_heads=num_heads,
        norm_epsilon=reader.number("attention.layer_norm_epsilon", low=0.0, high=1.0),
        merge=merge,
        output_size=shape[1 if projector.is_transposed else 0],
        num_deepstack=len(deepstack) if name == "qwen3vl_merger" else 0,
    )


def _activation(metadata: Mapping[str, object]) -> str:
    reader = MetadataReader(metadata, ARCHITECTURE)
    use_gelu, use_silu = reader.optional_boolean("use_gelu"), reader.optional_boolean("use_silu")
    if use_gelu and use_silu:
        raise reader.contradiction("use_gelu", "true beside clip.use_silu", "one of them")
    return "gelu" if use_gelu else "silu" if use_silu else "quick"


def _read_picture(metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> PictureConfig:
    name = _projector(metadata, "vision", PICTURE_PROJECTORS)
    reader = MetadataReader(metadata, f"{ARCHITECTURE}.vision")
    sizes = _sizes(reader, name, PICTURE_PROJECTORS[name], shapes)
    num_heads = sizes.num_heads
    head_size = reader.integer("attention.head_dim", max(sizes.hidden_size // num_heads, 1), low=1, high=_MAX_HEAD)
    if "attention.head_dim" not in reader and sizes.hidden_size % num_heads:
        raise reader.contradiction("attention.head_count", num_heads, f"a divisor of {sizes.hidden_size}")
    num_kv_heads = reader.integer("attention.head_count_kv", num_heads, low=1, high=num_heads)
    if num_heads % num_kv_heads:
        raise reader.contradiction("attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads}")
    if name == "minicpmv4_6" and sizes.merge not in (2, 4):
        raise reader.contradiction("projector.scale_factor", sizes.merge, "2 or 4")
    version, num_queries = _minicpmv(metadata)
    means, stds = (_channels(reader, key) for key in ("image_mean", "image_std"))
    if min(stds) <= 0.0:
        raise reader.contradiction("image_std", min(stds), "numbers above 0")
    window_layers = reader.list_of_integers("wa_layer_indexes")
    no_limit = None if name in _LIMITED_BY_FILE else 0
    return PictureConfig(
        **vars(sizes),
        image_size=reader.integer("image_size", low=1, high=_MAX_SIZE),
        patch_size=reader.integer("patch_size", low=1, high=1024),
        mean=means,
        std=stds,
        activation=_activation(metadata),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        feature_layers=_feature_layers(reader, sizes.num_layers),
        window_pattern=reader.integer(
            "n_wa_pattern", None if name == "qwen2.5vl_merger" else 0, low=0, high=max(sizes.num_layers, 1024)
        ),
        window_layer=window_layers[0] if window_layers else 0,
        pinpoints=_pinpoints(reader),
        preproc_image_size=reader.integer("preproc_image_size", 0, low=0, high=_MAX_SIZE),
        min_tiles=reader.integer("preproc_min_tiles", 1, low=1, high=_MAX_ENTRIES),
        max_tiles=reader.integer("preproc_max_tiles", 12, low=1, high=_MAX_ENTRIES),
        min_pixels=reader.integer("image_min_pixels", no_limit, low=0, high=_MAX_PIXELS),
        max_pixels=reader.integer("image_max_pixels", no_limit, low=0, high=_MAX_PIXELS),
        minicpmv_version=version,
        num_queries=num_queries,
        swiglu_clamp=reader.number("swiglu_clamp", None if name == "glm5v" else 0.0, low=0.0),
        has_image_break="v.token_embd.img_break" in shapes and name == "pixtral",
    )


def _channels(reader: MetadataReader, key: str) -> tuple[float, float, float]:
    values = reader.numbers(key, 3, low=-1e6, high=1e6)
    if not values:
        raise reader.contradiction(key, "missing", "a number for each of three channels")
    return values[0], values[1], values[2]


def _minicpmv(metadata: Mapping[str, object]) -> tuple[int, int]:
    """The version of MiniCPM-V and the rows of its resampler."""
    reader = MetadataReader(metadata, ARCHITECTURE)
    version = reader.integer("minicpmv_version", 0, low=0, high=1 << 30)
    # The oldest files, of version 2, do not say so.
    return version, reader.integer("minicpmv_query_num", 96 if version in (0, 2) else 64, low=1, high=_MAX_SIZE)


def _feature_layers(reader: MetadataReader, num_layers: int) -> tuple[int, ...]:
    layers = reader.list_of_integers("feature_layer")
    if layers and max(layers) > num_layers:
        raise reader.contradiction("feature_layer", max(layers), f"numbers up to {num_layers}, the blocks of the file")
    return layers


def _pinpoints(reader: MetadataReader) -> tuple[tuple[int, int], ...]:
    key = "image_grid_pinpoints"
    count = reader.length_of(reader.full_key(key)) or 0
    if count % 2 or count > _MAX_ENTRIES:
        raise reader.contradiction(key, f"an array of {count} values", f"pairs, at most {_MAX_ENTRIES // 2}")
    values = reader.integers(key, count, (), low=1, high=_MAX_SIZE)
    return tuple(zip(values[::2], values[1::2], strict=True))


def _read_sound(metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> SoundConfig:
    name = _projector(metadata, "audio", SOUND_PROJECTORS)
    reader = MetadataReader(metadata, f"{ARCHITECTURE}.audio")
    sizes = _sizes(reader, name, SOUND_PROJECTORS[name], shapes)
    if sizes.num_layers and sizes.hidden_size % sizes.num_heads:
        raise reader.contradiction("attention.head_count", sizes.num_heads, f"a divisor of {sizes.hidden_size}")
    if sizes.hidden_size > _MAX_HEAD * sizes.num_heads:
        raise reader.contradiction("attention.head_count", sizes.num_heads, f"heads of {_MAX_HEAD} columns at most")
    return SoundConfig(**vars(sizes), num_mel_bins=reader.integer("num_mel_bins", low=1, high=_MAX_SIZE))
