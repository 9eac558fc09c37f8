"""The training loop of the demo model: mixed batches, Muon and AdamW, a schedule by CPU time, checkpoints."""

import json
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from network import DemoModel, Shape
from numpy.typing import NDArray
from torch import Tensor, nn

START_SHARES = {
    "books": 0.28, "stories": 0.17, "story_chat": 0.10, "grammar_chat": 0.18, "talk": 0.07, "copies": 0.20,
}  # fmt: skip
END_SHARES = {
    "books": 0.04, "stories": 0.03, "story_chat": 0.01, "grammar_chat": 0.78, "talk": 0.14, "copies": 0.00,
}  # fmt: skip
"""Each source's share of the tokens at the start and from 70 % of the training on."""
PEAK_RATES = (0.02, 3e-3)
"""Learning rates of Muon, for the matrices, and of AdamW, for the embedding and the norms."""
SAVE_INTERVAL_SECONDS = 180
REPORT_INTERVAL_SECONDS = 20


class Batches:
    """Draws rows of packed documents; the mixture moves from START_SHARES to END_SHARES."""

    def __init__(self, work: Path, seed: int) -> None:
        arrays = np.load(work / "tokens.npz")
        self._random = random.Random(seed)
        self._documents = {
            source: np.split(arrays[source].astype(np.int64), arrays[f"{source}.ends"][:-1])
            for source in (*START_SHARES, "held_out")
        }
        self._queues: dict[str, list[int]] = {source: [] for source in START_SHARES}
        self._drawn = dict.fromkeys(START_SHARES, 1)

    def _next_document(self, progress: float) -> NDArray[np.int64]:
        mix = min(1.0, progress / 0.7)
        total = sum(self._drawn.values())
        shortage = {
            source: START_SHARES[source] * (1 - mix) + END_SHARES[source] * mix - drawn / total
            for source, drawn in self._drawn.items()
        }
        source = max(shortage, key=lambda name: shortage[name])
        if not self._queues[source]:
            self._queues[source] = list(range(len(self._documents[source])))
            self._random.shuffle(self._queues[source])
        document = self._documents[source][self._queues[source].pop()]
        # Forgetting old counts lets the realised shares follow the moving ones.
        self._drawn = {name: int(count * 0.999) + 1 for name, count in self._drawn.items()}
        self._drawn[source] += len(document)
        return document

    def draw(self, progress: float, num_rows: int, length: int) -> Tensor:
        """Return int64[num_rows, length + 1]; each row starts with a document, its last one is cut."""
        rows = np.empty((num_rows, length + 1), np.int64)
        for row in rows:
            filled = 0
            while filled <= length:
                piece = self._next_document(progress)[: length + 1 - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
        return torch.from_numpy(rows)

    def held_out(self, length: int = 512, num_rows: int = 24) -> Tensor:
        """Return the packed evaluation rows int64[num_rows, length + 1], always the same ones."""
        tokens = np.concatenate(self._documents["held_out"])[: num_rows * (length + 1)]
        whole_rows = len(tokens) // (length + 1)
        return torch.from_numpy(tokens[: whole_rows * (length + 1)].reshape(whole_rows, length + 1))


@dataclass(kw_only=True)
class Progress:
    """What a checkpoint knows beside the weights."""

    step: int = 0
    tokens: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


def schedule(progress: float) -> float:
    """Return the learning rate's factor: short warm-up, plateau to 35 %, then linearly to 1 %."""
    if progress < 0.015:
        return 0.05 + 0.95 * progress / 0.015
    return 1.0 if progress < 0.35 else max(0.01, (1.0 - progress) / 0.65)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats a token, of rows int64[batch, time + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def load_model(work: Path) -> tuple[DemoModel, Progress]:
    """Return the model of the newest checkpoint."""
    state = torch.load(work / "checkpoint.pt")
    model = DemoModel(Shape())
    model.load_state_dict(state["model"])
    return model.eval(), Progress(**state["progress"])


class Trainer:
    """Trains in a work folder until a budget of CPU or wall time is spent; continues from its checkpoint."""

    def __init__(self, work: Path, *, tokens_per_step: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._work = work
        self._tokens_per_step = tokens_per_step
        self._model = DemoModel(Shape())
        is_matrix = {name: name.startswith("blk.") and w.ndim == 2 for name, w in self._model.named_parameters()}
        matrices = [w for name, w in self._model.named_parameters() if is_matrix[name]]
        others = [w for name, w in self._model.named_parameters() if not is_matrix[name]]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=PEAK_RATES[0], momentum=0.95, weight_decay=0.03),
            torch.optim.AdamW(others, lr=PEAK_RATES[1], betas=(0.9, 0.97), weight_decay=0.0),
        ]
        self._done = Progress()
        self._recent_losses: list[float] = []
        if (work / "checkpoint.pt").exists():
            self._load()
        self._batches = Batches(work, seed + self._done.step)

    def _load(self) -> None:
        state = torch.load(self._work / "checkpoint.pt")
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._done = Progress(**state["progress"])

    def run(self, *, cpu_budget_seconds: float, wall_budget_seconds: float) -> None:
        """Train until either budget is spent; SIGTERM saves a checkpoint and stops."""
        stop_requested = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
        done = self._done
        cpu_start, wall_start = time.process_time() - done.cpu_seconds, time.time() - done.wall_seconds
        last_save = last_report = done.cpu_seconds
        while True:
            done.cpu_seconds, done.wall_seconds = time.process_time() - cpu_start, time.time() - wall_start
            progress = max(done.cpu_seconds / cpu_budget_seconds, done.wall_seconds / wall_budget_seconds)
            is_over = progress >= 1.0 or stop_requested.is_set()
            if is_over or done.cpu_seconds - last_save > SAVE_INTERVAL_SECONDS:
                self._save()
                self._evaluate()
                last_save = done.cpu_seconds
            if is_over:
                return
            self._step(progress)
            if done.cpu_seconds - last_report > REPORT_INTERVAL_SECONDS:
                loss, rate = np.mean(self._recent_losses[-20:]), done.tokens / done.cpu_seconds
                print(f"{progress:.1%} step {done.step} loss {loss:.3f} {rate:.0f} tokens/s", flush=True)
                last_report = done.cpu_seconds

    def _step(self, progress: float) -> None:
        for optimizer, rate in zip(self._optimizers, PEAK_RATES, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(progress)
        # One step in eight sees the whole context, so that long chats work.
        length = Shape.context_length if self._done.step % 8 == 7 else 512
        rows = self._batches.draw(progress, self._tokens_per_step // length, length)
        loss = loss_of(self._model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._done.step += 1
        self._done.tokens += rows.shape[0] * length
        self._recent_losses.append(loss.item())

    def _save(self) -> None:
        newest = self._work / "checkpoint.pt"
        partial = newest.with_suffix(".partial")
        state = {
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": asdict(self._done),
        }
        torch.save(state, partial)
        partial.replace(newest)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Append the training loss and the loss on held-out stories to log.jsonl."""
        held_out = float(np.mean([loss_of(self._model, row[None]).item() for row in self._batches.held_out()]))
        train_loss = float(np.mean(self._recent_losses)) if self._recent_losses else None
        entry = {**asdict(self._done), "train_loss": train_loss, "held_out_loss": held_out}
        with (self._work / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        print(entry, flush=True)
        self._recent_losses = []
