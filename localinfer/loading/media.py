"""The encoders of a model that sees or hears: which file they are in, and the `MediaModel` that a loaded model uses."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.media import Check, checked_lock
from localinfer.errors import ContextLengthError, MissingPackageError, RequestError
from localinfer.generation.chat.media_parts import CAPABILITIES, MediaKind
from localinfer.generation.whole_prompts import WholeSight
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit.compile_ahead import compile_ahead
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.media.companion import find_companion
from localinfer.models.media.encoder import MediaEncoder, read_mmproj
from localinfer.models.media.folder_media import WHOLE_PROMPTS, FolderMedia, open_folder_media
from localinfer.models.media.mmproj import MediaConfig
from localinfer.models.media.picture_layouts import count_rows, lay_out, outline
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.media.spectrograms import lay_out_sound
from localinfer.quant.checkpoint.folder import open_folder
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.gguf.reader import read_gguf
from localinfer.storage.fingerprint import WeightsFiles, program
from localinfer.system.extras import require
from localinfer.system.machine_limits import processor_limits
from localinfer.types import FloatArray, ProgressCallback

if TYPE_CHECKING:
    from localinfer.models.load.loader import Model
    from localinfer.models.media.folder_processors import PictureProcessor

logger = logging.getLogger(__name__)


_LARGEST_SIZES = ((1 << 13, 1 << 13), (1 << 16, 1 << 10), (1 << 10, 1 << 16), (64, 64))
"""Pictures of which one takes the most that its family's rules allow: by area, by a side, or by being enlarged."""
_SOUND_FRAMES = 3000
"""Half a minute, of 10 ms a frame: longer sounds are encoded in parts by most models."""


@dataclass(frozen=True)
class MediaPlan:
    """Encoders of a model, and the memory that they take."""

    path: Path
    """An mmproj file, or the model's folder."""
    kinds: tuple[MediaKind, ...]
    """Kinds that they read."""
    weight_bytes: int
    """Bytes of their weights."""
    buffer_bytes: int
    """Bytes of buffers for the largest picture, and for half a minute of sound; they stay once they are used."""


def find_media(model: Path) -> Path | None:
    """The mmproj file beside a model's file, None for a model of text. Raises: ModelFileError."""
    with read_gguf(model) as file:
        width = file.metadata.get(f"{file.metadata.get('general.architecture')}.embedding_length")
    return find_companion(model, width) if isinstance(width, int) else None


def plan_media(path: Path) -> MediaPlan:
    """Count what the encoders of an mmproj file or a folder take. Raises: ModelFileError."""
    with ExitStack() as opened:
        file: ModelFile
        if path.is_dir():
            folder = opened.enter_context(open_folder(path))
            parts = open_folder_media(folder, None)
            file, config, pictures = parts.file, parts.config, parts.pictures
        else:
            file = opened.enter_context(read_gguf(path))
            config, pictures = read_mmproj(file), None
        encoder = MediaEncoder(config, file, None)
        patches = 0
        for width, height in _LARGEST_SIZES if config.picture is not None else ():
            sizes = _input_sizes(width, height, config, pictures)
            patches = max([patches, *(encoder.num_patches(*size, is_tiled=is_tiled) for size, is_tiled in sizes)])
        buffers = encoder.picture_bytes(patches) if patches else 0
        if config.sound is not None:
            buffers += encoder.sound_bytes(_SOUND_FRAMES)
        return MediaPlan(path, _kinds(config), encoder.weight_bytes, buffers)


def _input_sizes(
    width: int, height: int, config: MediaConfig, pictures: "PictureProcessor | None"
) -> list[tuple[tuple[int, int], bool]]:
    """Width and height of each encoder input of a picture, and whether its tiles are one; none of a refused one."""
    try:
        if pictures is None:
            outlined = outline(width, height, config)
            return [((piece.width, piece.height), False) for piece in outlined if not isinstance(piece, str)]
        cuts = pictures.plan(width, height)
        return [(piece.size, piece.kept is not None) for piece in cuts if not isinstance(piece, str)]
    except RequestError:
        return []


