"""Sessions: saving one sequence of the prefix tree as a file, and loading it again.

| bytes | what |
|---|---|
| 8 | `LOCALSES` |
| 4 | version (little-endian uint32) |
| 8 | length of the JSON text (little-endian uint64) |
| | JSON: fingerprint, token ids and the contents that those of short pictures stand for, tokens and bytes per page, \
sliding-window blocks, snapshots of states |
| 32 x buffers | checksum of each page, each sliding-window block and each snapshot |
| 32 | checksum of everything up to here |
| | the pages, as in memory, then the sliding-window blocks of the last of them, then the snapshots |

Nothing of a file is used before all of it is verified. It is plain data: reading it runs no code.
"""

import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from localinfer.engine.cache.block_hashes import NO_SALT, salt_of_type
from localinfer.engine.cache.block_pool import PageNumbers, PagePool
from localinfer.engine.engine import Engine
from localinfer.errors import SessionFileError, SessionMismatchError
from localinfer.storage.fingerprint import Fingerprint, ModelIdentity, differing_parts
from localinfer.storage.page_store import CHECKSUM_BYTES, PageFormat, checksum, chosen_positions, read_all
from localinfer.system import disk
from localinfer.system.files import OutputFile, check_output, num_io_threads
from localinfer.system.folders import expand_home
from localinfer.types import Closing, TokenIds

MAGIC = b"LOCALSES"
FORMAT_VERSION = 3
_FIXED = struct.Struct("<8sIQ")
_MAX_JSON_BYTES = 64 << 20
_PAGES_AHEAD = 8
"""Pages whose checksums are computed while others are read or written."""
_CHANGED = "the model's file has changed since it was loaded; load the model again"


def save_session(
    engine: Engine,
    identity: ModelIdentity,
    path: str | os.PathLike[str],
    token_ids: TokenIds | None,
    salt: bytes = NO_SALT,
) -> int:
    """Write the cached pages of a sequence, by default of the one that ended last; return its number of tokens.

    salt: of the sequence, where it is given.
    Raises: SessionFileError if none are cached, or the file cannot be written.
    """
    target = expand_home(path)
    check_output(target, inputs=identity.paths, error=SessionFileError)
    fingerprint = _fingerprint(identity)
    if identity.has_changed:
        raise SessionFileError(_CHANGED)
    with engine.exclusive_cache() as cache:
        if token_ids is None:
            wanted, salt, row_type = cache.last_retired, cache.last_retired_salt, cache.last_retired_type
        else:
            wanted, salt, row_type = token_ids, engine.text_salt(token_ids, salt), engine.row_type(token_ids)
        if wanted is None:
            raise SessionFileError("there is no conversation to save yet; save one after its first answer")
        match = cache.tree.match(wanted, salt)
        length = match.usable
        if not length:
            raise SessionFileError(
                "nothing of this conversation is in memory; save it after an answer, before others take its place"
            )
        pool = cache.pool
        num_pages = pool.num_pages_for(length)
        # Continuing from the end needs these blocks; earlier pages may lack theirs.
        windowed = pool.sliding.kept(num_pages, length) & match.windowed[:num_pages]
        pages, num_windowed = match.pages[:num_pages].copy(), int(windowed.sum()) if pool.sliding.tokens else 0
        views = [pool.view(page).data for page in pages.tolist()] + _windowed_views(pool, pages, num_windowed)
        known = {position: slot for position, slot in match.snapshots.items() if position <= length}
        positions = chosen_positions(known, pool.grid)
        slots = [known[position] for position in positions]
        views += [pool.state_view(slot).data for slot in slots]
        # Retained, so that the pages are not overwritten.
        pool.retain(pages, windowed)
        for slot in slots:
            pool.states.retain(slot)
    try:
        form = PageFormat(pool.page_tokens, pool.page_bytes)
        content = SessionContent(
            fingerprint.parts,
            wanted[:length],
            form,
            pool.windowed_bytes,
            num_windowed,
            pool.states.slot_bytes,
            positions,
            engine.embeddings.short_runs.named(wanted[:length], salt),
            row_type,
        )
        write_session(target, content, views)
    finally:
        with engine.exclusive_cache():
            pool.release(pages, windowed)
            for slot in slots:
                pool.release_state(slot)
    return length


