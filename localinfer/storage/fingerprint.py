"""The fingerprint of a model: everything that cached keys and values depend on besides the token ids.

The weights are identified by a SHA-256 of all their bytes, which is computed once and cached for as long as the files'
attributes are unchanged. Everything else is cheap and computed at every load. A folder of the cache describes its
fingerprint in a file, for people and error messages only: pages are found and verified without it.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.system import disk
from localinfer.system.files import read_bounded, run_all, write_all, write_atomically
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.storage.page_store import PageFormat

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 16 << 20
_SMALL_BYTES = 128 << 20
"""Files up to this size are hashed without a cache, in at most a tenth of a second."""
_MAX_NOTE_BYTES = 1 << 12
"""A cached hash has about a hundred."""
_MAX_DESCRIPTION_BYTES = 1 << 16
_MAX_PAGE_SIZE = 1 << 40
_RACY_NS = 2_000_000_000
"""A file that changed less than this ago may change again within the resolution of its timestamp."""

NOT_COMPUTING = ("models/calibration/", "models/demo/")
"""Sources that do not affect what a loaded model computes."""

ShouldStop = Callable[[], bool]


class Fingerprint(Record):
    """The parts by name, each as text."""

    parts: Mapping[str, str]

    @cached_property
    def key(self) -> bytes:
        """A 32-byte hash of all parts."""
        return hashlib.sha256(json.dumps(dict(self.parts), sort_keys=True).encode()).digest()


def describe_parts(file: ModelFile, kv_layout: object, config: object) -> dict[str, str]:
    """Every part of the fingerprint but the hash of the weights, in milliseconds.

    kv_layout: identified by its repr. config: the context length changes the rotary frequencies of some models.
    """
    return {
        **described_file(file),
        "key-value layout": f"{getattr(kv_layout, 'kv_type', '')} {_hash(repr(kv_layout))}".strip(),
        "position encoding": _position_encoding(config),
        "program": program(),
    }


def described_file(file: ModelFile) -> dict[str, str]:
    """The parts that a file's metadata and list of tensors give."""
    tokenizer, template, settings = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for key in sorted(file.metadata):
        is_template = key.startswith("tokenizer.chat_template")
        part = template if is_template else tokenizer if key.startswith("tokenizer.") else settings
        part.update(f"{key}\0".encode() + _bytes_of(file.metadata, key) + b"\0")
    for name in sorted(file.tensors):
        tensor = file.tensors[name]
        settings.update(f"{name}\0{tensor.shape}\0{getattr(tensor, 'type', '')}\0".encode())
    return {
        "model settings": settings.hexdigest()[:32],
        "tokenizer": tokenizer.hexdigest()[:32],
        "chat template": template.hexdigest()[:32],
    }


class ModelIdentity:
    """The fingerprint of a loaded model, computed once, on first use. Thread-safe.

    memory: a private folder to cache hashes in, or None. Raises: OSError if a file of the model does not exist.
    """

    def __init__(self, file: ModelFile, kv_layout: object, config: object, memory: Path | None) -> None:
        self.name = file.path.name
        self._file, self._kv_layout, self._config = file, kv_layout, config
        self._weights = WeightsFiles(file, memory)
        self._lock = threading.Lock()
        self._fingerprint: Fingerprint | None = None

    @property
    def paths(self) -> Sequence[Path]:
        """The files that make up the model."""
        return self._file.paths

    @property
    def has_changed(self) -> bool:
        """True if a file of the model was changed since it was loaded, so that nothing more may be cached for it."""
        return self._file.has_changed

    def known(self) -> Fingerprint | None:
        """The fingerprint, or None if a large file must be read for it. Raises: ClosedError if the model is closed."""
        with self._lock:
            if self._fingerprint is None:
                value = self._weights.cached_hash()
                if value is None and self._weights.num_bytes <= _SMALL_BYTES:
                    value = self._weights.compute_hash()
                self._describe(value)
            return self._fingerprint

    def compute(self, *, threads: int = 1, should_stop: ShouldStop = lambda: False) -> Fingerprint | None:
        """The fingerprint; None if stopped, or if the model's files have changed since they were loaded.

        Raises: OSError if they cannot be read; ClosedError once the model is closed.
        """
        known = self.known()
        if known is not None:
            return known
        with self._lock:
            if self._fingerprint is None:
                self._describe(self._weights.compute_hash(threads=threads, should_stop=should_stop))
            return self._fingerprint

    def _describe(self, weights_hash: str | None) -> None:
        if weights_hash is None:
            return
        parts = describe_parts(self._file, self._kv_layout, self._config)
        # The files must not have changed between loading and hashing.
        if not self._file.has_changed:
            self._fingerprint = Fingerprint({"weights": weights_hash[:32], **parts})


