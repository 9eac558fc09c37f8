"""Slots: numbered places, as llama.cpp's server has them, that say what runs and which text ran there last.

A text needs none to be computed: all texts share one cache. A slot only names a text, so that its session can be saved,
restored and erased by the number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localinfer.apps.server.transport.http import ApiError

if TYPE_CHECKING:
    from localinfer.generation.stream import TextStream
    from localinfer.types import TokenIds

NO_SLOT = -1
"""Stands for any slot in a request, and for none in an answer: of a text that found every slot taken."""


@dataclass(eq=False)
class SlotText:
    """A text in a slot, or the last one that was there. reply_id: None for one that was restored from a file.

    token_ids: known once it has ended. tenant: whose it is, where clients are kept apart. cache_salt: the option with
    which it was generated.
    """

    slot_id: int
    model_id: str
    reply_id: str | None = None
    token_ids: "Sequence[int] | TokenIds" = ()
    has_ended: bool = False
    tenant: str = ""
    cache_salt: str | None = None
    _stream: "TextStream | None" = field(default=None, repr=False)

    def opening(self, open_stream: "Callable[[], TextStream]") -> "Callable[[], TextStream]":
        """A call that opens this text's stream; any thread may make it."""

        def opened() -> "TextStream":
            stream = self._stream = open_stream()
            return stream

        return opened

    def end(self) -> None:
        """Keep what the text was, and let go of all else: a model that is unloaded must not live on here."""
        if self._stream is not None:
            self.token_ids = self._stream.token_ids
        self._stream, self.has_ended = None, True


class SlotTable:
    """The slots of a server, used on its event loop."""

    def __init__(self, count: int) -> None:
        self._texts: dict[int, SlotText | None] = dict.fromkeys(range(count))

    def texts(self) -> list[SlotText | None]:
        """What each slot holds, by their numbers."""
        return [self._texts[slot_id] for slot_id in range(len(self._texts))]

    def text(self, slot_id: int) -> SlotText | None:
        """What a slot holds. Raises: ApiError if there is no such slot."""
        if slot_id not in self._texts:
            last = len(self._texts) - 1
            reason = f"there is no slot {slot_id}; give one from 0 to {last}, or start the server with --parallel"
            raise ApiError(400, reason, param="id_slot")
        return self._texts[slot_id]

    def check_idle(self, slot_id: int) -> None:
        """Raise ApiError if there is no such slot, or a text runs in it."""
        text = self.text(slot_id)
        if text is not None and not text.has_ended:
            raise ApiError(409, f"slot {slot_id} is generating; try again when it has ended", code="slot_busy")

    def take(
        self, model_id: str, reply_id: str, wanted: int | None, tenant: str = "", cache_salt: str | None = None
    ) -> SlotText | None:
        """Put a text into the slot that is wanted, or that was used least recently; None if that is taken.

        Raises: ApiError for a slot that does not exist.
        """
        if wanted is None or wanted == NO_SLOT:
            # Rows come in the order of their last use.
            wanted = next((slot_id for slot_id, text in self._texts.items() if text is None or text.has_ended), NO_SLOT)
            if wanted == NO_SLOT:
                return None
        former = self.text(wanted)
        if former is not None and not former.has_ended:
            return None
        return self._put(SlotText(wanted, model_id, reply_id, tenant=tenant, cache_salt=cache_salt))

    def hold(
        self, slot_id: int, model_id: str, token_ids: Sequence[int], tenant: str = "", cache_salt: str | None = None
    ) -> None:
        """Put a text into a slot that does not run. Raises: ApiError if one runs there."""
        self.check_idle(slot_id)
        self._put(SlotText(slot_id, model_id, None, token_ids, has_ended=True, tenant=tenant, cache_salt=cache_salt))

    def erase(self, slot_id: int) -> None:
        """Forget what a slot held."""
        self._texts[slot_id] = None

    def _put(self, text: SlotText) -> SlotText:
        del self._texts[text.slot_id]
        self._texts[text.slot_id] = text
        return text
