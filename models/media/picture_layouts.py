"""Pictures as GGUF's families of encoders read them: sizes, tiles, and the special tokens around.

A family is a record. Sizes alone give what stands in a prompt (`outline`), so that rows are counted before a picture is
decoded; `lay_out` makes the inputs themselves. Where llama.cpp differs from a model's own processor, llama.cpp is
followed, as it is what these files are made for; `models/README.md` lists the differences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from localinfer.errors import CorruptFileError, RequestError, ShapeError, UnsupportedFormatError
from localinfer.models.media.mmproj import MediaConfig, PictureConfig
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.media.resizing import BLACK, Color, Filter, Pixels, Size, pad, smart_size, top_left_fit
from localinfer.models.media.tiling import (
    Tiling,
    area_candidates,
    square_candidates,
    tile_candidate,
    tile_idefics3,
    tile_lfm2,
    tile_slices,
)

_Picture = TypeVar("_Picture")
_Area = tuple[int, int]
_SizeRule = Callable[[Size, PictureConfig, _Area], Tiling]
_ORANGE: Color = (122, 116, 104)
_GREY: Color = (127, 127, 127)


@dataclass(frozen=True)
class TileTexts:
    """Special tokens inside a tiled picture."""

    tile_begin: str = ""
    """Before each tile; `{row}` and `{column}` count from 1."""
    tile_end: str = ""
    """After each tile."""
    row_end: str = ""
    """After each row of tiles but the last."""
    tiles_begin: str = ""
    """Before all tiles."""
    tiles_end: str = ""
    """After all tiles."""
    overview_begin: tuple[str, ...] = ()
    """Before the overview."""
    overview_end: str = ""
    """After the overview."""
    has_overview_first: bool = False
    """True if the overview precedes the tiles."""
    marks_lone_overview: bool = True
    """True if what stands around an overview stands around one without tiles, too."""


@dataclass(frozen=True)
class PictureFamily:
    """A family of encoders of pictures."""

    size_rule: _SizeRule
    """From a picture's size, the settings and the least and greatest area to what is encoded; an area of 0 is none."""
    texts: tuple[tuple[str, str], ...] = (("", ""),)
    """Begin and end of a picture: the first pair whose begin is a token, else the last."""
    tile_texts: TileTexts = field(default_factory=TileTexts)
    """Around its parts."""
    tokens: tuple[int, int] = (0, 0)
    """Least and most rows by default, which limit areas; 0: no limit."""
    has_limits_of_file: bool = False
    """True if areas that the file gives are the limits."""
    takes_limits: bool = False
    """True if a user's limits are obeyed."""
    takes_limits_over_file: bool = False
    """True if they are obeyed, too, where the file gives areas."""
    has_grid: bool = False
    """True if rows have positions of their own in decoders with several dimensions; others stand in one line there."""
    needs_limits: bool = False
    """True if a file without areas cannot be used."""


@dataclass(frozen=True)
class InputSize:
    """An `EncoderInput` without its values."""

    width: int
    """Pixels across."""
    height: int
    """Pixels down."""
    num_rows: int
    """Embeddings that come of it."""
    grid: tuple[int, int] | None
    """As in `EncoderInput`."""
    num_positions: int
    """As in `EncoderInput`."""


def _square(filter: Filter, color: Color = BLACK) -> _SizeRule:
    def rule(source: Size, config: PictureConfig, _: _Area) -> Tiling:
        return Tiling((pad(source, (config.image_size, config.image_size), filter, color),))

    return rule


def _smart(filter: Filter, longest_edge: Callable[[PictureConfig], int] | None = None) -> _SizeRule:
    def rule(source: Size, config: PictureConfig, area: _Area) -> Tiling:
        edge = longest_edge(config) if longest_edge else 0
        size = smart_size(source, config.patch_size * config.merge, *area, edge)
        return Tiling((pad(source, size, filter),))

    return rule


def _glm5v(source: Size, config: PictureConfig, area: _Area) -> Tiling:
    return Tiling((top_left_fit(source, config.patch_size * config.merge, *area, "bicubic"),))


def _llava(source: Size, config: PictureConfig, area: _Area) -> Tiling:
    if not config.pinpoints:
        return _square("bicubic", _ORANGE)(source, config, area)
    side = config.image_size
    if any(width % side or height % side for width, height in config.pinpoints):
        raise UnsupportedFormatError(
            f"clip.vision.image_grid_pinpoints has sizes that are no multiples of image_size, {side}; wanted whole "
            "tiles: convert the model's mmproj file again"
        )
    return tile_candidate(source, side, config.pinpoints, "bicubic")


