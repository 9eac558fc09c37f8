"""What spells a token that ends or steers a reply is text, wherever a caller's words are, in every vocabulary."""

import numpy as np
import pytest

from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from tests.models.text.vocabularies import (
    CONTROL,
    NORMAL,
    REAL,
    UNUSED,
    USER_DEFINED,
    bpe_metadata,
    keyed,
    real_metadata,
    real_tokenizer,
    spm_metadata,
    with_token,
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.content|trim }}<|im_end|>\n{% endfor %}"
)
KINDS = (NORMAL, CONTROL, USER_DEFINED, UNUSED)
END_NAMES = ("<|im_end|>", "<|end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|endoftext|>", "<eos>", "<|halt|>")


def closed_ids(tokenizer: Tokenizer) -> dict[int, str]:
    """All ids that a text must not get: control tokens and what ends a reply."""
    ids = {*tokenizer.special_ids.values(), *tokenizer.eog_token_ids} - {tokenizer.unknown_token_id}
    assert ids
    return {token_id: tokenizer.token_text(token_id) for token_id in ids}


def spellings(text: str) -> tuple[str, ...]:
    return text, f"a{text}b", text + text, f" {text}\n", text[:-1] + text, text + text[1:]


@pytest.mark.parametrize("name", REAL)
def test_text_never_gets_a_special_token_of_a_real_vocabulary(name: str):
    tokenizer = real_tokenizer(name)
    closed = closed_ids(tokenizer)
    for token_id, text in closed.items():
        for words in spellings(text):
            ids = tokenizer.encode(words, add_special=False)
            assert not closed.keys() & set(ids)
            assert tokenizer.decode(ids) == words
        assert tokenizer.encode(text, add_special=False, parse_special=True) == [token_id]


@pytest.mark.parametrize("name", REAL)
def test_chat_content_never_gets_a_special_token_of_a_real_vocabulary(name: str):
    tokenizer = real_tokenizer(name)
    own = ChatTemplate.from_metadata(real_metadata(name), tokenizer)
    closed = closed_ids(tokenizer)
    all_of_them = "".join(word for text in closed.values() for word in spellings(text))
    for template in (own, ChatTemplate(TEMPLATE)) if own.source else (ChatTemplate(TEMPLATE),):
        plain, hostile = (
            [
                token_id
                for token_id in template.encode(tokenizer, [{"role": "user", "content": content}])
                if token_id in closed
            ]
            for content in ("hello", all_of_them)
        )
        assert hostile == plain


# One kind for each of the others together: any two of the four meet.
@pytest.mark.parametrize(
    ("made", "end", "role", "kind"),
    [
        (made, end, role, KINDS[(first + second + third) % len(KINDS)])
        for first, made in enumerate((spm_metadata, bpe_metadata))
        for second, end in enumerate(END_NAMES)
        for third, role in enumerate((None, "eos", "eot", "eom"))
    ],
)
def test_text_never_gets_a_token_that_ends_a_reply_whatever_the_file_declares_it(made, end, role, kind):  # type: ignore[no-untyped-def]
    metadata = made()
    tokens = metadata[PREFIX + "tokens"]
    if end not in tokens:
        metadata = with_token(metadata, end, kind)
        tokens = metadata[PREFIX + "tokens"]
    token_id = tokens.index(end)
    if role is not None:
        metadata |= keyed(**{f"{role}_token_id": token_id})
    tokenizer = Tokenizer.from_metadata(metadata)
    if token_id not in tokenizer.eog_token_ids:
        assert role is None
        assert end in ("</s>", "<|halt|>")
        return
    for words in spellings(end):
        assert token_id not in tokenizer.encode(words, add_special=False)
    assert tokenizer.encode(end, add_special=False, parse_special=True) == [token_id]
    assert tokenizer.decode([token_id]) == ""
    chat = ChatTemplate(TEMPLATE).encode(tokenizer, [{"role": "user", "content": f"x{end}y{end}"}])
    assert chat.count(token_id) == (end == "<|im_end|>")


def test_end_that_phi3_declares_a_word_ends_a_reply():
    tokenizer = real_tokenizer("phi-3")
    end = tokenizer.token_id("</s>")
    assert end in tokenizer.eog_token_ids
    assert end not in tokenizer.encode("<s>struck out</s>", add_special=False)


def test_strike_out_of_a_vocabulary_that_knows_html_is_a_word():
    metadata = spm_metadata()
    tokens, types = list(metadata[PREFIX + "tokens"]), np.array(metadata[PREFIX + "token_type"])  # type: ignore[call-overload]
    tokens[2] = "<eos>"
    tokenizer = Tokenizer.from_metadata(
        with_token(metadata | keyed(tokens=tokens, token_type=types), "</s>", USER_DEFINED)
    )
    struck = tokenizer.token_id("</s>")
    assert struck not in tokenizer.eog_token_ids
    assert struck in tokenizer.encode("a</s>", add_special=False)


def test_single_character_that_ends_a_reply_stays_a_character():
    metadata = bpe_metadata()
    newline = metadata[PREFIX + "tokens"].index("Ċ")  # type: ignore[attr-defined]
    tokenizer = Tokenizer.from_metadata(metadata | keyed(eos_token_id=newline))
    assert newline in tokenizer.eog_token_ids
    assert tokenizer.decode(tokenizer.encode("a\nb")) == "a\nb"
