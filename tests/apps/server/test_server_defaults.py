"""Options of replies by precedence: the request's, the command line's, the configuration's, the file's, ours."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from local_servers import STORY

from localinfer.apps.cli import EXIT_BAD_INPUT, main
from localinfer.apps.config import config_path
from localinfer.apps.server.app import LocalServer
from localinfer.engine.sampling.params import NUMBER_OPTIONS
from tests.support.limits import seconds

CHAT = "/v1/chat/completions"
OF_FILE = ["--set", "general.sampling.temp=0.25", "--set", "general.sampling.top_k=7"]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Run `localinfer serve` with words until a function of its client has returned; its result and that server."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run = LocalServer.run

    def call(*words: str, ask: Callable[[httpx.Client], Any] = lambda client: None) -> tuple[LocalServer, Any]:
        found: list[Any] = []

        def run_and_ask(server: LocalServer, on_ready: Callable[[], object]) -> None:
            def work() -> None:
                url = f"http://127.0.0.1:{server.port}"
                with httpx.Client(base_url=url, timeout=seconds(15), trust_env=False, verify=False) as client:
                    (served, *_) = server.service.registry.models()
                    try:
                        found.extend((server, dict(served.llm.defaults), ask(client)))
                    finally:
                        server.stop()

            run(server, on_ready=lambda: threading.Thread(target=work).start())

        monkeypatch.setattr(LocalServer, "run", run_and_ask)
        assert main(["serve", "--port", "0", "--no-socket", "--no-disk-cache", "--threads", "1", *words]) == 0
        return tuple(found)

    return call


def configure(text: str) -> None:
    path = config_path()
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_each_source_of_an_option_goes_before_the_next(serve):
    _, defaults, _ = serve(*OF_FILE)
    assert defaults == {"temperature": 0.25, "top_k": 7}
    configure("[sampling]\ntop_k = 9\ntop_p = 0.5\nseed = 3\n")
    _, defaults, _ = serve(*OF_FILE)
    assert defaults == {"temperature": 0.25, "top_k": 9, "top_p": 0.5, "seed": 3}
    _, defaults, _ = serve(*OF_FILE, "--top-p", "0.75", "--no-config")
    assert defaults == {"temperature": 0.25, "top_k": 7, "top_p": 0.75}
    _, defaults, _ = serve(*OF_FILE, "--ignore-model-sampling", "--temp", "0.125", "--max-tokens", "5")
    assert defaults == {"temperature": 0.125, "top_k": 9, "top_p": 0.5, "seed": 3, "max_tokens": 5}


def test_what_is_set_for_one_model_goes_before_what_is_set_for_all(serve, tmp_path):
    (tmp_path / "models.toml").write_text(
        "[defaults.sampling]\ntop_p = 0.5\n[models.demo-f16]\nignore-model-sampling = true\n"
        "[models.demo-f16.sampling]\ntemperature = 0.75\n"
    )
    _, defaults, _ = serve(*OF_FILE, "--models-config", str(tmp_path / "models.toml"), "--temp", "0", "--top-p", "1")
    assert defaults == {"temperature": 0.75, "top_p": 0.5}


def test_every_option_of_the_table_is_one_of_the_server(serve):
    values = {"mirostat": 2, "dry_base": 1.5, "repetition_last_n": 5, "dry_allowed_length": 3, "dry_last_n": 9}
    wanted = {name: values.get(name, 1 if option.kind is int else 0.5) for name, option in NUMBER_OPTIONS.items()}
    words = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    _, defaults, _ = serve(*words, "--dry-sequence-breaker", ".", "--logit-bias", "5=-1", "--seed", "4")
    assert defaults == {**wanted, "dry_sequence_breakers": ["."], "logit_bias": {5: -1.0}, "seed": 4}


def test_request_goes_before_all(serve):
    def ask(client: httpx.Client) -> list[Any]:
        def chat(**more: Any) -> dict[str, Any]:
            return client.post(CHAT, json={"messages": STORY, **more}).json()

        def complete(**more: Any) -> dict[str, Any]:
            return client.post("/v1/completions", json={"prompt": "Once", **more}).json()

        def said(reply: dict[str, Any]) -> str:
            (choice,) = reply["choices"]
            return choice["text"] if "text" in choice else choice["message"]["content"]

        assert said(chat()) == said(chat(temperature=0, top_k=0)) == said(chat(seed=1))
        assert said(chat(max_tokens=9)).startswith(said(chat()))
        assert chat()["usage"]["completion_tokens"] == 5
        assert complete()["usage"]["completion_tokens"] == 5
        assert complete(max_tokens=7)["usage"]["completion_tokens"] == 7
        assert said(complete()) == said(complete(temperature=0))
        assert len({choice["message"]["content"] for choice in chat(n=4, temperature=3.0, min_p=0)["choices"]}) > 1
        hot = {"temperature": 3.0, "top_p": 1, "min_p": 0, "top_k": 0}
        assert len({said(chat(**hot, seed=seed)) for seed in range(4)}) > 1
        own = client.post("/v1/messages", json={"messages": STORY, "max_tokens": 5}).json()
        assert own["content"][0]["text"] == said(chat())
        response = client.post("/v1/responses", json={"input": STORY[0]["content"]}).json()
        assert response["output"][0]["content"][0]["text"] == said(chat())
        return []

    serve("--temp", "0", "-n", "5", "--seed", "7", ask=ask)
    _, defaults, tokens = serve(ask=lambda client: client.post("/v1/completions", json={"prompt": "Once"}).json())
    assert defaults == {}
    assert tokens["usage"]["completion_tokens"] <= 16


def test_model_is_called_by_its_aliases(serve):
    def ask(client: httpx.Client) -> list[str]:
        for name in ("house", "gpt-4o", "demo-f16", None):
            reply = client.post(CHAT, json={"messages": STORY, "max_tokens": 1, "model": name})
            assert reply.json()["model"] == "house"
        assert client.post(CHAT, json={"messages": STORY, "model": "other"}).status_code == 404
        return [card["id"] for card in client.get("/v1/models").json()["data"]]

    assert serve("--alias", "house,gpt-4o", "--strict-model", ask=ask)[2] == ["house"]


def test_key_and_template_may_be_given_by_their_names_elsewhere(serve, tmp_path, capsys):
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}")

    def ask(client: httpx.Client) -> str:
        assert client.post("/apply-template", json={"messages": STORY}).status_code == 401
        client.headers["authorization"] = "Bearer key"
        return client.post("/apply-template", json={"messages": STORY}).json()["prompt"]

    words = ("--api-key", "key", "--chat-template-file", str(template))
    assert serve(*words, ask=ask)[2] == STORY[0]["content"]
    assert main(["serve", *words, "--chat-template", str(template)]) == EXIT_BAD_INPUT
    assert main(["serve", "--api-key", "key", "--token-file", str(template)]) == EXIT_BAD_INPUT
    assert "--api-key" in capsys.readouterr().err


def test_reasoning_is_switched_where_a_model_has_some(serve, tmp_path):
    template = tmp_path / "template"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )

    def prompt(client: httpx.Client, **more: Any) -> str:
        return client.post("/apply-template", json={"messages": STORY, **more}).json()["prompt"]

    words = ("--chat-template", str(template))
    asked, overruled = serve(
        *words, "--reasoning", "off", ask=lambda client: (prompt(client), prompt(client, enable_thinking=True))
    )[2]
    assert asked.endswith("</think>\n\n")
    assert overruled.endswith("assistant\n") == serve(*words, ask=prompt)[2].endswith("assistant\n")
    assert serve("--reasoning", "on", "--reasoning-budget", "5")[1] == {}
    assert serve(*words, "--reasoning", "on", "--reasoning-budget", "5")[1] == {"thinking": True, "thinking_budget": 5}


def test_the_date_of_a_template_is_asked_for_by_a_request_or_for_all(serve, tmp_path):
    """Requests add to the variables of the command line, name by name."""
    template = tmp_path / "dated.jinja"
    own = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    template.write_text(own + "{{ date_string }}|{{ name }}|{% for m in messages %}{{ m.content }}{% endfor %}")

    def ask(client: httpx.Client) -> list[str]:
        asked: list[dict[str, Any]] = [{}, {"template_date": "2027-01-02"}, {"date_string": "1 May"}, {"name": "B"}]
        prompts = []
        for variables in asked:
            body = {"messages": STORY, "chat_template_kwargs": variables}
            prompts.append(client.post("/apply-template", json=body).json()["prompt"])
            assert client.post(CHAT, json={**body, "max_tokens": 1}).status_code == 200
        wrong = client.post(CHAT, json={"messages": STORY, "chat_template_kwargs": {"template_date": "soon"}})
        assert wrong.status_code == 400 and "such as" in wrong.json()["error"]["message"]
        cached = client.post(CHAT, json={"messages": STORY, "max_tokens": 1}).json()["usage"]
        assert cached["prompt_tokens_details"]["cached_tokens"] > 0
        return ["|".join(prompt.split("|")[:2]) for prompt in prompts]

    words = ["--chat-template", str(template)]
    _, _, found = serve(*words, ask=ask)
    assert found == ["26 Jul 2024|", "02 Jan 2027|", "1 May|", "26 Jul 2024|B"]
    words += ["--chat-template-kwargs", "template_date=2026-10-01", "--chat-template-kwargs", '{"name": "A"}']
    _, defaults, found = serve(*words, ask=ask)
    assert defaults["template_variables"] == {"template_date": "2026-10-01", "name": "A"}
    assert found == ["01 Oct 2026|A", "02 Jan 2027|A", "1 May|A", "01 Oct 2026|B"]
