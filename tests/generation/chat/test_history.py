"""A reply keeps the ids it was generated with, and never at the price of another text."""

import random
from itertools import count

import numpy as np
import pytest

from localinfer.errors import TemplateError
from localinfer.generation.chat_model import ChatHistory
from localinfer.llm import LLM
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.template_costs import MAX_RENDER_SECONDS, sharing_render_time
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.storage.chats import EncodedChat
from tests.engine.fakes import ByteTokenizer, FakeModel, FakeTemplate, fake_model
from tests.models.text.vocabularies import REAL, bpe_metadata, real_tokenizer, spm_metadata

Messages = list[dict[str, str]]
MESSAGE = "{{ '### ' ~ message.role ~ '\n' ~ CONTENT ~ 'END\n' }}"
MARKED = "{% for message in messages %}" + MESSAGE + "{% endfor %}{{ '### assistant\n' }}"
STYLES = {
    "verbatim": MARKED.replace("CONTENT", "message.content"),
    "trimmed": MARKED.replace("CONTENT", "(message.content | trim)"),
    "plain": MARKED.replace("CONTENT", "message.content").replace("END", "\\n"),
}
REPLIES = [
    "Hello there",
    "a  b\n\n  c\n",
    "naïve café – 東京 😀",
    "<|im_end|> is text, <s> too",
    "x",
    " leading",
    "1,234.5",
]


def ask(*texts: str) -> Messages:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def odd_ids(tokenizer: Tokenizer, text: str, seed: int) -> list[int]:
    """Ids of a text that is cut at random, as a model might choose them."""
    chooser, ids = random.Random(seed), []
    while text:
        size = chooser.randrange(1, 5)
        ids += tokenizer.encode_segments([(text[:size], False)], continues_run=True)
        text = text[size:]
    return ids


