"""Compares a folder of every type of causal language model that transformers has with what it computes, by hand:

    python -m tests.proof.peers.transformers_sweep [--variants] [TYPE ...]

A type is made tiny, saved by its own class, given weights of which every part matters, and opened here. Its result:
`agrees`, `refused` with the error's line, `DISAGREES` (normalised squared error above 1e-6), `CRASHES` (an exception
that is not localinfer's), `no logits` (it is an encoder here), or `not made` where transformers cannot make the model
or its weights do not determine it. The last two kinds are no statement about this package. `--variants` also changes
one setting after the other of each type that agrees.
"""

import argparse
import collections
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import LocalinferError
from localinfer.models.checkpoint.families import find_family
from tests.models.checkpoint.checkpoint_oracle import oracle_logits
from tests.models.checkpoint.published_models import TOKEN_IDS, normalized_error, weights
from tests.proof.peers.small_configs import Settings, attempts, part_ties, small_settings, variants
from tests.support.checkpoint_files import safetensors_bytes

MOST_PARAMETERS = 30_000_000
COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay", "inv_freq", "original_inv_freq", "position_ids")
"""Last parts of names of tensors that follow from settings."""
UNSCALED = {
    **dict.fromkeys(("aya_vision", "cohere2_vision"), lambda text, logits: logits * text.logit_scale),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), lambda text, logits: logits / text.logits_scaling),
    "gemma3": lambda text, logits: _limited(logits, text.final_logit_softcapping),
}
"""What the classes of these wrappers leave out behind the matrix of their text model, which it has by itself."""


def _limited(logits: NDArray[np.float32], limit: float | None) -> NDArray[np.float32]:
    return logits if limit is None else np.tanh(logits / limit) * np.float32(limit)


class NotMadeError(Exception):
    """Transformers does not make this model."""


def model_types() -> dict[str, tuple[str, ...]]:
    """By type: the classes that compute logits of it."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, ...]] = {}
    for table in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        for name, kinds in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
            first = kinds if isinstance(kinds, str) else kinds[0]
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), first)))
    return found


def first_config(model_type: str, kind: Any) -> tuple[Any, Settings]:
    """Return the first tiny configuration that a class's model accepts, and its settings."""
    import transformers

    config_kind = transformers.CONFIG_MAPPING[model_type]
    try:
        default = config_kind()
        settings = small_settings(config_kind)
    except Exception as error:
        raise NotMadeError(f"its configuration: {error!r:.150}") from error
    problem: Exception | None = None
    for tried in attempts(settings, default):
        try:
            return _checked(config_kind, kind, tried), tried
        except Exception as error:
            problem = problem or error
    raise NotMadeError(f"{problem!r:.200}") from problem


def _checked(config_kind: Any, kind: Any, settings: Settings) -> Any:
    import torch

    config = config_kind(**settings)
    with torch.device("meta"):
        model = kind._from_config(config_kind(**settings), attn_implementation="eager")
    size = sum(value.numel() for value in model.parameters())
    if size > MOST_PARAMETERS:
        raise NotMadeError(f"{size} parameters")
    with torch.no_grad():
        kind._from_config(config, attn_implementation="eager").float().eval()(_inputs()[:, :4])
    return config_kind(**settings)


def _inputs() -> Any:
    import torch

    return torch.tensor(TOKEN_IDS.astype(np.int64))[None]


def write_model(config: Any, kind: Any, folder: Path) -> NDArray[np.float32]:
    """Save a model with weights that all matter; returns float32[T, vocab_size] of transformers."""
    import safetensors.numpy
    import torch

    options: dict[str, Any] = {"attn_implementation": "eager"}
    try:
        kind._from_config(config, **options).float().save_pretrained(folder)
        path = folder / "model.safetensors"
        stored = safetensors.numpy.load_file(path)
        redrawn = weights({name: value.shape for name, value in stored.items()})
        kept = {
            name: value
            for name, value in stored.items()
            if value.dtype != np.float32 or name.rpartition(".")[2] in COMPUTED
        }
        path.write_bytes(safetensors_bytes({**redrawn, **kept}))
        model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
        if report["missing_keys"] or report["mismatched_keys"]:
            raise NotMadeError(f"weights that are not in its own file: {sorted(report['missing_keys'])[:3]}")
        with torch.no_grad():
            logits: NDArray[np.float32] = model.eval()(_inputs()).logits[0].float().numpy()
    except NotMadeError:
        raise
    except Exception as error:
        raise NotMadeError(f"{error!r:.200}") from error
    if not np.isfinite(logits).all():
        raise NotMadeError("its logits are not finite")
    return logits


