"""Record what agents send, and make the small files of `tests/data/agents` of it.

`python -m tests.proof.peers.record_agents serve FOLDER` starts a server on port 8080 whose model plays an agent: it
reads a file, lists the folder, starts a subagent where the question says "helper", and then answers. Every request goes
to FOLDER with its answer. Then, in a folder of its own with a `notes.txt`, one program at a time:

    ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_AUTH_TOKEN=x ANTHROPIC_MODEL=agent-test claude
    codex exec "..." and codex exec resume --last "...", with a provider of base_url http://127.0.0.1:8080/v1 and
        wire_api "responses" in config.toml
    opencode run "..." and opencode run -c "...", with @ai-sdk/openai-compatible in opencode.json
    aider --model openai/agent-test --openai-api-base http://127.0.0.1:8080/v1 --edit-format whole notes.txt
    cn -p "..." and cn -p "..." --resume, with provider openai in config.yaml

`python -m tests.proof.peers.record_agents shorten FOLDER "NAME VERSION" FILE` writes the small file: see its README for
what is kept. Programs and their prompts are installed and recorded outside of this repository.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "server"))

QUESTIONS = (
    "How many lines has notes.txt?",
    "Let a helper count them too.",
    "And once more, please.",
    "Thanks, and the first line?",
    "What is the last line of notes.txt?",
    "Add a third line.",
    "And say what it has now.",
)
LOOK, DONE, PLAIN, TITLE = (
    "I look at that.",
    "Done: the notes have two lines.",
    "The notes have two lines.",
    "Reading the notes",
)
HELP = "Count the lines of notes.txt and report."
EDIT = "I add a line.\n\nnotes.txt\n```\nfirst line\nsecond line\nthird line\n```\n"
OWN = {*QUESTIONS, LOOK, DONE, PLAIN, TITLE, HELP}
HEADERS = ("user-agent", "anthropic-version", "anthropic-beta", "x-stainless-lang", "originator", "accept")
WORDS = (
    "file reads line then keeps value before next step when folder holds note text names each change asks first answer "
    "short where list shows order plain result only after write check"
).split()
KEPT = re.compile(
    r"billing-header|Working directory|Is directory|Platform:|[Tt]oday's date|current_date|OS Version|Shell:|cwd>|"
    r"shell>|timezone>|currentDate|branch:|Recent commits|^\s*(\?\?|M) |(first|second|third) line|notes\.txt|</?env>"
)
"""Lines about the machine and the project, which stay."""


def played(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """What an agent's model would say: calls of tools that look and help, as often as none was made, then an answer."""
    names = [tool["function"]["name"] for tool in options.get("tools") or ()]
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    asked = str(messages[last].get("content"))
    if not names:
        system = " ".join(str(message.get("content")) for message in messages[:1])
        if "title" in (system + asked).lower():
            return {"content": TITLE}
        return {"content": EDIT if "file listing" in (system + asked).lower() else PLAIN}
    calls = _planned(names, str(Path.cwd()), with_help="helper" in asked)
    count = sum(message["role"] == "tool" for message in messages[last:])
    if count >= len(calls):
        return {"content": DONE}
    name, arguments = calls[count]
    call = {"id": f"call_{len(messages)}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"content": "" if count else LOOK, "tool_calls": [call]}


def _planned(names: Sequence[str], folder: str, *, with_help: bool) -> list[tuple[str, dict[str, Any]]]:
    help_ = {"description": "Count lines", "prompt": HELP, "subagent_type": "general-purpose"}
    kinds: list[dict[str, dict[str, Any]]] = [
        {"Read": {"file_path": f"{folder}/notes.txt"}, "read": {"filePath": f"{folder}/notes.txt"}},
        dict.fromkeys(("Bash", "bash"), {"command": "ls -1", "description": "List files"})
        | {"exec_command": {"cmd": "cat notes.txt"}},
    ]
    if with_help:
        kinds.append(
            {"Agent": help_, "Task": help_, "task": {**help_, "subagent_type": "general"}}
            | {name: {"message": HELP} for name in names if name.endswith("spawn_agent")}
        )
    return [found[0] for kind in kinds if (found := [(name, kind[name]) for name in names if name in kind])]


class Recorder:
    """ASGI middleware that writes each request and its answer to a file of its own."""

    def __init__(self, app: Any, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._count = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._count += 1
        number, body, answer, status = self._count, bytearray(), bytearray(), 0

        async def received() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            entry = {
                "path": scope["path"],
                "query": scope["query_string"].decode(),
                "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
                "body": body.decode("utf-8", "replace"),
                "status": status,
                "answer": answer.decode("utf-8", "replace"),
            }
            (self._folder / f"{number:04}.json").write_text(json.dumps(entry, indent=1))
            print(number, scope["method"], scope["path"], status, flush=True)


def serve(folder: Path, port: int) -> None:
    """Serve until Ctrl-C."""
    from agent_models import given_replies, load_agent_model, write_agent_model

    import localinfer.apps.server.app as app_module
    from localinfer.apps.server.router.model_folder import ModelSource, measure_need
    from localinfer.apps.server.router.models import ModelRegistry
    from localinfer.apps.server.transport.settings import ServerSettings

    folder.mkdir(parents=True, exist_ok=True)
    make_app = app_module.make_app

    def recorded(*parts: Any) -> Any:
        app = make_app(*parts)
        app.add_middleware(Recorder, folder=folder)
        return app

    app_module.make_app = recorded
    source = ModelSource("agent-test", write_agent_model(folder / "agent-test.gguf"), 1_700_000_000)
    with (
        given_replies(),
        app_module.LocalServer(
            ServerSettings(port=port, max_body_bytes=16 << 20),
            lambda metrics: ModelRegistry(
                [source],
                lambda source: load_agent_model(source.path, played, threads=1),
                lambda source: measure_need(source.path, "f16"),
                metrics,
            ),
            preloads=True,
        ) as server,
    ):
        server.run(on_ready=lambda: print("ready", flush=True))


def scrubbed(value: Any) -> Any:
    """A value with made-up paths, dates and ids, equal ones for equal ones."""
    if isinstance(value, dict):
        return {key: scrubbed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [scrubbed(one) for one in value]
    if not isinstance(value, str):
        return value
    text = value.replace(str(Path.cwd()), "/home/dev/project").replace(str(Path.home()), "/home/dev")
    text = re.sub(r"/tmp/[\w./-]+", "/home/dev/other", text)
    text = re.sub(r"\b20\d\d-\d\d-\d\d\b", "2026-01-15", text)
    uuid = r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    text = re.sub(uuid, lambda found: f"00000000-0000-4000-8000-{_digest(found[0])[:12]}", text)
    return re.sub(r"\b[0-9a-f]{40,64}\b", lambda found: _digest(found[0])[: len(found[0])], text)


def reworded(text: str, share: float, most_lines: int) -> str:
    """A text with the lines of another, each with about a share of its words, drawn from a list by what it was."""
    lines = text.split("\n")
    if len(lines) > most_lines:
        lines = [*lines[: most_lines * 2 // 3], *lines[most_lines * 2 // 3 - most_lines :]]
    made = []
    for line in lines:
        bare = line.strip()
        if not bare or re.fullmatch(r"</?[\w-]+>|```\w*", bare) or (KEPT.search(line) and len(line) < 120):
            made.append(line)
            continue
        lead = re.match(r"\s*(?:[-*] |#+ |\d+\. )?", line)
        digest = hashlib.sha256(bare.encode()).digest()
        count = max(1, round(len(bare.split()) * share))
        words = " ".join(WORDS[digest[index % 32] % len(WORDS)] for index in range(count))
        made.append((lead[0] if lead else "") + words)
    return "\n".join(made)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text(text: str) -> str:
    text = scrubbed(text)
    if len(text) < 24 or text.strip('"') in OWN:
        return text
    return reworded(text, 0.8, 40) if len(text) < 400 else reworded(text, 0.35, 24)


def _content(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {
            key: _content(one) if key in ("text", "content", "output") else scrubbed(one) for key, one in value.items()
        }
    return [_content(one) for one in value] if isinstance(value, list) else value


def _tool(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: reworded(one, 0.2, 12) if key in ("description", "title") and isinstance(one, str) else _tool(one)
            for key, one in value.items()
        }
    return [_tool(one) for one in value] if isinstance(value, list) else scrubbed(value)


def _body(body: dict[str, Any]) -> dict[str, Any]:
    makers = dict.fromkeys(("messages", "input", "system", "instructions"), _content) | {"tools": _tool}
    return {key: makers.get(key, scrubbed)(value) for key, value in body.items()}


def shorten(folder: Path, client: str, target: Path) -> None:
    """Write the small file of a recorded folder; what occurs more than once stands in it once."""
    import httpx
    from agent_replies import read_answer

    requests = []
    for path in sorted(folder.glob("*.json")):
        entry = json.loads(path.read_text())
        if not entry["body"]:
            continue
        kind = "text/event-stream" if not entry["answer"].startswith("{") else "application/json"
        reply = read_answer(
            entry["path"], httpx.Response(entry["status"], text=entry["answer"], headers={"content-type": kind})
        ).message
        requests.append(
            {
                "path": entry["path"],
                "query": entry["query"],
                "headers": {name: scrubbed(entry["headers"][name]) for name in HEADERS if name in entry["headers"]},
                "body": _body(json.loads(entry["body"])),
                "reply": {**scrubbed(reply), "content": _text(reply["content"])},
            }
        )
    counts: dict[str, int] = {}
    for request in requests:
        _count(request, counts)
    parts: list[Any] = []
    places: dict[str, int] = {}

    def packed(value: Any) -> Any:
        if not isinstance(value, (dict, list)):
            return value
        key = json.dumps(value)
        if key in places:
            return {"$part": places[key]}
        made = (
            {name: packed(one) for name, one in value.items()} if isinstance(value, dict) else list(map(packed, value))
        )
        if counts.get(key, 0) > 1:
            parts.append(made)
            places[key] = len(parts) - 1
            return {"$part": places[key]}
        return made

    lines = [json.dumps(packed(request), ensure_ascii=False) for request in requests]
    shared = ",\n".join(json.dumps(part, ensure_ascii=False) for part in parts)
    target.write_text(
        f'{{"client": {json.dumps(client)},\n"parts": [\n{shared}\n],\n"requests": [\n' + ",\n".join(lines) + "\n]}\n"
    )


def _count(value: Any, counts: dict[str, int]) -> None:
    """Count how often each larger value occurs, what is within it only the first time."""
    if not isinstance(value, (dict, list)):
        return
    key = json.dumps(value)
    if len(key) > 60:
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > 1:
            return
    for one in value.values() if isinstance(value, dict) else value:
        _count(one, counts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    serving = commands.add_parser("serve")
    serving.add_argument("folder", type=Path)
    serving.add_argument("--port", type=int, default=8080)
    shortening = commands.add_parser("shorten")
    shortening.add_argument("folder", type=Path)
    shortening.add_argument("client")
    shortening.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "serve":
        serve(given.folder, given.port)
    else:
        shorten(given.folder, given.client, given.file)
