"""Tabs of one browser that share the chat page's conversations, used at random and compared with what must be there."""

import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.support.limits import wait_until

REPLY = "A reply that takes a moment, in a few words that come one after the other."
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chromium-headless-shell",
)
_TOKEN_SECONDS = 0.012
_WEIGHTS = {
    "send": 10,
    "send while a reply is written": 4,
    "edit": 4,
    "type into an editor": 3,
    "regenerate": 4,
    "continue": 2,
    "stop": 2,
    "choose a version": 2,
    "open another conversation": 4,
    "new conversation": 2,
    "rename": 1,
    "delete": 1,
    "reload": 2,
    "close the tab": 2,
}
_NUM_CONVERSATIONS = 3
_SETTLE_SECONDS = 30.0
_REST_SECONDS = 0.1
_CHECK_EVERY = 25
_ACT_SECONDS = 30.0
_ACT_MILLISECONDS = 3000.0
_PAUSES_MILLISECONDS = (5, 30, 150, 400)

_STORE = """async () => {
  const all = await app.store.list();
  return Promise.all(all.map(async ({ id }) => {
    const { record, messages } = await app.store.load(id);
    const conversation = new Conversation(record, messages);
    return { id, name: record.name, messages, shown: conversation.turns.map((turn) => turn.id) };
  }));
}"""
"""What the store has, read past all tabs."""
_LEAVE = """() => {
  // Nothing more is begun, so that what is being written now is all that can be cut off.
  app.catchUp = app.closeCut = () => new Promise(() => {});
  return [...app.replies.values()].map((reply) => reply.turn.id);
}"""
"""Gives the replies that a tab writes which is about to go."""
_IS_AT_REST = """async () => {
  const { held, pending } = await navigator.locks.query();
  return !held.length && !pending.length && !app.replies.size && !app.others.size && app.waiting === null;
}"""
_SHOWN = """() => ({
  id: app.current.id,   turns: [...document.querySelectorAll('#log > .turn')].map((node, index) => {
    const { turn } = app.log.views[index];
    const body = node.querySelector('.body');
    const isLeft = node.querySelector('.writing') !== null;
    return { id: turn.id, role: turn.role, text: body?.textContent ?? null, content: turn.content, isLeft,
      note: node.querySelector('.note:not([hidden])')?.textContent ?? '' };
  }),
})"""
"""What a tab shows."""


@dataclass(eq=False)
class _Tab:
    """A tab of the browser."""

    page: Any
    """As playwright has it."""
    number: int
    """By which it is named, also once it was closed and opened again."""
    typed: str | None = None
    """What stands in an editor that was left open."""
    problems: list[str] = field(default_factory=list)
    """What went wrong in its scripts."""


class NoBrowserError(Exception):
    """There is no browser that can be driven."""


