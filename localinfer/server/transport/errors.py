"""The one shape in which every error leaves the server, and what status each kind of error has."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from localinfer.errors import (
    BackendUnavailableError,
    ClosedError,
    ConstraintError,
    ContextLengthError,
    LocalinferError,
    ModelFileError,
    OutOfMemoryError,
    OverloadedError,
    RequestError,
    TemplateError,
)

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_RETRY_SECONDS = "1"


class ApiError(Exception):
    """A request that is refused or fails: its status, and what the client is told.

    param: the field at fault, as a path. code: a word that programs can tell apart. facts: more members of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.facts = dict(facts or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", _RETRY_SECONDS)
        if status >= 500 or status == 409:
            # Clients repeat these by themselves, though the same request would fail the same way.
            self.headers.setdefault("x-should-retry", "true" if code == "model_loading" else "false")

    def body(self) -> dict[str, Any]:
        """The JSON object that goes to the client."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.facts}
        return {"error": error}

    def response(self) -> Response:
        """The error as a response."""
        return json_response(self.body(), self.status, self.headers)


class ModelLoadError(Exception):
    """A model could not be loaded; its cause says why, and holds what no client is told, such as a path."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"the model {model_id!r} could not be loaded")
        self.model_id = model_id


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; text outside ASCII stays as it is."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), media_type="application/json")


def to_api_error(error: BaseException, request_id: str = "", *, prompt_field: str = "messages") -> ApiError:
    """What a client is told of an error.

    Of what is the server's own fault, the log has the text, and the client only the id to find it by: such texts hold
    paths. prompt_field: the member of the request that holds its prompt.
    """
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            sizes = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_length}
            return ApiError(400, str(error), code="context_length_exceeded", param=prompt_field, facts=sizes)
        case TemplateError():
            return ApiError(400, str(error), param=prompt_field)
        case ConstraintError():
            facts = {} if error.keyword is None else {"keyword": error.keyword}
            field = error.field or "response_format"
            return ApiError(400, str(error), code="unsupported_schema", param=field, facts=facts)
        case RequestError():
            return ApiError(400, str(error), param=error.field)
        case OverloadedError():
            seconds = str(max(1, round(error.retry_after_seconds)))
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": seconds})
        case BackendUnavailableError():
            return ApiError(400, str(error), code="unsupported_parameter")
        case OutOfMemoryError():
            return ApiError(503, str(error), code="insufficient_memory")
        case ClosedError():
            return ApiError(503, "the model was unloaded while it answered; ask again", code="model_unloaded")
        case MemoryError():
            return ApiError(503, "this machine has no memory left for that; ask for less", code="insufficient_memory")
        case ModelLoadError():
            return _load_failure(error, request_id)
    _log_failure(request_id, error)
    return ApiError(500, f"the server failed; {_see_log(request_id)}")


def _load_failure(error: ModelLoadError, request_id: str) -> ApiError:
    cause = error.__cause__ or error
    _log_failure(request_id, cause, f"{error}: ")
    message = f"{error}; {_see_log(request_id)}"
    if isinstance(cause, OutOfMemoryError | MemoryError):
        return ApiError(503, message, code="insufficient_memory")
    return ApiError(500, message, code="model_file" if isinstance(cause, ModelFileError) else "model_not_loaded")


def _see_log(request_id: str) -> str:
    return f"its log has the reason under {request_id}" if request_id else "its log has the reason"


def _log_failure(request_id: str, error: BaseException, prefix: str = "") -> None:
    """One line of what was foreseen; of what was not, where it happened too."""
    is_foreseen = isinstance(error, LocalinferError | OSError | MemoryError)
    told = " ".join(f"{prefix}{error}".split()) if is_foreseen else "a fault of the server"
    logger.error("request %s failed: %s", request_id or "unknown", told, exc_info=None if is_foreseen else error)
