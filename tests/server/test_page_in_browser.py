"""The chat page in a headless Chromium: what a user does, and that nothing runs or leaves the page but what should."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from local_servers import ServedModel, serving
from scripted_models import loader, scripted_sources

from localinfer.server.transport.settings import ServerSettings
from tests.limits import seconds, wait_until

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

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 800}, **options)
        self.context.set_default_timeout(1000 * min(20, seconds(10)))
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.url = url
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.page.on(
            "console", lambda line: self.problems.append(line.text) if line.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(url + "/")

    def _note(self, request: Any) -> None:
        self.asked.append(request.url)
        if request.url.endswith("/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    def choose(self, model: str) -> None:
        self.page.locator("#model").select_option(model)

    def send(self, text: str) -> None:
        self.page.locator("#message").fill(text)
        self.page.keyboard.press("Enter")

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

    def make(url: str = chats.url, **options: Any) -> Chat:
        opened.append(Chat(browser, url, **options))
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
    chat.wait("your message waits", "#notice")
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
    chat.wait_end()
    assert chat.texts(".user .body") == ["Eins"]
    assert [message["content"] for message in chat.bodies[2]["messages"]] == ["Eins"]
    chat.page.get_by_role("button", name="Undo").click()
    assert chat.texts(".user .body") == ["One", "Two"]
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
    assert chat.texts("#conversations button") == ["Tell me."]
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
    assert chat.texts("#conversations button") == []
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
