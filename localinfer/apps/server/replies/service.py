"""State of all routes: models, running replies and their slots, admission, an orderly end, and one shape of errors.

Paths are served with and without `/v1`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from localinfer.apps.server.kv_transfer import KVTransferClient, PrefillServer, http_servers
from localinfer.apps.server.operation.logs import RequestLog
from localinfer.apps.server.operation.observation import Metrics, Observer, RequestRecord, error_name, record_of
from localinfer.apps.server.replies.clients import (
    RateLimiter,
    Reservation,
    cache_salt_of,
    check_generations,
    check_queue,
    checked_priority,
    may_see_reply,
    ownership,
    salt_options,
    tenant_of,
)
from localinfer.apps.server.replies.relay import RELAY, ReplyRelay, Resumption
from localinfer.apps.server.replies.reply import Reply, ServerState, TextPlan, TextStage
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.router.models import Lease, ModelRegistry
from localinfer.apps.server.transport.bodies import Bodies, unless_gone
from localinfer.apps.server.transport.http import (
    ApiError,
    ClientGone,
    ModelLoadError,
    Record,
    identifier,
    not_supported,
    shutting_down,
    to_api_error,
)
from localinfer.apps.server.transport.known_fields import collecting, header
from localinfer.apps.server.transport.media_urls import fetch_media
from localinfer.apps.server.transport.settings import ServerSettings

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, TextStream
    from localinfer.llm import LLM
    from localinfer.types import TokenIds


@dataclass
class ComputedWork:
    """Tokens of prompts that were computed, and tokens that were generated after the first of each text, in time."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    later_tokens: int = 0
    later_seconds: float = 0.0

    def add(self, other: "ComputedWork") -> None:
        """Count more work."""
        self.prompt_tokens += other.prompt_tokens
        self.prompt_seconds += other.prompt_seconds
        self.later_tokens += other.later_tokens
        self.later_seconds += other.later_seconds


