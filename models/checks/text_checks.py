"""Checks of texts' way to the model: the vocabulary, and the chat template against it.

A vocabulary's kind is compared with its tokens, its word splitting with its merges, and its ends with those of the
family; every marker of a template has to be a token, and what closes a reply has to end it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from localinfer.errors import TemplateError
from localinfer.models.checks import Finding
from localinfer.models.text.encoders import PRE_TOKENIZERS, SPACE_MARK, build_splitter
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import TokenType, Vocabulary, find_end_of_generation
from localinfer.quant.checkpoint.model_file import ModelFile

if TYPE_CHECKING:
    from localinfer.models.text.chat_template import ChatTemplate

_SAMPLED_TOKENS = 4096
_BYTE_SPACE = "Ġ"
_AGAIN = "get a current conversion of the model"
_FEW_TOKENS = 300
"""Vocabularies of fewer are made by hand: 256 are bytes."""
_TEXT_KINDS = {
    "digits": r"[0-9]{2,}",
    "contractions": r"'[a-zA-Z]{1,2}",
    "words": r" ?[^\W\d_]{2,}",
    "punctuation": r"[^\w\s]{2,}",
    "punctuation after a space": r" [^\w\s]+",
    "line breaks": r"\s*\n+",
    "punctuation before a line break": r"[^\w\s]+\n+",
    "spaces": r" {2,}",
    "words after punctuation": r"[^\w\s][^\W\d_]+",
    "other characters": r"(?s:.*)",
}
"""Kinds of text that word splittings treat differently, by the pattern of their tokens; the first that fits holds."""
_KIND_PATTERN = re.compile("|".join(f"({pattern})" for pattern in _TEXT_KINDS.values()))
_SCANNED_MERGES = 8192
_KIND_SAMPLES = 48
_LEAST_OF_KIND = 4
_MOST_UNREACHABLE = {"kind": 0.5, "all": 0.1}
"""Share of tokens of one kind, and of all, that a word splitting makes impossible; a vocabulary has up to 0.02 of them
under its own."""
_LEAST_MERGES = 0.9
"""Merges for each token that is made by one; published vocabularies have 0.998 or more."""
_MOST_POSITIVE = 0.5
_ORDINARY_WORD = re.compile(r"[ĠĊ▁]?[^\W_]+")


def check_vocabulary(tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yield what makes texts other ids than those a model was trained with; takes about a millisecond."""
    vocabulary = tokenizer.vocabulary
    other_kind = list(_check_kind(vocabulary))
    if other_kind:
        # Nothing else can be right.
        yield from other_kind
        return
    if vocabulary.kind in ("spm", "unigram"):
        yield from _check_scores(vocabulary)
    if vocabulary.kind == "spm":
        yield from _check_bytes(vocabulary)
    if vocabulary.kind == "bpe":
        yield from _check_pre_tokenizer(tokenizer)
        yield from _check_merges(vocabulary)
    yield from _check_ends(vocabulary)


