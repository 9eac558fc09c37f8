"""Ownership of requests: the salt that keeps texts of tokens apart, and each token's limits on texts and urgency."""

import hashlib
import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.types import Scope

from localinfer.apps.server.operation.requests import record_of
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.security import TOKEN_IDENTITY
from localinfer.apps.server.transport.settings import Quota, ServerSettings
from localinfer.engine.admission import Owner

if TYPE_CHECKING:
    from localinfer.apps.server.replies.reply import Reply


def tenant_of(scope: Scope, settings: ServerSettings) -> str:
    """Whom a request belongs to; "" where clients are not kept apart, and of what came through the Unix socket.

    Who can open that is the server's owner, who may see and stop all that runs.
    """
    identity: str = scope["state"].get(TOKEN_IDENTITY, "")
    return identity if settings.isolates_cache else ""


def cache_salt_of(tenant: str, wanted: str | None) -> str | None:
    """The option `cache_salt` of a request. wanted: its member of that name, which keeps texts of one client apart."""
    return None if not tenant and wanted is None else json.dumps([tenant, wanted])


def salt_options(request: Request) -> dict[str, Any]:
    """The engine's options that keep the texts of a request apart, whose body has been read; none if nothing does."""
    cache_salt = record_of(request.scope).cache_salt
    return {} if cache_salt is None else {"cache_salt": cache_salt}


def digest_of(tenant: str, name: str = "") -> str:
    """Identifier of a client and of a name that it gave, where others could read it: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(["localinfer tenant", tenant, name]).encode()).hexdigest()[:32]


def may_see(tenant: str, other: str) -> bool:
    """Return whether a client may see what runs for another, and stop it."""
    return tenant in ("", other)


def may_see_reply(tenant: str, reply: "Reply | None") -> bool:
    """Return whether there is a reply that a client may see."""
    return reply is not None and may_see(tenant, reply.tenant)


TTFT_HEADER = "x-slo-ttft-ms"
"""Milliseconds in which a client wants its first token, as the gateways of llm-d and Kubernetes call it."""


class OwnedTexts(Protocol):
    """Texts of one request. token: of who asked, by name; is_cancelled: nothing runs on."""

    @property
    def token(self) -> str: ...

    @property
    def num_texts(self) -> int: ...

    @property
    def is_cancelled(self) -> bool: ...


def ownership(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The engine's options that say whose a request is, when its first token is wanted, and how urgent it is if it
    does not say.

    The scheduler is fair among tokens; where there are none, among connections by TCP; by the Unix socket each request
    is on its own. Raises: ApiError for a header that is no time.
    """
    record, identity = record_of(request.scope), request.scope["state"].get(TOKEN_IDENTITY)
    quota = settings.quota_of(record.token)
    if identity is None:
        options: dict[str, Any] = {"owner": str(request.client or request.state.request_id)}
    else:
        options = {"owner": Owner(identity, quota.max_running)}
    if record.priority is None and quota.min_priority is not None and quota.min_priority > 0:
        options["priority"] = quota.min_priority
    wanted = request.headers.get(TTFT_HEADER)
    objective = settings.ttft_objective if wanted is None else _seconds(wanted)
    return options if objective is None else {**options, "ttft_objective": objective}


def checked_priority(body: object, quota: Quota) -> int | None:
    """The priority that a request asks for, None if it does not say. Raises: ApiError for one that is too urgent."""
    asked = getattr(body, "priority", None)
    if asked is None:
        # Ollama's options are members of one.
        asked = getattr(getattr(body, "options", None), "priority", None)
    if not isinstance(asked, int):
        return None
    if quota.min_priority is not None and asked < quota.min_priority:
        raise ApiError(
            403,
            f"priority is {asked}, and the most urgent that this client may ask for is {quota.min_priority}; send that "
            "or a larger number",
            code="priority_not_allowed",
            param="priority",
        )
    return asked


def check_generations(running: int, count: int, most: int, *, is_first: bool) -> None:
    """Refuse so many texts more where others are generated or wait, and all of them are too many. Raises: ApiError.

    is_first: of a token that has none: it has a text whatever others have asked for, and there are as many tokens as
    the file has lines.
    """
    if running and running + count > most and not (is_first and count == 1):
        raise ApiError(
            429, f"{running} texts are being generated, of at most {most}; try again later", code="queue_full"
        )


def check_queue(token: str, count: int, replies: Collection[OwnedTexts], settings: ServerSettings) -> None:
    """Refuse so many texts more of a token than may run and wait. token: its name. Raises: ApiError."""
    quota = settings.quota_of(token)
    if not token or quota.max_queued is None:
        return
    running = settings.num_slots if quota.max_running is None else quota.max_running
    present = sum(reply.num_texts for reply in replies if reply.token == token and not reply.is_cancelled)
    if present + count > running + quota.max_queued:
        raise ApiError(
            429,
            f"{present} texts of this token are generated or wait, and {count} more are asked for; {running} may be "
            f"generated and {quota.max_queued} wait at one time; try again later",
            code="queue_full",
        )


def _seconds(milliseconds: str) -> float:
    if not (milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) < 10 and int(milliseconds)):
        raise ApiError(
            400,
            f"the header {TTFT_HEADER} is {milliseconds!r:.80}; give whole milliseconds from 1 on, such as 500, or "
            "leave it out",
            param=TTFT_HEADER,
        )
    return int(milliseconds) / 1e3
