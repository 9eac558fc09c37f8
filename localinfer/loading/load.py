"""`localinfer.load`: from a path and options to an `LLM`. Naming it imports next to nothing; see `imports.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localinfer.errors import LoadCancelledError
from localinfer.loading.imports import import_modules, shown_progress, stoppable
from localinfer.loading.load_options import LoadOptions, takes

if TYPE_CHECKING:
    import os

    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer


@takes(LoadOptions)
def load(options: LoadOptions) -> LLM:
    """Load a model and return it ready to answer.

    Raises: ModelFileError, RequestError, BackendUnavailableError, OutOfMemoryError, LoadCancelledError,
        MissingPackageError.
    """
    with shown_progress(options.progress) as told:
        report = stoppable(told, options.cancel)
        import_modules(report)
        from localinfer.loading.build import build_llm
        from localinfer.loading.options import check_options

        checked = check_options(replace(options, progress=report))
        try:
            return build_llm(checked)
        except LoadCancelledError as error:
            cancelled = str(error)
    # A new one: as long as an app keeps the first, its frames would keep the weights.
    raise LoadCancelledError(cancelled)


def load_tokenizer(model: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load only the tokenizer, of a GGUF file with or without tensors, or of a folder; None: the demo model's.

    Raises: ModelFileError.
    """
    import_modules(None)
    from localinfer.loading.options import model_path
    from localinfer.models.load.loader import load_tokenizer as tokenizer_of

    return tokenizer_of(model_path(model))
