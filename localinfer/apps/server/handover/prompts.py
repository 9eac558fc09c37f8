"""Which prompts of a decode server are handed over, to whom, and what happens where that fails.

Whatever happens, the text is generated: a prompt that nobody else computed is computed here, to the same bits.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localinfer.apps.server.handover.prefill_server import PrefillAnswer, PrefillCancelled, PrefillFailed, PrefillServer
from localinfer.apps.server.operation.metrics import Metrics
from localinfer.apps.server.transport.handover_options import HandoverOptions
from localinfer.errors import ClosedError, LocalinferError

if TYPE_CHECKING:
    from localinfer.engine.request import Request
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM

logger = logging.getLogger("localinfer.server")

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 2.0, 60.0
"""For which a server that failed is not asked: longer each time that it fails again."""


@dataclass(eq=False)
class _Server:
    """What is known of a prefill server. num_asked: prompts that it computes for this process now. paused_until: on
    the monotonic clock, after a failure. failure: the last one, None once it has answered."""

    asked: PrefillServer
    num_asked: int = 0
    last_asked: int = 0
    paused_until: float = 0.0
    pause_seconds: float = _LEAST_PAUSE_SECONDS
    failure: str | None = None


class PromptHandover:
    """Has prompts computed by prefill servers. Any thread may call; each call blocks its thread.

    options: which prompts, and how long one is waited for. servers: who is asked.
    """

    def __init__(self, options: HandoverOptions, metrics: Metrics, servers: Sequence[PrefillServer]) -> None:
        self._options = options
        self._metrics = metrics
        self._lock = threading.Lock()
        self._servers = [_Server(server) for server in servers]
        self._num_asked = 0

    def prepare(self, llm: "LLM", model_id: str, stream: "TextStream", is_cancelled: Callable[[], bool]) -> None:
        """See to it that little of a stream's prompt is left to compute, before its first event; log what fails."""
        began = time.monotonic()
        try:
            prefilled = self._prepare(llm, model_id, stream.request, is_cancelled)
        except (PrefillCancelled, ClosedError):
            return
        except LocalinferError as error:
            logger.warning("prompts are not handed over: %s", error)
            return
        except Exception:
            # A text is made all the same, and what is wrong here can be found.
            logger.exception("a prompt was not handed over, and is computed here")
            return
        stream.note_prefilled(prefilled, time.monotonic() - began)

    def _prepare(self, llm: "LLM", model_id: str, request: "Request", is_cancelled: Callable[[], bool]) -> int:
        """Return how many ids another process computed for this text."""
        token_ids, salt = request.head, request.hints.salt
        if request.is_over or token_ids.size < self._options.threshold:
            return 0
        in_memory = llm.cached_tokens(token_ids, salt)
        if token_ids.size - in_memory < self._options.threshold:
            return 0
        on_disk = llm.stored_tokens(token_ids, salt)
        known = max(in_memory, on_disk)
        is_asked = token_ids.size - known >= self._options.threshold
        if is_asked:
            known = max(known, self._ask(llm, model_id, request, is_cancelled))
            on_disk = llm.stored_tokens(token_ids, salt)
        if on_disk <= in_memory:
            return 0
        found = llm.fetch_prompt(token_ids, salt)
        return max(0, found - known) if is_asked else 0

    def _ask(self, llm: "LLM", model_id: str, request: "Request", is_cancelled: Callable[[], bool]) -> int:
        """Ask one server after the other, until one has done it; return how many ids one of them knew before."""
        hints, token_ids = request.hints, request.head
        fingerprint = llm.handover_fingerprint()
        body = json.dumps(
            {
                "model": model_id,
                "token_ids": token_ids.tolist(),
                "salt": hints.salt.hex(),
                "system_tokens": hints.system_tokens,
                "branch_tokens": list(hints.branch_tokens),
                "fingerprint": dict(fingerprint.parts),
                "owner": str(request.owner) if isinstance(request.owner, str) else "",
            }
        ).encode()
        deadline, cached_tokens = time.monotonic() + self._options.deadline_seconds, 0
        while (server := self._take()) is not None:
            try:
                answer = _answer_of(server.asked, body, deadline, is_cancelled)
                cached_tokens = answer.cached_tokens
                self._check_stored(llm, request, answer)
            except PrefillFailed as error:
                self._note_failure(server, str(error))
                if time.monotonic() >= deadline:
                    break
            else:
                self._note_success(server)
                return cached_tokens
            finally:
                with self._lock:
                    server.num_asked -= 1
        self._metrics.handovers.labels("computed_here").inc()
        return cached_tokens

    def _check_stored(self, llm: "LLM", request: "Request", answer: PrefillAnswer) -> None:
        """Raise PrefillFailed unless all that a server says it wrote is where this process finds it.

        That it could not write all of a prompt is no failure of a server that can write.
        """
        if answer.has_failed:
            raise PrefillFailed(answer.problem or "it cannot write what it computes")
        if answer.problem is not None:
            logger.info("a prompt was handed over in part: %s", answer.problem)
        found = llm.stored_tokens(request.head, request.hints.salt)
        if found < answer.stored_tokens:
            raise PrefillFailed(
                f"of {answer.stored_tokens} tokens that it wrote, {found} are in {llm.handover_folder}; give both "
                "servers the same --disk-cache-folder, of a --disk-cache-size that holds their prompts (in Python "
                "disk_cache_folder and disk_cache)"
            )

    def _take(self) -> _Server | None:
        """The server with the fewest prompts, of those not paused; of several the one that was asked longest ago."""
        with self._lock:
            now = time.monotonic()
            ready = [server for server in self._servers if server.paused_until <= now]
            if not ready:
                return None
            server = min(ready, key=lambda one: (one.num_asked, one.last_asked))
            self._num_asked += 1
            server.num_asked += 1
            server.last_asked = self._num_asked
            return server

    def _note_failure(self, server: _Server, reason: str) -> None:
        """Leave a server alone for a while, and log that once per reason until it has answered again."""
        with self._lock:
            is_new = server.failure != reason
            server.failure = reason
            server.paused_until = time.monotonic() + server.pause_seconds
            server.pause_seconds = min(2 * server.pause_seconds, _MOST_PAUSE_SECONDS)
        self._metrics.handovers.labels("failed").inc()
        level = logging.WARNING if is_new else logging.INFO
        logger.log(level, "the prefill server %s: %s; prompts are computed here", server.asked.name, reason)

    def _note_success(self, server: _Server) -> None:
        with self._lock:
            was_failing, server.failure, server.pause_seconds = server.failure, None, _LEAST_PAUSE_SECONDS
        self._metrics.handovers.labels("handed_over").inc()
        if was_failing is not None:
            logger.warning("the prefill server %s computes prompts again", server.asked.name)


def _answer_of(server: PrefillServer, body: bytes, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
    """What a server answers. Raises: PrefillFailed for whatever goes wrong, PrefillCancelled."""
    try:
        return server.ask(body, deadline=deadline, is_cancelled=is_cancelled)
    except (PrefillFailed, PrefillCancelled):
        raise
    except Exception as error:
        logger.exception("the prefill server %s could not be asked", server.name)
        raise PrefillFailed(f"it could not be asked: {type(error).__name__}") from error
