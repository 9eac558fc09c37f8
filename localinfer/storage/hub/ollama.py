"""Models that Ollama holds: its manifests name the blobs, of which the one with the model is a GGUF file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localinfer.system.files import read_bounded

_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_HOST, _NAMESPACE = "registry.ollama.ai", "library"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class OllamaModel:
    """A model of Ollama's. name: as `ollama list` shows it. problem: why it cannot be used; empty for a good one."""

    name: str
    quant: str | None
    num_bytes: int
    path: Path
    problem: str = ""


def find_ollama(folder: Path) -> Iterator[OllamaModel]:
    """The models of a folder that holds `manifests` and `blobs`, by name; none where it is missing or closed."""
    manifests = folder / "manifests"
    try:
        paths = sorted(path for path in manifests.glob("*/*/*/*") if path.is_file())
    except OSError:
        return
    for path in paths:
        if not path.name.startswith("."):
            yield _read(folder, path, _name(path.relative_to(manifests).parts))


def _name(parts: tuple[str, ...]) -> str:
    """The shortest name that Ollama knows a model by."""
    host, namespace, model, tag = parts
    above = [] if namespace == _NAMESPACE and host == _HOST else [namespace]
    return "/".join([*([] if host == _HOST else [host]), *above, f"{model}:{tag}"])


def _read(folder: Path, path: Path, name: str) -> OllamaModel:
    pull = f"`ollama pull {name}` brings it again"
    try:
        layers = json.loads(read_bounded(path, _MOST_BYTES))["layers"]
        kinds = [layer["mediaType"] for layer in layers]
        models = [layer for layer in layers if layer["mediaType"] == _MODEL]
        # `sha256:<hex>` is the file `sha256-<hex>`.
        algorithm, _, digest = models[0]["digest"].partition(":") if models else ("", "", "")
        size = int(models[0]["size"]) if models else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return OllamaModel(name, None, 0, path, f"its manifest cannot be read ({type(error).__name__}); {pull}")
    if not models:
        return OllamaModel(name, None, 0, path, "it holds no GGUF file: it runs elsewhere, or is of another kind")
    blob = folder / "blobs" / f"{algorithm}-{digest}"
    if algorithm != "sha256" or not digest.isalnum():
        return OllamaModel(name, None, size, path, f"its manifest names no blob; {pull}")
    problem = ""
    try:
        found = blob.stat().st_size
        if found != size:
            problem = f"its file has {found:,} bytes in place of {size:,}; {pull}"
    except OSError:
        problem = f"its file is missing; {pull}"
    if not problem and len(models) > 1:
        problem = "its model is split into several files, which have no names here; import the GGUF files themselves"
    if not problem and _ADAPTER in kinds:
        problem = "it is an adapter (LoRA) over a model, which localinfer does not apply; use a merged model"
    return OllamaModel(name, _quant(folder, path), size, blob, problem)


def _quant(folder: Path, path: Path) -> str | None:
    """The quantization, which the manifest's configuration tells."""
    try:
        manifest = json.loads(read_bounded(path, _MOST_BYTES))
        blob = folder / "blobs" / manifest["config"]["digest"].replace(":", "-").replace("/", "")
        quant = json.loads(read_bounded(blob, _MOST_BYTES))["file_type"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return quant if isinstance(quant, str) else None
