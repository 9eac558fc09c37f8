"""A stand-in of the hub on 127.0.0.1: what huggingface_hub asks for, with connections that are cut and wrong bytes."""

import contextlib
import hashlib
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from localinfer.storage.hub.download import HubClient
from localinfer.storage.hub.places import Places

LARGE = 200
"""Files from this size on are LFS files here, with a SHA-256."""
_PIECE = 1 << 18


@dataclass
class StandInHub:
    """Repositories by name, each path to bytes; and how it misbehaves.

    cut_after: bytes of an answer after which the connection is closed, one entry for each answer to come, None for a
    whole one. wrong: paths delivered with a changed byte. refused: by repository, a status and the hub's error code.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cut_after: list[int | None] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    refuses_files_only: bool = False
    ignores_ranges: bool = False
    downloads: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range of each file that was asked for."""
    tokens: list[str | None] = field(default_factory=list)
    user_agents: set[str | None] = field(default_factory=set)
    before_bytes: threading.Event | None = None
    stall_after: int | None = None
    """Bytes of an answer after which nothing comes until `stalled` is set."""
    pause_seconds: float = 0.0
    """After each piece of a large answer."""
    stalled: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def client(self, retries: int = 2) -> HubClient:
        return HubClient(self.endpoint, timeout_seconds=30, retries=retries, retry_seconds=0)

    def commit(self, repo: str) -> str:
        """Another one with other contents."""
        return hashlib.sha1(repr(sorted(self.repositories[repo].items())).encode()).hexdigest()


def places_in(folder: Path, endpoint: str = "http://127.0.0.1:9") -> Places:
    """Places below a folder of the test's; nothing listens at the usual endpoint."""
    return Places(
        folder / "records",
        folder / "hub",
        ollama=(folder / "ollama",),
        lm_studio=(folder / "lmstudio",),
        endpoint=endpoint,
    )


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that was killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandInHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.stand_in.user_agents.add(self.headers.get("User-Agent"))
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            self._list(path.removeprefix("/api/models/"))
        else:
            self._send(*self._wanted(path), with_body=True)

    def do_HEAD(self) -> None:
        self._send(*self._wanted(unquote(urlsplit(self.path).path)), with_body=False)

    def _list(self, repo: str) -> None:
        hub = self.stand_in
        hub.tokens.append(self.headers.get("Authorization"))
        if repo in hub.refused and not hub.refuses_files_only:
            return self._refuse(*hub.refused[repo])
        if repo not in hub.repositories:
            return self._refuse(404, "RepoNotFound")
        siblings = []
        for path, content in hub.repositories[repo].items():
            one = {"rfilename": path, "size": len(content), "blobId": git_id(content)}
            if len(content) >= LARGE:
                digest = hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
            siblings.append(one)
        body = {"id": repo, "modelId": repo, "sha": hub.commit(repo), "siblings": siblings}
        return self._answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _wanted(self, path: str) -> tuple[str, str]:
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        return repo, rest.partition("/")[2]

    def _send(self, repo: str, path: str, *, with_body: bool) -> None:
        hub = self.stand_in
        if repo in hub.refused:
            return self._refuse(*hub.refused[repo])
        content = hub.repositories.get(repo, {}).get(path)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        etag = hashlib.sha256(content).hexdigest() if len(content) >= LARGE else git_id(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit(repo), "Accept-Ranges": "bytes"}
        if len(content) >= LARGE:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        if not with_body:
            return self._answer(200, headers | {"Content-Length": str(len(content))}, b"", is_head=True)
        asked = self.headers.get("Range")
        hub.downloads.append((path, asked))
        hub.asked.set()
        if hub.before_bytes is not None:
            hub.before_bytes.wait(60)
        if path in hub.wrong:
            content = bytes([content[0] ^ 1]) + content[1:]
        status = 200
        if asked is not None and not hub.ignores_ranges:
            start, _, end = asked.removeprefix("bytes=").partition("-")
            last = min(int(end), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            status, content = 206, content[int(start) : last + 1]
        return self._answer(status, headers, content, cut_after=hub.cut_after.pop(0) if hub.cut_after else None)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"X-Error-Code": code}, b'{"error": "no"}')

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, *, is_head: bool = False, cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            body = body if cut_after is None else body[:cut_after]
            stall = self.stand_in.stall_after if len(body) >= LARGE and status < 300 and "ETag" in headers else None
            with contextlib.suppress(ConnectionError):
                self._write(body[:stall])
                if stall is not None:
                    self.stand_in.stalled.wait(60)
                    self.wfile.write(body[stall:])
        if cut_after is not None:
            self.close_connection = True

    def _write(self, body: bytes) -> None:
        pause = self.stand_in.pause_seconds
        step = _PIECE if pause else max(1, len(body))
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            self.wfile.flush()
            if pause:
                time.sleep(pause)

    def log_message(self, format: str, *arguments: object) -> None:
        pass
