"""Drafting from history beside the peer's prompt lookup: `python -m tests.bench.bench_lookup VOCABULARY`.

Both draft up to ten tokens whenever the text so far has been read, on the same texts; no model runs. Tokens per pass is
what a model of these texts would yield with one pass per draft; the peer drafts by its defaults (n-grams of two).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.loading.load import load_tokenizer
from tests.bench.edit_tasks import edit_tasks

COUNT = 10

_PEER = """
import json, sys, time
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
texts, count = json.load(sys.stdin)
for prompt, output in texts:
    drafter = LlamaPromptLookupDecoding(num_pred_tokens=count)
    whole = np.array(prompt + output, np.intc)
    position, passes, drafted, accepted, seconds = len(prompt) + 1, 1, 0, 0, 0.0
    while position < whole.size:
        began = time.perf_counter()
        found = drafter(whole[:position])
        seconds += time.perf_counter() - began
        found = found[: whole.size - position]
        right = 0
        while right < len(found) and found[right] == whole[position + right]:
            right += 1
        drafted, accepted, passes, position = drafted + len(found), accepted + right, passes + 1, position + right + 1
    print(json.dumps([len(output) / passes, accepted / max(1, drafted), 1e6 * seconds / passes]), flush=True)
"""


def replay(prompt: list[int], output: list[int]) -> tuple[float, float, float]:
    """Tokens per pass, the share of drafted tokens that were right, and microseconds per draft."""
    text = NgramDrafter().begin()
    whole = np.array(prompt + output, np.int32)
    out = np.empty(COUNT, np.int32)
    position, passes, drafted, accepted, seconds = len(prompt) + 1, 1, 0, 0, 0.0
    while position < whole.size:
        began = time.perf_counter()
        found = text.draft(whole[:position], out)
        seconds += time.perf_counter() - began
        found = min(found, whole.size - position)
        right = 0
        while right < found and out[right] == whole[position + right]:
            right += 1
        drafted, accepted, passes, position = drafted + found, accepted + right, passes + 1, position + right + 1
    return len(output) / passes, accepted / max(1, drafted), 1e6 * seconds / passes


def main() -> None:
    """Print one line per text: ours, then the peer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", help="a GGUF file with a tokenizer")
    parser.add_argument("--texts", type=Path, help="folder of .txt files, whose chapters are replayed as well")
    parser.add_argument("--peer-python", default=sys.executable)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.vocabulary)
    texts: list[tuple[str, list[int], list[int]]] = [
        (task.name, tokenizer.encode(task.prompt), tokenizer.encode(task.result, add_special=False))
        for task in edit_tasks()
    ]
    for path in sorted(options.texts.glob("*.txt")) if options.texts else []:
        ids = tokenizer.encode(path.read_text("utf-8", errors="replace")[50_000:56_000])
        texts.append((path.name, ids[:400], ids[400:1000]))
    request = json.dumps([[[prompt, output] for _, prompt, output in texts], COUNT])
    command = [options.peer_python, "-c", _PEER]
    replies = subprocess.run(command, input=request, capture_output=True, text=True, check=True).stdout.splitlines()
    print(f"{'':<52}{'tokens/pass':>19}{'right, %':>15}{'us a draft':>19}")
    for (name, prompt, output), line in zip(texts, replies, strict=True):
        ours: Any = replay(prompt, output)
        peer = json.loads(line)
        print(
            f"{name:<52}{ours[0]:>9.2f} /{peer[0]:>8.2f}{100 * ours[1]:>7.0f} /{100 * peer[1]:>6.0f}"
            f"{ours[2]:>9.1f} /{peer[2]:>8.1f}"
        )
    history = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 100_000).astype(np.int32)
    whole = np.append(history, history[:1000])
    drafter = NgramDrafter()
    text, out = drafter.begin(), np.empty(15, np.int32)
    began = time.perf_counter()
    text.draft(history, out)
    read = time.perf_counter() - began
    began = time.perf_counter()
    for index in range(1000):
        text.draft(whole[: history.size + index + 1], out)
    seconds = time.perf_counter() - began
    print(f"100,000 tokens read in {1e3 * read:.1f} ms, then {1e3 * seconds:.1f} us a round")


if __name__ == "__main__":
    main()
