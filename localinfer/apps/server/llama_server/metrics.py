"""`/metrics` with llama.cpp's names after the server's own."""

from collections.abc import Iterator

import psutil
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api import status
from localinfer.apps.server.replies.service import Service, service_of


async def metrics(request: Request) -> Response:
    """All metrics, as Prometheus reads them."""
    response = await status.metrics(request)
    body = bytes(response.body) + "".join(_lines(service_of(request))).encode()
    started = int(psutil.Process().create_time())
    shown = Response(body, media_type=response.headers["content-type"])
    # Written as llama-server writes it: its clients look for it so.
    shown.raw_headers.append((b"Process-Start-Time-Unix", str(started).encode()))
    return shown


def _lines(service: Service) -> Iterator[str]:
    totals = service.totals
    work, recent = totals.work, totals.take_recent()
    running = [reply for reply in service.replies() if not reply.is_cancelled]
    waiting = sum(reply.num_texts for reply in running if not reply.num_tokens)
    counters = {
        "prompt_tokens_total": ("Tokens of prompts that were computed", work.prompt_tokens),
        "prompt_tokens_cached_total": ("Tokens of prompts that were cached", totals.cached_tokens),
        "prompt_seconds_total": ("Seconds that prompts took", work.prompt_seconds),
        "tokens_predicted_total": ("Tokens generated", totals.completion_tokens),
        "tokens_predicted_seconds_total": ("Seconds that tokens took after the first of a text", work.later_seconds),
        "n_decode_total": ("Passes of the model, as if each text had run alone", totals.num_passes),
        "n_tokens_max": ("Most tokens that a text has had", totals.longest_tokens),
        "spec_decode_num_draft_tokens_total": ("Tokens drafted", totals.drafted_tokens),
        "spec_decode_num_accepted_tokens_total": ("Drafted tokens that were accepted", totals.accepted_tokens),
        "spec_decode_num_drafts_total": ("Drafts of at least one token", totals.num_drafts),
    }
    gauges = {
        "prompt_tokens_seconds": (
            "Tokens of prompts per second since the last look",
            _rate(recent.prompt_tokens, recent.prompt_seconds),
        ),
        "predicted_tokens_seconds": (
            "Tokens generated per second since the last look",
            _rate(recent.later_tokens, recent.later_seconds),
        ),
        "requests_processing": ("Texts being generated now", sum(reply.num_texts for reply in running)),
        "requests_deferred": ("Texts that have no token yet", waiting),
        "n_busy_slots_per_decode": (
            "Texts that ran when one ended, in the mean",
            _rate(totals.num_running, totals.num_texts),
        ),
    }
    for kind, table in (("counter", counters), ("gauge", gauges)):
        for name, (what, value) in table.items():
            yield f"# HELP llamacpp:{name} {what}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
    if totals.accepted_by_position:
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        yield f"# HELP {name} Drafted tokens that were accepted, by place in the draft\n# TYPE {name} counter\n"
        for position, count in enumerate(totals.accepted_by_position):
            yield f'{name}{{position="{position}"}} {count}\n'


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