def compare(config: Any, kind: Any) -> tuple[str, str]:
    """Return the result of one model and its line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            wanted = write_model(config, kind, folder)
        except NotMadeError as error:
            return "not made", str(error)
        try:
            found = oracle_logits(folder, TOKEN_IDS)
        except LocalinferError as error:
            return "refused", str(error).replace(f"{folder}/", "").replace(str(folder), "FOLDER")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return "CRASHES", f"{error!r:.200} at {place.filename.rpartition('/')[2]}:{place.lineno}"
    if found.shape != wanted.shape:
        return "no logits", f"{found.shape} where transformers has {wanted.shape}"
    if config.model_type in UNSCALED and hasattr(config, "text_config"):
        wanted = UNSCALED[config.model_type](config.text_config, wanted)
    error = normalized_error(found, wanted)
    return ("agrees" if error <= 1e-6 else "DISAGREES"), f"{error:.1e}"


def _refusal(model_type: str, problem: str) -> tuple[str, str]:
    """Return the result of a type that transformers does not make: its config.json may be refused all the same."""
    import transformers

    try:
        find_family(transformers.CONFIG_MAPPING[model_type]().to_dict())
    except LocalinferError as error:
        return "refused", str(error)
    except Exception:
        return "not made", problem
    return "not made", problem


def changed(config_kind: Any, settings: Settings, changes: Settings, is_whole: bool) -> Any:
    """Return a configuration of changed settings: the text part's, or the whole's with a part of its own in them."""
    if is_whole:
        inner = {**settings.get("text_config", {}), **changes.get("text_config", {})}
        return config_kind(**{**settings, **changes, "text_config": inner})
    if "text_config" in settings:
        return config_kind(**{**settings, "text_config": {**settings["text_config"], **changes}})
    return config_kind(**{**settings, **changes})


def results(model_type: str, class_name: str, with_variants: bool) -> Iterator[tuple[str, str, str]]:
    """Yield name, result and line of a type and its variants."""
    import transformers

    kind = getattr(transformers, class_name)
    name = f"{model_type} ({class_name})"
    try:
        config, settings = first_config(model_type, kind)
    except NotMadeError as error:
        yield name, *_refusal(model_type, str(error))
        return
    status, line = compare(config, kind)
    yield name, status, line
    if status not in ("agrees", "DISAGREES") or not with_variants:
        return
    config_kind = type(config)
    has_part = "text_config" in settings
    text = config.text_config if has_part else config
    wanted = [(name, changes, False) for name, changes in variants(text)]
    if has_part:
        wanted = [(name, changes, True) for name, changes in part_ties(config)] + wanted
    for name, changes, is_whole in wanted:
        try:
            other = changed(config_kind, settings, changes, is_whole)
        except Exception as error:
            yield f"{model_type} {name}", "not made", f"{error!r:.150}"
            continue
        yield f"{model_type} {name}", *compare(other, kind)


def main() -> None:
    """Print a line per model, and how many had each result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--variants", action="store_true", help="also change settings of types that agree")
    parser.add_argument("--but", default="", metavar="RESULTS", help="results that are only counted, with commas")
    arguments = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(f"{error}. This wants transformers and torch: pip install transformers torch")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    kinds = model_types()
    counts: collections.Counter[str] = collections.Counter()
    for model_type in arguments.types or kinds:
        for class_name in kinds[model_type]:
            for name, status, line in results(model_type, class_name, arguments.variants):
                counts[status] += 1
                if status not in arguments.but.split(","):
                    print(f"{status:9} {name}: {line}", flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
