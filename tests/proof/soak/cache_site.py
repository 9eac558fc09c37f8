"""The prompt cache on disk and saved sessions, used by a program that is killed."""

import json
import subprocess
import sys
from random import Random
from typing import Any

from tests.kernels.subprocesses import environment
from tests.proof.soak.caller import NUM_SEEDS, OPTIONS, load
from tests.proof.soak.cold_answers import Answer, draw_prompt
from tests.proof.soak.site import Site, ViolationError, check_ended_well, few_warnings, require

_REMEMBERED = 40


class CacheSite(Site):
    """`localinfer.load(disk_cache=...)`, `save_session` and `load_session`."""

    name = "cache"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asked: list[tuple[str, int]] = []
        self._sessions: dict[str, list[list[int]]] = {}
        """By name, the ids that were saved last, and then those whose save had begun."""
        self._saved: set[str] = set()
        self._must_be_cached: str | None = None

    def start(self, random: Random) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "tests.proof.soak.caller", str(self.folder), str(random.randrange(1 << 30))]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True)

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        assert process.stdout is not None and process.stderr is not None
        last: dict[str, Any] = {}
        for line in process.stdout:
            if not line.endswith("\n"):
                break
            last = json.loads(line)
            self._note(last)
        errors = process.stderr.read()
        process.wait()
        check_ended_well(process, errors)

    def _note(self, told: dict[str, Any]) -> None:
        """Take over what the process reports as begun or finished."""
        match told["event"]:
            case "asking":
                self._must_be_cached = None
            case "asked":
                self._compare(told["prompt"], told["seed"], told["answer"], told["cached"])
            case "closed" if self._asked:
                self._must_be_cached = self._asked[-1][0]
            case "saving":
                self._sessions.setdefault(told["name"], []).append(told["ids"])
            case "saved":
                self._saved.add(told["name"])
                self._sessions[told["name"]] = self._sessions[told["name"]][-1:]
            case "restored":
                self._check_session(told["name"], told["ids"])

    def _compare(self, prompt: str, seed: int, answer: list[Any], cached: int) -> None:
        cold = self.cold.complete(prompt, seed=seed, **OPTIONS)
        found = Answer(tuple(answer[0]), answer[1], tuple(answer[2]))
        require(
            found == cold, f"with {cached} cached tokens {found} is not the cold {cold}, for {prompt!r}, seed {seed}"
        )
        self._asked = [*self._asked[-_REMEMBERED:], (prompt, seed)]
        self.count("answers compared")
        self.count("answers with restored or cached tokens", cached > 0)

    def _check_session(self, name: str, ids: list[int]) -> None:
        known = self._sessions.get(name, [])
        found = [one for one in known if ids == one[: len(ids)] and len(ids) >= len(one) - 1]
        require(found, f"{name} holds {ids}, which is none of {known}")
        self._sessions[name] = found[-1:]
        self.count("sessions restored")

    def check(self) -> None:
        random = Random(len(self._asked))
        with few_warnings("loading the model"), load(self.folder / "cache") as llm:
            wanted = self._asked[-2:] + [(draw_prompt(random), random.randrange(NUM_SEEDS))]
            for prompt, seed in reversed(wanted):
                completion = llm.complete(prompt, seed=seed, **OPTIONS)
                cached = completion.stats.cached_tokens
                if prompt == self._must_be_cached:
                    self._must_be_cached = None
                    self.count("closed caches found again")
                    require(cached, f"a cache that was closed lost {prompt!r}: {completion.stats.cache_miss}")
                self._compare(prompt, seed, list(Answer.of(completion)), cached)
            for name in list(self._sessions):
                path = self.folder / name
                if not path.exists():
                    require(name not in self._saved, f"the session {name} is gone")
                    continue
                try:
                    ids = llm.load_session(path)
                except Exception as error:
                    raise ViolationError(f"{name} cannot be restored: {error}") from error
                self._check_session(name, ids)
                completion = llm.complete(ids, seed=1, **OPTIONS)
                cold = self.cold.complete(ids, seed=1, **OPTIONS)
                require(Answer.of(completion) == cold, f"the session {name} is continued otherwise")
        self._must_be_cached = None