def open_media(path: Path, model: "Model", memory: Path | None, progress: ProgressCallback | None) -> "LoadedMedia":
    """Load the encoders of an mmproj file, or of the model's folder, for a loaded model, on its threads.

    memory: a private folder in which the hash of the file is kept. Raises: ModelFileError; RequestError for a file of
    another model.
    """
    config = model.config
    with ExitStack() as opened:
        has_mrope = any(config.rope.sections[1:])
        parts: FolderMedia | None = None
        file: ModelFile
        if path.is_dir():
            folder = opened.enter_context(open_folder(path))
            parts = open_folder_media(folder, _token_id_finder(model), has_mrope=has_mrope)
            file, found = parts.file, parts.config
        else:
            file = opened.enter_context(read_gguf(path))
            found = read_mmproj(file, has_mrope=has_mrope)
        gives_vectors = find_architecture(config).compares_pictures
        size = model.file.tensor("dense_2.weight").shape[0] if gives_vectors else config.hidden_size
        for part in (found.picture, found.sound):
            if part is not None and part.output_size != size:
                raise RequestError(
                    f"{path.name} makes embeddings of {part.output_size} numbers, and {model.file.path.name} takes "
                    f"{size}; give the encoders of this model"
                )
        weights = WeightsFiles(file, memory)
        settings = hashlib.sha256(repr(found).encode()).digest()
        # Of its own, so that the steps of running texts need not wait until a picture is encoded.
        pool = ThreadPool(
            model.pool.num_threads,
            priority=model.pool.priority,
            performance_cores=processor_limits().performance_cores,
        )
        opened.callback(pool.close)
        encoder = MediaEncoder(found, file, pool, progress)
        opened.callback(encoder.close)
        compile_ahead(encoder.kernels, progress)
        # Small tensors are read when they are used.
        close = opened.pop_all().close

    def identity() -> bytes:
        found = weights.cached_hash() or weights.compute_hash(threads=model.pool.num_threads)
        # Of a file that was changed since, nothing is to be found by others, nor after a restart.
        return settings + (os.urandom(32) if found is None else found.encode())

    return LoadedMedia(
        encoder,
        pool,
        parts,
        close=close,
        text_size=config.hidden_size,
        context_length=config.context_length,
        gives_vectors=gives_vectors,
        whole=None if parts is None else _whole_sight(parts, model),
        identity=identity,
        has_token=_token_finder(model),
    )


def _whole_sight(parts: FolderMedia, model: "Model") -> WholeSight | None:
    """Properties of a folder's model whose prompts with pictures see themselves; None for others."""
    if parts.settings.model_type not in WHOLE_PROMPTS:
        return None
    architecture, name = find_architecture(model.config), "token_embd.weight"
    scale = np.float32(architecture.embedding_scale)

    def embed_words(ids: NDArray[np.int32]) -> FloatArray:
        table = model.file.tensor(name)
        rows = model.file.tensor_bytes(name).reshape(table.shape[0], -1)[ids]
        found: FloatArray = dequantize(np.ascontiguousarray(rows), table.type, (ids.size, table.shape[1])) * scale
        return found

    return WholeSight(parts.settings.token("bos_token", "<bos>"), "\n", embed_words)


