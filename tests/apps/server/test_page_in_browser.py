"""The chat page in a headless Chromium: what a user does, and that nothing runs or leaves the page but what should."""

import base64
import copy
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from local_servers import ServedModel, serving
from scripted_models import loader, scripted_sources

import localinfer
from localinfer.apps.server.router.model_folder import model_source
from localinfer.apps.server.transport.settings import ServerSettings
from tests.support.limits import seconds, wait_until
from tests.support.seeing_model import picture_file, seeing_demo

playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives browsers, is not installed")

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chromium-headless-shell",
)
HOSTILE = (
    b"<think>\nHm, well.\n</think>\n\n# Title\n\n<script>document.title = 'owned'</script>"
    b"<img src=x onerror=alert(1)>\n\n[bad](javascript:alert(1)) [good](https://example.org/)\n\n"
    b"```python\nx = 1\n```\n"
)
GATE = threading.Event()
SCRIPTS: dict[str, Any] = {
    "answer": HOSTILE,
    "waiting": [*b"First ", GATE, *b"and last."],
    "failing": [*b"abc", ValueError("a secret of /home/somebody")],
}
WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => violations.push(event.violatedDirective));
"""
LACKING = {
    "navigator.locks": "Object.defineProperty(navigator, 'locks', { value: undefined });",
    "indexedDB": "Object.defineProperty(globalThis, 'indexedDB', { value: undefined });",
}
OLD_PAGE = """
if (!sessionStorage.getItem('seen')) {
  sessionStorage.setItem('seen', '1');
  const turns = [{ role: 'user', content: 'One' },
    { role: 'assistant', content: 'First', reasoning: '', finish_reason: 'stop' }, { role: 'user', content: 'Two' },
    { role: 'assistant', content: '', reasoning: '' }];
  localStorage.setItem('localinfer.running.1', JSON.stringify({ ...turns[3], content: 'Second and more' }));
  const request = indexedDB.open('localinfer', 1);
  request.onupgradeneeded = () => request.result.createObjectStore('conversations', { keyPath: 'id' });
  request.onsuccess = () => {
    const transaction = request.result.transaction('conversations', 'readwrite');
    transaction.objectStore('conversations').put({ id: '1', name: 'Old', model: '', system: '', options: {}, turns,
      created: '2026-01-01', changed: '2026-01-01' });
    transaction.oncomplete = () => request.result.close();
  };
}
"""
"""Leaves what the first version of the page kept, with a reply that was being written."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, BROWSERS)), driver.chromium.executable_path)
        if not os.path.exists(found):
            pytest.skip("there is no Chromium in PATH, and none that `playwright install chromium` brought")
        options = [
            "--headless=shell",
            "--disable-gpu",
            *(["--no-sandbox"] if os.name != "nt" and os.getuid() == 0 else []),
        ]
        running = driver.chromium.launch(executable_path=found, args=options)
        yield running
        running.close()


@pytest.fixture(scope="module")
def chats() -> Iterator[ServedModel]:
    with serving(ServerSettings(port=0), sources=scripted_sources(*SCRIPTS), load=loader(SCRIPTS)) as running:
        yield running


