"""Rounds of `kill -9`: a process works, is killed at a random moment, and what it leaves is proven."""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from tests.proof.soak.cache_site import CacheSite
from tests.proof.soak.chat_site import ChatSite
from tests.proof.soak.cold_answers import ColdAnswers
from tests.proof.soak.folder_watch import FolderWatch
from tests.proof.soak.kernels_site import KernelsSite
from tests.proof.soak.moments import Life, Moment
from tests.proof.soak.pull_site import PullSite
from tests.proof.soak.quantize_site import QuantizeSite
from tests.proof.soak.server_site import ServerSite
from tests.proof.soak.sessions_site import SessionsSite
from tests.proof.soak.site import Drive, Site, ViolationError, check_nothing_runs, kill

SITES: dict[str, tuple[type[Site], float]] = {
    "cache": (CacheSite, 6),
    "chat": (ChatSite, 5),
    "server": (ServerSite, 5),
    "quantize": (QuantizeSite, 2),
    "pull": (PullSite, 2),
    "sessions": (SessionsSite, 3),
    "kernels": (KernelsSite, 0.3),
}
"""Kinds of processes, and how often each is killed."""
_LONGEST_LIVES = 4.0
"""In lives as measured: a process that makes fewer changes of files than others is killed after so long."""


class Kills:
    """A campaign of rounds; everything but time is chosen by the seed. say: is given lines of progress."""

    def __init__(self, seed: int, names: Sequence[str] = (), say: Callable[[str], None] = print) -> None:
        self.num_kills = self.num_ended = 0
        self._random = Random(seed)
        self._say = say
        self._seed = seed
        self._names = list(names or SITES)
        self._lives: dict[str, Life] = {}
        self._kills_of = dict.fromkeys(self._names, 0)

    def run(self, rounds: int) -> bool:
        """Kill so many processes; return whether nothing was found. The folder of a failure is kept."""
        folder = Path(tempfile.mkdtemp(prefix="soak-kills-"))
        began = time.monotonic()
        where = "at the start"
        try:
            with ExitStack() as opened:
                cold = opened.enter_context(ColdAnswers())
                sites = {name: opened.enter_context(SITES[name][0](folder, cold)) for name in self._names}
                weights = [SITES[name][1] for name in self._names]
                while self.num_kills < rounds:
                    site = sites[self._random.choices(self._names, weights)[0]]
                    where = f"round {self.num_kills + 1} ({site.name})"
                    self._round(site)
                    if (self.num_kills + self.num_ended) % 25 == 0:
                        self._say(f"{time.monotonic() - began:.0f} s: {self.num_kills} kills")
                for site in sites.values():
                    where = f"the end of {site.name}"
                    site.finish()
        except ViolationError as violation:
            self._say(f"FOUND with --seed {self._seed} in {where}: {violation}\nits files: {folder}")
            return False
        shutil.rmtree(folder)
        self._report(sites, time.monotonic() - began)
        return True

    def _round(self, site: Site) -> None:
        life = self._lives.get(site.name, site.first_life)
        moment = None if life is None else Moment.draw(self._random, life)
        with FolderWatch(site.folder) as watch:
            began = time.monotonic()
            process = site.start(self._random)
            drive = Drive(site, process, Random(self._random.randrange(1 << 30)))
            if life is not None and moment is not None:
                moment.wait(watch, began, _LONGEST_LIVES * life.seconds, lambda: process.poll() is not None)
                was_running = process.poll() is None and drive.is_alive
                kill(process)
            else:
                was_running = False
            try:
                drive.join()
            finally:
                kill(process)
                # Closes the pipes to it.
                process.__exit__(None, None, None)
            took = time.monotonic() - began
            watch.take()
        try:
            check_nothing_runs(process.pid)
            site.age_temporaries()
            site.check()
            site.check_temporaries()
        except ViolationError as violation:
            raise ViolationError(f"killed {moment}: {violation}") from violation
        if was_running:
            self.num_kills += 1
            self._kills_of[site.name] += 1
        else:
            self.num_ended += 1
            self._lives.setdefault(site.name, Life(took, watch.num_changes)).measured(took, watch.num_changes)

    def _report(self, sites: dict[str, Site], took: float) -> None:
        self._say(
            f"{self.num_kills} kills, {self.num_ended} processes that ended before, in {took:.0f} s: nothing lost"
        )
        for name, site in sites.items():
            counts = ", ".join(f"{what}: {number}" for what, number in site.counts.items())
            life = self._lives.get(name)
            lasts = (
                ""
                if life is None
                else f" of lives of {life.seconds:.1f} s with {life.num_changes:.0f} changes of files"
            )
            self._say(f"  {name}: {self._kills_of[name]} kills{lasts}; {counts}")
