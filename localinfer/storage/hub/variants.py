"""Names of models, `org/repo:quant`, the models that files of a repository make, and the preferred one of them."""

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localinfer.errors import RequestError
from localinfer.system.windows import refused_name

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REFERENCE = re.compile(
    rf"(?:https://(?:huggingface\.co|hf\.co)/|hf\.co/|huggingface\.co/)?(?P<repo>{_WORD}/{_WORD})(?::(?P<quant>[^\s:]+))?/?"
)
_QUANT = re.compile(
    r"(?<![^-._/])(?P<quant>(?:UD-)?(?:(?:I?Q|TQ)[1-9](?:_(?:K|[0-9]|XXS|XS|S|M|L|XL|XXL|NL|P))*"
    r"|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))(?![^-._/])",
    re.IGNORECASE,
)
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")

SAFETENSORS = "safetensors"
"""Name of a Hugging Face folder, in the position of a quantization."""


@dataclass(frozen=True)
class Reference:
    """A repository of the hub, `org/repo`, and the quantization or file asked for, None for the preferred one."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def parse_reference(text: str) -> Reference | None:
    """Read `org/repo`, `org/repo:quant`, or such a repository's address; None for anything else."""
    match = _REFERENCE.fullmatch(text.strip())
    if match is None or ".." in match["repo"] or "--" in match["repo"]:
        return None
    return Reference(match["repo"], match["quant"])


def quant_of(path: str) -> str | None:
    """The quantization that the path of a GGUF file names, such as Q4_K_M; the last, if several; None without one."""
    found = _QUANT.findall(whole_name(path))
    return found[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else None


def whole_name(path: str) -> str:
    """A file's path without its suffix, and without the number of its part."""
    return _PART.sub("", _without_suffix(path))


def part_of(path: str) -> tuple[int, int]:
    """Number and count of a file of a split model, (1, 1) for a whole one."""
    match = _PART.search(_without_suffix(path))
    return (1, 1) if match is None else (int(match["number"]), int(match["count"]))


def _without_suffix(path: str) -> str:
    return re.sub(r"\.(gguf|safetensors)$", "", path, flags=re.IGNORECASE)


PREFERRED = (
    "Q4_K_M Q4_K_S Q4_K_L UD-Q4_K_XL Q4_K_XL IQ4_NL IQ4_XS Q4_0 Q4_1 MXFP4 MXFP4_MOE Q5_K_M Q5_K_S Q5_0 Q5_1 Q6_K Q8_0 "
    "Q3_K_L Q3_K_M Q3_K_S Q2_K"
).split()
"""Four bits are the usual balance of size and quality; then what is nearest, better ones before worse ones."""
_TEXT_FILES = (".json", ".jinja", ".safetensors")
_TOKENIZER_FILES = ("tokenizer.model", "vocab.txt", "merges.txt")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\:*?\"<>|]")


@dataclass(frozen=True)
class StoredFile:
    """A file of a repository."""

    path: str
    """Its path there, with slashes."""
    size: int
    """In bytes."""
    sha256: str | None = None
    """Checksum of a large file, as the hub says."""
    git_id: str | None = None
    """Id of another file as a git blob."""


class Repository(NamedTuple):
    """A repository at one commit."""

    id: str
    """`org/repo`, in the hub's own spelling."""
    commit: str
    files: tuple[StoredFile, ...]


@dataclass(frozen=True)
class Variant:
    """One model of a repository."""

    name: str
    """Its quantization, or its file's name where that is not enough."""
    quant: str | None
    """Its quantization."""
    files: tuple[StoredFile, ...]
    """Its files; the first is the one that is opened, but for a folder of safetensors."""
    missing: str = ""
    """Parts that a split model lacks, in words."""

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def is_folder(self) -> bool:
        return self.name == SAFETENSORS


def is_safe_path(path: str) -> bool:
    """Return True if a path of a repository stays in the folder it is written to, on every system."""
    parts = path.split("/")
    return (
        all(part and part not in (".", "..") and part == part.strip(" ") for part in parts)
        and not any(refused_name(part) for part in parts)
        and not _UNSAFE.search(path)
    )


def is_left_aside(path: str) -> bool:
    """Return True for a GGUF file that is no model by itself: a projector for images or sound, an importance matrix."""
    name = posixpath.basename(path).lower()
    return "mmproj" in name or "imatrix" in name


_ENCODER_QUANTS = ("F16", "BF16", "F32", "Q8_0")
"""Types of encoders' files, the preferred one first: what small weights save is little beside the model."""


def encoders_for(variant: Variant, files: Iterable[StoredFile]) -> StoredFile | None:
    """The file with the encoders of a model that sees or hears (mmproj), in its folder or at the repository's top: of
    several the preferred one."""
    if variant.is_folder:
        return None
    named = [
        file
        for file in files
        if file.path.lower().endswith(".gguf") and "mmproj" in posixpath.basename(file.path).lower()
    ]
    beside = posixpath.dirname(variant.files[0].path)
    found = [file for file in named if posixpath.dirname(file.path) == beside]
    found = found or [file for file in named if "/" not in file.path]
    ranks = {quant: index for index, quant in enumerate(_ENCODER_QUANTS)}
    return min(found, key=lambda file: (ranks.get(quant_of(file.path) or "", len(ranks)), file.path), default=None)