def _check_kind(vocabulary: Vocabulary) -> Iterator[Finding]:
    """A kind writes spaces in one way only."""
    tokens = vocabulary.tokens[:: max(1, len(vocabulary.tokens) // _SAMPLED_TOKENS)]
    num_marks, num_byte_spaces = (sum(space in token for token in tokens) for space in (SPACE_MARK, _BYTE_SPACE))
    rule = PRE_TOKENIZERS.get(vocabulary.pre_tokenizer or "")
    is_byte_level = vocabulary.kind == "bpe" and not (rule is not None and rule.is_raw)
    if is_byte_level and not num_byte_spaces and num_marks > len(tokens) // 20:
        yield Finding(
            "tokenizer kind",
            "tokenizer.ggml.model is 'gpt2', byte-level BPE, but its tokens write spaces as SentencePiece does (▁): "
            f"texts become wrong ids; {_AGAIN}",
        )
    if vocabulary.kind == "spm" and not num_marks and num_byte_spaces > len(tokens) // 20:
        yield Finding(
            "tokenizer kind",
            "tokenizer.ggml.model is 'llama', SentencePiece, but its tokens write spaces as byte-level BPE does (Ġ): "
            f"texts become wrong ids; {_AGAIN}",
        )


def _check_scores(vocabulary: Vocabulary) -> Iterator[Finding]:
    scores = vocabulary.scores
    if scores is None or scores.size <= _FEW_TOKENS:
        return
    if scores.min() == scores.max():
        yield Finding(
            "tokenizer scores",
            f"tokenizer.ggml.scores are all {scores[0]:g}, so nothing says what merges first and texts become wrong "
            f"ids; {_AGAIN}",
        )
    elif np.mean(scores > 0) > _MOST_POSITIVE:
        yield Finding(
            "tokenizer scores",
            f"{np.mean(scores > 0):.0%} of tokenizer.ggml.scores are positive, where logarithms of shares and negative "
            f"ranks are wanted: what merges last merges first, and texts become wrong ids; {_AGAIN}",
        )


def _check_bytes(vocabulary: Vocabulary) -> Iterator[Finding]:
    missing = [byte for byte, token_id in enumerate(vocabulary.byte_ids) if token_id < 0]
    if 0 < len(missing) < 256 and len(vocabulary.tokens) > _FEW_TOKENS:
        yield Finding(
            "byte tokens",
            f"tokenizer.ggml.tokens lacks {len(missing)} of 256 byte tokens (first: <0x{missing[0]:02X}>), so texts "
            f"with these bytes lose them; {_AGAIN}",
        )


def _check_pre_tokenizer(tokenizer: Tokenizer) -> Iterator[Finding]:
    """A missing or unknown one was reported when the tokenizer was built."""
    vocabulary = tokenizer.vocabulary
    name = vocabulary.pre_tokenizer
    rule = PRE_TOKENIZERS.get(name or "")
    if rule is None or rule.is_raw or not vocabulary.merge_texts:
        return
    known = vocabulary.known
    if known is not None:
        if PRE_TOKENIZERS[known.pre_tokenizer].steps != rule.steps:
            wanted = known.pre_tokenizer
            yield Finding(
                "pre-tokenizer",
                f"tokenizer.ggml.pre is {name!r}, but the vocabulary is {known.owner}, which splits words as "
                f"{wanted!r}: texts become wrong ids; set tokenizer.ggml.pre={wanted} (--set), or {_AGAIN}",
            )
        return
    split = build_splitter(rule)
    kinds = _texts_by_kind(tokenizer)
    unreachable = {kind: [text for text in texts if len(split(text)) > 1] for kind, texts in kinds.items()}
    num_texts, num_lost = (sum(map(len, found.values())) for found in (kinds, unreachable))
    for kind, lost in unreachable.items():
        is_lost = len(kinds[kind]) >= _LEAST_OF_KIND and len(lost) > len(kinds[kind]) * _MOST_UNREACHABLE["kind"]
        if lost and (is_lost or num_lost > num_texts * _MOST_UNREACHABLE["all"]):
            of = f"{len(lost)} of {len(kinds[kind])} sampled tokens of {kind}"
            yield Finding(
                "pre-tokenizer",
                f"tokenizer.ggml.pre is {name!r}, which splits {of}, such as {lost[0]!r:.40}, so that no text becomes "
                f"them: it is not this vocabulary's; {_AGAIN}, or set the right name (--set tokenizer.ggml.pre=NAME)",
            )
            return


def _texts_by_kind(tokenizer: Tokenizer) -> dict[str, list[str]]:
    """Texts that some merges make, as far as they are whole characters, by their kind in `_TEXT_KINDS`."""
    merges = tokenizer.vocabulary.merge_texts
    ids = tokenizer.vocabulary.ids
    names = list(_TEXT_KINDS)
    found: dict[str, list[str]] = {name: [] for name in names}
    count = min(_SCANNED_MERGES, len(merges))
    made = [ids.get(merges[index * len(merges) // count].replace(" ", "")) for index in range(count)]
    for spelled in tokenizer.many_token_bytes([token_id for token_id in made if token_id is not None]):
        text = spelled.decode("utf-8", "replace")
        kind = _KIND_PATTERN.fullmatch(text)
        if kind is not None and kind.lastindex is not None and "\ufffd" not in text:
            texts = found[names[kind.lastindex - 1]]
            if len(texts) < _KIND_SAMPLES:
                texts.append(text)
    return {kind: texts for kind, texts in found.items() if texts}


def _check_merges(vocabulary: Vocabulary) -> Iterator[Finding]:
    """A list of merges that was cut short leaves tokens that no text becomes, and no rule is broken by it."""
    num_merged = int(np.count_nonzero(vocabulary.types == TokenType.NORMAL)) - 256
    count = len(vocabulary.merge_texts)
    if count and len(vocabulary.tokens) > 2 * _FEW_TOKENS and count < num_merged * _LEAST_MERGES:
        yield Finding(
            "merges",
            f"tokenizer.ggml.merges has {count} entries for {num_merged} tokens that merges make, so texts become "
            f"smaller pieces than those that the model was trained with; {_AGAIN}",
        )


def check_beginning(file: ModelFile, tokenizer: Tokenizer, template: str | None) -> Iterator[Finding]:
    """Yield whether texts begin otherwise than those that a known vocabulary's models were trained with.

    template: its source, by which chats may begin with the token by themselves; None without one.
    """
    vocabulary = tokenizer.vocabulary
    known, key = vocabulary.known, "tokenizer.ggml.add_bos_token"
    flag = vocabulary.flags.get("add_bos_token")
    if known is None or flag is None or key in getattr(file.metadata, "replaced_keys", ()):
        return
    bos_id = vocabulary.role_ids.get("bos")
    bos = "" if bos_id is None else vocabulary.tokens[bos_id]
    source = template or ""
    if not flag and known.bos and known.bos == bos and bos not in source and "bos_token" not in source:
        yield Finding(
            "beginning of text",
            f"{key} is false, but texts of models with {known.owner} vocabulary begin with {bos}, and neither does "
            f"the chat template write it: answers will be worse; set it to true (--set {key}=true), or {_AGAIN}",
        )
    elif flag and not known.bos and bos in known.ends:
        yield Finding(
            "beginning of text",
            f"{key} is true, so texts begin with {bos}, which ends those of models with {known.owner} vocabulary: "
            f"answers will be worse; set it to false (--set {key}=false), or {_AGAIN}",
        )


def _check_ends(vocabulary: Vocabulary) -> Iterator[Finding]:
    """A text's beginning and end have tokens of their own, not characters or words."""
    if vocabulary.kind == "wordpiece" or len(vocabulary.tokens) < _FEW_TOKENS:
        return
    for role, what in (("bos", "begins texts"), ("eos", "ends texts"), ("eot", "ends turns")):
        token_id = vocabulary.role_ids.get(role)
        if token_id is None:
            continue
        text = vocabulary.tokens[token_id]
        is_byte = len(text) == 1 or vocabulary.types[token_id] == TokenType.BYTE
        if is_byte or _ORDINARY_WORD.fullmatch(text):
            wanted = _likely_end(vocabulary) if role != "bos" else None
            way_out = "" if wanted is None else f"set tokenizer.ggml.{role}_token_id={wanted} (--set), or "
            yield Finding(
                "end of text",
                f"tokenizer.ggml.{role}_token_id is {token_id}, which is the {'character' if is_byte else 'word'} "
                f"{text!r}, not a token that {what}; {way_out}{_AGAIN}",
            )
    yield from _check_known_ends(vocabulary)


def _check_known_ends(vocabulary: Vocabulary) -> Iterator[Finding]:
    """The tokens that end generations of a known vocabulary's models, against those that end them here."""
    if vocabulary.known is None:
        return
    ids = {text: vocabulary.special_ids.get(text, vocabulary.ids.get(text)) for text in vocabulary.known.ends}
    present = {text: token_id for text, token_id in ids.items() if token_id is not None}
    if present and not vocabulary.end_of_generation_ids & set(present.values()):
        text, token_id = next(iter(present.items()))
        found = vocabulary.role_ids.get("eos")
        named = "missing" if found is None else f"{found}, {vocabulary.tokens[found]!r:.40}"
        yield Finding(
            "end of text",
            f"tokenizer.ggml.eos_token_id is {named}, but models with {vocabulary.known.owner} vocabulary end texts "
            f"with {', '.join(present)}, which ends none here, so replies may not end; set "
            f"tokenizer.ggml.eos_token_id={token_id} (--set), or {_AGAIN}",
        )


def _likely_end(vocabulary: Vocabulary) -> int | None:
    own = () if vocabulary.known is None else vocabulary.known.ends
    for text in own:
        if text in vocabulary.special_ids:
            return vocabulary.special_ids[text]
    others = [i for i in vocabulary.end_of_generation_ids if len(vocabulary.tokens[i]) > 1]
    others = [i for i in others if not _ORDINARY_WORD.fullmatch(vocabulary.tokens[i])]
    controls = np.flatnonzero(vocabulary.types == TokenType.CONTROL)
    return others[0] if len(others) == 1 and others[0] in controls else None


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
"""Special tokens that may close a turn, and those that close something inside of one."""
_CHECK = "chat template"
_ANOTHER = "give the model's own template (--chat-template FILE), or get a current conversion"


def check_template_source(source: str, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yield what the text of a template tells, without compiling it: that it is of another family, or ends no reply."""
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
    yield from _check_turn_markers(source, tokenizer, own)
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


def _check_turn_markers(source: str, tokenizer: Tokenizer, own: Sequence[str]) -> Iterator[Finding]:
    """Markers of turns that a template leaves out, or that end generations by mistake. own: those of the vocabulary."""
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
    if own and not has_markers and not writes_special and _compiles(source):
        yield Finding(
            _CHECK,
            f"the chat template writes no control token, but the vocabulary has {own[0]}, of "
            f"{_TURN_BEGINS[own[0]]}'s template: replies will likely be worse and may not end; {_ANOTHER}",
        )


def _compiles(source: str) -> bool:
    """Return whether a template is used as it is, which only compiling it tells."""
    from localinfer.models.text.chat_template import ChatTemplate

    return not ChatTemplate(source).is_fallback


def check_template(template: "ChatTemplate", tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yield what a chat rendered with the template tells beyond `check_template_source`.

    Every marker is one token, and a token that ends generations closes a reply.
    """
    from localinfer.models.text.chat_template import ANSWER, ASK

    if template.source is None or template.is_fallback:
        return
    try:
        text = template.render([ASK, {"role": "assistant", "content": ANSWER}], add_generation_prompt=False)
    except TemplateError:
        # Some take only chats that continue.
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