class Tabs:
    """A campaign; what is done is chosen by the seed. say: is given lines of progress.

    counts: how often what was done. sent: text and conversation of each message that a tab has shown: it is in the
    store, once, unless its conversation is among the deleted. cut: replies whose tab has gone: no others may be said to
    be cut off.
    """

    def __init__(self, seed: int, tabs: int, say: Callable[[str], None] = print) -> None:
        self.counts: Counter[str] = Counter()
        self._random = Random(seed)
        self._seed = seed
        self._number = tabs
        self._say = say
        self._tabs: list[_Tab] = []
        self.sent: dict[str, tuple[str, str]] = {}
        self.deleted: set[str] = set()
        self.cut: set[str] = set()
        self._next = 0

    def run(self, steps: int) -> bool:
        """Do so many things; return whether nothing was lost, doubled or said wrongly. Raises: NoBrowserError."""
        began = time.monotonic()
        problems: list[str] = []
        done = 0
        with _server() as url, _browser() as browser:
            context = browser.new_context(viewport={"width": 1000, "height": 700})
            context.set_default_timeout(1000 * _ACT_SECONDS)
            self._tabs = [self._open(context, url, number) for number in range(self._number)]
            while done < steps and not problems:
                self._step(context, url)
                done += 1
                if done % _CHECK_EVERY == 0 or done == steps:
                    problems = self._check()
            context.close()
        for problem in problems:
            self._say(f"FOUND with --seed {self._seed} after {done} steps: {problem}")
        acts = ", ".join(f"{number} {what}" for what, number in self.counts.most_common())
        took = f"{self._number} tabs, {done} steps in {time.monotonic() - began:.0f} s"
        self._say(f"{took}: {acts}; {len(self.sent)} messages sent, {len(problems)} problems")
        return not problems

    # What tabs do.

    def _open(self, context: Any, url: str, number: int) -> _Tab:
        tab = _Tab(context.new_page(), number)
        tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
        tab.page.goto(f"{url}/")
        self._wait_for_start(tab)
        return tab

    def _reload(self, tab: _Tab) -> None:
        tab.page.reload()
        self._wait_for_start(tab)

    def _wait_for_start(self, tab: _Tab) -> None:
        tab.page.locator("#model option").first.wait_for(state="attached")

    def _step(self, context: Any, url: str) -> None:
        tab = self._random.choice(self._tabs)
        what = self._random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        acts = {
            "close the tab": lambda: self._close(context, url, tab),
            "reload": lambda: self._leave(tab, lambda: self._reload(tab)),
            "send": lambda: self._send(tab),
            "send while a reply is written": lambda: self._send(tab, is_written=True),
            "edit": lambda: self._edit(tab, sends=True),
            "type into an editor": lambda: self._edit(tab, sends=False),
            "open another conversation": lambda: self._open_conversation(tab),
            "new conversation": lambda: self._click(tab, "#new"),
            "rename": lambda: self._rename(tab),
            "delete": lambda: self._delete(tab),
            "stop": lambda: self._press(tab, "Escape"),
            "regenerate": lambda: self._click_last(tab, ".assistant footer button", "Regenerate"),
            "continue": lambda: self._click_last(tab, ".assistant footer button", "Continue"),
            "choose a version": lambda: self._choose(tab),
        }
        try:
            if acts[what]():
                self.counts[what] += 1
        except Exception as error:
            # A control that another tab's work took away in the same moment is no fault.
            if "Timeout" not in str(error) and "not attached" not in str(error):
                raise
            self.counts["too late"] += 1
        if self._random.random() < 0.7 and not tab.page.is_closed():
            tab.page.wait_for_timeout(self._random.choice(_PAUSES_MILLISECONDS))
        self._note(tab)

    def _text(self) -> str:
        self._next += 1
        return f"Message {self._next}"

    def _send(self, tab: _Tab, *, is_written: bool = False) -> bool:
        if is_written and not tab.page.evaluate("app.isWritten(app.current)"):
            return False
        if self._num_conversations() >= _NUM_CONVERSATIONS and not tab.page.evaluate("app.current.head"):
            return False
        # What is still there, since its reply was stopped, is sent first.
        if not tab.page.locator("#message").input_value():
            tab.page.locator("#message").fill(self._text())
        tab.page.locator("#message").press("Enter")
        return True

    def _edit(self, tab: _Tab, *, sends: bool) -> bool:
        if tab.typed is None:
            edits = tab.page.locator(".user footer button", has_text="Edit")
            number = edits.count()
            if not number:
                return False
            edits.nth(self._random.randrange(number)).click(force=True, timeout=_ACT_MILLISECONDS)
            typed = self._text()
            tab.page.locator(".edit textarea").fill(typed, timeout=_ACT_MILLISECONDS)
            tab.typed = typed
        if sends:
            tab.page.locator(".edit textarea").press("Enter", timeout=_ACT_MILLISECONDS)
            tab.page.locator(".edit textarea").wait_for(state="detached")
            tab.typed = None
        return True

    def _open_conversation(self, tab: _Tab) -> bool:
        rows = tab.page.locator("#conversations .open")
        number = rows.count()
        if not number or tab.typed is not None:
            return False
        rows.nth(self._random.randrange(number)).click(timeout=_ACT_MILLISECONDS)
        return True

    def _click(self, tab: _Tab, selector: str) -> bool:
        if tab.typed is not None:
            return False
        tab.page.locator(selector).click(timeout=_ACT_MILLISECONDS)
        return True

    def _press(self, tab: _Tab, key: str) -> bool:
        tab.page.locator("#message").press(key)
        return True

    def _click_last(self, tab: _Tab, selector: str, text: str) -> bool:
        control = tab.page.locator(selector, has_text=text)
        if not control.count() or tab.typed is not None:
            return False
        control.last.click(timeout=_ACT_MILLISECONDS)
        return True

    def _choose(self, tab: _Tab) -> bool:
        controls = tab.page.locator(".versions button:not([disabled])")
        number = controls.count()
        if not number or tab.typed is not None:
            return False
        controls.nth(self._random.randrange(number)).click(force=True, timeout=_ACT_MILLISECONDS)
        return True

    def _rename(self, tab: _Tab) -> bool:
        if not tab.page.evaluate("app.current.head"):
            return False
        tab.page.evaluate("void app.rename()")
        tab.page.locator("#ask input").fill(f"Name {self._text()}")
        tab.page.locator("#ask input").press("Enter")
        return True

    def _delete(self, tab: _Tab) -> bool:
        if tab.typed is not None or not tab.page.evaluate("app.current.head"):
            return False
        self.deleted.add(tab.page.evaluate("app.current.id"))
        tab.page.evaluate("app.delete()")
        return True

    def _leave(self, tab: _Tab, act: Callable[[], object]) -> bool:
        """Do what ends the page of a tab: the replies that it writes may be cut off."""
        self._note(tab)
        self.cut.update(tab.page.evaluate(_LEAVE))
        act()
        tab.typed = None
        return True

    def _close(self, context: Any, url: str, tab: _Tab) -> bool:
        self._leave(tab, tab.page.close)
        self._tabs[self._tabs.index(tab)] = self._open(context, url, tab.number)
        return True

    def _num_conversations(self) -> int:
        return int(self._tabs[0].page.evaluate("app.conversations.length"))

    # What is compared.

    def _note(self, tab: _Tab) -> None:
        """Note what a tab shows as sent."""
        if tab.page.is_closed():
            return
        shown = tab.page.evaluate(_SHOWN)
        for turn in shown["turns"]:
            if turn["role"] == "user":
                self.sent[turn["id"]] = (turn["content"], shown["id"])

    def _check(self) -> list[str]:
        """Let all come to rest, and say what is not as it has to be."""
        # Twice, since a tab may be told by another what it does next.
        rest = wait_until(
            lambda: all(self._is_at_rest(tab) for tab in self._tabs * 2), _SETTLE_SECONDS, every=_REST_SECONDS
        )
        problems = [f"tab {tab.number}: {problem}" for tab in self._tabs for problem in tab.problems]
        if not rest:
            return [*problems, f"a tab does not come to rest: {[tab.page.evaluate(_SHOWN) for tab in self._tabs]}"]
        for tab in self._tabs:
            self._note(tab)
        kept = self._tabs[0].page.evaluate(_STORE)
        problems += self.judge_store(kept)
        for tab in self._tabs:
            problems += self._judge_tab(tab, {one["id"]: one for one in kept})
        return problems

    def _is_at_rest(self, tab: _Tab) -> bool:
        return bool(tab.page.evaluate(_IS_AT_REST))

    def judge_store(self, kept: list[dict[str, Any]]) -> list[str]:
        """What is wrong with the messages of all conversations."""
        messages = [message for one in kept for message in one["messages"]]
        ids = {message["id"] for message in messages}
        texts = Counter(message["content"] for message in messages if message["role"] == "user")
        problems = [f"{text} is there {number} times" for text, number in texts.items() if number > 1]
        for message in messages:
            problems += self._judge_reply(message) if message["role"] == "assistant" else []
            if message["parent"] and message["parent"] not in ids:
                problems.append(f"what {message['id']} follows is not there")
        for name, (text, conversation) in self.sent.items():
            if name not in ids and conversation not in self.deleted:
                problems.append(f"{text} was shown as sent, and is not in the store")
        return problems

    def _judge_reply(self, message: dict[str, Any]) -> list[str]:
        reason, text = message["finish_reason"], message["content"]
        if not reason:
            # It is said to be cut off when its conversation is shown, which the next check of a tab demands.
            return [] if message["id"] in self.cut else [f"the reply {message['id']} never ends"]
        if reason == "interrupted" and message["id"] not in self.cut:
            return [f"the reply {message['id']} is said to be cut off, but no tab that wrote it went away"]
        if not REPLY.startswith(text) or (reason == "stop" and text != REPLY):
            return [f"the reply {message['id']} ({reason}) is not what the model said: {text!r}"]
        return []

    def _judge_tab(self, tab: _Tab, conversations: dict[str, Any]) -> list[str]:
        shown = tab.page.evaluate(_SHOWN)
        problems = []
        if tab.typed is not None:
            editors = tab.page.locator(".edit textarea")
            typed = editors.first.input_value() if editors.count() else None
            if typed != tab.typed:
                problems.append(f"tab {tab.number}: {tab.typed!r} was typed into an editor, which has {typed!r}")
        kept = conversations.get(shown["id"])
        if kept is None or tab.typed is not None:
            return problems
        ids = [turn["id"] for turn in shown["turns"]]
        if ids != kept["shown"]:
            problems.append(f"tab {tab.number} shows {ids}, the store has {kept['shown']}")
        states = {message["id"]: message for message in kept["messages"]}
        for turn in shown["turns"]:
            state = states.get(turn["id"])
            # Markdown has no white space at its end.
            texts = {turn["content"].strip(), turn["text"].strip(), state["content"].strip()} if state else {""}
            if len(texts) > 1 or (state and turn["isLeft"]):
                problems.append(f"tab {tab.number} shows {turn}, the store has {state}")
            if state and ("Cut off" in turn["note"]) != (state.get("finish_reason") == "interrupted"):
                problems.append(f"tab {tab.number} says {turn['note']!r} of {state}")
        return problems


