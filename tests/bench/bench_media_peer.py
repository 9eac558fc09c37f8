"""Encoding a picture, and the first token of a prompt with one, beside llama.cpp's libmtmd.

python -m tests.bench.bench_media_peer --peer-python PATH [--types F16,Q8_0] [--threads 1,2] [--layers N] [--rounds 3]
    [--shapes SigLIP,Qwen] [--no-first]

Both read the same files of random weights, in turns, with the same number of threads: an encoder of SigLIP-400M's
shape before Gemma 3 (896 x 896 pixels, 4,096 patches, 256 rows) and one of Qwen2.5-VL's (a picture of 1,024 x 768,
3,996 patches, 999 rows), text models of a billion weights in Q4_K. Embeddings are compared. Encoding is of a prepared
picture; the first token is from the bytes of a PNG file, a new picture each round, with an empty cache. Processor time
is what tells where other programs run: on one thread it is all that they leave equal.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import localinfer
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.types import FloatArray
from tests.bench.random_media import ENCODERS, TEXTS, write_encoder, write_text_model

SIZES = {"SigLIP-400M (Gemma 3)": (896, 896), "Qwen2.5-VL": (1024, 768)}
BEFORE, AFTER = "What is in ", " and what is it for?"


class Peer:
    """libmtmd in a process of its own."""

    def __init__(self, python: str, model: Path, mmproj: Path, threads: int) -> None:
        command = [python, str(Path(__file__).with_name("peer_media.py")), str(model), str(mmproj), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._marker = self._answer()["marker"]

    def encode(self, picture: Path, target: Path) -> tuple[list[float], FloatArray]:
        """Seconds, those on processors, and the embeddings."""
        seconds = self._ask(f"encode {picture} {target}")["seconds"]
        return seconds, np.load(target)

    def first(self, picture: Path) -> list[float]:
        """Seconds to the first token, and those on processors."""
        found: list[float] = self._ask(f"first {picture} {json.dumps(BEFORE + self._marker + AFTER)}")["seconds"]
        return found

    def close(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with {self._process.wait()}")
        return json.loads(line)


def picture(folder: Path, size: tuple[int, int], seed: int) -> Path:
    """A PNG file of coarse coloured noise."""
    path = folder / f"picture-{size[0]}-{seed}.png"
    if not path.exists():
        small = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8)
        Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path, "PNG", compress_level=1)
    return path


def clocks() -> tuple[float, float]:
    """Time, and the process's time on processors."""
    return time.perf_counter(), time.process_time()


def since(begin: tuple[float, float]) -> list[float]:
    return [now - before for now, before in zip(clocks(), begin, strict=True)]


def told(what: str, ours: list[list[float]], peers: list[list[float]]) -> None:
    """Print medians, and ratios with their spread."""
    for index, kind in enumerate(("", ", processors")):
        own, other = [[pair[index] for pair in side] for side in (ours, peers)]
        ratios = sorted(second / first for first, second in zip(own, other, strict=True))
        print(
            f"  {what + kind:34} {statistics.median(own):7.2f} s {statistics.median(other):7.2f} s"
            f" {statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


def compare(options: argparse.Namespace, folder: Path, name: str, kind: str, threads: int) -> None:
    """Time one shape of one type."""
    model, mmproj = folder / f"{TEXTS[name]['arch']}.gguf", folder / f"mmproj-{TEXTS[name]['arch']}-{kind}.gguf"
    peer = Peer(options.peer_python, model, mmproj, threads)
    with localinfer.load(model, mmproj=mmproj, threads=threads, disk_cache=False, context_length=4096) as llm:
        media = llm._media
        assert media is not None, "the file was given"
        ours: list[list[float]] = []
        peers: list[list[float]] = []
        errors = []
        # The first one warms both up, unless there is one only.
        for turn in range(options.rounds + (options.rounds > 1)):
            path = picture(folder, SIZES[name], turn)
            (piece,) = (one for one in media.prepare("image", path.read_bytes())[0].pieces if not isinstance(one, str))
            begin = clocks()
            rows = media.encode(piece)
            own = since(begin)
            seconds, wanted = peer.encode(path, folder / "peer.npy")
            errors.append(float(((rows - wanted) ** 2).sum() / (wanted**2).sum()))
            if turn or options.rounds == 1:
                ours.append(own)
                peers.append(seconds)
        told(f"encoding, {threads} threads", ours, peers)
        print(f"  embeddings differ by {max(errors):.1e}, {len(rows)} rows of {rows.shape[1]}", flush=True)
        if not options.no_first:
            ours, peers = [], []
            for turn in range(options.rounds):
                path = picture(folder, SIZES[name], 100 + turn)
                data = path.read_bytes()
                llm.clear_cache()
                begin = clocks()
                source = MediaSource("image", data, "prompt")
                llm.complete(llm.encode_prompt([BEFORE, source, AFTER]), max_tokens=1, temperature=0)
                ours.append(since(begin))
                peers.append(peer.first(path))
            told(f"first token, {threads} threads", ours, peers)
    peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--types", default="F16,Q8_0")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--shapes", default="SigLIP,Qwen")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-first", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the files here, and use those that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in ENCODERS:
            if not any(word in name for word in options.shapes.split(",")):
                continue
            model = folder / f"{TEXTS[name]['arch']}.gguf"
            if not model.exists():
                write_text_model(model, name, layers=2 if options.no_first else 0)
            for kind in options.types.split(","):
                mmproj = folder / f"mmproj-{TEXTS[name]['arch']}-{kind}.gguf"
                if not mmproj.exists():
                    write_encoder(
                        mmproj, name, kind, side=SIZES[name][0], output=TEXTS[name]["width"], layers=options.layers
                    )
                print(f"{name}, {kind}, {options.layers or ENCODERS[name]['layers']} blocks", flush=True)
                for threads in map(int, options.threads.split(",")):
                    compare(options, folder, name, kind, threads)


if __name__ == "__main__":
    main()
