"""WordPiece vocabularies against the tokenizers package."""

import pytest
from tokenizers import Tokenizer as PeerTokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from localinfer.models.text.encoders import LONGEST_WORD
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from tests.models.text.unigram_vocabularies import random_texts
from tests.models.text.vocabularies import bert_metadata


@pytest.mark.parametrize("limits_words", [True, False])
@pytest.mark.parametrize("lowers", [True, False])
def test_wordpiece_ids_are_those_of_the_tokenizers_package(lowers: bool, limits_words: bool) -> None:
    metadata = bert_metadata(**{"normalizer.lowercase": lowers, "limits_words": limits_words})
    tokenizer = Tokenizer.from_metadata(metadata)
    tokens = metadata[PREFIX + "tokens"]
    assert isinstance(tokens, list)
    # GGUF marks the beginnings of words, the checkpoint what follows in them.
    ids = {
        token if index < 5 else token[1:] if token[0] == "▁" else f"##{token}": index
        for index, token in enumerate(tokens)
    }
    longest = LONGEST_WORD if limits_words else 1 << 20
    peer = PeerTokenizer(WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=longest))
    peer.normalizer, peer.pre_tokenizer = BertNormalizer(lowercase=lowers), BertPreTokenizer()
    for text in [*random_texts(400, seed=1, highest=0x24F), *("the" * 33 + end for end in ("", "t", "th", "é", "É!"))]:
        # The first is white space or a control character, the second begins words in GGUF.
        if "\x85" not in text and "▁" not in text:
            assert tokenizer.encode(text, add_special=False) == peer.encode(text).ids, ascii(text)


def test_pairs_share_one_separator_and_characters_without_a_name_are_words() -> None:
    tokenizer = Tokenizer.from_metadata(bert_metadata())
    assert tokenizer.ids_between == []
    assert [tokenizer.token_text(i) for i in tokenizer.encode("the \u0378")] == ["[CLS]", "▁the", "[UNK]", "[SEP]"]