class WeightsFiles:
    """The files of the weights, and their attributes when they were loaded."""

    def __init__(self, file: ModelFile, memory: Path | None) -> None:
        """memory: a private folder to cache hashes in, or None. Raises: OSError if a file does not exist."""
        self._paths = [path.resolve() for path in file.paths]
        self._data_starts = [_data_start(file, part) for part in range(len(self._paths))]
        self._memory = memory
        self._stamps = [_stamp(path) for path in self._paths]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(stamp[0] for stamp in self._stamps)

    def cached_hash(self) -> str | None:
        """The cached hash, if the files' attributes are unchanged."""
        if self._memory is None:
            return None
        try:
            answer = read_bounded(self._memory / self._name, _MAX_NOTE_BYTES).decode("ascii")
        except (OSError, ValueError):
            return None
        value, _, proof = answer.partition(" ")
        return value if proof == self._proof(value) else None

    def compute_hash(self, *, threads: int = 1, should_stop: ShouldStop = lambda: False) -> str | None:
        """Hash every byte and cache the hash; None if stopped, or if the files have changed since they were loaded.

        It is a hash of the hashes of 16 MiB chunks, so that threads can share the work. Raises: OSError.
        """
        digest = hashlib.sha256()
        for path, start in zip(self._paths, self._data_starts, strict=True):
            digest.update(_hash_file(path, start, threads, should_stop))
        if should_stop() or [_stamp(path) for path in self._paths] != self._stamps:
            return None
        value = digest.hexdigest()
        if self._memory is not None and all(time.time_ns() - stamp[1] > _RACY_NS for stamp in self._stamps):
            text = f"{value} {self._proof(value)}".encode()
            with contextlib.suppress(OSError):
                disk.make_folder(self._memory)
                write_atomically(self._memory / self._name, lambda file: write_all(file, text))
        return value

    @cached_property
    def _name(self) -> str:
        return _hash(json.dumps([[str(path), *stamp] for path, stamp in zip(self._paths, self._stamps, strict=True)]))

    def _proof(self, value: str) -> str:
        return _hash(f"{self._name} {value}")


def _stamp(path: Path) -> tuple[int, ...]:
    """The attributes of a file that change with any write."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


def _data_start(file: ModelFile, part: int) -> int:
    """Offset of the weights in one of the files; GGUF's header is hashed by its contents (`describe_parts`)."""
    infos = [tensor for tensor in file.tensors.values() if getattr(tensor, "part", None) == part]
    return min((getattr(tensor, "offset", 0) for tensor in infos), default=0)


def _hash_file(path: Path, data_start: int, threads: int, should_stop: ShouldStop) -> bytes:
    def hash_chunk(start: int) -> bytes:
        if should_stop():
            return b""
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            left = _CHUNK_BYTES
            while left and (data := file.read(min(left, 1 << 20))):
                digest.update(data)
                left -= len(data)
        return digest.digest()

    starts = range(data_start, os.path.getsize(path), _CHUNK_BYTES)
    return hashlib.sha256(b"".join(run_all([partial(hash_chunk, start) for start in starts], threads))).digest()


def _bytes_of(values: Mapping[str, object], key: str) -> bytes:
    """A metadata value as bytes, not decoded if the file has them."""
    value_bytes: Callable[[str], bytes] | None = getattr(values, "value_bytes", None)
    if value_bytes is not None:
        return value_bytes(key)
    value = values[key]
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()


def _position_encoding(config: object) -> str:
    """LongRoPE has other frequencies for contexts longer than the original one."""
    original = getattr(getattr(config, "rope", None), "original_context_length", 0)
    return "long context" if 0 < original < getattr(config, "context_length", 0) else "as trained"


def program() -> str:
    """Versions and source hash: another kernel may round differently. Not the CPU, as every path has the same bits."""
    from llvmlite import binding as llvm

    from localinfer.kernels.versions import installed_version

    llvm_version = ".".join(map(str, llvm.llvm_version_info))
    return f"localinfer {installed_version('localinfer')} {_code()}, LLVM {llvm_version}"


@cache
def _code() -> str:
    """Hash of the sources that compute; a text unique to this process if they are unknown."""
    from localinfer.kernels.versions import PACKAGES, UNKNOWN_SOURCES, combined, source_digests

    digests: dict[str, str] = {}
    for package in PACKAGES:
        found = source_digests(package)
        if found is None:
            logger.warning("no other process can read what this one caches on disk: %s", UNKNOWN_SOURCES)
            return f"of unknown sources in process {os.urandom(16).hex()}"
        digests |= {name: digest for name, digest in found.items() if not name.startswith(NOT_COMPUTING)}
    return combined(digests)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Description(TypedDict):
    """A model's name, the parts of its fingerprint by name, and the tokens and bytes of a page."""

    model: str
    parts: dict[str, str]
    page_tokens: int
    page_bytes: int


def describe_folder(path: Path, model: str, fingerprint: Fingerprint, form: "PageFormat") -> None:
    """Write the description of a folder, unless it exists. Errors of the disk are ignored."""
    parts = dict(fingerprint.parts)
    try:
        if read_description(path)["parts"] == parts:
            return
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.info("%s is rewritten: %s", path, error)
    fields = Description(model=model, parts=parts, page_tokens=form.page_tokens, page_bytes=form.page_bytes)
    text = json.dumps(fields, indent=1).encode()
    with contextlib.suppress(OSError):
        write_atomically(path, lambda file: write_all(file, text))


def read_description(path: Path) -> Description:
    """Read the description of a folder from an untrusted file. Raises: OSError, ValueError."""
    try:
        fields = json.loads(read_bounded(path, _MAX_DESCRIPTION_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not an object")
    model, parts = fields.get("model"), fields.get("parts")
    if not isinstance(model, str) or not isinstance(parts, dict):
        raise ValueError("it names no model, or no parts")
    if not all(isinstance(value, str) for value in parts.values()):
        raise ValueError("a part is not text")
    page_tokens, page_bytes = _size(fields.get("page_tokens"), least=1), _size(fields.get("page_bytes"), least=0)
    return Description(model=model, parts=parts, page_tokens=page_tokens, page_bytes=page_bytes)


def _size(value: object, *, least: int) -> int:
    """A size in an untrusted file; pages of recurrent layers alone have no bytes. Raises: ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_PAGE_SIZE:
        raise ValueError("a page has an impossible size")
    return value


def differing_parts(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """The names of the parts in which two fingerprints differ."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def describe_differences(stored: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The parts in which two fingerprints differ, as a sentence."""
    return f"it was stored with different {', '.join(differing_parts(ours, stored))}"