def _candidates(grids: Callable[[PictureConfig], Iterator[tuple[int, int]]]) -> _SizeRule:
    def rule(source: Size, config: PictureConfig, _: _Area) -> Tiling:
        side = config.image_size
        sizes = ((columns * side, rows * side) for columns, rows in grids(config))
        return tile_candidate(source, side, sizes, "bicubic")

    return rule


def _lfm2(source: Size, config: PictureConfig, area: _Area) -> Tiling:
    return tile_lfm2(source, config.patch_size, config.patch_size * config.merge, *area)


def _idefics3(source: Size, config: PictureConfig, area: _Area) -> Tiling:
    return tile_idefics3(source, config.image_size, config.preproc_image_size, *area)


def _minicpmv(source: Size, config: PictureConfig, _: _Area) -> Tiling:
    is_fine = config.projector == "minicpmv4_6" and config.merge == 2
    return tile_slices(source, config.image_size, config.patch_size * config.merge, enlarges=is_fine)


_QWEN = PictureFamily(
    _smart("bicubic"), (("<|vision_start|>", "<|vision_end|>"),), tokens=(8, 4096), takes_limits=True, has_grid=True
)
_GEMMA4 = PictureFamily(_smart("bicubic"), (("<|image>", "<image|>"),), tokens=(70, 1120), takes_limits=True)
_GLM = (("<|begin_of_image|>", "<|end_of_image|>"),)
_MINICPM_TEXTS = TileTexts(
    tile_begin="<slice>",
    tile_end="</slice>",
    row_end="\n",
    overview_begin=("<image>",),
    overview_end="</image>",
    has_overview_first=True,
)
_MINICPM_25_TEXTS = TileTexts(
    tile_begin="<image>",
    tile_end="</image>",
    row_end="\n",
    tiles_begin="<slice>",
    tiles_end="</slice>",
    overview_begin=("<image>",),
    overview_end="</image>",
    has_overview_first=True,
)
_MINICPM_VERSIONS = {0: _MINICPM_25_TEXTS, 2: _MINICPM_25_TEXTS} | dict.fromkeys((3, 4, 5, 6, 100045), _MINICPM_TEXTS)

PICTURE_FAMILIES: dict[str, PictureFamily] = {
    "gemma3": PictureFamily(_square("bilinear"), (("<start_of_image>", "<end_of_image>"),)),
    "qwen2vl_merger": _QWEN,
    "qwen2.5vl_merger": _QWEN,
    "qwen3vl_merger": _QWEN,
    "idefics3": PictureFamily(
        _idefics3,
        tile_texts=TileTexts(
            tile_begin="<fake_token_around_image><row_{row}_col_{column}>",
            row_end="\n",
            overview_begin=("\n\n", "<fake_token_around_image>", "<global-img>"),
            overview_end="<fake_token_around_image>",
        ),
        takes_limits=True,
    ),
    "pixtral": PictureFamily(_smart("bicubic"), (("", "[IMG_END]"),), tokens=(8, 1024), takes_limits=True),
    "lightonocr": PictureFamily(
        _smart("bicubic", lambda config: config.preproc_image_size or config.image_size),
        (("<|im_start|>", "<|im_end|>"),),
        takes_limits=True,
    ),
    "internvl": PictureFamily(
        _candidates(lambda config: area_candidates(config.min_tiles, config.max_tiles)), (("<img>", "</img>"),)
    ),
    "gemma4v": _GEMMA4,
    "gemma4uv": _GEMMA4,
    "mlp": PictureFamily(_llava),
    "lfm2": PictureFamily(
        _lfm2,
        (("<|image_start|>", "<|image_end|>"),),
        TileTexts(
            tile_begin="<|img_row_{row}_col_{column}|>",
            overview_begin=("<|img_thumbnail|>",),
            marks_lone_overview=False,
        ),
        tokens=(64, 256),
        takes_limits=True,
    ),
    "llama4": PictureFamily(_candidates(lambda _: square_candidates(3)), (("<|image_start|>", "<|image_end|>"),)),
    "glm4v": PictureFamily(_smart("bicubic"), _GLM, tokens=(8, 4096), takes_limits=True, has_grid=True),
    "glm5v": PictureFamily(
        _glm5v,
        _GLM,
        has_limits_of_file=True,
        takes_limits=True,
        takes_limits_over_file=True,
        has_grid=True,
        needs_limits=True,
    ),
    "resampler": PictureFamily(_minicpmv, tile_texts=_MINICPM_TEXTS),
    "minicpmv4_6": PictureFamily(_minicpmv, tile_texts=_MINICPM_TEXTS),
    "kimivl": PictureFamily(
        _smart("bicubic"), (("<|media_start|>", "<|media_end|>"),), tokens=(8, 1024), takes_limits=True
    ),
    "kimik25": PictureFamily(
        _smart("bicubic"),
        # GLM-5.2-V has this encoder, and marks of its own.
        (*_GLM, ("<|media_begin|>", "<|media_end|>")),
        tokens=(2, 4096),
        has_limits_of_file=True,
        takes_limits=True,
    ),
    "phi4": PictureFamily(_smart("bilinear"), has_limits_of_file=True, needs_limits=True),
    "paddleocr": PictureFamily(
        _smart("bicubic"),
        (("<|IMAGE_START|>", "<|IMAGE_END|>"),),
        has_limits_of_file=True,
        has_grid=True,
        needs_limits=True,
    ),
    "dots_ocr": PictureFamily(
        _smart("bicubic"), (("<|img|>", "<|endofimg|>"),), has_limits_of_file=True, needs_limits=True
    ),
    "janus_pro": PictureFamily(_square("bicubic", _GREY)),
}
"""Families by `projector_type`."""


