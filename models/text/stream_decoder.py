"""From token ids back to text while they arrive: whole characters only."""

import codecs
from collections.abc import Collection
from typing import Protocol


class TokenText(Protocol):
    """What decoding asks of a tokenizer."""

    strips_space_at_start: bool

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control or unknown token."""
        ...

    def starts_text_after(self, token_id: int) -> bool:
        """Whether plain text after this token starts anew, with the vocabulary's space before it."""
        ...


class StreamDecoder:
    """Decodes ids one at a time; what `push` and `flush` return, joined, equals `Tokenizer.decode`.

    `previous_token_id` is the last token before the stream, where there is one. A SentencePiece
    vocabulary puts a space before a text, and it is taken off again at the start of a stream or after
    a special token; but not after `previous_token_id` of plain text, whose continuation may well begin
    with a real space. So a completion gives the last id of its prompt here. `keeps_first_space` leaves
    all of the bytes as they are. `shown_ids` are control tokens that are spelled out all the same.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        *,
        skip_special: bool = True,
        previous_token_id: int | None = None,
        keeps_first_space: bool = False,
        shown_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = tokenizer.strips_space_at_start and not keeps_first_space
        self._strips_next = self._strips and (
            previous_token_id is None or tokenizer.starts_text_after(previous_token_id)
        )

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is now certain, often "" inside a character.

        Raises: RequestError if the id is not in the vocabulary.
        """
        tokenizer = self._tokenizer
        piece = tokenizer.token_bytes(token_id)
        if tokenizer.starts_text_after(token_id):
            self._strips_next = self._strips
            if self._skip_special and tokenizer.is_special(token_id) and token_id not in self._shown_ids:
                return ""
        elif self._strips_next and piece:
            piece = piece.removeprefix(b" ")
            self._strips_next = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Return what is left: U+FFFD where the stream ended inside a character."""
        return self._decoder.decode(b"", final=True)