@dataclass
class ReplyTotals:
    """Sums over the texts that have ended; used on the event loop."""

    work: ComputedWork = field(default_factory=ComputedWork)
    """All work since the start."""
    recent: ComputedWork = field(default_factory=ComputedWork)
    """Work since `take_recent`."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_texts: int = 0
    num_running: int = 0
    """Texts that ran when one ended, summed up."""
    num_passes: int = 0
    """Passes of the model, as if each text had run alone."""
    longest_tokens: int = 0
    num_drafts: int = 0
    """Drafts with at least one token."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    """Accepted tokens by their position in the draft."""

    def count_text(self, stats: "Stats", num_running: int) -> None:
        """Count a text that was generated. num_running: texts that ran just before it ended."""
        computed = max(0, stats.prompt_tokens - stats.cached_tokens)
        later, rate = max(0, stats.completion_tokens - 1), stats.decode_tokens_per_second
        prompt_seconds = max(0.0, stats.time_to_first_token_seconds - stats.waited_seconds)
        self._count(ComputedWork(computed, prompt_seconds, later, later / rate if rate > 0 else 0.0))
        self.cached_tokens += stats.cached_tokens
        self.completion_tokens += stats.completion_tokens
        self.num_texts += 1
        self.num_running += num_running
        self.num_passes += 1 + round(later / max(1.0, stats.tokens_per_pass))
        self.longest_tokens = max(self.longest_tokens, stats.prompt_tokens + stats.completion_tokens)
        self.num_drafts += stats.drafted_by_position[0] if stats.drafted_by_position else 0
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self._count_positions(stats.accepted_by_position)

    def count_prompts(self, num_tokens: int, seconds: float) -> None:
        """Count texts that were read for their vectors or scores."""
        self._count(ComputedWork(prompt_tokens=num_tokens, prompt_seconds=seconds))
        self.num_passes += 1

    def take_recent(self) -> ComputedWork:
        """The work since the last call."""
        recent, self.recent = self.recent, ComputedWork()
        return recent

    def _count(self, work: ComputedWork) -> None:
        self.work.add(work)
        self.recent.add(work)

    def _count_positions(self, counts: Sequence[int]) -> None:
        missing = len(counts) - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(0, missing)
        for position, count in enumerate(counts):
            self.accepted_by_position[position] += count


NO_SLOT = -1
"""Stands for any slot in a request, and for none in an answer: of a text that found every slot taken."""


@dataclass(eq=False)
class SlotText:
    """A text in a slot, or the last one that was there."""

    slot_id: int
    model_id: str
    reply_id: str | None = None
    """None for a text that was restored from a file."""
    token_ids: "Sequence[int] | TokenIds" = ()
    """Known once it has ended."""
    has_ended: bool = False
    tenant: str = ""
    """The owner, where clients are kept apart."""
    cache_salt: str | None = None
    """The option with which it was generated."""
    _stream: "TextStream | None" = field(default=None, repr=False)

    def show(self, stream: "TextStream", _: Callable[[], bool]) -> None:
        """Stage of a text: show its stream in the slot."""
        self._stream = stream

    def end(self) -> None:
        """Keep what the text was, and let go of all else: a model that is unloaded must not live on here."""
        if self._stream is not None:
            self.token_ids = self._stream.token_ids
        self._stream, self.has_ended = None, True


class SlotTable:
    """The slots of a server, used on its event loop."""

    def __init__(self, count: int) -> None:
        self._texts: dict[int, SlotText | None] = dict.fromkeys(range(count))

    def texts(self) -> list[SlotText | None]:
        """Texts of all slots, by their numbers."""
        return [self._texts[slot_id] for slot_id in range(len(self._texts))]

    def text(self, slot_id: int) -> SlotText | None:
        """The text of a slot. Raises: ApiError if there is no such slot."""
        if slot_id not in self._texts:
            last = len(self._texts) - 1
            reason = f"there is no slot {slot_id}; give one from 0 to {last}, or start the server with --parallel"
            raise ApiError(400, reason, param="id_slot")
        return self._texts[slot_id]

    def check_idle(self, slot_id: int) -> None:
        """Raise ApiError if there is no such slot, or a text runs in it."""
        text = self.text(slot_id)
        if text is not None and not text.has_ended:
            raise ApiError(409, f"slot {slot_id} is generating; try again when it has ended", code="slot_busy")

    def take(
        self, model_id: str, reply_id: str, wanted: int | None, tenant: str = "", cache_salt: str | None = None
    ) -> SlotText | None:
        """Put a text into the slot that is wanted, or that was used least recently; None if that is taken.

        Raises: ApiError for a slot that does not exist.
        """
        if wanted is None or wanted == NO_SLOT:
            # Rows come in the order of their last use.
            wanted = next((slot_id for slot_id, text in self._texts.items() if text is None or text.has_ended), NO_SLOT)
            if wanted == NO_SLOT:
                return None
        former = self.text(wanted)
        if former is not None and not former.has_ended:
            return None
        return self._put(SlotText(wanted, model_id, reply_id, tenant=tenant, cache_salt=cache_salt))

    def hold(
        self, slot_id: int, model_id: str, token_ids: Sequence[int], tenant: str = "", cache_salt: str | None = None
    ) -> None:
        """Put a text into a slot that does not run. Raises: ApiError if one runs there."""
        self.check_idle(slot_id)
        self._put(SlotText(slot_id, model_id, None, token_ids, has_ended=True, tenant=tenant, cache_salt=cache_salt))

    def erase(self, slot_id: int) -> None:
        """Forget what a slot held."""
        self._texts[slot_id] = None

    def _put(self, text: SlotText) -> SlotText:
        del self._texts[text.slot_id]
        self._texts[text.slot_id] = text
        return text


@dataclass(frozen=True)
class Configuration:
    """Settings and models that may change while a server runs. sources: the models, None to leave them as they are."""

    settings: ServerSettings
    sources: Sequence[ModelSource] | None = None


@dataclass(frozen=True)
class Observability:
    """Observers of a server, and the reader of its configuration."""

    observers: tuple[Observer, ...] = ()
    """Told of every request at its end."""
    request_log: RequestLog | None = None
    """Gets all requests whole."""
    read_configuration: Callable[[ServerSettings], Configuration] | None = None
    """Given the present settings, in a thread, and may raise; None: nothing can be read again."""


NO_OBSERVABILITY = Observability()


Body = TypeVar("Body")
Result = TypeVar("Result")
Plan = Callable[["LLM"], Sequence[TextPlan]]
"""Lists the texts of a request."""
Endpoint = Callable[[Request], Awaitable[Response]]
PREFILL = "prefill"
"""Prefix of the ids of prompts that are computed for other servers."""
_JOIN_SECONDS = 5.0
_LLAMA_PATHS = {"/completions": "/completion", "/embeddings": "/embedding"}
_MOST_NAME = 1024
_CLIENT_CLOSED = 499
"""Written to the log only: the client has left."""


class Service:
    """The server behind its routes. Lives on one event loop, between `open` and its end.

    preloads: load what the registry's `preload` does at once; until then `is_ready` is false, and requests for it wait.
    prefill_servers: servers that compute long prompts, beside those of `settings.handover`. Raises: RequestError.
    """

    def __init__(
        self,
        settings: ServerSettings,
        make_registry: Callable[[Metrics], ModelRegistry],
        *,
        preloads: bool = False,
        prefill_servers: Sequence[PrefillServer] = (),
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.registry = make_registry(self.metrics)
        asked = (*http_servers(settings.handover), *prefill_servers)
        self.kv_transfer = KVTransferClient(settings.handover, self.metrics, asked) if asked else None
        self.limiter = RateLimiter(self.present_settings)
        self.metrics.engines = lambda: {
            model.source.id: model.llm.engine_stats for model in self.registry.models() if model.llm is not None
        }
        self.is_ready = not preloads
        self.is_stopping = False
        self._state: ServerState | None = None
        self.bodies = Bodies(settings)
        self.slots = SlotTable(settings.num_slots)
        self.totals = ReplyTotals()
        self._tasks: set[asyncio.Task[object]] = set()
        self._replies: dict[str, Reply] = {}
        self._sessions: dict[tuple[str, str], Reply] = {}
        self._load_progress: tuple[str, int, int] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold models while the context lasts; leaving it stops what runs and unloads them."""
        state = self._state = ServerState(self.metrics)
        unloading = asyncio.create_task(self.registry.unload_idle())
        try:
            yield
        finally:
            unloading.cancel()
            replies = self.replies()
            for reply in replies:
                reply.close()
            deadline = time.monotonic() + _JOIN_SECONDS
            for reply in replies:
                await asyncio.to_thread(reply.join, max(0.0, deadline - time.monotonic()))
            state.threads.close()
            self.bodies.close()
            await self.registry.close()

    async def get_ready(self) -> None:
        """Load the models that are wanted from the start, if any are. Raises: what the load raised."""
        if self.is_ready:
            return
        try:
            await self.registry.preload()
        except ModelLoadError as error:
            raise error.__cause__ or error from None
        self.is_ready = True

    def note_load(self, stage: str, done: int, total: int) -> None:
        """Note the progress of a load, for `load_progress`; any thread."""
        self._load_progress = stage, done, total

    def load_progress(self) -> dict[str, Any]:
        """The stage of the load that was noted last, its units done and their total; empty if there was none."""
        noted = self._load_progress
        return {} if noted is None else dict(zip(("stage", "done", "total"), noted, strict=True))

    def stop(self) -> None:
        """Admit no new requests, and load no model; running replies continue until `fail_replies`."""
        self.is_stopping = True
        self.registry.stop_loading()

    def reload(self, settings: ServerSettings, sources: Sequence[ModelSource] | None = None) -> None:
        """Go on with other settings, and other models if any are given; what runs is not touched.

        Where the server listens stays as it is. Raises: RequestError; then nothing has changed.
        """
        if sources is not None:
            self.registry.replace_sources(sources)
        self.settings = settings

    def present_settings(self) -> ServerSettings:
        """The settings that hold now."""
        return self.settings

    def fail_replies(self) -> None:
        """End what still runs, with an error that says why."""
        for reply in self.replies():
            reply.fail(shutting_down())

    def replies(self) -> list[Reply]:
        """Replies that are being generated."""
        return list(self._replies.values())

    def keep(self, work: Coroutine[Any, Any, object]) -> None:
        """Do some work beside requests; what it raises is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[object]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                to_api_error(error)

        task.add_done_callback(done)

    def reply(self, reply_id: str) -> Reply | None:
        """A reply that is being generated, by its id."""
        return self._replies.get(reply_id)

    def num_ahead(self, reply: Reply) -> int:
        """Number of earlier replies without a token."""
        replies = self.replies()
        return sum(not other.num_tokens for other in replies[: replies.index(reply)]) if reply in replies else 0

    def cancel(self, reply_id: str, tenant: str = "") -> bool:
        """Stop a reply by its id; return whether there was one that this client may stop."""
        reply = self._replies.get(reply_id)
        if reply is None or not may_see_reply(tenant, reply):
            return False
        reply.cancel()
        return True

    async def lease(self, request: Request, model: str | None) -> Lease:
        """A model, to be closed. Raises: ApiError, LocalinferError, ClientGone."""
        if self.is_stopping:
            raise shutting_down()
        if (loaded := self.registry.lease_loaded(model)) is not None:
            return loaded
        return await unless_gone(request.receive, self.registry.lease(model), Lease.close)

    async def begin(
        self,
        request: Request,
        model: str | None,
        kind: str,
        plan: Plan,
        *,
        session: str | None = None,
        id_slot: int | None = None,
        relay: ReplyRelay | None = None,
    ) -> Reply:
        """Have texts generated, and return when the model is loaded and every prompt was checked.

        kind: how the reply's id begins. session: ends the reply that runs under the same name. id_slot: the slot
        of the first text, if that matters. relay: passes the reply on, which another process may have begun.
        The caller closes the reply. Checking a prompt continues when its client has left, which the reply will notice.
        Raises: ApiError, LocalinferError, ClientGone; then nothing runs any more.
        """
        if self.settings.handover.role == "prefill" and kind != PREFILL:
            raise not_supported(
                "this server computes prompts for others and generates no text (--role prefill); send this to a server "
                "of --role decode, or of both"
            )
        lease = await self.lease(request, model)
        reply: Reply | None = None
        try:
            record = record_of(request.scope)
            asked = _AskedTexts(kind, plan(lease.llm), record, session, id_slot, relay)
            record.reply = reply = self._admit(lease, asked)
            await reply.start()
        except BaseException:
            if reply is not None:
                reply.close()
            lease.close()
            raise
        return reply

    def _admit(self, lease: Lease, asked: "_AskedTexts") -> Reply:
        """Make a reply, to be started. Raises: ApiError where it is one too many, and for a slot that is not there."""
        former = None if asked.session is None else self._sessions.pop(asked.session, None)
        if former is not None:
            reason = "a newer request with the same prompt_cache_key took its place"
            former.fail(ApiError(409, reason, code="superseded"))
        record, relay = asked.record, asked.relay
        if asked.resumption is None:
            # A reply that another process began is not refused.
            present = [reply for reply in self._replies.values() if not reply.is_cancelled]
            running = sum(reply.num_texts for reply in present)
            is_first = bool(record.token) and all(reply.token != record.token for reply in present)
            check_generations(running, len(asked.plans), self.settings.max_generations, is_first=is_first)
            check_queue(record.token, len(asked.plans), self._replies.values(), self.settings)
        assert self._state is not None, "the service is not open"
        admitted = _Admission(self, lease, asked)
        reply = Reply(admitted.reply_id, lease, admitted.plans(), self._state, admitted, relay)
        reply.tenant, reply.token, reply.notices = record.tenant, record.token, tuple(record.notices)
        reply.slot_ids = [NO_SLOT if slot is None else slot.slot_id for slot in admitted.slots]
        if relay is not None:
            relay.reply_begun(reply)
        self._replies[reply.id] = reply
        if asked.session is not None:
            self._sessions[asked.session] = reply
        return reply

    def count(self, reply: Reply) -> None:
        """Count the texts of a reply that has ended."""
        num_running = sum(other.num_texts for other in self._replies.values())
        for index in range(reply.num_texts):
            if (stats := reply.stats_so_far(index)) is not None:
                self.totals.count_text(stats, num_running)

    def forget(self, reply: Reply, session: tuple[str, str] | None) -> None:
        """Let a reply be found no more, by its id and its session."""
        self._replies.pop(reply.id, None)
        if session is not None and self._sessions.get(session) is reply:
            del self._sessions[session]


@dataclass(frozen=True)
class _AskedTexts:
    """Texts that a request asks for."""

    kind: str
    """Prefix of the reply's id."""
    plans: Sequence[TextPlan]
    record: RequestRecord
    session_name: str | None
    """Name under which a newer reply ends an older one."""
    id_slot: int | None
    """Slot of the first text, None for any."""
    relay: ReplyRelay | None

    @property
    def session(self) -> tuple[str, str] | None:
        """The session, kept apart by owner; None without a name."""
        return (self.record.tenant, self.session_name) if self.session_name else None

    @property
    def resumption(self) -> Resumption | None:
        """Progress of another process with the reply."""
        return None if self.relay is None else self.relay.resumption