def lay_out(
    picture: Pixels,
    config: MediaConfig,
    *,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    has_token: Callable[[str], bool] | None = None,
) -> PreparedMedia:
    """Prepare a picture, uint8 RGB [height, width, 3].

    min_tokens, max_tokens: a user's limits of rows, in families whose pictures have no fixed sizes (`takes_limits`).
    has_token: whether a text is a token of the vocabulary; which marks a family has may depend on it.
    Raises: RequestError for limits or a picture that do not fit the model; UnsupportedFormatError, CorruptFileError.
    """
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise ShapeError(
            f"the picture is {picture.dtype} {list(picture.shape)}; wanted uint8 [height, width, 3] of a pixel or more"
        )
    plan = _Plan(picture.shape[1], picture.shape[0], config, min_tokens, max_tokens)
    whole, tiles = plan.tiling.cut(picture)
    sizes = plan.input_size(plan.tiling.whole_size), plan.input_size(plan.tiling.tile_size) if tiles else None

    def encoder_input(values: Pixels, size: InputSize | None) -> EncoderInput:
        assert size is not None
        return EncoderInput(False, np.ascontiguousarray(values), size.num_rows, size.grid, size.num_positions)

    inputs = [encoder_input(tile, sizes[1]) for tile in tiles]
    return PreparedMedia.from_pieces(list(plan.pieces(encoder_input(whole, sizes[0]), inputs, has_token)))


def outline(
    width: int,
    height: int,
    config: MediaConfig,
    *,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    has_token: Callable[[str], bool] | None = None,
) -> list[str | InputSize]:
    """The pieces of `lay_out` for a picture of this size, with sizes in place of inputs."""
    plan = _Plan(width, height, config, min_tokens, max_tokens)
    tiling = plan.tiling
    tiles = [plan.input_size(tiling.tile_size)] * (tiling.columns * tiling.rows) if tiling.canvas else []
    return list(plan.pieces(plan.input_size(tiling.whole_size), tiles, has_token))


def count_rows(
    width: int, height: int, config: MediaConfig, *, min_tokens: int | None = None, max_tokens: int | None = None
) -> int:
    """Embeddings of a picture of this size."""
    pieces = outline(width, height, config, min_tokens=min_tokens, max_tokens=max_tokens)
    return sum(piece.num_rows for piece in pieces if isinstance(piece, InputSize))


def takes_limits(config: PictureConfig) -> bool:
    """Return whether a user's limits of rows change anything in this file's family."""
    family = PICTURE_FAMILIES[config.projector]
    return family.takes_limits and (family.takes_limits_over_file or not _has_areas(family, config))


def _has_areas(family: PictureFamily, config: PictureConfig) -> bool:
    return family.has_limits_of_file and config.min_pixels > 0 and config.max_pixels > 0