def load_session(
    engine: Engine, identity: ModelIdentity, path: str | os.PathLike[str], salt: bytes = NO_SALT
) -> TokenIds:
    """Load a saved conversation into the cache, after verifying all of it; return its token ids.

    salt: of the texts that may continue it; a file says nothing of one.
    Raises: SessionFileError if the file is damaged; SessionMismatchError, naming the differences, if it was saved with
        another model, setting or version; OutOfMemoryError if memory has no room for it.
    """
    with SessionReader(expand_home(path)) as session:
        session.check_fingerprint(_fingerprint(identity).parts)
        token_ids, form, row_type = session.content.token_ids, session.content.form, session.content.row_type
        salt = salt_of_type(salt, row_type)
        pool = engine.pool
        if token_ids.size > engine.context_length or int(token_ids.max()) >= engine.vocab_size:
            raise SessionMismatchError(
                f"{path} holds {token_ids.size} tokens, but the context holds {engine.context_length}; load the model "
                "with a larger context_length"
            )
        num_pages, num_windowed = session.content.num_pages, session.content.num_windowed
        sizes = (form, session.content.windowed_bytes, session.content.state_bytes)
        if sizes != (PageFormat(pool.page_tokens, pool.page_bytes), pool.windowed_bytes, pool.states.slot_bytes):
            raise SessionMismatchError(f"{path} has pages of another size; send the conversation again")
        slots: list[int] = []
        with engine.exclusive_cache():
            windowed = np.arange(num_pages) >= num_pages - num_windowed if pool.sliding.tokens else None
            fresh = pool.acquire(num_pages, windowed)
            buffers = [pool.buffer(page) for page in fresh.tolist()]
            views = [buffer.data for buffer in buffers] + _windowed_views(pool, fresh, num_windowed)
        try:
            with engine.exclusive_cache():
                for _ in session.content.positions:
                    slots.append(pool.take_slot(pool.states))
                    views.append(pool.state_view(slots[-1]).data)
            session.read_pages(views)
            with engine.exclusive_cache() as cache:
                for page, buffer in zip(fresh.tolist(), buffers, strict=True):
                    pool.fill(page, buffer)
                # What an id of a short picture stands for here is not said anew.
                length = engine.embeddings.short_runs.learn(token_ids, session.content.contents, salt)
                count = pool.num_pages_for(length)
                held = None if windowed is None else windowed[:count]
                snapshots = {
                    at: slot for at, slot in zip(session.content.positions, slots, strict=True) if at <= length
                }
                cache.tree.insert(token_ids[:length], fresh[:count], held, snapshots=snapshots, salt=salt)
                cache.last_retired, cache.last_retired_salt, cache.last_retired_type = token_ids, salt, row_type
        finally:
            with engine.exclusive_cache():
                pool.release(fresh, windowed)
                for slot in slots:
                    pool.release_state(slot)
    return token_ids