@contextmanager
def _server() -> Iterator[str]:
    """A server whose model says the same slowly, at its address."""
    folder = str(Path(__file__).parents[2] / "apps" / "server")
    # Where the servers of tests are, which import each other by their bare names.
    if folder not in sys.path:
        sys.path.append(folder)
    from local_servers import serving
    from scripted_models import loader, scripted_sources

    from localinfer.apps.server.transport.settings import ServerSettings

    steps = [step for byte in REPLY.encode() for step in (_Moment(), byte)]
    with serving(ServerSettings(port=0), sources=scripted_sources("slow"), load=loader({"slow": steps})) as running:
        yield running.url


class _Moment(threading.Event):
    """Is over by itself after a moment."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(_TOKEN_SECONDS)
        return True


@contextmanager
def _browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowserError("playwright, which drives browsers, is not installed; pip install playwright") from error
    with sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, BROWSERS)), driver.chromium.executable_path)
        if not os.path.exists(found):
            raise NoBrowserError("there is no Chromium in PATH; install one, or run `playwright install chromium`")
        options = ["--headless=shell", "--disable-gpu", *(["--no-sandbox"] if os.getuid() == 0 else [])]
        browser = driver.chromium.launch(executable_path=found, args=options)
        try:
            yield browser
        finally:
            browser.close()