class _Plan:
    """Tiles, sizes and texts for pictures of one size."""

    def __init__(
        self, width: int, height: int, config: MediaConfig, min_tokens: int | None, max_tokens: int | None
    ) -> None:
        if config.picture is None:
            raise RequestError(
                "the model's mmproj file has no encoder of pictures; wanted text or sound: use another model",
                field="image",
            )
        self._config = config.picture
        self._has_mrope = config.has_mrope
        self._family = PICTURE_FAMILIES[config.picture.projector]
        area = self._limits(min_tokens, max_tokens)
        self.tiling = self._family.size_rule((width, height), self._config, area)

    def _limits(self, min_tokens: int | None, max_tokens: int | None) -> _Area:
        config, family = self._config, self._family
        cell = (config.patch_size * config.merge) ** 2
        low, high = (number * cell for number in family.tokens)
        if _has_areas(family, config):
            low, high = config.min_pixels, config.max_pixels
        elif family.needs_limits:
            raise CorruptFileError(
                "clip.vision.image_min_pixels or image_max_pixels is 0; wanted the areas that this kind of encoder is "
                "limited to: convert the model's mmproj file again"
            )
        if takes_limits(config):
            for name, number in (("image_min_tokens", min_tokens), ("image_max_tokens", max_tokens)):
                if number is not None and number < 1:
                    raise RequestError(
                        f"{name} is {number}; wanted a number of embeddings above 0, or none", field=name
                    )
            low = min_tokens * cell if min_tokens else low
            high = max_tokens * cell if max_tokens else high
        if high and low > high:
            raise RequestError(
                f"a picture would have at least {low // cell} and at most {high // cell} embeddings; wanted a least "
                "number below the greatest: change image_min_tokens or image_max_tokens",
                field="image_min_tokens" if min_tokens else "image_max_tokens",
            )
        return low, high

    def input_size(self, size: Size) -> InputSize:
        config = self._config
        columns, rows = (-(-(side // config.patch_size) // config.merge) for side in size)
        if not rows * columns:
            raise CorruptFileError(
                f"clip.vision.image_size is {config.image_size}, and an input of {size[0]} x {size[1]} pixels has no "
                f"patch of {config.patch_size} in it; wanted one at least. Download the mmproj file again"
            )
        if config.projector == "resampler":
            num_rows = config.num_queries
        else:
            num_rows = rows * columns + (rows - 1 if config.has_image_break else 0)
        grid = None
        if self._has_mrope:
            grid = (rows, columns) if self._family.has_grid else (1, num_rows)
        return InputSize(*size, num_rows, grid, max(grid) if grid else num_rows)

    def pieces(
        self, whole: _Picture, tiles: Sequence[_Picture], has_token: Callable[[str], bool] | None
    ) -> Iterator[str | _Picture]:
        """The whole picture and its tiles with the texts around."""
        pairs = self._family.texts
        begin, end = next((pair for pair in pairs[:-1] if has_token and has_token(pair[0])), pairs[-1])
        texts = self._tile_texts()
        marks = texts if tiles or texts.marks_lone_overview else TileTexts()
        overview: list[str | _Picture] = [*marks.overview_begin, whole, marks.overview_end]
        parts: list[str | _Picture] = [begin, *(overview if texts.has_overview_first else [])]
        if tiles:
            parts.append(texts.tiles_begin)
            columns = self.tiling.columns
            for index, tile in enumerate(tiles):
                row, column = divmod(index, columns)
                name = texts.tile_begin.format(row=row + 1, column=column + 1)
                is_row_end = column == columns - 1 and index < len(tiles) - 1
                parts += [name, tile, texts.tile_end, texts.row_end if is_row_end else ""]
            parts.append(texts.tiles_end)
        parts += [*([] if texts.has_overview_first else overview), end]
        return (part for part in parts if not isinstance(part, str) or part)

    def _tile_texts(self) -> TileTexts:
        if self._config.projector != "resampler":
            return self._family.tile_texts
        version = self._config.minicpmv_version
        if version not in _MINICPM_VERSIONS:
            raise UnsupportedFormatError(
                f"clip.minicpmv_version is {version}, whose prompts are unknown here; wanted one of "
                f"{', '.join(map(str, _MINICPM_VERSIONS))}: update localinfer, or use another model"
            )
        return _MINICPM_VERSIONS[version]
