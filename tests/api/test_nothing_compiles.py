"""Nothing compiles once `load` has returned, whatever is asked for then.

Each model runs in a process of its own, where no kernel is linked yet. What loading made sure of is noted; after it,
a kernel that was not among it fails, as it would have to be compiled on a machine that has none.
"""

from pathlib import Path

from tests.kernels.subprocesses import run_in_copy
from tests.models.arch_models import build_model, build_text_model
from tests.support.checkpoint_files import llama_weights, tokenizer_document, write_folder

PRELUDE = """
import sys
import numpy as np
import localinfer
from localinfer.kernels.jit import object_cache

sure, is_loaded = set(), False
is_cached, address = object_cache.Kernel.is_cached, object_cache._address

def noted(kernel):
    assert not is_loaded or kernel.name in sure, f"{kernel.name} is compiled after loading"
    sure.add(kernel.name)
    return is_cached.fget(kernel)

def linked(name):
    assert not is_loaded or name in sure, f"{name} is compiled after loading"
    return address(name)

object_cache.Kernel.is_cached = property(noted)
object_cache._address = linked

def loaded(path=None, **options):
    global is_loaded
    is_loaded = False
    sure.clear()
    llm = localinfer.load(path, device="cpu", **options)
    is_loaded = True
    return llm
"""

EVERYTHING = """
def ask_everything(llm):
    few = {"max_tokens": 6, "temperature": 1.0, "seed": 1}
    ids = list(range(3, 40))
    llm.complete(ids, **few)
    llm.complete(ids[:5], max_tokens=4, temperature=0)
    llm.complete(ids, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.9, xtc_probability=0.5, dry_multiplier=1.0, **few)
    llm.complete(ids, mirostat=2, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={4: 1.0}, **few)
    llm.complete(ids, logprobs=3, **few)
    llm.complete_many(ids, n=2, **few)
    llm.beam_search(ids, num_beams=2, max_tokens=3)
    llm.score(ids, top=2)
    llm.logits(ids)
    llm.complete([5, 6] * 20, max_tokens=20, temperature=0)
    for pooling in ("mean", "first", "last", "none"):
        llm.embed(ids, pooling=pooling)
    if "chat" in llm.capabilities and llm._model.tokenizer is not None:
        user = [{"role": "user", "content": "hello there"}]
        llm.chat(user, **few)
        llm.complete("Once upon", constraint=localinfer.Regex("[a-z ]+"), **few)
        llm.chat(user, constraint=localinfer.JsonObject(), max_tokens=30)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        llm.chat(user, tools=[tool], tool_choice="required", max_tokens=30)
        streams = [llm.stream(text, **few) for text in ("one", "two", "three")]
        for events in zip(*streams):
            pass
    llm.close()
"""


def ask(code: str) -> None:
    assert (
        run_in_copy(PRELUDE + EVERYTHING + code + "\nassert 'numba' not in sys.modules\nprint('asked')")[0] == "asked"
    )


def test_of_the_demo_model_with_every_kind_of_cache_and_draft(tmp_path: Path) -> None:
    """Every request, with drafts of text and of a model, every type of keys and values, a window, and the disk."""
    ask(f"""
from localinfer.loading.options import model_path
demo = model_path(None)
ask_everything(loaded(draft=demo))
for kv_type in ("f32", "q8_0", "q4_0", "q8_0/q4_0"):
    llm = loaded(kv_type=kv_type, threads=1)
    llm.complete([5, 6] * 40, max_tokens=20, temperature=0)
    llm.score([3, 4, 5])
    llm.embed([3, 4, 5])
    llm.close()
llm = loaded(kv_window=128, threads=1)
llm.complete(list(range(3, 200)), max_tokens=60)
llm.close()
llm = loaded(disk_cache=True, disk_cache_folder={str(tmp_path)!r})
llm.complete("Once upon a time there was a little fox who " * 8, max_tokens=4)
llm.close()
llm = loaded(disk_cache=True, disk_cache_folder={str(tmp_path)!r})
llm.complete("Once upon a time there was a little fox who " * 8, max_tokens=4)
llm.save_session({str(tmp_path / "session")!r})
llm.load_session({str(tmp_path / "session")!r})
llm.close()
""")


def test_of_texts_as_vectors_and_scores(tmp_path: Path) -> None:
    names = ("bert-encoder", "modern-bert-reranker", "gemma-embedding-encoder", "qwen3-reranker")
    paths = [str(build_text_model(tmp_path, name).path) for name in names]
    ask(f"""
for path in {paths!r}:
    llm = loaded(path, threads=1)
    texts = [list(range(3, 20)), [3, 4, 5], list(range(3, 100))]
    for pooling in (None, "mean", "first", "last", "none"):
        if pooling or "rerank" not in llm.capabilities:
            llm.embed_many(texts, pooling=pooling, truncate=True)
    if "rerank" in llm.capabilities:
        from localinfer.models.decoder.block_config import Pooling
        from localinfer.generation.pooling import PooledText
        llm._embedder._pool([PooledText(np.array(text, np.int32)) for text in texts], Pooling.RANK)
    llm.close()
""")


def test_of_experts_recurrent_states_and_windows(tmp_path: Path) -> None:
    names = ("qwen3moe-moe", "mamba2-recurrent", "gemma3-dense")
    paths = [str(build_model(tmp_path, name).path) for name in names]
    ask(f"for path in {paths!r}: ask_everything(loaded(path, threads=1))")


def test_of_layers_that_predict_several_tokens_and_of_folders(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", llama_weights(), tokenizer=tokenizer_document())
    mtp = build_model(tmp_path, "glm4moe-mtp").path
    ask(f"""
llm = loaded({str(folder)!r}, threads=1)
llm.complete([3, 4, 5, 6], max_tokens=6)
llm.embed([3, 4, 5])
llm.close()
llm = loaded({str(mtp)!r}, speculation="auto", threads=1)
llm.complete([3, 4, 5, 6], max_tokens=20, temperature=0)
llm.close()
""")
