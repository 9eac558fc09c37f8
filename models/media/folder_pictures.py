"""Families of Hugging Face folders that see: how each prepares a picture, and the text that stands around it.

A family reads its settings once and returns a plan: the pieces of a picture of any size, as texts and cuts. Texts join
what stands before and behind them in the prompt; each input of the encoder stands where the published processor puts
as many placeholders as it has embeddings.
Source: the processors of transformers 5.24.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, sqrt
from typing import Any

from localinfer.models.media import folder_sizes as sizes
from localinfer.models.media.cuts import Canvas, Cut, Plan, tiles
from localinfer.models.media.folder_settings import MAX_AREA, PartSettings, ProcessorSettings
from localinfer.models.media.folder_sizes import Size
from localinfer.models.media.patch_positions import fewer

_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_CLIP = {"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "resample": _BICUBIC}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": _BICUBIC}
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
"""Tokens whose rows Ovis 2 keeps in the encoder's table, in its order."""
_TILING = {"crop_to_patches": False, "min_patches": 1, "max_patches": 12}
_TILES = {"crop_to_patches": True}
_MOST_TILES_A_SIDE = 64


@dataclass(frozen=True)
class SeeingFamily:
    """A family: its way of preparing pictures, and what stands for one in a prompt."""

    plan: Callable[[ProcessorSettings], Plan]
    """Reads the settings, those of the class included."""
    defaults: Mapping[str, Any]
    """Settings of the class, for those that a folder leaves out."""
    token: tuple[str, str]
    """Name and usual text of the special token that stands for a picture in a prompt and in a rendered template."""
    around: tuple[str, str] = ("", "")
    """Texts around that token where no template puts it into a prompt."""
    resizes_as_torch: bool = False
    """True if its published processor has no Pillow in it."""
    adds_bos: bool = True
    """Texts are tokenized with the tokenizer's own beginning, as texts without pictures are."""
    frame: Callable[[str, str, str], str] | None = None
    """Completes a prompt: of its text, the token of a picture, and that of a beginning."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the published processor gives with every picture, so that what a file says of them is void."""


