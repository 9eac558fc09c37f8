"""How much of a model calibration keeps, beside llama.cpp's quantizer with importance from the same text.

python -m tests.bench.bench_gptq MODEL TEXT OTHER [--peer-python PYTHON] [--types Q4_0,Q4_1] [--tokens N] [--chunks N]

The first half of TEXT calibrates both sides; its second half and OTHER, which neither has seen, measure them, all in
one runtime. Without a peer our own encoders with the same importance stand for it, and their bytes are equal to its.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

import localinfer
from localinfer.apps.evaluate.measure import Comparison, compare
from localinfer.apps.quantize import quantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.methods.presets import PRESETS, Preset, find_preset

PEER_FILES = Path(__file__).parent / "peer_files.py"
PROMPT = "Once upon a time"
NEW_TOKENS = 24

# Every matrix of the layers in one type, which no preset of llama.cpp's asks for.
PRESETS["LAYERS_Q4_K"] = Preset("LAYERS_Q4_K", 15, TensorType.Q4_K)


def peer(python: str, *words: object) -> str:
    result = subprocess.run([python, str(PEER_FILES), *map(str, words)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    return result.stdout


def judge(base: Path, candidate: Path, text: str, max_chunks: int) -> Comparison:
    with (
        localinfer.load(base, speculation=None) as first,
        localinfer.load(candidate, speculation=None) as second,
    ):
        length = min(512, first.context_length)
        return compare(first, second, text, context_length=length, max_chunks=max_chunks)


def greedy(model: Path, prompt: list[int]) -> list[int]:
    with localinfer.load(model, speculation=None) as llm:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(llm.logits(np.array(ids, np.int32))[-1].argmax()))
    return ids[len(prompt) :]


def types_of(path: Path) -> dict[str, TensorType]:
    with read_gguf(path) as file:
        return {name: record.type for name, record in file.tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--types", default="Q4_0,Q4_1")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, default=40)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    middle = text.index("\n", len(text) // 2)
    texts = {"same": text[middle:], "other": args.other.read_text(encoding="utf-8")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration, importance = folder / "calibration", folder / "importance.gguf"
        calibration.mkdir()
        # A tenth is held back of what is given; halves of the halves are not needed here.
        (calibration / "text.txt").write_text(text[:middle], encoding="utf-8")
        print("type text | peer: KLD top-1 99.9 % | ours: KLD top-1 99.9 % | ratio | seconds, bytes, types, text")
        for type in args.types.split(","):
            base, ours = folder / f"peer-{type}.gguf", folder / f"ours-{type}.gguf"
            options = {"calibration": calibration, "calibration_tokens": args.tokens}
            base_type = "Q4_K_M" if type == "LAYERS_Q4_K" else type
            quantize(args.model, base, type=base_type, method="imatrix", save_imatrix=importance, **options)
            if args.peer_python is not None:
                file_type = find_preset(base_type).file_type
                peer(args.peer_python, "quantize", args.model, base, file_type, importance)
            start = time.perf_counter()
            quantize(args.model, ours, type=type, method="gptq", **options)
            seconds = time.perf_counter() - start
            size = "equal" if base.stat().st_size == ours.stat().st_size else f"{ours.stat().st_size:,}"
            kinds = "equal" if types_of(base) == types_of(ours) else "differ"
            said = "-"
            if args.peer_python is not None:
                with localinfer.load(args.model, speculation=None) as llm:
                    prompt = llm.tokenizer.encode(PROMPT)
                words = peer(args.peer_python, "continue", ours, " ".join(map(str, prompt)), NEW_TOKENS)
                said = "equal" if [int(word) for word in words.split()] == greedy(ours, prompt) else "differs"
            for name, content in texts.items():
                first, second = (judge(args.model, path, content, args.chunks) for path in (base, ours))
                cells = [f"{c.mean:.4f} {c.same_top:.4f} {c.quantile(0.999):.3f}" for c in (first, second)]
                ratio = second.mean / first.mean
                print(
                    f"{type} {name} | {' | '.join(cells)} | {ratio:.3f} | {seconds:.1f} {size} {kinds} {said}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
