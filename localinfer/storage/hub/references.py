"""Names of models: `org/repo:quant`, and the quantization in the name of a file."""

import re
from dataclasses import dataclass

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
"""What stands for the quantization where a repository is a Hugging Face folder."""


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