class LoadedMedia:
    """Encoders of a loaded model; implements `MediaModel`. pool: its threads. folder: what prepares the pictures and
    sounds of a folder; None for an mmproj file, whose kind of encoder says how."""

    def __init__(
        self,
        encoder: MediaEncoder,
        pool: ThreadPool,
        folder: "FolderMedia | None" = None,
        *,
        close: Callable[[], None],
        text_size: int,
        context_length: int,
        gives_vectors: bool = False,
        whole: WholeSight | None = None,
        identity: Callable[[], bytes],
        has_token: Callable[[str], bool],
    ) -> None:
        self.config = encoder.config
        self.kinds = _kinds(self.config)
        self.gives_vectors = gives_vectors
        self.whole = whole
        self._encoder = encoder
        self._folder = folder
        self.tokens: dict[MediaKind, str] = {}
        self.alone: dict[MediaKind, str] = {}
        if folder is not None:
            processors: dict[MediaKind, Any] = {"image": folder.pictures, "audio": folder.sounds}
            self.tokens = {kind: one.token for kind, one in processors.items() if one is not None}
            self.alone = {kind: one.alone for kind, one in processors.items() if one is not None}
        self.number_prefix = "" if folder is None or folder.pictures is None else folder.pictures.number_prefix
        self.pool = pool
        self._close = close
        self._lock = threading.Lock()
        self._text_size = text_size
        self._context_length = context_length
        self._find_identity = identity
        self._identity: bytes | None = None
        self._has_token = has_token

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        return self._encoder.width

    @property
    def identity(self) -> bytes:
        """Identity of weights and settings; the weights are hashed when it is first asked for."""
        if self._identity is None:
            self._identity = self._find_identity()
        return self._identity

    @cached_property
    def preparation(self) -> bytes:
        """Identity of settings, program and libraries, which may decode and resize in another way."""
        parts = [program(), repr(self.config), repr(None if self._folder is None else self._folder.settings)]
        parts += [f"{name} {_version(name)}" for name in ("numpy", "pillow", "soundfile", "soxr")]
        return hashlib.sha256("\0".join(parts).encode()).digest()

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Tasks of the model that come with the encoders."""
        return tuple(CAPABILITIES[kind] for kind in self.kinds)

    def prepare(self, kind: MediaKind, data: bytes, *, is_alone: bool = True) -> tuple[PreparedMedia, tuple[str, ...]]:
        """Decode and lay out the bytes of a file; also what was left out, in words.

        is_alone: no template writes the texts around it. Raises: RequestError for what cannot be read;
        MissingPackageError.
        """
        if kind == "image":
            from localinfer.models.media.pictures import open_picture

            opened = open_picture(data)
            self._check_rows(opened.width, opened.height)
            picture = opened.decode()
            if self._folder is not None:
                assert self._folder.pictures is not None, "the folder sees"
                return self._folder.pictures.lay_out(picture.pixels, is_alone=is_alone), picture.notices
            return lay_out(picture.pixels, self.config, has_token=self._has_token), picture.notices
        from localinfer.models.media.sounds import read_sound

        if self._folder is not None:
            assert self._folder.sounds is not None, "the folder hears"
            return self._folder.sounds.lay_out(read_sound(data), is_alone=is_alone), ()
        return lay_out_sound(read_sound(data), self.config), ()

    def _check_rows(self, width: int, height: int) -> None:
        """Refuse a picture that no prompt can hold, before it is decoded. Raises: ContextLengthError."""
        if self._folder is not None and self._folder.pictures is not None:
            num_rows = self._folder.pictures.count_rows(width, height)
        else:
            num_rows = count_rows(width, height, self.config)
        if num_rows > self._context_length:
            raise ContextLengthError(
                f"a picture of {width} x {height} pixels takes {num_rows:,} tokens, and the context holds "
                f"{self._context_length:,}; make it smaller, or load the model with a larger context_length",
                num_tokens=num_rows,
                context_length=self._context_length,
            )

    def encode(self, piece: EncoderInput, check: Check | None = None) -> FloatArray:
        """Return the embeddings, float32[num_rows, width], on threads of its own, beside steps of the model.

        check: called every few hundredths of the work, and while another picture is encoded; ends it by raising.
        """
        with checked_lock(self._lock, check):
            return self._encoder.encode(piece, check)

    def count_patches(self, piece: EncoderInput) -> int:
        """Patches that the encoder computes of a picture."""
        assert self.config.picture is not None, "it has prepared a picture"
        height, width = map(int, piece.values.shape[:2])
        return height // self.config.picture.patch_size * (width // self.config.picture.patch_size)

    def sees_itself(self, piece: EncoderInput) -> bool:
        """True if the decoder's rows of this input see each other in both directions."""
        return not piece.is_sound and self.config.sees_itself(self._text_size)

    def close(self) -> None:
        """Release the encoders' weights and threads, once a picture in progress is encoded."""
        with self._lock:
            self._close()


def missing_packages(kinds: tuple[MediaKind, ...]) -> str | None:
    """The error of packages that reading such media needs and that are not installed; None if all are."""
    modules = {"image": ("PIL",), "audio": ("soundfile", "soxr")}
    try:
        for kind in kinds:
            require("media", {"image": "reading pictures", "audio": "reading sounds"}[kind], modules[kind])
    except MissingPackageError as error:
        return str(error)
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is missing"


def _kinds(config: MediaConfig) -> tuple[MediaKind, ...]:
    return _named_kinds(config.picture is not None, config.sound is not None)


def _named_kinds(sees: bool, hears: bool) -> tuple[MediaKind, ...]:
    found: list[MediaKind] = []
    if sees:
        found.append("image")
    if hears:
        found.append("audio")
    return tuple(found)


def _token_id_finder(model: "Model") -> Callable[[str], int | None]:
    tokenizer = model.tokenizer
    return (lambda text: None) if tokenizer is None else tokenizer.token_id


def _token_finder(model: "Model") -> Callable[[str], bool]:
    tokenizer = model.tokenizer

    def has_token(text: str) -> bool:
        return tokenizer is not None and len(tokenizer.encode(text, add_special=False, parse_special=True)) == 1

    return has_token
