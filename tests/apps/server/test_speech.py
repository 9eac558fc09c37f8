"""What a sound says: forms with a file, on a server whose model hears, and on one whose model does not."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_imports import import_or_skip
from starlette.datastructures import Headers

import localinfer
from localinfer.apps.server.api.audio import SpeechRequest
from localinfer.apps.server.router.model_folder import model_source
from localinfer.apps.server.transport.bodies import form_record
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import ServerSettings
from tests.apps.server.local_servers import serving
from tests.support.seeing_model import hearing_demo, seeing_demo, sound_file

pytest.importorskip("soundfile", reason="soundfile is an optional package")
pytest.importorskip("soxr", reason="soxr is an optional package")
pytest.importorskip("PIL", reason="Pillow is an optional package")
PATH = "/v1/audio/transcriptions"
ROWS = 5
SOUND = ("said.wav", sound_file(ROWS), "audio/wav")
MODEL = {"model": "demo-f16", "max_completion_tokens": "6"}


def client_of(path: Any) -> Iterator[httpx.Client]:
    source = model_source(path)
    assert source is not None
    llm = localinfer.load(source.path, threads=1, disk_cache=False)
    settings = ServerSettings(port=0, max_body_bytes=1 << 20)
    with (
        llm,
        serving(settings, sources=[source], load=lambda _: llm) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server whose model hears."""
    yield from client_of(hearing_demo(tmp_path_factory.mktemp("hearing")))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of one whose model sees only."""
    yield from client_of(seeing_demo(tmp_path_factory.mktemp("seeing")))


def sent(client: httpx.Client, path: str = PATH, sound: Any = SOUND, **more: Any) -> httpx.Response:
    return client.post(path, data={**MODEL, **more}, files={"file": sound})


@pytest.mark.system
class TestServer:
    """Over a socket."""

    def test_tokens_of_the_sound_and_of_the_text_are_counted(self, hearing: httpx.Client) -> None:
        answer = sent(hearing)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        usage = found["usage"]
        assert found["text"] and usage["output_tokens"] <= 6 and usage["type"] == "tokens"
        assert usage["input_token_details"]["audio_tokens"] == ROWS
        longer = sent(hearing, prompt="Names: Ada, Bo.", language="en").json()["usage"]
        assert longer["input_token_details"]["audio_tokens"] == ROWS
        assert longer["input_tokens"] > usage["input_tokens"]

    def test_the_text_is_the_same_in_every_form(self, hearing: httpx.Client) -> None:
        text = sent(hearing).json()["text"]
        plain = sent(hearing, response_format="text")
        assert plain.text == f"{text}\n" and plain.headers["content-type"].startswith("text/plain")
        lines = sent(hearing, stream="true").text.split("\n\n")
        assert lines[0].startswith("event: transcript.text.delta") and lines[-2] == "data: [DONE]"

    def test_translations_are_asked_for_otherwise(self, hearing: httpx.Client) -> None:
        counted = [sent(hearing, f"/v1/audio/{name}").json() for name in ("transcriptions", "translations")]
        assert counted[0]["usage"]["input_tokens"] != counted[1]["usage"]["input_tokens"]

    @pytest.mark.parametrize(
        ("param", "change"),
        [
            ("response_format", {"response_format": "verbose_json"}),
            ("response_format", {"response_format": "tables"}),
            ("temperature", {"temperature": "warm"}),
            ("timestamp_granularities", {"timestamp_granularities[]": ["word"]}),
            ("file", {"sound": (None, "a text")}),
            ("file", {"sound": ("said.wav", b"")}),
            ("file", {"sound": ("said.wav", b"RIFF")}),
        ],
    )
    def test_what_is_missing_or_wrong_is_named(self, hearing: httpx.Client, param: str, change: Any) -> None:
        answer = sent(hearing, **change)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param

    def test_a_model_that_does_not_hear_is_named(self, seeing: httpx.Client) -> None:
        answer = sent(seeing)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
        assert "'demo-f16' hears no sounds" in answer.text

    def test_a_form_is_bounded_as_every_body_is(self, hearing: httpx.Client) -> None:
        answer = sent(hearing, sound=("long.wav", bytes(1 << 20)))
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"

    def test_forms_are_taken_nowhere_else_and_json_not_here(self, hearing: httpx.Client) -> None:
        assert sent(hearing, "/v1/chat/completions").status_code == 415
        assert hearing.post(PATH, json=MODEL).json()["error"]["code"] == "not_a_form"
        other = {"origin": "http://evil.example"}
        assert hearing.post(PATH, data=MODEL, files={"file": SOUND}, headers=other).status_code == 403

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.usefixtures("own_leftovers")
    def test_openai(self, hearing: httpx.Client) -> None:
        openai = import_or_skip("openai")
        text = sent(hearing).json()["text"]
        with openai.OpenAI(base_url=f"{hearing.base_url}/v1", api_key="none") as client:
            asked = {"model": "demo-f16", "file": SOUND, "extra_body": {"max_completion_tokens": 6}}
            made = client.audio.transcriptions.create(**asked, temperature=0, language="")
            assert made.text == text and made.usage.input_token_details.audio_tokens == ROWS
            assert client.audio.transcriptions.create(**asked, response_format="text") == f"{text}\n"
            events = list(client.audio.transcriptions.create(**asked, stream=True))
            assert "".join(event.delta for event in events[:-1]) == events[-1].text == text
            assert events[-1].usage.total_tokens == made.usage.total_tokens
            assert client.audio.translations.create(**asked).text
            with pytest.raises(openai.BadRequestError, match="verbose_json"):
                client.audio.transcriptions.create(**asked, response_format="verbose_json")


def form(*parts: tuple[str, str, bytes]) -> bytes:
    """A form of names, further members of their lines, and contents."""
    written = b"".join(
        b'--cut\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more.encode(), content)
        for name, more, content in parts
    )
    return written + b"--cut--\r\n"


def parsed(body: bytes, kind: str = "multipart/form-data; boundary=cut") -> SpeechRequest:
    return form_record(body, Headers({"content-type": kind}), SpeechRequest)


def test_a_form_becomes_the_record_that_json_would() -> None:
    file = ("file", '; filename="a.wav"', b"\r\n--cu\r\n\x00" * 3)
    made = parsed(form(file, ("temperature", "", b"0.5"), ("stream", "", b"true"), ("prompt", "", b"")))
    assert (made.file, made.temperature, made.stream, made.prompt) == (file[2], 0.5, True, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--cut",
        b"--cut\r\nContent-Disposition: form-data\r\n\r\nx\r\n--cut--\r\n",
        form(*[("file", '; filename="a"', b"x")] * 2),
        form(*[("prompt", "", b"x")] * 1000),
        form(("prompt", "", bytes(1 << 20))),
        b"--cut\r\n" + b"X: y\r\n" * 100_000,
        b"--cut\r\nX: " + b"y" * (1 << 20),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parsed(body)
    assert error.value.status == 400


def test_a_form_without_a_boundary_or_a_file_is_refused() -> None:
    with pytest.raises(ApiError, match="boundary"):
        parsed(form(("file", '; filename="a"', b"x")), "multipart/form-data")
    with pytest.raises(ApiError) as error:
        parsed(form(("prompt", "", b"x")))
    assert error.value.param == "file"
