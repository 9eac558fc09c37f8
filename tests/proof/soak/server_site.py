"""A server that is killed: its responses, its conversations, the files of its slots, and its prompt cache."""

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec

from localinfer.apps.server.api.responses import KeptConversation, KeptResponse, ResponseMemory
from localinfer.apps.server.transport.http import ApiError
from localinfer.errors import LocalinferError
from localinfer.storage.response_store import ResponseStore, ResponseStoreOptions, responses_folder
from tests.kernels.subprocesses import environment
from tests.proof.soak.caller import load
from tests.proof.soak.cold_answers import MOST_TURNS, QUESTIONS
from tests.proof.soak.site import Site, ViolationError, check_ended_well, few_warnings, require

_MOST_RESPONSES = 30
_NUM_CONVERSATIONS = 3
_SLOT_FILES = ("slot-a", "slot-b")
_MAX_TOKENS = 24


class ServerSite(Site):
    """`localinfer serve --no-tcp --slot-save-path`, and a client that does one thing after the other."""

    name = "server"
    most_temporaries = 6

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        (self.folder / "slots").mkdir()
        self._responses: dict[str, dict[str, Any]] = {}
        self._messages: dict[str, list[dict[str, str]]] = {}
        """By response, what the model read, and its reply."""
        self._deleting: set[str] = set()
        self._conversations: dict[str, int] = {}
        """Finished items of each."""
        self._slots: dict[str, int] = {}

    def start(self, random: Random) -> subprocess.Popen[str]:
        words = ["--no-tcp", "--socket", str(self.folder / "s.sock"), "--slot-save-path", str(self.folder / "slots")]
        words += ["--disk-cache-folder", str(self.folder / "cache"), "--disk-cache-size", "3MB", "--threads", "1"]
        command = [sys.executable, "-m", "localinfer", "serve", *words, "--no-config", "--parallel", "2"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True)

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        assert process.stdout is not None and process.stderr is not None
        if "serving " in process.stdout.readline():
            transport = httpx.HTTPTransport(uds=str(self.folder / "s.sock"))
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=120) as client:
                try:
                    self._use(client, random)
                    process.terminate()
                except httpx.HTTPError as error:
                    # While it is being killed, `poll` may come before the connection's end is seen.
                    require(process.wait(10) == -9, f"the server is there and cannot be reached: {error!r}")
        told = process.stderr.read()
        process.wait()
        check_ended_well(process, told)

    def _use(self, client: httpx.Client, random: Random) -> None:
        for response_id in random.sample(sorted(self._responses), min(2, len(self._responses))):
            found = client.get(f"/v1/responses/{response_id}")
            require(found.status_code == 200, f"{response_id} cannot be read: {found.text}")
            require(found.json() == self._responses[response_id], f"{response_id} changed: {found.text}")
            self.count("responses read after a start")
        for _ in range(random.randrange(3, 9)):
            choice = random.random()
            if choice < 0.65:
                self._ask(client, random)
            elif choice < 0.8:
                self._save_slot(client, random.choice(_SLOT_FILES))
            elif choice < 0.9 and self._responses:
                self._delete(client, random.choice(sorted(self._responses)))
            elif self._slots:
                name = random.choice(sorted(self._slots))
                found = client.post("/slots/0?action=restore", json={"filename": name})
                require(found.status_code == 200, f"{name} cannot be restored: {found.text}")
        while len(self._responses) > _MOST_RESPONSES:
            self._delete(client, min(self._responses))

    def _ask(self, client: httpx.Client, random: Random) -> None:
        body: dict[str, Any] = {"input": random.choice(QUESTIONS), "max_output_tokens": _MAX_TOKENS, "temperature": 0}
        before: list[dict[str, str]] = []
        choice = random.random()
        usable = [one for one, messages in sorted(self._messages.items()) if len(messages) < 2 * MOST_TURNS]
        conversation = None
        if choice < 0.5 and usable:
            body["previous_response_id"] = random.choice(usable)
            before = self._messages[body["previous_response_id"]]
        elif choice < 0.8:
            conversation = self._conversation(client, random)
            body["conversation"] = conversation
            items = client.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100").json()["data"]
            before = [{"role": one["role"], "content": one["content"][0]["text"]} for one in items]
            require(len(items) >= self._conversations[conversation], f"{conversation} lost items: {items}")
            # A kill may have come between a turn's end and its answer.
            self._conversations[conversation] = len(items)
        answered = client.post("/v1/responses", json=body)
        if answered.status_code == 400 and self._names_deleted(answered.text):
            self._messages.pop(body["previous_response_id"])
            return
        require(answered.status_code == 200, f"{body} is refused: {answered.text}")
        response = answered.json()
        text = response["output"][0]["content"][0]["text"]
        messages = [*before, {"role": "user", "content": body["input"]}]
        cold = self.cold.chat(messages, max_tokens=_MAX_TOKENS, temperature=0.0)
        require(text == cold.text, f"the reply to {messages} is {text!r}, not the cold {cold.text!r}")
        self.count("replies compared")
        cached = response["usage"]["input_tokens_details"]["cached_tokens"]
        self.count("replies with restored or cached tokens", cached > 0)
        self._responses[response["id"]] = response
        self._messages[response["id"]] = [*messages, {"role": "assistant", "content": text}]
        if conversation is not None:
            self._conversations[conversation] = len(before) + 2

    def _conversation(self, client: httpx.Client, random: Random) -> str:
        short = [one for one, size in sorted(self._conversations.items()) if size < 2 * MOST_TURNS]
        if short and (len(short) >= _NUM_CONVERSATIONS or random.random() < 0.7):
            return random.choice(short)
        made: str = client.post("/v1/conversations", json={}).json()["id"]
        self._conversations[made] = 0
        return made

    def _save_slot(self, client: httpx.Client, name: str) -> None:
        saved = client.post("/slots/0?action=save", json={"filename": name})
        if saved.status_code == 200:
            self._slots[name] = saved.json()["n_saved"]

    def _delete(self, client: httpx.Client, response_id: str) -> None:
        self._responses.pop(response_id)
        self._deleting.add(response_id)
        self._messages.pop(response_id, None)
        answered = client.delete(f"/v1/responses/{response_id}")
        require(answered.status_code == 200, f"{response_id} is gone: {answered.text}")

    def check(self) -> None:
        folder = responses_folder(self.folder / "cache")
        assert folder is not None, "a folder was given"
        with few_warnings("reading responses"), ResponseStore(ResponseStoreOptions(folder)) as store:
            memory = ResponseMemory(store)
            for response_id, response in self._responses.items():
                content = store.get(f"{response_id}.json")
                require(content is not None, f"the response {response_id} was answered and is not kept")
                assert content is not None
                kept = msgspec.json.decode(content, type=KeptResponse)
                require(kept.response == response, f"the response {response_id} changed: {kept.response}")
            for response_id, messages in self._messages.items():
                self._check_history(memory, response_id, messages)
            for conversation_id, num_items in self._conversations.items():
                self._check_conversation(memory, conversation_id, num_items)
        self.count("responses found after kills", len(self._responses))
        self._check_slots()

    def _names_deleted(self, refusal: str) -> bool:
        """Whether it is a response whose deletion has begun that something cannot be continued without."""
        return any(response_id in refusal for response_id in self._deleting)

    def _check_history(self, memory: ResponseMemory, response_id: str, messages: list[dict[str, str]]) -> None:
        try:
            items = memory.history(response_id, "id")
        except ApiError as error:
            if self._names_deleted(str(error)):
                return
            raise ViolationError(f"{response_id} cannot be continued: {error}") from error
        texts = [one["content"][0]["text"] for one in items]
        require(texts == [one["content"] for one in messages], f"{response_id} follows {texts}, not {messages}")

    def _check_conversation(self, memory: ResponseMemory, conversation_id: str, num_items: int) -> None:
        content = memory.store.get(f"{conversation_id}.json")
        require(content is not None, f"the conversation {conversation_id} was made and is not kept")
        assert content is not None
        kept = msgspec.json.decode(content, type=KeptConversation)
        wanted = f"{num_items} to {num_items + 2}"
        found_items = len(kept.items)
        require(num_items <= found_items <= num_items + 2, f"{conversation_id} has {found_items} items, not {wanted}")
        if kept.last is not None and kept.last not in self._deleting:
            found = memory.store.get(f"{kept.last}.json")
            require(found is not None, f"{conversation_id} ends with the response {kept.last}, which is not kept")

    def _check_slots(self) -> None:
        if not self._slots:
            return
        with few_warnings("loading the model"), load(self.folder / "cache") as llm:
            for name, num_tokens in self._slots.items():
                try:
                    ids = llm.load_session(self.folder / "slots" / Path(name))
                except LocalinferError as error:
                    raise ViolationError(f"{name} of {num_tokens} tokens cannot be restored: {error}") from error
                require(ids, f"{name} is empty")
                self.count("slot files restored")
