"""`/v1/audio/transcriptions` and `/v1/audio/translations`: what a sound says, as a chat with a model that hears."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localinfer.apps.server.api.serving import Event, ReplyWriter, chat_plan, serve_reply, usage
from localinfer.apps.server.replies.fields import given
from localinfer.apps.server.replies.reply import Reply, TextPlan
from localinfer.apps.server.replies.service import caller_options, read_form
from localinfer.apps.server.transport.http import DONE, ApiError, unsupported
from localinfer.apps.server.transport.known_fields import SPEECH
from localinfer.engine.sampling.params import MAX_SEED
from localinfer.generation.chat.media_parts import MediaSource

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, StreamEvent
    from localinfer.llm import LLM

_FORMATS = ("json", "text")
_TRANSCRIBE = "Write down what is said, in the language in which it is said. Answer with these words only."
_TRANSLATE = "Write down what is said, in English. Answer with the translation only."

Sound = Annotated[bytes, Meta(extra_json_schema={"contentEncoding": "binary", "format": "binary"})]


class SpeechRequest(msgspec.Struct, kw_only=True):
    """The members of a request about a sound, which comes as a form.

    file: WAV, FLAC, Ogg, MP3 or AIFF. prompt: what the model should know, such as names that are said, or how it should
    write. language: in which it is spoken, as a code or a name. temperature: 0 if nothing is said.
    max_completion_tokens: of the text, at most.
    """

    known_fields: ClassVar = SPEECH

    file: Sound
    model: str | None = None
    prompt: Annotated[str, Meta(max_length=1 << 16)] | None = None
    language: Annotated[str, Meta(max_length=64)] | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt", "diarized_json"] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: int | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    stream: bool | None = None

    def messages(self, instruction: str) -> list[dict[str, Any]]:
        """The chat whose reply is the text. Raises: ApiError."""
        if not self.file:
            raise ApiError(400, "file is empty; send the bytes of a sound", param="file")
        if self.response_format not in (None, *_FORMATS):
            raise unsupported(
                f"response_format is {self.response_format}, and no model here tells when or by whom words were said; "
                f"send {' or '.join(_FORMATS)}",
                "response_format",
            )
        lines = [instruction]
        if self.language:
            lines.append(f"The language is: {self.language}.")
        if self.prompt:
            lines.append(self.prompt)
        text = {"type": "text", "text": "\n".join(lines)}
        return [{"role": "user", "content": [text, MediaSource("audio", self.file, "file")]}]

    def generation_options(self) -> dict[str, Any]:
        """The engine's options."""
        seed = None if self.seed is None else self.seed % (MAX_SEED + 1)
        sampling = given(top_p=self.top_p, seed=seed, max_tokens=self.max_completion_tokens)
        return {"temperature": self.temperature or 0.0, "thinking": False, **sampling}


async def transcriptions(request: Request) -> Response:
    """Write down what a sound says."""
    return await _answer(request, _TRANSCRIBE)


async def translations(request: Request) -> Response:
    """Write down in English what a sound says."""
    return await _answer(request, _TRANSLATE)


async def _answer(request: Request, instruction: str) -> Response:
    body = await read_form(request, SpeechRequest)
    chat = chat_plan(body.messages(instruction), {**body.generation_options(), **caller_options(request)})

    def plan(llm: "LLM") -> Sequence[TextPlan]:
        if "audio" not in llm.capabilities:
            raise unsupported(
                f"the model {body.model or llm.info.name!r} hears no sounds; ask one with an encoder for them, "
                'whose capabilities at /v1/models have "audio"',
                "model",
            )
        return chat(llm)

    return await serve_reply(request, body, "transcription", plan, lambda reply: _SpeechWriter(reply, body))


class _SpeechWriter(ReplyWriter):
    """The text as it comes, and at the end all of it; or all of it alone, as JSON or plain text."""

    last_frame = DONE

    def __init__(self, reply: Reply, body: SpeechRequest) -> None:
        super().__init__(reply)
        self._texts: list[str] = []
        self._reason = "stop"
        if body.response_format == "text":
            self.respond = _plain

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        if token.text:
            self._texts.append(token.text)
            yield {"type": "transcript.text.delta", "delta": token.text}

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        self._reason = reason
        return iter(())

    def finish(self) -> Iterator[Event]:
        yield {"type": "transcript.text.done", **self.whole()}

    def whole(self) -> dict[str, Any]:
        # Not of OpenAI: a text that was cut off is none that ended.
        cut = {} if self._reason == "stop" else {"finish_reason": self._reason}
        return {"text": "".join(self._texts), **cut, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        counted = usage(self.reply)
        prompt_ids = self.reply.prompt_ids(0)
        heard = 0 if prompt_ids is None else int((prompt_ids < 0).sum())
        return {
            "type": "tokens",
            "input_tokens": counted["prompt_tokens"],
            "input_token_details": {"audio_tokens": heard, "text_tokens": counted["prompt_tokens"] - heard},
            "output_tokens": counted["completion_tokens"],
            "total_tokens": counted["total_tokens"],
        }


def _plain(whole: dict[str, Any]) -> Response:
    return PlainTextResponse(f"{whole['text']}\n")
