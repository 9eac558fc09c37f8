"""Checks of a chat template against the vocabulary: its markers are tokens, and what closes a reply ends it."""

import re
from collections.abc import Iterator, Sequence

from localinfer.errors import TemplateError
from localinfer.models.checks.finding import Finding
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_learning import ANSWER, ASK
from localinfer.models.text.splitting import find_end_of_generation
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import TokenType

_MARKER = re.compile(r"<\|[^<>|\s'\"{}%]{1,40}\|>|<｜[^<>｜\s'\"{}%]{1,40}｜>|<(?:start|end)_of_turn>")
_TURN_BEGINS = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<start_of_turn>": "Gemma",
    "<|START_OF_TURN_TOKEN|>": "Command R",
    "<|header_start|>": "Llama 4",
    "<｜User｜>": "DeepSeek",
}
"""The marker that begins a turn, and whose it is; in a vocabulary each is one token that nothing else is for."""
_TURN_ENDS = {
    "<|im_start|>": "<|im_end|>",
    "<|start_header_id|>": "<|eot_id|>",
    "<start_of_turn>": "<end_of_turn>",
    "<|START_OF_TURN_TOKEN|>": "<|END_OF_TURN_TOKEN|>",
    "<|header_start|>": "<|eot|>",
}
"""The marker that closes a turn which the other one begins."""
_CLOSER = re.compile(r"(?i)end|eo[tsm](?![a-z])|stop")
_OF_CONTENT = re.compile(
    r"(?i)header|image|vision|video|audio|media|tool|call|think|reason|channel|system|fim|box|object"
)
"""Of special tokens: those that may close a turn, and those that close something inside of one."""
_CHECK = "chat template"
_ANOTHER = "give the model's own template (--chat-template FILE), or get a current conversion"


