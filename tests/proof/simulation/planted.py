"""Bugs that are planted in the product, to see that the simulation finds each: what it would miss is not proven by it.

Each is a mistake of the kind that was made here or elsewhere: a reference too few, a place one too late, a check that
is left out. `python -m tests.proof.simulation.plant` measures how long each takes to be found.
"""

from tests.proof.simulation.planting import Planted

_POOL = "localinfer.engine.cache.block_pool"
_RADIX = "localinfer.engine.cache.prefix_tree"
_TREE = "localinfer.engine.cache.prefix_tree"
_NODE = "localinfer.engine.cache.prefix_tree"
_CACHE = "localinfer.engine.cache.prefix_cache"
_SEQUENCE = "localinfer.engine.cache.sequence"
_STATE = "localinfer.engine.cache.sequence_state"
_WINDOW = "localinfer.engine.cache.block_pool"
_SCHEDULER = "localinfer.engine.scheduler"
_ADMISSION = "localinfer.engine.admission"
_MEDIA = "localinfer.engine.media"
_PRECEDENCE = "localinfer.engine.admission"
_RUNNER = "localinfer.engine.runner"
_STORE = "localinfer.storage.page_store"
_SESSIONS = "localinfer.storage.sessions"
_RECORDS = "localinfer.storage.records"
_FILES = "localinfer.system.files"