class _Admission:
    """Resources of a reply from its admission to its end, released as its `ReplyOwner`."""

    def __init__(self, service: Service, lease: Lease, asked: _AskedTexts) -> None:
        self._service, self._lease, self._asked = service, lease, asked
        record, resumption = asked.record, asked.resumption
        self.reply_id = identifier(asked.kind) if resumption is None else resumption.reply_id
        self.slots = [
            service.slots.take(
                lease.model_id, self.reply_id, None if index else asked.id_slot, record.tenant, record.cache_salt
            )
            for index in range(len(asked.plans))
        ]
        # The process that relays a reply holds its client's limits.
        self._reservation = asked.relay or Reservation(service.limiter, record.token)

    def plans(self) -> list[TextPlan]:
        """The plans of the texts with all their stages."""
        transfer, lease = self._service.kv_transfer, self._lease
        preparations = [] if transfer is None else [partial(transfer.prepare, lease.llm, lease.model_id)]
        # A reply that another process may resume there, or has begun, has one prompt.
        alone: dict[str, Any] = {} if self._asked.relay is None else {"summaries": None}
        return [
            replace(plan, checks=self._checks(index, plan), preparations=preparations, **alone)
            for index, plan in enumerate(self._asked.plans)
        ]

    def _checks(self, index: int, plan: TextPlan) -> list[TextStage]:
        """Stages before a text is announced: show it in its slot, resume it, and take the tokens of its prompt."""
        found: list[TextStage] = []
        if (slot := self.slots[index]) is not None:
            found.append(slot.show)
        if self._asked.relay is not None:
            found.append(partial(self._asked.relay.resume, index))
        if plan.follows is None:
            copies = sum(other.follows == index for other in self._asked.plans)
            found.append(partial(self._reserve, 1 + copies))
        return found

    def _reserve(self, num_texts: int, stream: "TextStream", _: Callable[[], bool]) -> None:
        """Take the tokens of a prompt, and of as many texts of it as are made. Raises: ApiError 429."""
        prompt, request = stream.prompt_tokens, stream.request
        most = prompt + num_texts * max(0, request.last - request.prompt_length + 1)
        # A text that may extend to the end of the context was given no maximum to count with.
        is_open = most >= prompt + num_texts * (self._lease.llm.context_length - prompt)
        self._reservation.reserve(prompt if is_open else most, most)

    def end(self, reply: Reply) -> None:
        """Count the texts, and give back the tokens that were not used."""
        self._service.count(reply)
        self._reservation.settle(sum(reply.num_used()))
        lengths = [0 if one is None else one.completion_tokens for one in reply.stats]
        self._service.metrics.vllm.count_request(reply.model_id, lengths, self._asked.record.max_tokens)

    def close(self, reply: Reply) -> None:
        """Release the slots, the session and the model."""
        self._service.forget(reply, self._asked.session)
        for slot in self.slots:
            if slot is not None:
                slot.end()
        self._lease.close()


