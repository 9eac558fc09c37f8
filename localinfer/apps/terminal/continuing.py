"""Begin a chat with a saved conversation: find it, show its end, and save what follows."""

import logging
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from shlex import quote
from typing import TextIO

import click
from click.core import ParameterSource

from localinfer.apps.cli.options import LoadOptions
from localinfer.apps.cli.sessions import ago
from localinfer.apps.terminal.display_width import wrap_words
from localinfer.apps.terminal.reply_output import last_exchange, show_last_exchange, terminal_columns
from localinfer.errors import RequestError, SessionFileError
from localinfer.storage.conversations import ConversationStore, SavedConversation, check_name, model_label, open_store
from localinfer.terminal import check_text, dim, neutralise_controls

logger = logging.getLogger(__name__)

_DEMO = "demo"
_NO_FOLDER = "this user has no home folder to save it in; set HOME, or chat with --no-history"


@dataclass(frozen=True)
class SavedChat:
    """A chat that is saved."""

    saved: SavedConversation
    """The conversation as it begins."""
    store: ConversationStore | None
    """None for a user without a home folder."""

    def save(self, conversation: SavedConversation) -> None:
        """Save the conversation as it is now. Raises: SessionFileError."""
        if self.store is None:
            raise SessionFileError(f"this conversation is not saved: {_NO_FOLDER}")
        try:
            self.store.save(conversation)
        except KeyboardInterrupt:
            # A Ctrl-C that leaves the chat must not lose the last turn.
            self.store.save(conversation)
            raise


def begin_saving(
    options: LoadOptions, *, continues: bool, session: str | None, system: str | None, no_history: bool
) -> SavedChat | None:
    """The conversation that a chat begins with, and what saves it; None without a history.

    Without a history, the prompt cache on disk is switched off in `options` too: it holds the text of replies. Without
    a model on the command line, a saved conversation continues with its own, which is set in `options`.
    continues: the one changed last, or a new one if none is saved. session: the one of this name, or a new one of it.
    system: of a new conversation. Raises: RequestError for wishes that exclude each other, and for a name that none may
    have; SessionFileError if the conversation that was asked for cannot be read.
    """
    wishes = [name for name, is_given in (("--continue", continues), ("--session", session is not None)) if is_given]
    if no_history:
        wishes.append("--no-history")
    if len(wishes) > 1:
        raise RequestError(f"{' and '.join(wishes)} exclude each other; leave one out")
    if no_history:
        options["disk_cache"] = False
        return None
    store = open_store()
    if wishes and store is None:
        raise RequestError(f"{wishes[0]} needs saved conversations: {_NO_FOLDER}")
    model = _reference(options["model"])
    name = "" if session is None else check_name(check_text(session, "--session"))
    saved = None
    if store is not None and wishes:
        saved = store.latest() if continues else store.find(name)
    if saved is None:
        if continues:
            logger.warning("no conversation is saved yet; this begins one")
        elif store is not None and (similar := store.similar_names(name) if name else []):
            logger.warning(
                "no conversation is named %r; this begins it, beside %s", name, " and ".join(map(repr, similar))
            )
        return SavedChat(SavedConversation.begin(model, name=name, system=system), store)
    if saved.model != model and not _is_model_given():
        options["model"] = None if saved.model in ("", _DEMO) else saved.model
        return SavedChat(saved, store)
    if saved.model != model:
        labels = saved.name, saved.model_label, model_label(model)
        logger.warning("%r was with %s until now, and continues with %s", *labels)
    return SavedChat(replace(saved, model=model), store)


def _reference(model: str | None) -> str:
    """A reference that loads the model from any folder: the absolute path of a file, or its name as it is."""
    if model is None:
        return _DEMO
    return os.path.abspath(model) if os.path.exists(model) else model


def _is_model_given() -> bool:
    """True if the command line names a model, rather than the configuration file."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source("model") is ParameterSource.COMMANDLINE


def show_continued(saved: SavedConversation, output: TextIO, notices: TextIO) -> None:
    """Say which conversation continues, and show its last exchange: the question's beginning and the whole reply."""
    count = f"{len(saved.turns):,} message{'' if len(saved.turns) == 1 else 's'}"
    changed = ago(saved.changed, datetime.now(UTC))
    _notice(f"continues {saved.name!r}: {count} with {saved.model_label}, last changed {changed}", notices)
    earlier = len(saved.turns) - len(last_exchange(saved.turns))
    if earlier:
        _notice(f"({earlier:,} earlier: localinfer sessions show {quote(saved.name)})", notices)
    show_last_exchange(saved.turns, output, notices)


def _notice(text: str, notices: TextIO) -> None:
    text = neutralise_controls(text)
    if notices.isatty():
        text = wrap_words(text, terminal_columns())
    notices.write(f"{dim(text, notices)}\n")
    notices.flush()
