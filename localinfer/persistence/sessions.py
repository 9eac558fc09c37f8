"""Conversations kept by hand: from the prefix tree to a file that can be copied, and back."""

import os

import numpy as np

from localinfer.cache.block_pool import PageNumbers, PagePool
from localinfer.cache.prefix_tree import TokenIds
from localinfer.engine.engine import Engine
from localinfer.errors import SessionFileError, SessionMismatchError
from localinfer.files import check_output
from localinfer.kernels.user_folders import expand_home
from localinfer.persistence.fingerprint import Fingerprint, ModelIdentity
from localinfer.persistence.page_file import PageFormat
from localinfer.persistence.session_file import SessionContent, SessionReader, write_session
from localinfer.worker_threads import num_io_threads

_CHANGED = "the model's file has changed since it was loaded; load the model again"


def save_session(
    engine: Engine, identity: ModelIdentity, path: str | os.PathLike[str], token_ids: TokenIds | None
) -> int:
    """Write what is cached of a text, by default of the one that ended last; return how many tokens that is.

    Raises: SessionFileError if nothing of it is cached, or the file cannot be written.
    """
    target = expand_home(path)
    check_output(target, inputs=identity.paths, error=SessionFileError)
    fingerprint = _fingerprint(identity)
    if identity.has_changed:
        raise SessionFileError(_CHANGED)
    with engine.exclusive_cache() as cache:
        wanted = cache.last_retired if token_ids is None else token_ids
        if wanted is None:
            raise SessionFileError("there is no conversation to save yet; save one after its first answer")
        match = cache.tree.match(wanted)
        length = match.usable
        if not length:
            raise SessionFileError(
                "nothing of this conversation is in memory; save it after an answer, before others take its place"
            )
        pool = cache.pool
        num_pages = pool.num_pages_for(length)
        # What going on from its end needs; the page before that may lack its windowed part.
        windowed = pool.sliding.kept(num_pages, length) & match.windowed[:num_pages]
        pages, num_windowed = match.pages[:num_pages].copy(), int(windowed.sum()) if pool.sliding.tokens else 0
        views = [pool.view(page).data for page in pages.tolist()] + _windowed_views(pool, pages, num_windowed)
        # Held, so that nothing else is written there.
        pool.retain(pages, windowed)
    try:
        form = PageFormat(pool.page_tokens, pool.page_bytes)
        content = SessionContent(fingerprint.parts, wanted[:length], form, pool.windowed_bytes, num_windowed)
        write_session(target, content, views)
    finally:
        with engine.exclusive_cache():
            pool.release(pages, windowed)
    return length


def load_session(engine: Engine, identity: ModelIdentity, path: str | os.PathLike[str]) -> TokenIds:
    """Put a saved conversation into the cache, after all of it was proven; return its token ids.

    Raises: SessionFileError if the file is damaged; SessionMismatchError, naming what differs, if it was saved with
        another model, setting or version; OutOfMemoryError if memory has no room for it.
    """
    with SessionReader(expand_home(path)) as session:
        session.check_fingerprint(_fingerprint(identity).parts)
        token_ids, form = session.content.token_ids, session.content.form
        pool = engine.pool
        if token_ids.size > engine.context_length or int(token_ids.max()) >= engine.vocab_size:
            raise SessionMismatchError(
                f"{path} holds {token_ids.size} tokens, but the context holds {engine.context_length}; load the model "
                "with a larger context_length"
            )
        num_pages, num_windowed = session.content.num_pages, session.content.num_windowed
        sizes = (form, session.content.windowed_bytes)
        if sizes != (PageFormat(pool.page_tokens, pool.page_bytes), pool.windowed_bytes):
            raise SessionMismatchError(f"{path} has pages of another size; send the conversation again")
        with engine.exclusive_cache():
            windowed = np.arange(num_pages) >= num_pages - num_windowed if pool.sliding.tokens else None
            fresh = pool.acquire(num_pages, windowed)
            buffers = [pool.buffer(page) for page in fresh.tolist()]
            views = [buffer.data for buffer in buffers] + _windowed_views(pool, fresh, num_windowed)
        try:
            session.read_pages(views)
            with engine.exclusive_cache() as cache:
                for page, buffer in zip(fresh.tolist(), buffers, strict=True):
                    pool.fill(page, buffer)
                cache.tree.insert(token_ids, fresh, windowed)
                cache.last_retired = token_ids
        finally:
            with engine.exclusive_cache():
                pool.release(fresh, windowed)
    return token_ids


def _windowed_views(pool: PagePool, pages: PageNumbers, count: int) -> list[memoryview]:
    """The bytes of the windowed parts of the last `count` pages."""
    return [pool.windowed_view(page).data for page in pages[pages.size - count :].tolist()]


def _fingerprint(identity: ModelIdentity) -> Fingerprint:
    try:
        fingerprint = identity.compute(threads=num_io_threads())
    except OSError as error:
        raise SessionFileError(f"the model's file cannot be read any more: {error}; load the model again") from error
    if fingerprint is None:
        raise SessionFileError(_CHANGED)
    return fingerprint
