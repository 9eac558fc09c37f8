"""Every error that localinfer raises, as one tree.

LocalinferError
|-- ModelFileError                 the file, as a whole, cannot be used
|   |-- CorruptFileError           its bytes contradict themselves or the GGUF specification
|   |-- UnsupportedFormatError     it is well formed, and this version cannot run it
|   `-- TokenizerError             its vocabulary cannot be built
|-- ShapeError                     an array does not have the shape or type a function needs
|-- RequestError                   an argument is invalid
|   |-- ContextLengthError         the prompt does not fit the context
|   |-- TokenIdError               these token ids are none that the model can read
|   |-- MessageError               a message of a chat cannot be read
|   |-- TemplateError              the chat template cannot render these messages
|   `-- ConstraintError            a schema, regex or grammar cannot be enforced
|-- SessionFileError               a saved conversation cannot be written, read or verified
|   `-- SessionMismatchError       it is intact, and belongs to another model, setting or version
|-- DownloadError                  a model cannot be brought from the hub
|   `-- HubUnreachableError        it does not answer, or may not be asked
|-- OfflineError                   another machine was to be reached in offline mode
|-- BackendUnavailableError        the requested device or instruction set is not available
|-- MissingPackageError            a part is used whose packages are not installed
|-- OutOfMemoryError               a budget the caller set would be exceeded
|-- LoadCancelledError             the event given to `load` was set before the model was there
|-- AnswerError                    an answer that was to be of a type is cut short, or is not of it
|-- ToolRoundsError                the model calls tools again and again without an answer
|-- OverloadedError                the queue is full, or the first token would come too late
`-- ClosedError                    the model or session was closed, or the process was forked

A message names what was found, what was wanted, and the way out.
"""

import traceback


class LocalinferError(Exception):
    """Root of the tree."""


class ModelFileError(LocalinferError):
    """The model file cannot be used."""


class CorruptFileError(ModelFileError):
    """The bytes of the file contradict themselves or the format's specification."""


class UnsupportedFormatError(ModelFileError):
    """The file is well formed, but this version cannot run what it holds."""


class TokenizerError(ModelFileError):
    """The vocabulary in the file cannot be built into a tokenizer."""


class ShapeError(LocalinferError):
    """An array does not have the shape, type or layout that a function needs."""


class RequestError(LocalinferError):
    """An argument is invalid; `field`: the option or member at fault, if any."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """The prompt, or the requested completion after it, does not fit the context.

    num_tokens, context_length: both sizes in tokens, if known.
    """

    def __init__(self, message: str, *, num_tokens: int | None = None, context_length: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.context_length = context_length


class TokenIdError(RequestError):
    """Token ids are none that the model can read: one is not in its vocabulary, or there has to be one."""


class MessageError(RequestError):
    """A message of a chat cannot be read.

    path: the member at fault, such as "messages[2].content". is_unsupported: it is well formed, but not text.
    """

    def __init__(self, message: str, path: str, *, is_unsupported: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.is_unsupported = is_unsupported


class TemplateError(RequestError):
    """The chat template cannot render these messages."""


class ConstraintError(RequestError):
    """A schema, regular expression or grammar cannot be enforced; `keyword`: of the schema, at fault, if any.

    field: "regex", "grammar" or "tools" if one of these is at fault.
    """

    def __init__(self, message: str, *, keyword: str | None = None, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.keyword = keyword


class SessionFileError(LocalinferError):
    """The file of a saved conversation cannot be written, read or verified."""


class SessionMismatchError(SessionFileError):
    """A saved conversation belongs to another model, setting or version."""


class DownloadError(LocalinferError):
    """A model cannot be brought from the hub: it refuses, cannot be reached, or the files are wrong or do not fit."""


class HubUnreachableError(DownloadError):
    """The hub does not answer, or the user forbids asking it."""


class OfflineError(LocalinferError, ConnectionError):
    """Another machine was to be reached in offline mode, by whatever code."""


class BackendUnavailableError(LocalinferError):
    """The requested device or instruction set is not available on this machine."""


class MissingPackageError(LocalinferError):
    """A part of localinfer is used whose packages are not installed; `extra`: what to install, as in its message."""

    def __init__(self, message: str, *, extra: str) -> None:
        super().__init__(message)
        self.extra = extra


class OutOfMemoryError(LocalinferError):
    """An allocation would exceed the memory budget."""


class LoadCancelledError(LocalinferError):
    """Loading was given up because its `cancel` event was set; nothing of the model is left."""


class AnswerError(LocalinferError):
    """An answer that was to be of a type was cut short, or is not of it.

    text: what there is of it. finish_reason: why it ended, as a `Completion` says it.
    """

    def __init__(self, message: str, *, text: str, finish_reason: str) -> None:
        super().__init__(message)
        self.text = text
        self.finish_reason = finish_reason


class ToolRoundsError(LocalinferError):
    """The model called tools for as many rounds as it may; `rounds`: how many."""

    def __init__(self, message: str, *, rounds: int) -> None:
        super().__init__(message)
        self.rounds = rounds


class OverloadedError(LocalinferError):
    """The queue of waiting requests is full, or a first token would come later than it is wanted.

    retry_after_seconds: when a slot is likely to be free. predicted_ttft_seconds: until the first token, if that is
    why.
    """

    def __init__(
        self, message: str, retry_after_seconds: float, *, predicted_ttft_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.predicted_ttft_seconds = predicted_ttft_seconds


class ClosedError(LocalinferError):
    """The object was closed, or belongs to another process."""


def without_frames(error: Exception) -> Exception:
    """An error that is kept for a later reader, without the frames that it passed, and what those hold.

    Of one that is none of ours they are a note, as text.
    """
    if not isinstance(error, LocalinferError):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error