def reserve_prompts(request: Request, num_tokens: int) -> None:
    """Take the tokens of a text that is only read, before it is computed. Any thread. Raises: ApiError 429."""
    relay: ReplyRelay | None = request.scope["state"].get(RELAY)
    reservation = relay or Reservation(service_of(request).limiter, record_of(request.scope).token)
    reservation.reserve(num_tokens, num_tokens)
    reservation.settle(num_tokens)


def service_of(request: Request) -> Service:
    """The service that a request was sent to."""
    return cast(Service, request.app.state.service)


def caller_options(request: Request) -> dict[str, Any]:
    """The engine's options that name a text's client and time. To be called when the body has been read.

    Raises: ApiError for a header that is no time.
    """
    return {**ownership(request, service_of(request).settings), **salt_options(request)}


async def read_body(request: Request, record: type[Record]) -> Record:
    """The body of a request as a record. Raises: as `Bodies.read`."""
    service = service_of(request)
    body = await service.bodies.read(request, record, service.settings)
    if service.settings.allows_media_urls:
        await fetch_media(body)
    _note_body(request, body)
    return body


async def read_form(request: Request, record: type[Record]) -> Record:
    """The form of a request, with a file, as a record. Raises: as `Bodies.read_form`."""
    service = service_of(request)
    body = await service.bodies.read_form(request, record, service.settings)
    _note_body(request, body)
    return body


