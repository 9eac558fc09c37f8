"""A server in this process whose model says what marks its prompt, beside the demo model, and what it logs of faults.

A mark is "zq[" with eight hexadecimal digits and a bracket.
"""

import logging
import os
import sys
from contextlib import ExitStack
from functools import cache
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import RequestError
from tests.proof.fuzz.target import FOLDER

SAYS = 3
"""How often the model says what marks a request."""
MARK_SIZE = len("zq[00000000]")
_BOT, _END = 259, 257


class _Faults(logging.Handler):
    """Collects what the server logs of faults of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None or record.name.startswith(("asyncio", "uvicorn")):
            self.found.append(logging.Formatter().format(record)[-3000:])


class EchoService:
    """The server under test, its port, and what it held when it was young."""

    def __init__(self) -> None:
        self.faults = _Faults()
        logging.disable(logging.NOTSET)
        logging.getLogger().addHandler(self.faults)
        self._stack = ExitStack()
        # Elsewhere the tests' server is imported by the name that pytest gives it.
        sys.path.append(str(FOLDER.parents[1] / "apps" / "server"))
        home = mkdtemp(prefix="localinfer-fuzz-home-")
        os.environ.update(HF_HOME=home, XDG_DATA_HOME=home, OLLAMA_MODELS=home, HF_HUB_OFFLINE="1")
        from tests.apps.server.local_servers import serving
        from tests.apps.server.scripted_models import scripted_sources

        settings = ServerSettings(
            port=0,
            header_seconds=0.5,
            body_seconds=0.5,
            slow_reader_seconds=1.0,
            max_body_bytes=1 << 20,
            max_generations=12,
            allowed_origins=("http://localhost:3000",),
        )
        running = self._stack.enter_context(serving(settings, sources=scripted_sources("echo", "demo"), load=_load))
        self.port: int = running.port
        self.replies = running.server.service.replies
        self.num_cases = 0
        self.least_memory = 0


def compile_kernels() -> None:
    """Compile what the demo model needs."""
    _load_demo(None).close()


def _load_demo(path: Any) -> Any:
    import localinfer

    return localinfer.load(path, threads=1, kv_memory=32 << 20, context_length=256)


def _load(source: Any) -> Any:
    from tests.engine.fakes import fake_model

    if source.id == "demo":
        return _load_demo(source.path)
    from localinfer.engine.admission import EngineLimits
    from localinfer.llm import LLM
    from tests.apps.server.scripted_models import FillingTokenizer, ThinkingTemplate, _info

    model = fake_model(_echoed, vocab_size=263, context_length=512, max_batch_rows=64, max_output_rows=16)
    model.chat_template = ThinkingTemplate()
    model.tokenizer = FillingTokenizer()
    vars(model.tokenizer).update(unknown_token_id=None, kind="bpe")
    llm = LLM(model, limits=EngineLimits(max_running=12))  # type: ignore[arg-type]
    llm.info = _info(supports=False)  # type: ignore[misc]
    llm.embed_many = llm.rerank = _refuse_vectors  # type: ignore[method-assign]
    return llm


def _refuse_vectors(*_: Any, **__: Any) -> Any:
    raise RequestError("this model gives no vectors; ask the demo model")


def _echoed(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
    """Logits of a model that says what marks the prompt, some times, then ends."""
    row = np.zeros(vocab_size, np.float32)
    starts = np.flatnonzero(history == (_BOT if _BOT in history else ord("|")))
    place = int(starts[-1]) if starts.size else history.size - 1
    prompt = bytes(history[:place][history[:place] < 256].astype(np.uint8))
    start = prompt.rfind(b"zq[")
    mark = prompt[start : start + MARK_SIZE] if start >= 0 else b""
    reply = mark * SAYS
    said = history.size - 1 - place
    row[reply[said] if said < len(reply) else _END] = 50.0
    return row


@cache
def echo_service() -> EchoService:
    return EchoService()