def check_template_source(template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yield what the text of a template tells, without compiling it: that it is of another family, or ends no reply."""
    source = template.source
    if source is None:
        return
    markers = dict.fromkeys(_MARKER.findall(source))
    known = [marker for marker in markers if tokenizer.token_id(marker) is not None]
    begins = [marker for marker in markers if marker in _TURN_BEGINS]
    own = [marker for marker in _TURN_BEGINS if tokenizer.token_id(marker) is not None]
    if begins and not set(begins) & set(known) and own:
        yield Finding(
            _CHECK,
            f"the chat template is {_TURN_BEGINS[begins[0]]}'s, whose {begins[0]} is no token of this vocabulary; it "
            f"has {own[0]}, of {_TURN_BEGINS[own[0]]}'s template: replies will be worse and may not end; {_ANOTHER}",
        )
        return
    vocabulary = tokenizer.vocabulary
    ids = vocabulary.ids
    ordinary = [one for one in known if one in ids and vocabulary.types[ids[one]] == TokenType.NORMAL]
    if ordinary:
        yield Finding(
            _CHECK,
            f"the chat template writes {_listed(ordinary)}, which tokenizer.ggml.token_type declares to be ordinary "
            "words, not control tokens, so chats are cut into other tokens than the model was trained with: replies "
            "will be worse and may not end; get a current conversion",
        )
        return
    yield from _check_turn_markers(template, tokenizer, own)
    lacking = [marker for marker in markers if marker not in known]
    ends = [marker for marker in lacking if find_end_of_generation({marker: 0}, {}, lambda _: True)]
    writes_end = "eos_token" in source or any(tokenizer.token_text(i) in source for i in tokenizer.eog_token_ids)
    if writes_end:
        return
    if ends:
        yield _unending(ends[0])
        return
    spelled = (tokenizer.token_text(found.token_id) for found in tokenizer.special_spellings.find(source))
    closers = [text for text in dict.fromkeys(spelled) if _CLOSER.search(text) and not _OF_CONTENT.search(text)]
    if closers:
        yield _other_end(tokenizer, closers)


def _check_turn_markers(template: ChatTemplate, tokenizer: Tokenizer, own: Sequence[str]) -> Iterator[Finding]:
    """Markers of turns that a template leaves out, or that end generations by mistake. own: those of the vocabulary."""
    source = template.source or ""
    ends = {tokenizer.token_text(token_id) for token_id in tokenizer.eog_token_ids}
    for begin in own:
        if begin in ends and begin in source:
            yield Finding(
                "end of turn",
                f"{begin} ends generations here, but begins a turn in the chat template: a reply may end before its "
                "first word, or never; set tokenizer.ggml.eos_token_id to the token that closes a turn (--set), or "
                "get a current conversion",
            )
            return
        end = _TURN_ENDS.get(begin, "")
        closes = end in source or "eos_token" in source
        if begin in source and end and tokenizer.token_id(end) is not None and not closes:
            yield Finding(
                "end of turn",
                f"the chat template begins turns with {begin} and never writes {end}, which closes them: replies will "
                f"be worse and may not end; {_ANOTHER}",
            )
            return
    writes_special = "os_token" in source or next(iter(tokenizer.special_spellings.find(source)), None) is not None
    has_markers = _MARKER.search(source) is not None
    if own and not has_markers and not writes_special and not template.is_fallback:
        yield Finding(
            _CHECK,
            f"the chat template writes no control token, but the vocabulary has {own[0]}, of "
            f"{_TURN_BEGINS[own[0]]}'s template: replies will likely be worse and may not end; {_ANOTHER}",
        )


def check_template(template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yield what a chat rendered with the template tells beyond `check_template_source`.

    Every marker is one token, and a token that ends generations closes a reply.
    """
    if template.source is None or template.is_fallback:
        return
    try:
        text = template.render([ASK, {"role": "assistant", "content": ANSWER}], add_generation_prompt=False)
    except TemplateError:
        # Some take only chats that go on.
        return
    if ANSWER not in text:
        return
    markers = dict.fromkeys(_MARKER.findall(text))
    lacking = [marker for marker in markers if tokenizer.token_id(marker) is None]
    closing = text[text.rindex(ANSWER) + len(ANSWER) :]
    closers = [tokenizer.token_text(found.token_id) for found in tokenizer.special_spellings.find(closing)]
    ends = {tokenizer.token_text(token_id) for token_id in tokenizer.eog_token_ids}
    lacking_ends = [marker for marker in _MARKER.findall(closing) if marker in lacking]
    if lacking_ends and not ends & set(closers):
        yield _unending(lacking_ends[0])
        return
    if closers and not ends & set(closers):
        yield _other_end(tokenizer, closers)
    # Some families have a token for the end of a turn alone.
    if lacking and len(lacking) < len(markers.keys() - ends):
        yield Finding(
            _CHECK,
            f"the chat template writes {_listed(lacking)}, no token of this vocabulary, beside others that are: "
            f"replies may be worse; {_ANOTHER}",
        )


def _other_end(tokenizer: Tokenizer, closers: Sequence[str]) -> Finding:
    ends = sorted(tokenizer.token_text(token_id) for token_id in tokenizer.eog_token_ids)
    return Finding(
        "end of turn",
        f"the chat template closes replies with {_listed(closers)}, which ends no generation here ({_listed(ends)} "
        f"would), so replies may not end; set tokenizer.ggml.eot_token_id={tokenizer.token_id(closers[-1])} (--set), "
        "or get a current conversion",
    )


def _unending(marker: str) -> Finding:
    return Finding(
        "end of turn",
        f"the chat template closes replies with {marker}, which is no token of this vocabulary, so replies may not "
        f"end; {_ANOTHER}, or stop at it (stop, --stop of run)",
    )


def _listed(texts: Sequence[str]) -> str:
    shown = [text if text.isprintable() else ascii(text) for text in dict.fromkeys(texts)]
    return ", ".join(f"{text:.40}" for text in shown[:3]) + (f" and {len(shown) - 3} more" if shown[3:] else "")