async def read_parted(request: Request, record: type[Record]) -> tuple[Record, dict[str, bytes]]:
    """The body of a request as a record, with its files by name if it is a form. Raises: as `Bodies.read_parted`."""
    service = service_of(request)
    body, files = await service.bodies.read_parted(request, record, service.settings)
    _note_body(request, body)
    return body, files


def _note_body(request: Request, body: object) -> None:
    """Note what the record of a request says of it. Raises: ApiError."""
    model = getattr(body, "model", None)
    if isinstance(model, str) and len(model) > _MOST_NAME:
        raise ApiError(400, f"model has {len(model):,} characters; names have at most {_MOST_NAME:,}", param="model")
    noted = record_of(request.scope)
    noted.take_body(body)
    noted.cache_salt = cache_salt_of(noted.tenant, getattr(body, "cache_salt", None))
    noted.priority = checked_priority(body, service_of(request).settings.quotas[noted.token])


async def prepared(request: Request, work: Callable[..., Result], *arguments: Any) -> Result:
    """Run work on a request's body, in a thread if the body is large. Raises: as the work."""
    return await service_of(request).bodies.prepare(request, work, *arguments)


async def on_model(request: Request, name: str | None, work: "Callable[[LLM, Body], Result]", body: Body) -> Result:
    """Run work on a model in a thread. Raises: as `Service.lease`, and as the work."""
    service = service_of(request)
    with await service.lease(request, name) as lease:
        return await service.bodies.run(request, work, lease.llm, body)