class Chat:
    """A page, what it asked for, and what went wrong in it."""

    def __init__(self, browser: Any, url: str, scripts: tuple[str, ...] = (), **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 800}, **options)
        self.context.set_default_timeout(1000 * min(20, seconds(10)))
        self.context.add_init_script(WATCH)
        for script in scripts:
            self.context.add_init_script(script)
        self.url = url
        self._open()

    def _open(self) -> None:
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.page.on(
            "console", lambda line: self.problems.append(line.text) if line.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        # Not the method itself, which playwright would bind to the tab that was copied.
        self.page.on("request", lambda request: self._note(request))
        self.page.goto(self.url + "/")

    def second_tab(self) -> "Chat":
        """Another tab of the same browser."""
        tab = copy.copy(self)
        tab._open()
        return tab

    def choose_conversation(self, name: str) -> None:
        self.page.locator("#conversations .open", has_text=name).click()

    def _note(self, request: Any) -> None:
        self.asked.append(request.url)
        if request.url.endswith("/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    def choose(self, model: str) -> None:
        self.page.locator("#model").select_option(model)

    def send(self, text: str) -> None:
        self.page.locator("#message").fill(text)
        self.page.keyboard.press("Enter")

    def wait_start(self) -> None:
        """Wait until the page has read its options, connected its controls and found the models.

        It does so once its database is open, which may be after the browser calls it loaded.
        """
        self.page.locator("#model option").first.wait_for(state="attached")

    def wait(self, text: str, selector: str = ".assistant") -> None:
        self.page.locator(selector).last.get_by_text(text).first.wait_for()

    def wait_end(self) -> None:
        self.page.locator("#send", has_text="Send").wait_for()
        self.page.locator(".assistant footer", has_text="Regenerate").wait_for()

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found

    def check(self) -> None:
        """Nothing was asked of others, no policy was broken, and the console is empty."""
        assert self.problems == []
        assert self.page.evaluate("violations") == []
        assert [url for url in self.asked if not url.startswith((self.url, "data:", "blob:"))] == []


@pytest.fixture
def open_chat(browser: Any, chats: ServedModel) -> Iterator[Callable[..., Chat]]:
    opened: list[Chat] = []

    def make(url: str = chats.url, *, lacks: str = "", old: bool = False, **options: Any) -> Chat:
        scripts = LACKING.get(lacks, ""), OLD_PAGE if old else ""
        opened.append(Chat(browser, url, scripts, **options))
        return opened[-1]

    GATE.clear()
    yield make
    GATE.set()
    for chat in opened:
        chat.context.close()
    wait_until(lambda: not chats.server.service.replies())


def test_reply_is_shown_as_text_with_its_reasoning_folded_and_its_cost(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("answer")
    chat.send("Hello\nthere")
    chat.wait_end()
    page = chat.page
    assert page.title() == "Hello - localinfer"
    assert page.locator("#log script, #log img").count() == 0
    assert "<script>document.title = 'owned'</script>" in chat.texts(".assistant .body")[0]
    (link,) = page.locator("#log a").all()
    assert link.get_attribute("href") == "https://example.org/"
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert page.locator(".reasoning").get_attribute("open") is None
    assert chat.texts(".reasoning summary") == ["Reasoning · 9 characters"]
    (cost,) = chat.texts(".assistant .stats")
    assert "tokens/s" in cost and "first token after" in cost and "0% of the prompt cached" in cost
    assert "of 4,096 tokens of context" in chat.texts("#context-words")[0]
    page.keyboard.press("Alt+R")
    page.locator(".assistant .stats", has_text=re.compile(r"\b9\d% of the prompt cached")).wait_for()
    assert [len(body["messages"]) for body in chat.bodies] == [1, 1]
    chat.check()


def test_reply_streams_and_a_stop_keeps_what_is_there(open_chat: Callable[..., Chat], chats: ServedModel) -> None:
    chat = open_chat()
    chat.choose("waiting")
    chat.send("Tell me.")
    chat.wait("First")
    assert chats.server.service.replies()
    chat.send("What next?")
    chat.wait("sent when the reply is complete", "#notice")
    assert len(chat.bodies) == 1
    chat.page.locator("#message").press("Escape")
    chat.wait_end()
    assert chat.texts(".assistant .body") == ["First"]
    assert chat.texts(".assistant .note") == ["Stopped."]
    GATE.set()
    assert wait_until(lambda: not chats.server.service.replies())
    chat.page.keyboard.press("Enter")
    chat.page.locator(".assistant").nth(1).get_by_text("First and last.").wait_for()
    chat.wait_end()
    assert [message["content"] for message in chat.bodies[1]["messages"]] == ["Tell me.", "First ", "What next?"]
    chat.check()


def test_a_stopped_reply_is_continued_where_it_ends(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("waiting")
    chat.send("Tell me.")
    chat.wait("First")
    chat.page.locator("#message").press("Escape")
    chat.wait_end()
    GATE.set()
    chat.page.get_by_role("button", name="Continue").click()
    chat.wait("First and last.")
    chat.wait_end()
    assert chat.texts(".turn .body") == ["Tell me.", "First and last."]
    body = chat.bodies[1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("user", "Tell me."),
        ("assistant", "First "),
    ]
    assert chat.page.get_by_role("button", name="Continue").count() == 0
    chat.page.reload()
    chat.wait("First and last.")
    chat.check()


def test_an_edited_message_is_answered_anew_and_can_be_had_back(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("answer")
    for text in ("One", "Two"):
        chat.send(text)
        chat.wait_end()
    chat.page.locator(".user").first.get_by_role("button", name="Edit").click()
    chat.page.get_by_role("textbox", name="Edit message").fill("Eins")
    chat.page.keyboard.press("Enter")
    chat.wait("Eins", ".user")
    chat.wait_end()
    assert chat.texts(".user .body") == ["Eins"]
    assert [message["content"] for message in chat.bodies[2]["messages"]] == ["Eins"]
    chat.page.get_by_role("button", name="Version before").first.click()
    assert chat.texts(".user .body") == ["One", "Two"]
    chat.page.get_by_role("button", name="Version after").first.click()
    assert chat.texts(".user .body") == ["Eins"]
    chat.check()


def test_a_message_edited_during_its_reply_gets_the_new_reply_alone(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("waiting")
    chat.send("One")
    chat.wait("First")
    chat.page.locator(".user").get_by_role("button", name="Edit").click()
    chat.page.get_by_role("textbox", name="Edit message").fill("Eins")
    chat.page.keyboard.press("Enter")
    chat.page.locator("#send", has_text="Stop").wait_for()
    GATE.set()
    chat.wait("First and last.")
    chat.wait_end()
    assert chat.texts(".turn .body") == ["Eins", "First and last."]
    chat.page.reload()
    chat.wait("First and last.")
    assert chat.texts(".turn .body") == ["Eins", "First and last."]
    chat.check()


def test_reload_keeps_conversations_and_a_reply_that_was_being_written(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("waiting")
    chat.send("Tell me.")
    chat.wait("First")
    chat.page.locator("#message").fill("a draft")
    chat.page.reload()
    chat.wait("Cut off")
    assert chat.texts(".assistant .body") == ["First"]
    assert chat.page.locator("#message").input_value() == "a draft"
    GATE.set()
    chat.page.get_by_role("button", name="Regenerate").click()
    chat.wait("First and last.")
    chat.wait_end()
    chat.page.reload()
    chat.wait("First and last.")
    assert chat.texts("#conversations .open") == ["Tell me."]
    chat.check()


def test_conversations_are_renamed_exported_and_deleted(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("answer")
    chat.send("Hello")
    chat.wait_end()
    page = chat.page

    def choose(action: str) -> None:
        page.locator("#actions summary").click()
        page.get_by_role("button", name=action, exact=True).click()

    choose("Rename")
    page.locator("#ask input").fill("A name")
    page.keyboard.press("Enter")
    page.locator("#title", has_text="A name").wait_for()
    with page.expect_download() as exported:
        choose("Export as JSON")
    assert exported.value.suggested_filename == "A-name.json"
    kept = json.loads(exported.value.path().read_text(encoding="utf-8"))
    assert [turn["role"] for turn in kept["turns"]] == ["user", "assistant"]
    assert kept["turns"][1]["finish_reason"] == "stop" and kept["turns"][1]["reasoning"] == "Hm, well."
    choose("Delete")
    page.locator("#conversations .open").wait_for(state="detached")
    page.get_by_role("button", name="Undo").click()
    page.locator("#conversations", has_text="A name").wait_for()
    page.reload()
    page.locator("#conversations", has_text="A name").wait_for()
    chat.check()


def test_options_are_sent_and_new_conversations_begin_with_them(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("answer")
    chat.page.keyboard.press("Alt+O")
    for name, value in {"system": "Be brief.", "temperature": "0", "max_tokens": "5", "seed": "7"}.items():
        chat.page.locator(f"#{name}").fill(value)
    chat.page.get_by_role("button", name="Done").click()
    for _ in range(2):
        chat.page.keyboard.press("Alt+N")
        chat.send("Hello")
        chat.wait_end()
    for body in chat.bodies:
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 5, 7)
    assert "maximum of tokens" in chat.texts(".assistant .note")[0]
    chat.check()


def test_failures_are_told_in_words(open_chat: Callable[..., Chat], chats: ServedModel) -> None:
    chat = open_chat()
    chat.choose("failing")
    chat.send("Hello")
    chat.wait_end()
    assert chat.texts(".assistant .body") == ["abc"]
    (words,) = chat.texts(".assistant .note[role=alert]")
    assert words.startswith("The server says: the server failed") and "secret" not in words
    assert chat.page.get_by_role("button", name="Continue").count() == 1
    chat.page.route("**/chat/completions", lambda route: route.abort())
    chat.send("And now?")
    chat.page.locator(".note", has_text='See whether "localinfer serve" still runs').wait_for()
    assert all("net::ERR_FAILED" in problem for problem in chat.problems)


def test_keyboard_reaches_everything(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    page = chat.page
    focused = "document.activeElement.id || document.activeElement.textContent"
    page.locator("#model option").first.wait_for(state="attached")
    assert page.evaluate(focused) == "message"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "send"
    page.keyboard.press("Control+/")
    assert page.locator("#keys").get_attribute("open") is not None
    page.keyboard.press("Escape")
    assert page.locator("#keys").get_attribute("open") is None
    page.keyboard.press("Alt+M")
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#message").input_value() == "One\ntwo"
    chat.choose("answer")
    page.keyboard.press("Alt+M")
    page.keyboard.press("Enter")
    chat.wait_end()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.value") == "One\ntwo"
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "message"
    page.keyboard.press("Alt+L")
    assert page.evaluate(focused) == "One"
    chat.check()


def test_keys_that_type_go_into_the_text(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(locale="de-DE")
    page = chat.page
    chat.choose("answer")
    chat.send("One")
    chat.wait_end()
    page.locator("#message").focus()
    # As Option-L of a German Mac arrives.
    page.evaluate("""document.activeElement.dispatchEvent(
      new KeyboardEvent('keydown', { key: '@', code: 'KeyL', altKey: true, bubbles: true, cancelable: true }))""")
    assert page.evaluate("document.activeElement.id") == "message"
    for first in ("Control+/", "Control+/"):
        page.keyboard.press(first)
        assert page.locator("#keys").get_attribute("open") is not None
        page.keyboard.press("l")
        assert page.evaluate("document.activeElement.textContent") == "One"
    assert page.locator("#keys").get_attribute("open") is None
    chat.check()


@pytest.mark.parametrize("kept", ["{", "null"])
def test_broken_settings_leave_a_page_that_works(open_chat: Callable[..., Chat], kept: str) -> None:
    chat = open_chat()
    chat.wait_start()
    chat.page.evaluate("(kept) => localStorage.setItem('localinfer.options', kept)", kept)
    chat.page.reload()
    chat.wait("could not be read", "#notice")
    chat.choose("answer")
    chat.send("Hello")
    chat.wait_end()
    chat.page.reload()
    chat.page.locator("#title", has_text="Hello").wait_for()
    assert not chat.page.locator("#notice").is_visible()
    chat.check()


def test_narrow_windows_show_one_column(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.page.set_viewport_size({"width": 360, "height": 640})
    chat.choose("answer")
    chat.send("Hello " + "x" * 200)
    chat.wait_end()
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert chat.page.evaluate("document.getElementById('log').scrollWidth") <= 360
    assert not chat.page.locator("nav").is_visible()
    chat.page.get_by_role("button", name="Conversations").click()
    assert chat.page.locator("nav").is_visible()
    chat.page.keyboard.press("Escape")
    assert not chat.page.locator("nav").is_visible()
    chat.check()


def test_long_replies_are_added_to_and_not_made_anew(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    removed, same, length = chat.page.evaluate("""async () => {
      const root = document.getElementById('log').appendChild(document.createElement('div'));
      let removed = 0;
      new MutationObserver((found) => found.forEach((one) => { removed += one.removedNodes.length; }))
        .observe(root, { childList: true, subtree: true });
      const view = new MarkdownView(root);
      const code = 'let x = 1; // note\\n'.repeat(1000);
      const text = '# Title\\n\\nSome **text** in a line.\\n\\n```js\\n' + code + '```\\n';
      view.feed('begin\\n\\n');
      const first = root.firstChild;
      for (let at = 0; at < text.length; at += 10) view.feed(text.slice(at, at + 10));
      await new Promise(requestAnimationFrame);
      return [removed, first === root.firstChild, root.textContent.length];
    }""")
    assert same and length > 19_000
    assert removed < 20_000
    chat.check()


def test_a_second_tab_sees_a_reply_come_and_its_message_waits(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("waiting")
    chat.send("One")
    chat.wait("First")
    other = chat.second_tab()
    other.choose_conversation("One")
    other.wait("First")
    other.page.locator(".small", has_text="another tab").wait_for()
    assert other.page.locator(".note:visible").count() == 0
    other.send("Two")
    other.wait("sent when the reply is complete", "#notice")
    assert other.bodies == []
    GATE.set()
    for tab in (other, chat):
        tab.page.locator(".assistant").nth(1).get_by_text("First and last.").wait_for()
        tab.wait_end()
        assert tab.texts(".turn .body") == ["One", "First and last.", "Two", "First and last."]
        assert tab.page.locator(".note:visible").count() == 0
        tab.check()
    assert [message["content"] for message in other.bodies[0]["messages"]] == ["One", "First and last.", "Two"]
    chat.page.reload()
    chat.page.locator(".assistant").nth(1).get_by_text("First and last.").wait_for()
    assert chat.texts(".turn .body") == ["One", "First and last.", "Two", "First and last."]


def test_a_closed_tab_is_said_to_have_cut_its_reply_off(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("waiting")
    chat.send("One")
    chat.wait("First")
    other = chat.second_tab()
    other.choose_conversation("One")
    other.wait("First")
    chat.page.close()
    other.wait("Cut off when the page was closed")
    assert other.texts(".assistant .body") == ["First"]
    GATE.set()
    other.page.get_by_role("button", name="Continue").click()
    other.wait("First and last.")
    other.wait_end()
    other.check()


def test_what_is_typed_into_edit_stays_when_another_tab_writes(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("answer")
    chat.send("One")
    chat.wait_end()
    other = chat.second_tab()
    other.choose_conversation("One")
    other.page.locator(".user").get_by_role("button", name="Edit").click()
    field = other.page.get_by_role("textbox", name="Edit message")
    field.fill("half a tho")
    chat.send("Two")
    chat.page.locator(".assistant").nth(1).wait_for()
    chat.wait_end()
    # A branch on which the edited message is not.
    chat.page.locator(".user").first.get_by_role("button", name="Edit").click()
    chat.page.get_by_role("textbox", name="Edit message").fill("Eins")
    chat.page.keyboard.press("Enter")
    chat.wait("Eins", ".user")
    chat.wait_end()
    chat.page.locator("#new").click()
    chat.send("Elsewhere")
    chat.wait_end()
    other.page.locator("#conversations .open", has_text="Elsewhere").wait_for()
    assert field.input_value() == "half a tho"
    field.press("Enter")
    other.wait("half a tho", ".user")
    other.wait_end()
    assert "3/3" in other.texts(".user .versions")[0]
    other.page.reload()
    other.wait("half a tho", ".user")
    other.page.get_by_role("button", name="Version before").click()
    other.wait("Eins", ".user")
    other.page.get_by_role("button", name="Version before").click()
    other.wait("Two", ".user")
    other.check()


def test_a_conversation_that_another_tab_deleted_can_be_kept(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.choose("answer")
    chat.send("One")
    chat.wait_end()
    other = chat.second_tab()
    other.choose_conversation("One")
    chat.page.locator("#conversations li").hover()
    chat.page.get_by_role("button", name="Delete One").click()
    other.wait("deleted in another tab", "#notice")
    assert other.texts(".user .body") == ["One"]
    other.page.get_by_role("button", name="Keep it").click()
    chat.page.locator("#conversations .open", has_text="One").click()
    chat.wait("One", ".user")
    for tab in (chat, other):
        tab.check()


@pytest.mark.parametrize("without", ["navigator.locks", "indexedDB"])
def test_browsers_that_lack_something_work(open_chat: Callable[..., Chat], without: str) -> None:
    chat = open_chat(lacks=without)
    chat.choose("waiting")
    chat.send("One")
    chat.wait("First")
    if without == "indexedDB":
        chat.wait("keeps nothing here", "#notice") if chat.page.locator("#notice").is_visible() else None
        GATE.set()
        chat.wait_end()
        chat.check()
        return
    other = chat.second_tab()
    other.choose_conversation("One")
    other.wait("First")
    other.page.locator(".small", has_text="another tab").wait_for()
    GATE.set()
    other.wait("First and last.")
    other.wait_end()
    assert other.page.locator(".note:visible").count() == 0
    for tab in (chat, other):
        tab.check()


def test_conversations_of_the_version_before_are_taken_over(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(old=True)
    chat.choose_conversation("Old")
    chat.page.locator(".assistant").nth(1).get_by_text("Second and more").wait_for()
    assert chat.texts(".turn .body") == ["One", "First", "Two", "Second and more"]
    chat.wait("Cut off when the page was closed")
    chat.page.reload()
    chat.page.locator(".assistant").nth(1).get_by_text("Second and more").wait_for()
    assert chat.texts("#conversations .open") == ["Old"]
    chat.check()


def test_conversations_are_found_by_their_messages_and_come_back_from_a_file(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    page = chat.page
    chat.choose("answer")
    for text in ("Apples", "Pears"):
        page.locator("#new").click()
        chat.send(text)
        chat.wait_end()
    page.locator("#search").fill("pEARS")
    page.locator("#conversations .open", has_text="Apples").wait_for(state="detached")
    assert chat.texts("#conversations .open") == ["Pears"]
    page.locator("#search").fill("owned")
    page.locator("#conversations .open").nth(1).wait_for()
    page.locator("#actions summary").click()
    with page.expect_download() as exported:
        page.get_by_role("button", name="Export as JSON").click()
    page.locator("#actions summary").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#search").fill("")
    page.locator("#conversations .open", has_text="Pears").wait_for(state="detached")
    page.locator("#import-file").set_input_files(exported.value.path())
    page.locator("#title", has_text="Pears").wait_for()
    assert len(chat.texts(".turn .body")) == 2
    page.reload()
    page.locator("#title", has_text="Pears").wait_for()
    page.locator("#import-file").set_input_files(
        files=[{"name": "x.json", "mimeType": "application/json", "buffer": b"[]"}]
    )
    chat.wait("x.json is no conversation", "#notice")
    chat.check()


def test_a_full_context_offers_what_makes_room(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    page = chat.page
    chat.choose("answer")
    for text in ("One " + "x" * 1000, "Two " + "y" * 2000, "Three"):
        chat.send(text)
        page.locator(".user", has_text=text[:4]).wait_for()
        chat.wait_end()
    chat.wait("soon full", "#context-words")
    page.locator("#room-open").click()
    page.get_by_role("button", name="Leave out the oldest").click()
    chat.wait("no longer reads", "#notice")
    assert not page.locator("#room-open").is_visible()
    chat.send("Four")
    page.locator(".user", has_text="Four").wait_for()
    chat.wait_end()
    asked = [message["content"][:5] for message in chat.bodies[-1]["messages"] if message["role"] == "user"]
    assert asked == ["Three", "Four"]
    chat.send("y" * 3000)
    page.locator(".user").nth(4).wait_for()
    chat.wait_end()
    page.locator("#room-open").click()
    page.get_by_role("button", name="Sum up").click()
    page.locator(".user", has_text="Summarise").wait_for()
    chat.wait_end()
    chat.send("Five")
    page.locator(".user", has_text="Five").wait_for()
    chat.wait_end()
    asked = [message["content"][:9] for message in chat.bodies[-1]["messages"] if message["role"] == "user"]
    assert asked == ["Summarise", "Five"]
    chat.check()


def test_a_message_is_added_to_a_long_conversation_without_touching_the_others(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat()
    chat.wait_start()
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"Message *{i}*", "reasoning": ""} for i in range(2000)]
    kept = {"name": "Long", "model": "answer", "system": "", "options": {}, "turns": turns}
    chat.page.locator("#import-file").set_input_files(
        files=[{"name": "long.json", "mimeType": "application/json", "buffer": json.dumps(kept).encode()}]
    )
    chat.page.locator("#log > article").nth(1999).wait_for(state="attached")
    wait_until(lambda: not chat.page.locator(".raw").count())
    assert chat.page.locator("em").count() == 1000
    chat.page.evaluate("""() => {
      window.changes = 0;
      new MutationObserver((found) => { changes += found.length; })
        .observe(document.getElementById('log'), { childList: true, subtree: true, attributes: true });
    }""")
    chat.choose("answer")
    chat.send("One more")
    chat.page.locator(".user", has_text="One more").wait_for()
    chat.wait_end()
    assert chat.page.locator("#log > article").count() == 2002
    assert chat.page.evaluate("changes") < 200
    assert all("400" in problem for problem in chat.problems), "the model reads no conversation of this length"


def test_policy_stops_what_a_page_must_not_do(open_chat: Callable[..., Chat]) -> None:
    page = open_chat().page
    with pytest.raises(playwright.Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert page.evaluate("fetch('https://example.org/').then(() => 'sent', () => 'refused')") == "refused"
    assert page.evaluate("""new Promise((done) => {
      const script = document.createElement('script');
      document.addEventListener('securitypolicyviolation', () => done('refused'));
      script.append('window.owned = true');
      document.body.append(script);
    })""")
    assert page.evaluate("window.owned") is None


def test_token_is_asked_for_and_kept_while_the_tab_is_open(open_chat: Callable[..., Chat]) -> None:
    settings = ServerSettings(port=0, token="s3cret")
    with serving(settings, sources=scripted_sources("answer"), load=loader(SCRIPTS)) as guarded:
        chat = open_chat(guarded.url)
        for token in ("wrong", "s3cret"):
            chat.page.locator("#ask input[type=password]").fill(token)
            chat.page.keyboard.press("Enter")
        chat.page.locator("#model option", has_text="answer").wait_for(state="attached")
        chat.page.reload()
        chat.page.locator("#model option", has_text="answer").wait_for(state="attached")
        chat.send("Hello")
        chat.wait_end()
        assert chat.page.evaluate("JSON.stringify(localStorage)").count("s3cret") == 0
        assert all("401" in problem for problem in chat.problems)
        chat.context.close()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """A server whose model reads pictures."""
    source = model_source(seeing_demo(tmp_path_factory.mktemp("seeing")))
    assert source is not None
    llm = localinfer.load(source.path, threads=1, disk_cache=False)
    with llm, serving(ServerSettings(port=0), sources=[source], load=lambda _: llm) as running:
        yield running


DROP = """([data, type]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], `${type}.png`, { type: 'image/png' }));
  const options = { bubbles: true, cancelable: true };
  const field = document.getElementById('message');
  field.dispatchEvent(type === 'drop' ? new DragEvent('drop', { ...options, dataTransfer: transfer })
    : new ClipboardEvent('paste', { ...options, clipboardData: transfer }));
}"""


def test_pictures_are_attached_sent_and_kept(browser: Any, seeing: ServedModel, tmp_path: Path) -> None:
    chat = Chat(browser, seeing.url)
    with closing(chat.context):
        page, data = chat.page, base64.b64encode(picture_file()).decode()
        (tmp_path / "chosen.png").write_bytes(picture_file(1))
        page.locator("#attach").wait_for()
        page.set_input_files("#attach-file", str(tmp_path / "chosen.png"))
        for number, way in enumerate(("drop", "paste"), 1):
            page.evaluate(DROP, [data, way])
            page.locator("#attached li").nth(number).wait_for()
        page.get_by_label("Remove drop.png").click()
        chat.send("What is it?")
        chat.wait_end()
        sent = chat.bodies[-1]["messages"][-1]["content"]
        assert [part["type"] for part in sent] == ["image_url", "image_url", "text"]
        assert sent[1]["image_url"]["url"] == f"data:;base64,{data}"
        assert page.locator("#attached li").count() == 0
        page.reload()
        page.locator(".turn.user img.thumbnail").nth(1).wait_for()
        assert page.evaluate("document.querySelector('.turn.user img').naturalWidth") == 60
        assert not chat.problems and not page.evaluate("window.violations")