PLANTED = (
    Planted(
        "page-freed-twice",
        _POOL,
        "        self._memory.give_back(pages[counts == 0][::-1].tolist())\n",
        "        self._memory.give_back(pages[counts <= 1][::-1].tolist())\n",
        "a page is free while another text still holds it",
    ),
    Planted(
        "page-never-freed",
        _POOL,
        "        self._memory.give_back(pages[counts == 0][::-1].tolist())\n",
        "        self._memory.give_back(pages[counts == 0][:0:-1].tolist())\n",
        "the first of the pages that are released is lost",
    ),
    Planted(
        "block-freed-under-a-text",
        _POOL,
        "            self.windowed_counts[pages] += 1\n",
        "            self.windowed_counts[pages[:1]] += 1\n",
        "of shared sliding-window blocks only the first has one reference more",
        "window",
    ),
    Planted(
        "budget-ignored",
        _POOL,
        "            excess = needed + self.allocated_bytes - self.max_bytes\n",
        "            excess = needed + self.held_bytes - self.max_bytes\n",
        "memory that is free, and not given back, is not counted",
    ),
    Planted(
        "shared-page-written",
        _SEQUENCE,
        "length > self.length and pool.counts[self.pages[tail]] > 1\n",
        "length > self.length and pool.counts[self.pages[tail]] > 2\n",
        "a page that two texts share is written by one of them",
    ),
    Planted(
        "fork-without-references",
        _SEQUENCE,
        "        num_pages = self._pool.num_pages_for(length - self._dropped)\n        if num_pages",
        "        num_pages = (length - self._dropped) // self._pool.page_tokens\n        if num_pages",
        "going back into a page gives up that page",
    ),
    Planted(
        "window-one-page-short",
        _WINDOW,
        "        return max(0, (length - self.tokens + 1) // self.page_tokens - 1)\n",
        "        return max(0, (length - self.tokens + 1) // self.page_tokens + 1)\n",
        "sliding-window blocks are freed while they are seen",
        "window",
    ),
    Planted(
        "window-hole-ignored",
        _WINDOW,
        "        if not self.tokens or windowed.all():\n",
        "        if not self.tokens or windowed[-1:].all():\n",
        "a text goes on where blocks before its end are missing",
        "window",
    ),
    Planted(
        "first-page-decides",
        _RADIX,
        "                return child, common_length(child.token_ids, token_ids)\n",
        "                return child, min(child.token_ids.size, token_ids.size)\n",
        "a text that begins with the first page of a node is taken for all of that node",
    ),
    Planted(
        "longer-text-not-retained",
        _RADIX,
        "        self._pool.retain(fresh, windowed[whole:])\n",
        "        self._pool.retain(fresh[1:], windowed[whole + 1 :])\n",
        "where a longer text replaces a shorter one, its first new page has no reference",
    ),
    Planted(
        "split-keeps-snapshots-above",
        _RADIX,
        "for offset, snapshot in snapshots if offset > length}\n",
        "for offset, snapshot in snapshots if offset >= length}\n",
        "a snapshot at the place where a node is split goes to both parts",
        "hybrid",
    ),
    Planted(
        "snapshot-one-token-late",
        _STATE,
        "targets += [(place - first, pool.states.address(slot)) for place",
        "targets += [(min(num_rows, place - first + 1), pool.states.address(slot)) for place",
        "states are kept after one token more than their place says",
        "hybrid",
    ),
    Planted(
        "state-before-not-released",
        _STATE,
        "        before, self.before = self.before, None\n        if before is not None:\n"
        "            self._release(before)\n"
        "        if self.next_state",
        "        self.before = None\n        if self.next_state",
        "the state before the last step is forgotten and never freed",
        "hybrid",
    ),
    Planted(
        "rollback-keeps-states",
        _STATE,
        "        reachable = [place.at(length) for place in places if place.position <= length]\n",
        "        reachable = [place.at(length) for place in places if place.position <= length + 1]\n",
        "going back may end in states of one token more",
        "hybrid",
    ),
    Planted(
        "draft-taken-for-true",
        "localinfer.engine.sampling.sampler",
        "index >= len(drafted) or drafted[index] != token_id:\n",
        "index >= len(drafted):\n",
        "what comes after a wrong draft counts",
    ),
    Planted(
        "draft-not-rolled-back",
        _RUNNER,
        "sequence.truncate(sequence.length - (part.num_drafted + 1 - len(chosen)))\n",
        "sequence.truncate(sequence.length - (part.num_drafted - len(chosen)))\n",
        "one rejected token of a draft stays in the text's memory",
    ),
    Planted(
        "wrong-row-sampled",
        _RUNNER,
        "                rows += range(num_rows - 1 - part.num_drafted, num_rows)\n",
        "                rows += [max(0, row - 1) for row in range(num_rows - 1 - part.num_drafted, num_rows)]\n",
        "a token is chosen from the logits of the position before",
    ),
    Planted(
        "retired-one-token-too-long",
        _RUNNER,
        "            sequence, token_ids = request.sequence, request.context_ids()\n",
        "            sequence, token_ids = request.sequence, np.roll(request.context_ids(), -1)\n",
        "what a text has computed is cached under ids that are one further",
    ),
    Planted(
        "preempted-without-its-last-token",
        _ADMISSION,
        "        token_ids = request.token_ids()\n        self._runner.retire(request)\n",
        "        token_ids = request.token_ids()[:-1]\n        self._runner.retire(request)\n",
        "a text that lost its memory goes on without its last token",
    ),
    Planted(
        "admitted-by-arrival",
        _ADMISSION,
        "    return rank(request), count > 0, request.is_prompt, count\n",
        "    return (0, True), count > 0, request.is_prompt, count\n",
        "who waits for a place is admitted whatever its priority",
    ),
    Planted(
        "prompts-by-owner-only",
        _SCHEDULER,
        "key=lambda request: (urgency(request), last_chunk.get(request.owner, 0))):\n",
        "key=lambda request: last_chunk.get(request.owner, 0)):\n",
        "rows of prompts are shared by owner, whatever their priorities",
    ),
    Planted(
        "most-urgent-gives-way",
        _PRECEDENCE,
        "        return sorted(found, key=self.urgency, reverse=True)\n",
        "        return sorted(found, key=self.urgency)\n",
        "of those that are less urgent the most urgent loses its place or memory",
    ),
    Planted(
        "equals-give-way",
        _PRECEDENCE,
        "self.urgency(other) > urgency\n",
        "self.urgency(other) >= urgency and other is not request\n",
        "requests of the same priority take place and memory from each other",
    ),
    Planted(
        "one-owner-holds-all-places",
        _PRECEDENCE,
        "            may_give.remove(newest)\n            found.append(newest)\n",
        "            may_give.remove(newest)\n",
        "an owner of whom nothing runs waits for the texts of another that holds all places",
    ),
    Planted(
        "last-text-of-an-owner-gives-way",
        _PRECEDENCE,
        "            if counts[newest.owner] < 2:\n",
        "            if counts[newest.owner] < 1:\n",
        "owners take places from each other in turns",
    ),
    Planted(
        "departed-never-closed",
        _SCHEDULER,
        "            if self.is_usable:\n                self._runner.finish(request)\n"
        "            self._remove(request)\n",
        "            if self.is_usable and not request.events:\n                self._runner.finish(request)\n"
        "            self._remove(request)\n",
        "a reader that leaves before it has read everything leaves its memory behind",
    ),
    Planted(
        "cancelled-late",
        _SCHEDULER,
        "        request.is_over, request.is_cancelled = True, False\n",
        "        request.is_over, request.is_cancelled = False, False\n",
        "a text that was cancelled goes on",
    ),
    Planted(
        "interrupted-step-not-undone",
        _SCHEDULER,
        "            for request in running:\n                _rollback(request)\n",
        "            for request in running[1:]:\n                _rollback(request)\n",
        "after Ctrl-C in a step the first text keeps what it has half done",
    ),
    Planted(
        "cached-to-the-last-token",
        _CACHE,
        "        prefix = token_ids[:-1] if media is None else token_ids[: media.reusable(token_ids.size - 1)]\n",
        "        prefix = token_ids[:]\n",
        "a prompt that is cached whole leaves nothing to compute",
    ),
    Planted(
        "key-without-history",
        _STORE,
        "            parent = record.key\n",
        "            parent = self._first_key if start else record.key\n",
        "the names of a text's later pages do not depend on all pages before them",
    ),
    Planted(
        "checksum-not-checked",
        "localinfer.storage.page_store",
        "    if checksum(header[:-CHECKSUM_BYTES] + wanted.contents, page) != header[-CHECKSUM_BYTES:]:\n",
        "    if len(checksum(header[:-CHECKSUM_BYTES], page)) != len(header[-CHECKSUM_BYTES:]):\n",
        "a file that was damaged is believed",
    ),
    Planted(
        "session-not-synced",
        _FILES,
        "            disk.sync(self._raw)\n",
        "            pass\n",
        "a session that was saved may be torn by a power cut",
    ),
    Planted(
        "session-page-not-proven",
        _SESSIONS,
        "                cache.tree.insert(token_ids[:length], fresh[:count], held, snapshots=snapshots, salt=salt)\n",
        "                cache.tree.insert(\n"
        "                    token_ids[:length], fresh[:count][::-1].copy(), held, snapshots=snapshots, salt=salt\n"
        "                )\n",
        "a session's pages come back in another order",
    ),
    Planted(
        "fingerprint-without-weights",
        "localinfer.storage.fingerprint",
        '            self._fingerprint = Fingerprint({"weights": weights_hash[:32], **parts})\n',
        '            self._fingerprint = Fingerprint({"weights": "", **parts})\n',
        "what another model of the same shape has cached or saved is taken for this one's",
    ),
    Planted(
        "fingerprint-not-compared",
        _SESSIONS,
        "        session.check_fingerprint(_fingerprint(identity).parts)\n",
        "        _fingerprint(identity)\n",
        "a session of any model of the same shape is loaded",
    ),
    Planted(
        "pinned-evicted-like-others",
        _NODE,
        "        return self.priority, self.eviction_score, self.last_used\n",
        "        return Priority.ORDINARY, self.eviction_score, self.last_used\n",
        "what is pinned, or begins with a system prompt, is evicted as if it were not",
    ),
    Planted(
        "most-valuable-evicted-first",
        _TREE,
        "        return min(idle, key=lambda leaf: leaf.eviction_order, default=None)\n",
        "        return max(idle, key=lambda leaf: leaf.eviction_order, default=None)\n",
        "what is worth most is evicted first",
    ),
    Planted(
        "pinned-states-evicted-like-others",
        _TREE,
        "            return place.node.priority, place.tokens_saved / (1 + self._clock - place.last_used)\n",
        "            return Priority.ORDINARY, place.tokens_saved / (1 + self._clock - place.last_used)\n",
        "snapshots of pinned texts are evicted before those of others",
        "hybrid",
    ),
    Planted(
        "used-page-evicted",
        _TREE,
        "        in_use = np.flatnonzero(self._pool.counts[leaf.pages] > 1)\n",
        "        in_use = np.flatnonzero(self._pool.counts[leaf.pages] > 2)\n",
        "pages that one running text holds are evicted",
    ),
    Planted(
        "session-checksum-not-checked",
        _SESSIONS,
        "            if found != wanted:\n",
        "            if len(found) != len(wanted):\n",
        "pages of a session that were damaged are believed",
    ),
    Planted(
        "session-one-token-late",
        _SESSIONS,
        "            wanted[:length],\n",
        "            np.roll(wanted[:length], -1),\n",
        "a session is saved under ids that are one further",
    ),
    Planted(
        "session-name-not-synced",
        _FILES,
        "            disk.sync_folder(os.path.dirname(self._place.path))\n",
        "            pass\n",
        "a session that was saved may be gone, or the one before, after a power cut",
    ),
    Planted(
        "conversation-not-synced",
        _RECORDS,
        "                disk.sync(file)\n",
        "                pass\n",
        "a conversation that was saved may be torn by a power cut",
        "disk",
    ),
    Planted(
        "conversation-name-not-synced",
        _RECORDS,
        "            disk.sync_folder(self.folder)\n        if self._budget is not None:\n",
        "            pass\n        if self._budget is not None:\n",
        "turns that were saved may be gone after a power cut",
        "disk",
    ),
    Planted(
        "conversations-not-locked",
        _RECORDS,
        "            while not disk.try_lock(lock):\n",
        "            while False:\n",
        "two processes write conversations at the same time",
        "disk",
    ),
    Planted(
        "renamed-before-written",
        _FILES,
        "        with file:\n            write(file)\n        disk.replace(temporary, path)\n",
        "        disk.replace(temporary, path)\n        with file:\n            write(file)\n",
        "a file has its name before its content",
        "disk",
    ),
    Planted(
        "salt-not-matched",
        _NODE,
        "        return self._of_salt.get(salt) or PrefixNode.root(salt)\n",
        "        return self._of_salt.get(salt) or self._of_salt.get(NO_SALT) or PrefixNode.root(salt)\n",
        "the first text of a salt finds what those without one have left",
    ),
    Planted(
        "salt-of-prompts-only",
        _CACHE,
        "        match = self.match(token_ids, salt, sequence.media)\n        before = sequence.length\n",
        "        match = self.match(token_ids, media=sequence.media)\n        before = sequence.length\n",
        "a prompt takes over what another salt computes meanwhile",
    ),
    Planted(
        "picture-cut-by-a-chunk",
        _SCHEDULER,
        "    parted = media.whole_run_at(start + count)\n",
        "    parted = None\n",
        "a chunk of a prompt ends within a picture whose rows see each other",
        "window",
    ),
    Planted(
        "words-behind-a-picture-too-far",
        _MEDIA,
        "            return MediaRows(positions=_line(first - shift, count)) if shift else None\n",
        "            return None\n",
        "tokens are decoded at positions that a picture has saved",
        "mixture",
    ),
    Planted(
        "picture-of-as-many-rows",
        _MEDIA,
        "        key = salt, run.ids.tobytes()\n",
        "        key = salt, bytes(run.ids.size)\n",
        "a picture has the embeddings of another of its size",
    ),
    Planted(
        "pictures-not-moved-by-a-shift",
        _MEDIA,
        "(one.start - first + kept, one.number, one.run)",
        "(one.start - first, one.number, one.run)",
        "where a context is shifted, pictures are looked for too early",
    ),
    Planted(
        "preempted-without-pictures",
        _ADMISSION,
        "        request.restart(token_ids, request.media)\n",
        "        request.restart(token_ids, None)\n",
        "a text that lost its memory comes back without its pictures",
    ),
)
"""All of them."""
