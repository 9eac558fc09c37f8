"""Who a request belongs to, where clients are kept apart: what their tokens stand for, and the salts made of it."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Scope

from localinfer.apps.server.operation.request_record import record_of
from localinfer.apps.server.transport.security import TOKEN_IDENTITY
from localinfer.apps.server.transport.settings import ServerSettings

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
    """What stands for a client, and a name that it gave, where others could read it: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(["localinfer tenant", tenant, name]).encode()).hexdigest()[:32]


def may_see(tenant: str, other: str) -> bool:
    """Whether a client may see what runs for another, and stop it."""
    return tenant in ("", other)


def may_see_reply(tenant: str, reply: "Reply | None") -> bool:
    """Whether there is a reply that a client may see."""
    return reply is not None and may_see(tenant, reply.tenant)
