"""Which source files one chat request executes code in, and how many Python calls it makes, over all threads.

A server runs on the demo model in this process. Each kind of POST /v1/chat/completions (whole, then streamed) is sent
once untraced, so that imports, compilation and caches are out of the way, and once under `sys.setprofile`:

    python tests/bench/trace_request.py            # how many files and calls, and the files by package
    python tests/bench/trace_request.py --calls    # also the functions, the most often called first

A file counts where a function in it is called. Imports and class bodies do not count, nor does code outside this
project (uvicorn, Starlette, msgspec, NumPy) or the client, a plain socket in the main thread.
The figure to hold: at most 47 files, and 49 where n-gram drafts are verified; the goal is 45.
"""

import argparse
import http.client
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import localinfer
from localinfer.apps.server.app import LocalServer
from localinfer.apps.server.router.model_folder import ModelSource, measure_need
from localinfer.apps.server.router.models import ModelRegistry
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.loading.options import model_path

ROOT = Path(__file__).parents[2]
PACKAGES = ("localinfer", "models", "quant", "kernels")
QUESTION = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8, "temperature": 0}


class CallCounter:
    """Counts the calls of this project's functions in all threads that begin after it, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self._places: dict[str, str | None] = {}
        threading.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.is_on and (place := self._place(frame.f_code.co_filename)):
            self.calls[place, frame.f_code.co_qualname] += 1

    def _place(self, name: str) -> str | None:
        """The path of a file below the project's folder, None for a file of others."""
        if name not in self._places:
            path = Path(name)
            is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            self._places[name] = path.relative_to(ROOT).as_posix() if is_ours else None
        return self._places[name]


def ask(port: int, *, stream: bool) -> None:
    """Send the question and read the whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({**QUESTION, "stream": stream})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert response.status == 200, answer


def report(kind: str, calls: Counter[tuple[str, str]], *, shows_calls: bool) -> None:
    """Print what one request ran through."""
    files = sorted({place for place, _ in calls})
    print(f"{kind}: {len(files)} files, {calls.total()} Python calls")
    for folder, names in sorted({str(Path(name).parent): [] for name in files}.items()):
        names += [Path(name).stem for name in files if str(Path(name).parent) == folder]
        print(f"  {folder}: {' '.join(names)}")
    if shows_calls:
        for (place, function), count in calls.most_common():
            print(f"{count:8} {place}:{function}")


def main() -> None:
    """Trace both kinds of request."""
    parser = argparse.ArgumentParser(description="Trace the source files and Python calls of one chat request.")
    parser.add_argument("--calls", action="store_true", help="list the functions that were called")
    shows_calls = parser.parse_args().calls
    counter = CallCounter()
    demo = model_path(None)

    def make_registry(metrics: Any) -> ModelRegistry:
        return ModelRegistry(
            [ModelSource("demo", demo, 0)],
            lambda source: localinfer.load(source.path, threads=1, kv_memory=64 << 20),
            lambda source: measure_need(source.path, "f16"),
            metrics,
        )

    ready = threading.Event()
    with LocalServer(ServerSettings(port=0), make_registry, preloads=True) as server:
        serving = threading.Thread(target=server.run, args=(ready.set,))
        serving.start()
        assert ready.wait(120), "the server did not start"
        for kind, stream in (("whole", False), ("streamed", True)):
            ask(server.port or 0, stream=stream)
            counter.calls.clear()
            counter.is_on = True
            ask(server.port or 0, stream=stream)
            counter.is_on = False
            report(kind, counter.calls.copy(), shows_calls=shows_calls)
        server.stop()
        serving.join()


if __name__ == "__main__":
    sys.exit(main())