def route(path: str, endpoint: Endpoint, method: str = "GET", *, prompt_field: str = "messages") -> Route:
    """A route whose errors are answered and counted, within the limits of rates.

    prompt_field: the member of its body with the prompt.
    """

    async def guarded(request: Request) -> Response:
        request_id, record, service = request.state.request_id, record_of(request.scope), service_of(request)
        record.route, record.token = path, request.scope["state"].get("token_name", "")
        record.tenant = tenant_of(request.scope, service.settings)
        record.cache_salt = cache_salt_of(record.tenant, None)
        is_limited = method == "POST" and not path.endswith("/cancel")
        headers: dict[str, str] = {}
        try:
            if is_limited:
                service.limiter.admit(record.token)
            with collecting() as record.notices:
                response = await endpoint(request)
            headers |= header(record.notices)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=_CLIENT_CLOSED)
        except Exception as error:
            refusal = to_api_error(error, request_id, prompt_field=prompt_field)
            record.error = error_name(refusal if refusal.code else error)
            response = refusal.response(path)
        if is_limited:
            headers |= service.limiter.headers(record.token)
        response.headers.update(headers)
        service.metrics.requests.labels(path, str(response.status_code)).inc()
        return response

    return Route(path, guarded, methods=[method])


async def unrouted(request: Request, error: Exception) -> Response:
    """Answer a path or a method that does not exist."""
    assert isinstance(error, HTTPException), "registered for it only"
    path = request.url.path
    if error.status_code == 405:
        message = f"{request.method} is not possible here; use {(error.headers or {}).get('Allow', 'another method')}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers).response(path)
    return ApiError(error.status_code, f"there is nothing at {path!r:.80}", code="not_found").response(path)


class PlainPaths:
    """ASGI middleware that strips `/v1` from paths, and slashes from their ends: clients disagree on both.

    Where llama-server has a shape of its own at a path that is OpenAI's with `/v1`, the bare path is its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/")
            is_bare = path != "/v1" and not path.startswith("/v1/")
            path = _LLAMA_PATHS.get(path, path) if is_bare else path.removeprefix("/v1")
            scope = {**scope, "path": path or "/"}
        await self._app(scope, receive, send)
