"""Every error localinfer raises on purpose, as one tree.

LocalinferError
|-- ModelFileError                 the file, as a whole, cannot be used
|   |-- CorruptFileError           its bytes contradict themselves or the GGUF specification
|   |-- UnsupportedFormatError     it is well formed, and this version cannot run it
|   `-- TokenizerError             its vocabulary cannot be built
|-- ShapeError                     an array does not have the shape or type a function needs
|-- RequestError                   the caller asked for something that has no meaning
|   |-- ContextLengthError         the prompt does not fit the context
|   |-- MessageError               a message of a chat cannot be read
|   |-- TemplateError              the chat template cannot render these messages
|   `-- ConstraintError            a schema, regex or grammar cannot be enforced
|-- SessionFileError               a saved conversation cannot be written, read or proven whole
|   `-- SessionMismatchError       it is whole, and belongs to another model, setting or version
|-- BackendUnavailableError        the device or instruction set asked for is not here
|-- OutOfMemoryError               a budget the caller set would be exceeded
|-- OverloadedError                as many requests wait already as may
`-- ClosedError                    the model was closed, or the process was forked

A message names what was found, what was wanted, and the way out.
"""


class LocalinferError(Exception):
    """Root of the tree; catch this to catch everything raised on purpose."""


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
    """The caller asked for something that has no meaning here; `field`: the option or member at fault, if one is."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """The prompt, or what was asked to follow it, does not fit the context.

    num_tokens, context_length: both sizes in tokens, where they are known.
    """

    def __init__(self, message: str, *, num_tokens: int | None = None, context_length: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.context_length = context_length


class MessageError(RequestError):
    """A message of a chat cannot be read.

    path: the member at fault, such as "messages[2].content". is_unsupported: it is well formed, and not text.
    """

    def __init__(self, message: str, path: str, *, is_unsupported: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.is_unsupported = is_unsupported


class TemplateError(RequestError):
    """The chat template cannot render these messages."""


class ConstraintError(RequestError):
    """A schema, regular expression or grammar cannot be enforced; `keyword`: the schema's word at fault, if one is.

    field: "regex", "grammar" or "tools" where one of these is at fault.
    """

    def __init__(self, message: str, *, keyword: str | None = None, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.keyword = keyword


class SessionFileError(LocalinferError):
    """The file of a saved conversation cannot be written, read, or proven whole."""


class SessionMismatchError(SessionFileError):
    """A saved conversation belongs to another model, setting or version."""


class BackendUnavailableError(LocalinferError):
    """The device or instruction set asked for is not present on this machine."""


class OutOfMemoryError(LocalinferError):
    """An allocation would exceed the memory budget the caller set."""


class OverloadedError(LocalinferError):
    """As many requests wait already as may; `retry_after_seconds` is when one of them is likely to have its place."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ClosedError(LocalinferError):
    """The object was closed, or belongs to another process."""
