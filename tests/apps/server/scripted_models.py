"""Models that say what a test wrote down, one byte a token, behind the names that a server knows them by."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
from local_servers import MODEL
from numpy.typing import NDArray

from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.engine.admission import EngineLimits
from localinfer.llm import LLM
from localinfer.models.text.vocabulary import FillInTokens
from localinfer.types import ModelInfo
from tests.engine.fakes import ByteTokenizer, FakeTemplate, fake_model
from tests.support.limits import seconds

Step = int | threading.Event | Exception
BOT, END = 259, 257
BAR = ord("|")
WAIT_SECONDS = 20.0


class ThinkingTemplate(FakeTemplate):
    """Names the markers of reasoning, as templates do that cut it out of former replies."""

    source = "<think></think>"


def scripted_model(
    steps: Sequence[Step], template: type[FakeTemplate] = ThinkingTemplate, max_running: int = 16
) -> LLM:
    """A model that answers every chat, and every prompt that ends with a bar, with the same tokens, then ends.

    An event among the steps is waited for before the next token; an exception is raised there.
    """
    tokens = [step for step in steps if isinstance(step, int)]
    pauses = {sum(isinstance(one, int) for one in steps[:i]): s for i, s in enumerate(steps) if not isinstance(s, int)}

    def logits(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        starts = np.flatnonzero(history == (BOT if BOT in history else BAR))
        count = history.size - 1 - int(starts[-1]) if starts.size else len(tokens)
        pause = pauses.get(count)
        if isinstance(pause, threading.Event):
            assert pause.wait(seconds(WAIT_SECONDS)), "nobody let the model go on"
        elif isinstance(pause, Exception):
            raise pause
        row = np.zeros(vocab_size, np.float32)
        row[tokens[count] if count < len(tokens) else END] = 50.0
        return row

    model = fake_model(logits, context_length=4096, max_batch_rows=64, max_output_rows=8)
    model.chat_template = template()
    llm = LLM(model, limits=EngineLimits(max_running=max_running))  # type: ignore[arg-type]
    # There is no file that it could be read from.
    llm.info = _info(supports=bool(template.source))  # type: ignore[misc]
    return llm


def _info(*, supports: bool) -> ModelInfo:
    return ModelInfo(
        name="scripted",
        path=MODEL.path,
        architecture="fake",
        capabilities=("completion", "chat", "embeddings"),
        parameters=0,
        quantization="F32",
        bits_per_weight=32.0,
        file_bytes=0,
        num_layers=1,
        num_experts=0,
        vocab_size=0,
        context_length=4096,
        trained_context_length=4096,
        device="cpu",
        threads=1,
        kv_type="f16",
        memory_bytes=1 << 20,
        sampling={},
        chat_template=None,
        supports_tools=supports,
        supports_thinking=supports,
    )


def scripted_sources(*names: str) -> list[ModelSource]:
    return [ModelSource(name, MODEL.path, MODEL.created) for name in names]


def loader(scripts: dict[str, Sequence[Step]], max_running: int = 16) -> Callable[[ModelSource], LLM]:
    """What loads each script under its name. max_running: texts that it says at one time."""
    return lambda source: scripted_model(scripts[source.id], max_running=max_running)


class FillingTokenizer(ByteTokenizer):
    """Has the tokens of models that were trained to fill in."""

    vocab_size = 263
    special_ids = {"<end>": 257, "<|fim_prefix|>": 260, "<|fim_suffix|>": 261, "<|fim_middle|>": 262}
    fill_in_tokens = FillInTokens(260, 261, 262)


def filling_loader(asked: list[list[int]]) -> Callable[[ModelSource], LLM]:
    """What loads a model that fills every hole with an "x", and notes each prompt that it was asked by."""

    def logits(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        row = np.zeros(vocab_size, np.float32)
        is_first = history[-1] == FillingTokenizer.fill_in_tokens.middle
        if is_first:
            asked.append(history.tolist())
        row[ord("x") if is_first else FillingTokenizer.special_ids["<end>"]] = 50.0
        return row

    def load(source: ModelSource) -> LLM:
        model = fake_model(logits, vocab_size=FillingTokenizer.vocab_size)
        model.tokenizer = FillingTokenizer()
        return LLM(model)  # type: ignore[arg-type]

    return load