def find_variants(files: Iterable[StoredFile]) -> list[Variant]:
    """The models among files: GGUF files, split ones as one, and the folder of safetensors, if there is one."""
    listed = sorted(files, key=lambda file: file.path)
    groups: dict[str, list[StoredFile]] = {}
    for file in listed:
        if file.path.lower().endswith(".gguf") and not is_left_aside(file.path):
            groups.setdefault(whole_name(file.path), []).append(file)
    quants = [quant_of(whole) for whole in groups]
    found = []
    for (whole, parts), quant in zip(groups.items(), quants, strict=True):
        is_enough = quant is not None and quants.count(quant) == 1
        name = quant if is_enough and quant is not None else posixpath.basename(whole)
        found.append(Variant(name, quant, tuple(parts), _missing_parts(parts)))
    folder = _folder_files(listed)
    if folder:
        weights = [file for file in folder if file.path.endswith(".safetensors")]
        found.append(Variant(SAFETENSORS, None, folder, _missing_parts(weights)))
    return found


def _missing_parts(parts: Sequence[StoredFile]) -> str:
    count = max(part_of(file.path)[1] for file in parts)
    have = {part_of(file.path)[0] for file in parts}
    lacking = [str(number) for number in range(1, count + 1) if number not in have]
    return f"part {', '.join(lacking)} of {count} is missing" if lacking else ""


def _folder_files(files: Sequence[StoredFile]) -> tuple[StoredFile, ...]:
    """Weights, settings and vocabulary of a Hugging Face folder; never pickles, which run code when they are read."""
    top = {file.path for file in files if "/" not in file.path}
    weights = {path for path in top if path.endswith(".safetensors")}
    if "config.json" not in top or not weights:
        return ()
    # Some repositories hold the same weights once more in their authors' own naming.
    if any(path.startswith("model") for path in weights):
        weights = {path for path in weights if not path.startswith("consolidated")}

    def belongs(path: str) -> bool:
        if path.endswith(".safetensors"):
            return path in weights or (path.count("/") == 1 and path[0].isdigit())
        # `1_Pooling/config.json` and the like say how an embedding model makes a vector.
        is_near = "/" not in path or (path.count("/") == 1 and path[0].isdigit())
        return is_near and (path.endswith(_TEXT_FILES) or path in _TOKENIZER_FILES or path.endswith(".tiktoken"))

    # Weights last: a folder without them is not taken for a model.
    return tuple(sorted(filter(lambda file: belongs(file.path), files), key=lambda file: file.path in weights))


def choose_variant(reference: Reference, files: Sequence[StoredFile]) -> Variant:
    """The model that a reference names, else the preferred one.

    Raises: RequestError that lists what there is.
    """
    variants = find_variants(files)
    if not variants:
        raise RequestError(f"{reference.repo} has no model that runs here: {_what_instead(files)}")
    chosen = _named(reference.quant, variants) if reference.quant is not None else _preferred(variants)
    if len(chosen) != 1:
        listed = describe_variants(variants)
        if reference.quant is None:
            problem = f"{reference.repo} has several models, and none in a quantization that is usually preferred"
        elif chosen:
            problem = f"{reference.quant} names several files of {reference.repo}"
        else:
            problem = f"{reference.repo} has no {reference.quant}"
        raise RequestError(f"{problem}; it has {listed}; `localinfer pull {reference.repo}:NAME` takes one of these")
    if chosen[0].missing:
        raise RequestError(f"{reference.repo}:{chosen[0].name} is incomplete on the hub: {chosen[0].missing}")
    return chosen[0]


def _named(wanted: str, variants: Sequence[Variant]) -> list[Variant]:
    """Variants whose name, quantization or file is `wanted`, in any case; quantizations also without `UD-`."""
    wanted = wanted.lower().removesuffix(".gguf")
    for names in (_own_names, _loose_names):
        found = [variant for variant in variants if wanted in (name.lower() for name in names(variant))]
        if found:
            return found
    return []


def _own_names(variant: Variant) -> list[str]:
    path = whole_name(variant.files[0].path)
    paths = [] if variant.is_folder else [path, posixpath.basename(path), variant.files[0].path.removesuffix(".gguf")]
    return [variant.name, variant.quant or "", *paths]


def _loose_names(variant: Variant) -> list[str]:
    return [(variant.quant or "").removeprefix("UD-")]


def _preferred(variants: Sequence[Variant]) -> list[Variant]:
    models = [variant for variant in variants if not variant.is_folder]
    for quant in PREFERRED:
        found = [variant for variant in models if variant.quant == quant]
        if found:
            return found
    return models if models else list(variants)


def describe_variants(variants: Sequence[Variant]) -> str:
    """Names with sizes, smallest first."""
    ordered = sorted(variants, key=lambda variant: variant.num_bytes)
    return ", ".join(f"{variant.name} ({describe_size(variant.num_bytes)})" for variant in ordered)


def _what_instead(files: Sequence[StoredFile]) -> str:
    kinds = {file.path.rpartition(".")[2].lower() for file in files}
    if any(is_left_aside(file.path) for file in files if file.path.lower().endswith(".gguf")):
        return "its GGUF files are projectors or importance matrices only; look for the model's own repository"
    if kinds & {"bin", "pt", "pth", "ckpt"}:
        return "its weights are pickles, which run code when they are read; look for one with GGUF or safetensors files"
    if "safetensors" in kinds:
        return "it has safetensors, and no config.json beside them; look for the model's own repository"
    return "it has neither GGUF files nor safetensors; look for another repository of this model"


def describe_size(num_bytes: int) -> str:
    """Bytes in the unit that suits them, powers of ten as the hub counts."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