@dataclass(frozen=True)
class SessionContent:
    """The description in a session file."""

    fingerprint: Mapping[str, str]
    """Parts of it, by name."""
    token_ids: TokenIds
    """int32[1..]."""
    form: PageFormat
    windowed_bytes: int = 0
    """Bytes of a sliding-window block."""
    num_windowed: int = 0
    """Number of pages at the end that have one."""
    state_bytes: int = 0
    """Bytes of a snapshot of recurrent states."""
    positions: tuple[int, ...] = ()
    """Positions of snapshots, rising."""
    contents: Mapping[int, tuple[bytes, int]] = field(default_factory=dict)
    """Contents of short runs, see `ShortRuns.named`."""
    row_type: int = 0
    """Token type of all rows."""

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return -(-self.token_ids.size // self.form.page_tokens)

    @property
    def num_buffers(self) -> int:
        """Number of pages, sliding-window blocks and snapshots."""
        return self.num_pages + self.num_windowed + len(self.positions)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        pages = self.num_pages * self.form.page_bytes + self.num_windowed * self.windowed_bytes
        return pages + len(self.positions) * self.state_bytes


def write_session(path: Path, content: SessionContent, pages: Sequence[memoryview]) -> int:
    """Write a session, one buffer per page, sliding-window block and snapshot, in this order; return the file's bytes.

    The write is atomic; a new file is readable by its owner only. Raises: SessionFileError.
    """
    assert len(pages) == content.num_buffers, "one buffer per page, sliding-window block and snapshot"
    fields = {
        "fingerprint": dict(content.fingerprint),
        "token_ids": content.token_ids.tolist(),
        "page_tokens": content.form.page_tokens,
        "page_bytes": content.form.page_bytes,
        "windowed_bytes": content.windowed_bytes,
        "num_windowed": content.num_windowed,
        "state_bytes": content.state_bytes,
        "positions": list(content.positions),
        "row_type": content.row_type,
    }
    if content.contents:
        # Versions that do not know these ids use nothing from them on.
        fields["contents"] = [[token_id, name.hex(), row] for token_id, (name, row) in content.contents.items()]
    text = json.dumps(fields).encode()
    start = _FIXED.pack(MAGIC, FORMAT_VERSION, len(text)) + text
    with OutputFile(path, is_private=True, error=SessionFileError) as file:
        # Before the pages, because a pipe is written in order.
        with ThreadPoolExecutor(num_io_threads(), "localinfer-checksum") as executor:
            header = start + b"".join(_ahead(executor, pages))
        file.write(header + checksum(header))
        for page in pages:
            file.write(page)
    return len(header) + CHECKSUM_BYTES + content.num_bytes


class SessionReader(Closing):
    """An open session file with a verified header; a context manager.

    Raises: SessionFileError if the file does not exist, is not a session, or has a damaged header.
    """

    content: SessionContent

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # Opening a named pipe would block, so check first.
            if not stat.S_ISREG(disk.status(self.path).st_mode):
                raise SessionFileError(f"{self.path} is not a regular file; give a file that save_session wrote")
            self._file = disk.open_to_read(self.path)
        except FileNotFoundError:
            raise SessionFileError(f"{self.path} does not exist; give a file that save_session wrote") from None
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._read_header()
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error
        except BaseException:
            self.close()
            raise

    def check_fingerprint(self, wanted: Mapping[str, str]) -> None:
        """Raise SessionMismatchError, naming each part that differs, unless the session has this fingerprint."""
        found = self.content.fingerprint
        differences = "; ".join(
            f"{name}: {found.get(name, 'not named')} in the file, {wanted.get(name, 'not named')} here"
            for name in differing_parts(found, wanted)
        )
        if differences:
            raise SessionMismatchError(
                f"{self.path} was saved with another model, setting or version ({differences}); load the model it was "
                "saved with, in the same way, or send the conversation again"
            )

    def read_pages(self, pages: Sequence[memoryview]) -> None:
        """Read every page, sliding-window block and snapshot into a buffer of its size, and verify them.

        Raises: SessionFileError; then the contents of the buffers are undefined.
        """
        assert len(pages) == self.content.num_buffers, "one buffer per page, sliding-window block and snapshot"
        try:
            self._file.seek(self._header_bytes)
            with ThreadPoolExecutor(num_io_threads(), "localinfer-checksum") as executor:
                digests = list(_ahead(executor, self._reading(pages)))
        except OSError as error:
            raise self._unreadable(error) from error
        for index, (found, wanted) in enumerate(zip(digests, self._digests, strict=True)):
            if found != wanted:
                raise self._damaged(f"page {index} of {len(pages)} does not match its checksum")

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _reading(self, pages: Sequence[memoryview]) -> Iterator[memoryview]:
        for page in pages:
            if not read_all(self._file, page):
                raise self._damaged("it ends inside a page")
            yield page

    def _read_header(self) -> None:
        num_bytes = self._num_bytes = disk.status_of(self._file).st_size
        fixed = self._take(_FIXED.size)
        magic, version, json_bytes = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise SessionFileError(f"{self.path} is not a saved session; give a file that save_session wrote")
        if version != FORMAT_VERSION:
            raise SessionMismatchError(
                f"{self.path} is a session of format {version}, and this version reads {FORMAT_VERSION}; send the "
                "conversation again"
            )
        if json_bytes > min(_MAX_JSON_BYTES, num_bytes):
            raise self._damaged("its first bytes are invalid")
        text = self._take(json_bytes)
        self.content = content = self._parse(text)
        digests = self._take(CHECKSUM_BYTES * content.num_buffers)
        if checksum(fixed + text + digests) != self._take(CHECKSUM_BYTES):
            raise self._damaged("its header does not match its checksum")
        self._digests = [digests[at : at + CHECKSUM_BYTES] for at in range(0, len(digests), CHECKSUM_BYTES)]
        self._header_bytes = self._file.tell()
        wanted = self._header_bytes + content.num_bytes
        if num_bytes != wanted:
            raise self._damaged(f"it has {num_bytes:,} bytes where {wanted:,} were written")

    def _take(self, count: int) -> bytes:
        if count > self._num_bytes - self._file.tell():
            raise self._damaged("it ends inside its header")
        data = bytearray(count)
        if not read_all(self._file, memoryview(data)):
            raise self._damaged("it ends inside its header")
        return bytes(data)

    def _parse(self, text: bytes) -> SessionContent:
        """Read the JSON, which is not verified yet: sizes are checked before anything is allocated."""
        try:
            fields = json.loads(text)
            fingerprint, token_ids = fields["fingerprint"], fields["token_ids"]
            page_tokens, page_bytes = fields["page_tokens"], fields["page_bytes"]
            windowed_bytes, num_windowed = fields["windowed_bytes"], fields["num_windowed"]
            state_bytes, positions = fields["state_bytes"], fields["positions"]
            contents = {int(one): (bytes.fromhex(name), int(row)) for one, name, row in fields.get("contents", ())}
            # Files of former versions say nothing of it.
            row_type = fields.get("row_type", 0)
            is_sound = (
                all(isinstance(value, str) for value in fingerprint.values())
                and isinstance(token_ids, list)
                and bool(token_ids)
                and all(type(value) is int and -(2**31) <= value < 2**31 for value in token_ids)
                and all(type(value) is int and 0 <= value < 2**40 for value in (page_tokens, page_bytes, state_bytes))
                and all(type(value) is int and 0 <= value < 2**40 for value in (windowed_bytes, num_windowed))
                and type(row_type) is int
                and 0 <= row_type < 256
                and isinstance(positions, list)
                and all(type(value) is int and 0 < value <= len(token_ids) for value in positions)
                and all(one < other for one, other in zip(positions, positions[1:], strict=False))
                and num_windowed <= -(-len(token_ids) // page_tokens)
            )
        except (ArithmeticError, AttributeError, ValueError, KeyError, TypeError, RecursionError):
            is_sound = False
        if not is_sound:
            raise self._damaged("its description is not what save_session writes")
        form = PageFormat(page_tokens, page_bytes)
        ids = np.array(token_ids, np.int32)
        sizes = (windowed_bytes, num_windowed, state_bytes, tuple(positions))
        return SessionContent(fingerprint, ids, form, *sizes, contents, row_type)

    def _damaged(self, found: str) -> SessionFileError:
        return SessionFileError(f"{self.path} is damaged: {found}; use another copy, or send the conversation again")

    def _unreadable(self, error: OSError) -> SessionFileError:
        return SessionFileError(f"{self.path} cannot be read: {error.strerror or error}")


def _windowed_views(pool: PagePool, pages: PageNumbers, count: int) -> list[memoryview]:
    """The bytes of the sliding-window blocks of the last `count` pages."""
    return [pool.windowed_view(page).data for page in pages[pages.size - count :].tolist()]


def _fingerprint(identity: ModelIdentity) -> Fingerprint:
    try:
        fingerprint = identity.compute(threads=num_io_threads())
    except OSError as error:
        raise SessionFileError(f"the model's file cannot be read any more: {error}; load the model again") from error
    if fingerprint is None:
        raise SessionFileError(_CHANGED)
    return fingerprint


def _ahead(executor: ThreadPoolExecutor, pages: Iterable[memoryview]) -> Iterator[bytes]:
    """Checksums of pages in order, computed by other threads some pages ahead."""
    futures = []
    for page in pages:
        futures.append(executor.submit(checksum, b"", page))
        if len(futures) > _PAGES_AHEAD:
            yield futures.pop(0).result()
    for future in futures:
        yield future.result()
