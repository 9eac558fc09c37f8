"""What a simulated engine keeps on a simulated disk: the prompt cache under its tree, and sessions."""

import atexit
import random
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from localinfer.errors import OutOfMemoryError, SessionFileError, SessionMismatchError
from localinfer.storage.fingerprint import ModelIdentity
from localinfer.storage.prompt_cache import DiskCache, DiskOptions
from localinfer.storage.sessions import load_session, save_session
from localinfer.system import disk as calls
from tests.proof.simulation.checks import require
from tests.proof.simulation.disk import Disk, Faults
from tests.proof.simulation.models import tiny_model
from tests.proof.simulation.universe import TokenIds

if TYPE_CHECKING:
    from tests.proof.simulation.world import World

_FAULTS = ("torn_write", "bit_flip", "short_read", "full_disk", "permission_lost", "failed_read", "failed_sync")
_SESSIONS = ("one", "two")
_Saved = tuple[int, bytes] | None
"""By which weights, and the ids."""


@cache
def identity_of(model: str, seed: int) -> ModelIdentity:
    """The identity of a tiny model, whose file is on the real disk."""
    tiny = tiny_model(model, seed)
    identity = ModelIdentity(tiny.model.file, tiny.layout, tiny.model.config, None)
    identity.compute()
    return identity


class Kept:
    """The prompt cache of the engine there is now, and the sessions that were ever saved.

    tier: None for an engine without a prompt cache. sessions: by name, the texts its file may hold; None for none.
    """

    def __init__(self, world: "World", disk: Disk) -> None:
        self.tier: DiskCache | None = None
        self.sessions: dict[str, set[_Saved]] = {name: {None} for name in _SESSIONS}
        self._damaged: set[str] = set()
        self._world, self._disk = world, disk
        self._is_power_cut = False

    def open(self, chooser: random.Random) -> None:
        """Begin with an engine: on a disk that is in order, with or without a prompt cache."""
        world, layout = self._world, self._world.tiny.layout
        self.mend()
        page = layout.page_bytes + layout.windowed_bytes + layout.state_bytes // 2
        max_bytes = chooser.choice((12 * page, 40 * page, 1 << 30))
        self.tier = None
        if chooser.random() < 0.6:
            options = DiskOptions(self._disk.root / "conversations", max_bytes)
            identity = identity_of(world.name, world.weights)
            self.tier = DiskCache(world.engine, identity, options, idle_seconds=0.05, in_background=False)
        calls.make_folder(self._disk.root / "sessions")
        calls.sync_folder(self._disk.root)

    def write(self, chooser: random.Random) -> None:
        """Take a few steps of the writer, or write all that there is."""
        if self.tier is None:
            return
        if chooser.random() < 0.1:
            self.tier.flush()
            return
        self._world.clock.advance(chooser.choice((0.001, 0.1)))
        for _ in range(chooser.choice((1, 1, 3))):
            self.tier.write_next()

    def save(self, chooser: random.Random, token_ids: TokenIds | None) -> None:
        """Save a text as a session; None for the last that ended."""
        world, name = self._world, chooser.choice(_SESSIONS)
        wanted = world.cache.last_retired if token_ids is None or chooser.random() < 0.3 else token_ids
        if wanted is None:
            return
        known = self.sessions[name]
        length = world.cache.tree.match(wanted).usable
        # Whatever becomes of this call, the file may be that text from now on.
        saving = (world.weights, wanted[:length].tobytes())
        known.add(saving if length else None)
        path = self._disk.root / "sessions" / name
        try:
            saved = save_session(world.engine, identity_of(world.name, world.weights), path, wanted)
        except SessionFileError as error:
            require(not length or self._disk.faults != Faults(), f"a session was not saved: {error}")
            return
        require(saved == length, f"a session of {length} tokens was saved with {saved}")
        if self._disk.faults == Faults():
            self.sessions[name] = {saving}
            self._damaged.discard(name)

    def load(self, chooser: random.Random) -> None:
        """Load a session, which must be one that was saved."""
        world, name = self._world, chooser.choice(_SESSIONS)
        known, path = self.sessions[name], self._disk.root / "sessions" / name
        if chooser.random() < 0.2 and str(path) in self._disk.files:
            # From now on it may be refused, by its version too, which is read before anything is proven.
            self._disk.flip_bit(str(path))
            self._damaged.add(name)
        is_damaged = name in self._damaged or self._disk.faults.bit_flip > 0
        try:
            found = load_session(world.engine, identity_of(world.name, world.weights), path)
        except OutOfMemoryError:
            return
        except SessionMismatchError as error:
            others = any(saved is not None and saved[0] != world.weights for saved in known)
            require(others or is_damaged, f"a session of the same model was refused: {error}")
            return
        except SessionFileError as error:
            is_faulty = self._disk.faults != Faults() or is_damaged
            require(is_faulty or None in known, f"a saved session is lost or refused: {error}")
            return
        world.count(loaded=1)
        loaded = (world.weights, np.ascontiguousarray(found, np.int32).tobytes())
        require(loaded in known, "a session is loaded that nobody saved with this model")

    def spoil(self, chooser: random.Random) -> None:
        """Faults of the disk from now on, or none any more; or the end of the process at one of its next operations."""
        if self._disk.faults != Faults() or chooser.random() < 0.3:
            self._disk.faults = Faults()
            return
        if chooser.random() < 0.5:
            self._is_power_cut = chooser.random() < 0.5
            self._disk.kill_after(chooser.randrange(chooser.choice((3, 30, 200))))
            return
        setattr(self._disk.faults, chooser.choice(_FAULTS), chooser.choice((0.05, 0.3, 1.0)))

    def mend(self) -> None:
        """The disk is in order, and nobody kills the process."""
        self._disk.faults = Faults()
        self._disk.process.kill_in = None

    def has_lost_power(self, chooser: random.Random) -> bool:
        """Whether the process ended with the power."""
        return self._is_power_cut

    def forget(self) -> None:
        """The process ended."""
        if self.tier is not None:
            atexit.unregister(self.tier._at_exit)
        self.tier = None

    def close(self) -> None:
        """Close the prompt cache, before its engine."""
        if self.tier is not None:
            self.tier.close()
            self.tier.close()
        self.tier = None
        self._check_files()

    def check(self) -> None:
        """Nothing is left open, but by the writer between two of its steps."""
        if self.tier is not None and self.tier._behind._steps is None:
            self._check_files()

    def _check_files(self) -> None:
        require(not self._disk.open_files, f"files are left open: {self._disk.open_files}")
        require(not self._disk.forgotten, f"files were never closed: {self._disk.forgotten}")