def check_turns(tokenizer: Tokenizer, style: str, seed: int) -> int:
    """Answer three times; every prompt reads as one encoded anew. Return how many replies kept their ids."""
    end = tokenizer.token_text(min(tokenizer.eog_token_ids))
    template = ChatTemplate(STYLES[style].replace("END", end))
    history, texts, kept = ChatHistory(template, tokenizer), ["Hi, <|im_start|>!"], 0
    former: EncodedChat | None = None
    reply_ids: list[int] = []
    for turn in range(3):
        prompt = history.encode(ask(*texts))
        canonical = template.encode(tokenizer, ask(*texts))
        assert tokenizer.decode(prompt.token_ids.tolist(), skip_special=False) == tokenizer.decode(
            canonical, skip_special=False
        )
        specials = [i for i in canonical if tokenizer.is_special(i)]
        assert [i for i in prompt.token_ids.tolist() if tokenizer.is_special(i)] == specials
        if former is not None:
            expected = np.concatenate((former.token_ids, np.array(reply_ids, np.int32)))
            kept += np.array_equal(prompt.token_ids[: expected.size], expected)
        former = prompt
        reply = REPLIES[(seed + turn) % len(REPLIES)]
        reply_ids = odd_ids(tokenizer, reply, seed)
        history.remember(prompt, [*reply_ids, min(tokenizer.eog_token_ids)])
        texts += [reply, "And then?"]
    return kept


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_prompts_with_kept_replies_read_as_if_encoded_anew(kind: str, style: str):
    tokenizer = Tokenizer.from_metadata(bpe_metadata() if kind == "bpe" else spm_metadata())
    kept = sum(check_turns(tokenizer, style, seed) for seed in range(14))
    assert kept >= (24 if style == "verbatim" else 12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies_keep_replies_too(name: str, style: str):
    assert sum(check_turns(real_tokenizer(name), style, seed) for seed in range(7)) >= 5


def fake_history() -> ChatHistory:
    return ChatHistory(FakeTemplate(), ByteTokenizer())  # type: ignore[arg-type]


def test_edited_reply_is_encoded_anew_from_the_last_turn_that_was_not():
    history = fake_history()
    first = history.encode(ask("one"))
    history.remember(first, [*b"good", 257])
    second = history.encode(ask("one", "good", "two"))
    history.remember(second, [*b"better", 257])
    edited = history.encode(ask("one", "good", "two", "best", "three"))
    turns = [256, 258, *b"one", 259, *b"good", 257, 258, *b"two", 259, *b"best", 257, 258, *b"three", 259]
    assert edited.token_ids.tolist() == turns
    assert edited.history is not None and edited.history.tolist() == [*first.token_ids, *b"good", 257]


def test_reply_cut_in_the_midst_of_a_character_reads_as_it_was_shown():
    history = fake_history()
    first = history.encode(ask("one"))
    history.remember(first, list("né€".encode())[:-1])
    second = history.encode(ask("one", "né�", "two"))
    assert ByteTokenizer().decode(second.token_ids.tolist()) == "onené�two"


def test_system_tokens_end_with_the_system_message_or_before_the_first():
    history = fake_history()
    system = [{"role": "system", "content": " Be kind. "}, *ask("hi")]
    assert history.encode(system).system_tokens == 2 + len(" Be kind.")
    assert history.encode(ask("hi")).system_tokens == 2
    assert history.encode(ask("")).system_tokens == 0


class WordTokenizer(ByteTokenizer):
    """As bytes, but 'then' is one token, 7."""

    def encode_segments(self, segments, *, continues_run=False, max_tokens=None):  # type: ignore[no-untyped-def]
        ids = super().encode_segments(segments)
        text = ",".join(map(str, ids))
        return [int(i) for i in text.replace(",".join(map(str, b"then")), "7").split(",")]

    def token_bytes(self, token_id: int) -> bytes:
        return b"then" if token_id == 7 else super().token_bytes(token_id)


def chatting(reply: str) -> tuple[LLM, FakeModel]:
    """A model that answers every prompt with the bytes of a reply."""

    def logits(history, vocab_size):  # type: ignore[no-untyped-def]
        begun = history[int(np.flatnonzero(history == 259)[-1]) + 1 :]
        row = np.zeros(vocab_size, np.float32)
        row[[*reply.encode(), 257][begun.size]] = 50
        return row

    model = fake_model(logits, context_length=256)
    model.tokenizer, model.chat_template = WordTokenizer(), FakeTemplate()
    return LLM(model), model  # type: ignore[arg-type]


def test_next_turn_computes_only_the_newest_message_though_the_reply_would_be_cut_otherwise():
    llm, model = chatting("and then")
    messages = ask("Hello")
    messages.append({"role": "assistant", "content": llm.chat(messages, temperature=0).text})
    messages += ask("more")
    before = sum(model.program.batch_sizes)
    completion = llm.chat(messages, temperature=0)
    # The end token that was sampled but never computed, a role, four bytes, a role; then the reply's tokens.
    assert sum(model.program.batch_sizes) - before == 7 + len("and then")
    assert completion.text == "and then"
    assert completion.stats.cached_tokens == 2 + 5 + 1 + len("and then") and completion.stats.cache_miss is None
    assert completion.stats.prompt_tokens == completion.stats.cached_tokens + 7


def test_template_that_writes_history_anew_is_named_as_the_cause():
    class Forgetful(FakeTemplate):
        def render_segments(self, messages, spellings, **_):  # type: ignore[no-untyped-def]
            changed = [dict(message, content=message["content"].replace("hm", "")) for message in messages]
            return super().render_segments(changed, spellings)

    llm, model = chatting("hm, yes")
    model.chat_template = Forgetful()
    llm = LLM(model)  # type: ignore[arg-type]
    messages = ask("Hello")
    messages.append({"role": "assistant", "content": llm.chat(messages, temperature=0).text})
    stats = llm.chat([*messages, *ask("more")], temperature=0).stats
    assert stats.cache_miss == (
        "the chat template wrote an earlier message anew at token 8, after '<begin><user>Hello<bot>'"
        ": cached 'hm, yes', now ', yes<end><user>m'"
    )
    assert llm.chat(ask("Help"), temperature=0).stats.cache_miss == (
        "the text differs at token 5, after '<begin><user>Hel': cached 'lo<bot>, yes', now 'p<bot>'"
    )


DEMANDING = """{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index -%}{%- endif -%}
{%- endfor -%}
{%- if last.user < 0 -%}{{- raise_exception('No user query found.') -}}{%- endif -%}
{{- messages[0].content ~ '\\n' -}}{%- for tool in tools or [] -%}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}
{%- for message in messages[1:] -%}
{{- '### ' ~ message.role ~ '\\n' -}}
{%- if message.role == 'assistant' and loop.index >= last.user -%}{{- '(thinking)' -}}{%- endif -%}
{{- message.content ~ 'END\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant\\n(thinking' -}}{%- endif -%}"""


def test_places_where_other_chats_part_are_found_whatever_the_template_demands():
    """It refuses chats without a user's message, writes tools behind the system message, and forgets thinking."""
    tokenizer = ByteTokenizer()
    history = ChatHistory(ChatTemplate(DEMANDING), tokenizer, finds_branches=True)  # type: ignore[arg-type]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]

    def places(*messages: dict[str, str]) -> list[str]:
        """The text up to each place, from the first message on."""
        chat = history.encode([{"role": "system", "content": "Be brief."}, *messages], tools)
        shared = chat.text.index("### user")
        assert "clock" in chat.text[:shared]
        return [tokenizer.decode(chat.token_ids[:count].tolist())[shared:] for count in chat.branch_tokens]

    first, second = ({"role": "user", "content": text} for text in ("xy?", "and now?"))
    assert places(first) == ["### user\n", "### user\nxy?END\n"]
    begun = "### user\nxy?END\n### assistant\n"
    # Before the first message, before thinking that is yet to be forgotten, before the last message and the reply.
    asked = begun + "noonEND\n### user\n"
    reply = {"role": "assistant", "content": "noon"}
    assert places(first, reply, second) == ["### user\n", begun, asked, asked + "and now?END\n"]


def test_renderings_of_one_chat_share_the_time_that_one_may_take(monkeypatch: pytest.MonkeyPatch):
    """A clock that goes on by 0.05 s whenever somebody looks at it, as a rendering does every few hundred steps."""
    looks = count()
    monkeypatch.setattr("localinfer.models.text.template_costs.time.thread_time", lambda: next(looks) * 0.05)
    template = ChatTemplate(MARKED.replace("CONTENT", "message.content") + "{% for i in range(9000) %}{% endfor %}")
    chat = ask("one", "two", "three")
    assert template.render(chat) == template.render(chat)
    with sharing_render_time():
        template.render(chat)
        with pytest.raises(TemplateError, match="rendering one chat takes longer than 3 s"):
            template.render(chat)
    with sharing_render_time(1.0), sharing_render_time(), pytest.raises(TemplateError, match="takes longer than"):
        template.render(chat)
    began = next(looks)
    history = ChatHistory(template, ByteTokenizer(), finds_branches=True)  # type: ignore[arg-type]
    encoded = history.encode(chat)
    took = 0.05 * (next(looks) - began)
    # Each further rendering is refused at its first look.
    assert MAX_RENDER_SECONDS <= took < MAX_RENDER_SECONDS + 1
    assert encoded.text == template.render(chat) and not encoded.branch_tokens