def _qwen(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    patch, merge = picture.integer("patch_size"), picture.integer("merge_size")
    least, most = _areas(picture)
    return _grid_plan(
        patch * merge, lambda width, height: sizes.area_between(width, height, patch * merge, least, most)
    )


def _qwen_in_a_row(settings: ProcessorSettings) -> Plan:
    """The same for a text model whose positions have one dimension."""
    plan = _qwen(settings)
    return lambda width, height, number: tuple(
        piece if isinstance(piece, str) else replace(piece, grid=None) for piece in plan(width, height, number)
    )


def _glm(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    unit = picture.integer("patch_size") * picture.integer("merge_size")
    frames = picture.integer("temporal_patch_size")
    least, most = _areas(picture)

    def size(width: int, height: int) -> Size:
        return sizes.area_between(*sizes.at_least(width, height, unit), unit, least, most, frames)

    return _grid_plan(unit, size)


def _paddleocr(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    unit = picture.integer("patch_size") * picture.integer("merge_size")
    least, most = _areas(picture)

    def size(width: int, height: int) -> Size:
        return sizes.area_between(*sizes.at_least_rounded(width, height, unit), unit, least, most)

    return _grid_plan(unit, size)


def _grid_plan(unit: int, size: Callable[[int, int], Size]) -> Plan:
    """One input of free size, whose embeddings have positions in a grid."""

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        found = size(width, height)
        grid = found[0] // unit, found[1] // unit
        return (Cut((found,), grid[0] * grid[1], grid=grid),)

    return plan


def _areas(picture: PartSettings) -> tuple[int, int]:
    """The least and greatest area in pixels, which older files have beside `size`."""
    size = picture.get("size")
    found = dict(size) if isinstance(size, dict) else {}
    for edge, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if older in picture:
            found[edge] = picture.integer(older, high=MAX_AREA)
        elif edge not in found:
            found[edge] = found.get(older)
    merged = PartSettings(picture.file, {"size": found})
    least, most = merged.edges("size", "shortest_edge", "longest_edge", high=MAX_AREA)
    return least, most


def _kimi(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    patch, merge = picture.integer("patch_size"), picture.integer("merge_size")
    most = picture.integer("max_patches", high=MAX_AREA)
    (side,) = picture.edges("size", "max_height")

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        resized = sizes.never_enlarged(width, height, patch, most, side)
        whole = sizes.aligned(*resized, patch * merge)
        num_rows = whole[0] // (patch * merge) * (whole[1] // (patch * merge))
        return (Cut((resized,), num_rows, canvas=Canvas(whole, (0, 0))),)

    return plan


def _gemma3(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    side = picture.square("size")
    num_rows = _rows_of_processor(settings, "image_seq_length", "mm_tokens_per_image", 256)
    start, end = settings.token("boi_token", "<start_of_image>"), settings.token("eoi_token", "<end_of_image>")
    pans = picture.boolean("do_pan_and_scan")
    least, most = picture.integer("pan_and_scan_min_crop_size"), picture.integer("pan_and_scan_max_num_crops")
    ratio = picture.number("pan_and_scan_min_ratio_to_activate", low=1.0)

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        parts = sizes.crops(width, height, least, most, ratio) if pans else []
        whole, *cropped = [
            (f"\n\n{start}", Cut(((side, side),), num_rows, part=part), f"{end}\n\n") for part in (None, *parts)
        ]
        if not cropped:
            return whole
        pieces: list[str | Cut] = ["Here is the original image ", *whole]
        pieces.append(" and here are some crops to help you see better ")
        for index, crop in enumerate(cropped):
            pieces += [" " if index else "", *crop]
        return tuple(piece for piece in pieces if piece)

    return plan


def _gemma4(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    unit = picture.integer("patch_size") * picture.integer("pooling_kernel_size")
    budget = picture.integer("max_soft_tokens", high=1 << 20)
    if budget not in (70, 140, 280, 560, 1120):
        raise picture.wrong("max_soft_tokens", "70, 140, 280, 560 or 1120")
    start, end = settings.token("boi_token", "<|image>"), settings.token("eoi_token", "<image|>")

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        found = sizes.filling_budget(width, height, unit, budget)
        return start, Cut((found,), found[0] // unit * (found[1] // unit)), end

    return plan


def _pixtral(settings: ProcessorSettings) -> Plan:
    """Rows of patches end with a break, the last with an end; the breaks are rows of the encoder's."""
    end = settings.token("image_end_token", "[IMG_END]")
    size, unit = _pixtral_size(settings)

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        found = size(width, height)
        return Cut((found,), (found[0] // unit + 1) * (found[1] // unit) - 1), end

    return plan


def _lighton(settings: ProcessorSettings) -> Plan:
    size, unit = _pixtral_size(settings)

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        found = size(width, height)
        return (Cut((found,), found[0] // unit * (found[1] // unit)),)

    return plan


def _pixtral_size(settings: ProcessorSettings) -> tuple[Callable[[int, int], Size], int]:
    picture, processor = settings.picture, settings.processor
    size = picture.get("size")
    if isinstance(size, dict) and "longest_edge" not in size:
        height, width = picture.edges("size", "height", "width")
    else:
        (width,) = picture.edges("size", "longest_edge")
        height = width
    # The processor's sizes are the model's; those of its pictures alone may leave out what joins patches.
    if "patch_size" in processor or "spatial_merge_size" in processor:
        processor = processor.over({"patch_size": 16, "spatial_merge_size": 1})
        unit = processor.integer("patch_size") * processor.integer("spatial_merge_size", high=64)
    else:
        unit = picture.square("patch_size")
    return lambda across, down: sizes.below_edge(across, down, (width, height), unit), unit


def _idefics(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    (edge,) = picture.edges("size", "longest_edge")
    (tile,) = picture.edges("max_image_size", "longest_edge")
    if ceil(edge / tile) > _MOST_TILES_A_SIDE:
        raise picture.wrong("max_image_size", f"a tile of which {_MOST_TILES_A_SIDE} at most make a side of {edge}")
    splits = picture.boolean("do_image_splitting")
    num_rows = _rows_of_processor(settings, "image_seq_len", "image_seq_len", 169)
    around = settings.token("fake_image_token", "<fake_token_around_image>")
    overall = settings.token("global_image_token", "<global-img>")
    square = tile, tile

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        first = sizes.longest_edge(width, height, edge)
        if not splits:
            return f"{around}{overall}", Cut((first, square), num_rows), around
        canvas = sizes.up_to_tiles(*first, tile)
        if max(canvas) <= tile:
            return f"{around}{overall}", Cut((first, canvas), num_rows), around
        pieces: list[str | Cut] = []
        grid = canvas[0] // tile, canvas[1] // tile
        for row, cuts in enumerate(tiles((first, canvas), grid, square, num_rows), 1):
            for column, cut in enumerate(cuts, 1):
                pieces += [f"{around}<row_{row}_col_{column}>", cut]
            pieces.append("\n")
        return (*pieces, f"\n{around}{overall}", Cut((first, canvas, square), num_rows), around)

    return plan


def _internvl(settings: ProcessorSettings) -> Plan:
    tiled = _tiled_by_aspect(settings)
    num_rows = _rows_of_processor(settings, "image_seq_length", "image_seq_length", 256)
    start, end = settings.token("start_image_token", "<img>"), settings.token("end_image_token", "</img>")

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        return start, *tiled(width, height, num_rows), end

    return plan


def _internvl_chat(settings: ProcessorSettings) -> Plan:
    """The same by the settings of InternVL's own folders, whose code prepares pictures itself."""
    config = settings.config.over(
        {"dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12, "use_thumbnail": True}
        | {"downsample_ratio": 0.5, "force_image_size": settings.part("vision_config").get("image_size") or 448}
    )
    side, splits = config.square("force_image_size"), config.boolean("dynamic_image_size")
    least, most = (config.integer(f"{word}_dynamic_patch", high=1 << 10) for word in ("min", "max"))
    candidates, has_whole = sizes.grids(least, most), config.boolean("use_thumbnail")
    num_rows = round((side // _tower_patch(settings) * config.number("downsample_ratio", low=1e-3, high=1.0)) ** 2)
    square = side, side

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        grid = sizes.nearest_aspect(width, height, candidates, square) if splits else (1, 1)
        cuts = _tiles_and_whole(grid, square, num_rows)
        return "<img>", *(cuts if has_whole or len(cuts) == 1 else cuts[:-1]), "</img>"

    return plan


def _aya(settings: ProcessorSettings) -> Plan:
    processor = settings.processor.over({"patch_size": 28, "img_size": 364, "downsample_factor": 1})
    tiled = _tiled_by_aspect(settings)
    side = processor.integer("img_size") // (processor.integer("patch_size") * processor.integer("downsample_factor"))
    start = settings.token("start_of_img_token", "<|START_OF_IMG|>")
    end = settings.token("end_of_img_token", "<|END_OF_IMG|>")
    tile, overall = settings.token("tile_token", "TILE"), settings.token("tile_global_token", "TILE_GLOBAL")

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        *cuts, whole = tiled(width, height, side * side)
        pieces: list[str | Cut] = [start]
        for index, cut in enumerate(cuts, 1):
            pieces += [f"{tile}_{index}", cut]
        return (*pieces, overall, whole, end)

    return plan


def _tiled_by_aspect(settings: ProcessorSettings) -> Callable[[int, int, int], list[Cut]]:
    """Tiles by the nearest aspect, then the whole as one more if there are several."""
    picture = settings.picture
    height, width = picture.edges("size", "height", "width")
    tile, most = (width, height), picture.integer("max_patches", high=1 << 10)
    candidates = sizes.grids(picture.integer("min_patches", high=1 << 10), most)
    splits = picture.boolean("crop_to_patches") and most > 1

    def tiled(across: int, down: int, num_rows: int) -> list[Cut]:
        grid = sizes.nearest_aspect(across, down, candidates, tile) if splits else (1, 1)
        return _tiles_and_whole(grid, tile, num_rows)

    return tiled


def _tiles_and_whole(grid: Size, tile: Size, num_rows: int) -> list[Cut]:
    whole = Cut((tile,), num_rows)
    if grid == (1, 1):
        return [whole]
    canvas = grid[0] * tile[0], grid[1] * tile[1]
    return [*(cut for row in tiles((canvas,), grid, tile, num_rows) for cut in row), whole]


def _cohere(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    tile, splits = picture.square("size"), picture.boolean("crop_to_patches")
    side = picture.integer("patch_size")  # of what becomes one embedding, in a tile
    candidates = sizes.grids(1, picture.integer("max_patches", high=1 << 10))
    start, end = settings.token("boi_token", "<|START_OF_IMG|>"), settings.token("eoi_token", "<|END_OF_IMG|>")
    line = settings.token("img_line_break_token", "<|IMG_LINE_BREAK|>")

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        grid = sizes.least_enlarged(width, height, candidates, tile) if splits else (1, 1)
        pieces: list[str | Cut] = [start]
        for cut in _tiles_and_whole(grid, (tile, tile), side * side):
            pieces += [cut, line]
        return (*pieces, end)

    return plan


def _ovis(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    tile, most = picture.square("size"), picture.integer("max_patches", high=1 << 10)
    splits, covers = picture.boolean("crop_to_patches") and most > 1, picture.boolean("use_covering_area_grid")
    least = picture.integer("min_patches", high=1 << 10)
    num_rows = _rows_of_processor(settings, "image_seq_length", "image_seq_length", 256)
    square = tile, tile
    # They are no words: beside a picture their rows are of its own table.
    start, grid_mark, column_mark, row_mark, end = range(len(OVIS_MARKS))

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        grid = 1, 1
        if splits and covers:
            grid = sizes.covering_grid(width, height, sizes.grids(1, most), tile)
        elif splits:
            grid = sizes.nearest_aspect(width, height, sizes.grids(least, most), square)
        cuts, behind = [Cut((square,), num_rows)], [[grid_mark]]
        if grid != (1, 1):
            canvas = grid[0] * tile, grid[1] * tile
            for cuts_of_row in tiles((canvas,), grid, square, num_rows):
                cuts += cuts_of_row
                behind += [*[[column_mark] for _ in cuts_of_row[1:]], [row_mark]]
            behind[-1].pop()
        behind[-1].append(end)
        before = [[start], *[[] for _ in cuts[1:]]]
        return tuple(map(_marked, cuts, before, behind))

    return plan


def _marked(cut: Cut, before: Sequence[int], behind: Sequence[int]) -> Cut:
    return replace(cut, marks=(tuple(before), tuple(behind)), num_rows=cut.num_rows + len(before) + len(behind))


def _llama4(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    processor = settings.processor.over({"patch_size": 14, "pixel_shuffle_ratio": 0.5})
    tile, patch = picture.square("size"), processor.integer("patch_size")
    shuffle = round(1 / processor.number("pixel_shuffle_ratio", low=1e-3, high=1.0) ** 2)
    num_rows = (tile // patch) ** 2 // shuffle
    candidates = sizes.canvases(picture.integer("max_patches", high=1 << 10))
    takes_largest = picture.boolean("resize_to_max_canvas")
    square = tile, tile

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        grid = sizes.best_canvas(width, height, candidates, tile, takes_largest)
        canvas = grid[0] * tile, grid[1] * tile
        resized = sizes.inside(width, height, canvas, None if takes_largest else (max(width, tile), max(height, tile)))
        placed = tiles((resized,), grid, square, num_rows, Canvas(canvas, (0, 0)))
        if grid == (1, 1):
            return "<|image_start|><|image|>", placed[0][0], "<|image_end|>"
        pieces: list[str | Cut] = ["<|image_start|>"]
        for cuts in placed:
            for column, cut in enumerate(cuts):
                pieces += [*["<|tile_x_separator|>"] * (column > 0), cut]
            pieces.append("<|tile_y_separator|>")
        return (*pieces, "<|image|>", Cut((square,), num_rows), "<|image_end|>")

    return plan


def _lfm2(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    patch, factor = picture.integer("encoder_patch_size"), picture.integer("downsample_factor")
    least, most = picture.integer("min_image_tokens"), picture.integer("max_image_tokens")
    tile, unit = picture.integer("tile_size"), patch * factor
    fewest, greatest = (picture.integer(key, high=1 << 10) for key in ("min_tiles", "max_tiles"))
    splits = picture.boolean("do_image_splitting") and not fewest == greatest == 1
    tolerance, adds_whole = picture.number("max_pixels_tolerance", low=0.0), picture.boolean("use_thumbnail")
    start, end = (
        settings.token("image_start_token", "<|image_start|>"),
        settings.token("image_end_token", "<|image_end|>"),
    )
    overall = settings.token("image_thumbnail", "<|img_thumbnail|>")
    candidates = sizes.grids(fewest, greatest)
    tile_rows = ceil(tile // patch / factor) ** 2

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        found = _lfm2_size(width, height, unit, least, most)
        whole = Cut((found,), found[0] // unit * (found[1] // unit))
        rounded = [max(patch, round(side / unit) * unit) for side in (width, height)]
        if not splits or rounded[0] * rounded[1] <= most * unit * unit * tolerance:
            return start, whole, end
        grid = sizes.nearest_aspect(width, height, candidates, (tile, tile))
        canvas = grid[0] * tile, grid[1] * tile
        if grid == (1, 1):
            return start, whole, end
        pieces: list[str | Cut] = [start]
        for row, cuts in enumerate(tiles((canvas,), grid, (tile, tile), tile_rows), 1):
            for column, cut in enumerate(cuts, 1):
                pieces += [f"<|img_row_{row}_col_{column}|>", cut]
        return (*pieces, *((overall, whole) if adds_whole else ()), end)

    return plan


def _lfm2_size(width: int, height: int, unit: int, least: int, most: int) -> Size:
    rounded = [max(unit, round(side / unit) * unit) for side in (width, height)]
    area = rounded[0] * rounded[1]
    if area > most * unit * unit:
        scale = sqrt(width * height / (most * unit * unit))
        return max(unit, floor(width / scale / unit) * unit), max(unit, floor(height / scale / unit) * unit)
    if area < least * unit * unit:
        scale = sqrt(least * unit * unit / (width * height))
        return ceil(width * scale / unit) * unit, ceil(height * scale / unit) * unit
    return rounded[0], rounded[1]


def _llava(settings: ProcessorSettings) -> Plan:
    side, cut = _cropped_square(settings)
    _check_selection(settings)
    num_rows = (side // _tower_patch(settings)) ** 2

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        return (cut(width, height, num_rows),)

    return plan


def _cropped_square(settings: ProcessorSettings) -> tuple[int, Callable[[int, int, int], Cut]]:
    """CLIP's picture: its shortest edge resized, its middle cut out. The side, and the cut of a size."""
    picture = settings.picture
    size = picture.get("size")
    is_square = isinstance(size, dict) and "height" in size
    (edge,) = (picture.square("size"),) if is_square else picture.edges("size", "shortest_edge")
    crops = picture.boolean("do_center_crop")
    side = picture.square("crop_size") if crops else edge
    if not crops and not is_square:
        raise picture.unsupported("do_center_crop", "pictures that are cut to a square")

    def cut(width: int, height: int, num_rows: int) -> Cut:
        resized = (edge, edge) if is_square else sizes.shortest_edge(width, height, edge)
        if resized == (side, side):
            return Cut((resized,), num_rows)
        # The canvas cuts where the picture is larger and pads where it is smaller; halves are rounded to the left.
        left, top = ((side - length) // 2 if length <= side else -((length - side) // 2) for length in resized)
        return Cut((resized,), num_rows, canvas=Canvas((side, side), (left, top)))

    return side, cut


def _llava_next(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    tile = picture.square("crop_size") if picture.get("crop_size") else picture.square("size")
    base = picture.square("size")
    patch = _tower_patch(settings)
    side = tile // patch
    if not side:
        raise picture.wrong("size", f"tiles of at least one patch of {patch} pixels")
    if settings.model_type != "llava_onevision":
        _check_selection(settings)
    pinpoints = _pinpoints(picture)
    if min(map(min, pinpoints)) < tile:
        raise picture.wrong("image_grid_pinpoints", f"sides of at least a tile of {tile} pixels")
    most = most_tiles(settings)

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        canvas = sizes.best_pinpoint(width, height, pinpoints)
        resized = sizes.inside_rounded_up(width, height, canvas)
        offset = (canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2
        kept = sizes.unpadded(width, height, (canvas[0] // tile * side, canvas[1] // tile * side))
        shrunk = fewer(kept, side, most)
        whole = ((base, base),) if base == tile else ((base, base), (tile, tile))
        packed = Cut((resized,), (shrunk[0] + 1) * shrunk[1], canvas=Canvas(canvas, offset), kept=kept)
        return Cut(whole, side * side), packed

    return plan


def _pinpoints(picture: PartSettings) -> list[Size]:
    """Widths and heights; the file has heights first."""
    found = picture.get("image_grid_pinpoints")
    entries = found if isinstance(found, list) and len(found) <= 1 << 10 else []
    pairs = [tuple(pair) for pair in entries if isinstance(pair, list) and len(pair) == 2]
    if (
        not pairs
        or len(pairs) != len(entries)
        or any(type(one) is not int or not 1 <= one <= 1 << 16 for pair in pairs for one in pair)
    ):
        raise picture.wrong("image_grid_pinpoints", "pairs of heights and widths")
    return [(width, height) for height, width in pairs]


def most_tiles(settings: ProcessorSettings) -> int:
    """The number of tiles whose embeddings are not made fewer; 0: any."""
    if settings.model_type != "llava_onevision":
        return 0
    word = settings.processor.text("vision_aspect_ratio") or settings.config.text("vision_aspect_ratio", "anyres_max_9")
    count = word.removeprefix("anyres_max_")
    if not count.isdecimal() or not 0 < int(count) <= 1 << 10:
        raise settings.config.wrong("vision_aspect_ratio", "anyres_max_ and a number of tiles")
    return int(count)


def _tower_patch(settings: ProcessorSettings) -> int:
    return settings.part("vision_config").over({"patch_size": 14}).integer("patch_size")


def _check_selection(settings: ProcessorSettings) -> None:
    """Refuse towers whose class row is one of a picture's embeddings."""
    word = settings.config.text("vision_feature_select_strategy", "default")
    has_class = "clip" in settings.part("vision_config").text("model_type", "clip_vision_model")
    if word != "default" and (has_class or word != "full"):
        raise settings.config.unsupported("vision_feature_select_strategy", "'default', and 'full' without a class row")


def _square(settings: ProcessorSettings) -> Plan:
    """A square of a fixed number of embeddings (PaliGemma)."""
    side = settings.picture.square("size")
    rows = settings.picture if "image_seq_length" in settings.picture else settings.processor
    num_rows = rows.integer("image_seq_length") if "image_seq_length" in rows else (side // _tower_patch(settings)) ** 2
    return lambda width, height, number: (Cut(((side, side),), num_rows),)


def _clip(settings: ProcessorSettings) -> Plan:
    _, cut = _cropped_square(settings)
    return lambda width, height, number: (cut(width, height, 1),)


def _siglip(settings: ProcessorSettings) -> Plan:
    side = settings.picture.square("size")
    return lambda width, height, number: (Cut(((side, side),), 1),)


def _siglip2(settings: ProcessorSettings) -> Plan:
    patch, most = settings.picture.integer("patch_size"), settings.picture.integer("max_num_patches")
    return lambda width, height, number: (Cut((sizes.most_patches(width, height, patch, most),), 1),)


def _minicpm(settings: ProcessorSettings) -> Plan:
    picture = settings.picture
    side, patch = picture.integer("scale_resolution"), picture.integer("patch_size")
    mode = picture.text("downsample_mode")
    if mode not in ("4x", "16x"):
        raise picture.wrong("downsample_mode", "'4x' or '16x'")
    merge = 2 if mode == "4x" else 4
    unit = patch * merge
    most = picture.integer("max_slice_nums", high=1 << 10) if picture.boolean("slice_mode") else 1
    numbered = picture.boolean("use_image_id")
    (first, last), (left, right), (begin, end) = (
        (settings.token(f"{name}_start_token", f"<{word}>"), settings.token(f"{name}_end_token", f"</{word}>"))
        for name, word in (("image_id", "image_id"), ("image", "image"), ("slice", "slice"))
    )

    def plan(width: int, height: int, number: int) -> tuple[str | Cut, ...]:
        grid = sizes.slices(width, height, most, side)
        whole = sizes.overview(width, height, side, unit, grid is None)
        pieces: list[str | Cut] = [
            f"{first}{number}{last}{left}" if numbered else left,
            Cut((whole,), whole[0] // unit * (whole[1] // unit)),
            right,
        ]
        if grid is not None:
            canvas = sizes.slice_canvas(width, height, grid, side, unit)
            cell = canvas[0] // grid[0], canvas[1] // grid[1]
            for row, cuts in enumerate(tiles((canvas,), grid, cell, cell[0] // unit * (cell[1] // unit))):
                pieces += ["\n"] * (row > 0)
                for cut in cuts:
                    pieces += [begin, cut, end]
        return tuple(pieces)

    return plan


def _rows_of_processor(settings: ProcessorSettings, key: str, config_key: str, default: int) -> int:
    """The embeddings of an input: the processor's number, the model's, or the class's."""
    if key in settings.processor:
        return settings.processor.integer(key, high=1 << 20)
    if config_key in settings.config:
        return settings.config.integer(config_key, high=1 << 20)
    return default


def _paligemma_prompt(text: str, token: str, beginning: str) -> str:
    """A prompt whose pictures stand before its beginning; others are put there."""
    end = text.rfind(token) + len(token) if token in text else 0
    return f"{text[:end]}{beginning}{text[end:]}\n"


_QWEN = SeeingFamily(
    _qwen,
    _CLIP
    | {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    | {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    ("image_token", "<|image_pad|>"),
    ("<|vision_start|>", "<|vision_end|>"),
)
_GLM = SeeingFamily(
    _glm,
    _CLIP
    | {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    | {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}},
    ("image_token", "<|image|>"),
    ("<|begin_of_image|>", "<|end_of_image|>"),
)
_PIXTRAL = SeeingFamily(_pixtral, _CLIP | {"size": {"longest_edge": 1024}, "patch_size": 16}, ("image_token", "[IMG]"))
_IDEFICS = SeeingFamily(
    _idefics,
    _HALF
    | {"resample": _LANCZOS, "do_image_splitting": True}
    | {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}},
    ("image_token", "<image>"),
)
_GEMMA4 = SeeingFamily(
    _gemma4,
    {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "resample": _BICUBIC, "do_normalize": False}
    | {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280},
    ("image_token", "<|image|>"),
)
_CLIP_SQUARE = _CLIP | {"size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True}
_SIGLIP_SQUARE = _HALF | {"size": 224}

PICTURE_FAMILIES: dict[str, SeeingFamily] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    # What stands around its picture is in its prompt.
    "colqwen2": replace(_QWEN, around=("", "")),
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"), _QWEN),
    **dict.fromkeys(
        ("exaone4_5", "hyperclovax_vision_v2"),
        SeeingFamily(_qwen_in_a_row, _QWEN.defaults, ("image_token", "<|image_pad|>")),
    ),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), _GLM),
    **dict.fromkeys(("mistral3", "pixtral"), _PIXTRAL),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "lighton_ocr": SeeingFamily(_lighton, _PIXTRAL.defaults, ("image_token", "<|image_pad|>")),
    "gemma3": SeeingFamily(
        _gemma3,
        _HALF
        | {"resample": _BILINEAR, "size": 224, "do_pan_and_scan": False, "pan_and_scan_min_crop_size": 256}
        | {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2},
        ("boi_token", "<start_of_image>"),
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(_GEMMA4, resizes_as_torch=True),
    "internvl": SeeingFamily(
        _internvl,
        _CLIP | _TILING | {"size": 384},
        ("context_image_token", "<IMG_CONTEXT>"),
        ("", "\n"),
        given=_TILES,
    ),
    "internvl_chat": SeeingFamily(
        _internvl_chat,
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": _BICUBIC},
        ("image_placeholder_token", "<image>"),
        ("", "\n"),
    ),
    # Its template writes another token than the one that embeddings take the place of.
    "qianfan_ocr": SeeingFamily(
        _internvl,
        _CLIP | _TILING | {"size": 384},
        ("image_placeholder_token", "<image>"),
        ("", "\n"),
        given=_TILES,
    ),
    "aya_vision": SeeingFamily(_aya, _CLIP | _TILING | {"size": 384}, ("image_token", "<image>"), given=_TILES),
    "cohere2_vision": SeeingFamily(
        _cohere,
        _CLIP | _TILING | {"crop_to_patches": True, "size": 512, "patch_size": 16},
        ("image_token", "<|IMG_PATCH|>"),
        resizes_as_torch=True,
    ),
    "ovis2": SeeingFamily(
        _ovis,
        _CLIP | _TILING | {"size": 384, "use_covering_area_grid": True},
        ("image_token", "<image>"),
        ("", "\n"),
    ),
    "llama4": SeeingFamily(
        _llama4,
        _HALF | {"resample": _BILINEAR, "size": 336, "max_patches": 16, "resize_to_max_canvas": False},
        ("image_token", "<|image|>"),
        resizes_as_torch=True,
    ),
    "lfm2_vl": SeeingFamily(
        _lfm2,
        _HALF
        | {"resample": _BILINEAR, "encoder_patch_size": 16, "downsample_factor": 2, "tile_size": 512}
        | {"min_image_tokens": 64, "max_image_tokens": 256, "min_tiles": 2, "max_tiles": 10}
        | {"do_image_splitting": True, "max_pixels_tolerance": 2.0, "use_thumbnail": True},
        ("image_token", "<image>"),
        resizes_as_torch=True,
        adds_bos=False,
    ),
    "llava": SeeingFamily(_llava, _CLIP_SQUARE, ("image_token", "<image>"), ("", "\n")),
    **dict.fromkeys(
        ("llava_next", "llava_next_video"),
        SeeingFamily(
            _llava_next, _CLIP_SQUARE | {"image_grid_pinpoints": _PINPOINTS}, ("image_token", "<image>"), ("", "\n")
        ),
    ),
    "llava_onevision": SeeingFamily(
        _llava_next,
        _CLIP
        | {"size": 384}
        | {"image_grid_pinpoints": [[384 * down, 384 * across] for down in range(1, 7) for across in range(1, 7)]},
        ("image_token", "<image>"),
        ("", "\n"),
    ),
    **dict.fromkeys(
        ("paligemma", "colpali"),
        SeeingFamily(_square, _SIGLIP_SQUARE, ("image_token", "<image>"), adds_bos=False, frame=_paligemma_prompt),
    ),
    "kimi_k25": SeeingFamily(
        _kimi,
        _HALF | {"patch_size": 14, "merge_size": 2, "max_patches": 16384, "size": {"max_height": 512}},
        ("image_token", "<|media_pad|>"),
        ("<|media_begin|>image<|media_content|>", "<|media_end|>"),
        resizes_as_torch=True,
    ),
    "minicpmv4_6": SeeingFamily(
        _minicpm,
        _HALF
        | {"patch_size": 14, "scale_resolution": 448, "max_slice_nums": 9, "slice_mode": True}
        | {"downsample_mode": "16x", "use_image_id": True},
        ("image_token", "<|image_pad|>"),
        ("", "\n"),
    ),
    "paddleocr_vl": SeeingFamily(
        _paddleocr,
        _CLIP
        | {"patch_size": 14, "merge_size": 2}
        | {"size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}},
        ("image_token", "<|IMAGE_PLACEHOLDER|>"),
        ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    ),
    "clip": SeeingFamily(_clip, _CLIP_SQUARE, ("", "")),
    "siglip": SeeingFamily(_siglip, _SIGLIP_SQUARE, ("", "")),
    "siglip2": SeeingFamily(
        _siglip2, _HALF | {"resample": _BILINEAR, "patch_size": 16, "max_num_patches": 256}, ("", "")
    ),
}
"""Families by `model_type`; Pixtral is a `llava` whose tower is Pixtral's."""
