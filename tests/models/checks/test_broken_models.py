"""Each check of a load fires on a file that is broken so, and says what is wrong in one line."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checks.quick import check_hyperparameters
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, copy_values, encode_value
from tests.models.checks.broken_models import demo, edited, findings_of, sized_config, small_llama
from tests.models.small_models import VOCAB
from tests.models.text.vocabularies import vocabulary_file

PRE, MODEL, TEMPLATE = "tokenizer.ggml.pre", "tokenizer.ggml.model", "tokenizer.chat_template"
TOKENS, MERGES, SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores"
TURNS = "{% for message in messages %}{{ BEGIN + message['role'] + message['content'] + END }}{% endfor %}"
LLAMA3_TURNS = TURNS.replace("BEGIN", "'<|start_header_id|>'").replace("END", "'<|eot_id|>'")


def only(path: Path) -> tuple[str, str]:
    """The check and the message of the one finding of a file, which fits a line."""
    (finding,) = findings_of(path)
    assert "\n" not in finding.message and finding.message.isprintable() and not finding.message.endswith(".")
    return finding.check, finding.message


def stored(path: Path, key: str) -> Any:
    with read_gguf(path) as file:
        value = file.metadata[key]
        return value.tolist() if isinstance(value, np.ndarray) else value


def with_vocabulary(name: str, path: Path, **settings: Any) -> Path:
    """A model of four narrow layers with a published vocabulary."""
    with read_gguf(vocabulary_file(name, path.parent)) as file:
        words = {key: value for key, value in copy_values(file.metadata).items() if key.startswith("tokenizer.")}
        size = file.metadata.stored(TOKENS).count
    assert size is not None, "an array"
    words |= {f"tokenizer.ggml.{key}": encode_value(value) for key, value in settings.items()}
    with read_gguf(small_llama(path.parent)) as file:
        values = {**copy_values(file.metadata), **words, "llama.vocab_size": encode_value(size)}
        records = [
            TensorRecord(one.name, TensorType.Q4_0, (size, one.shape[1])) if one.shape[0] == VOCAB else one
            for one in file.tensors.values()
        ]
        with GGUFWriter(path, values, records) as writer:
            for one in records:
                if one.type is TensorType.Q4_0:
                    writer.write(np.random.default_rng(1).integers(0, 30, one.num_bytes, np.uint8))
                else:
                    writer.write(file.tensor_bytes(one.name).reshape(-1))
    return path


def spm_settings(**values: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of the demo model's words, which are as many."""
    size = len(stored(demo(), TOKENS))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"▁word{index}" for index in range(size - len(tokens))]
    types = [2, 3, 3, *[6] * 256, *[1] * (size - 259)]
    scores = [0.0] * 259 + [-float(index) for index in range(size - 259)]
    own = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1}
    return {f"tokenizer.ggml.{key}": value for key, value in {**own, "eos_token_id": 2, **values}.items()}


UNNEEDED = (MERGES, PRE, TEMPLATE, "tokenizer.ggml.eot_token_id")


@pytest.mark.parametrize("name", ["qwen2", "gpt-2", "llama-bpe"])
def test_a_known_vocabulary_with_another_word_splitting_is_told_the_right_one(name: str, tmp_path: Path) -> None:
    assert findings_of(with_vocabulary(name, tmp_path / "good.gguf")) == []
    check, message = only(with_vocabulary(name, tmp_path / "broken.gguf", pre="default"))
    assert check == "pre-tokenizer" and f"tokenizer.ggml.pre={name} (--set)" in message


def test_a_word_splitting_that_the_merges_contradict_is_found(tmp_path: Path) -> None:
    with read_gguf(vocabulary_file("qwen2", tmp_path)) as file:
        merges = file.metadata[MERGES][:-1]  # type: ignore[index]
    assert findings_of(with_vocabulary("qwen2", tmp_path / "good.gguf", merges=merges)) == []
    check, message = only(with_vocabulary("qwen2", tmp_path / "broken.gguf", merges=merges, pre="default"))
    assert check == "pre-tokenizer" and "'default', which splits" in message


def test_a_missing_word_splitting_of_a_known_vocabulary_is_named(tmp_path: Path) -> None:
    path = with_vocabulary("qwen2", tmp_path / "broken.gguf", pre="of-another-version")
    with pytest.warns(UserWarning, match="The vocabulary is Qwen 2's: set tokenizer.ggml.pre=qwen2"):
        findings_of(path)


def spm_tokens_as_bpe() -> dict[str, Any]:
    return {key: [text.replace("Ġ", "▁") for text in stored(demo(), key)] for key in (TOKENS, MERGES)}


VOCABULARIES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...], str, str]] = {
    "SentencePiece's tokens as BPE": (spm_tokens_as_bpe, (), "tokenizer kind", "'gpt2', byte-level BPE"),
    "BPE's tokens as SentencePiece": (
        lambda: spm_settings(
            tokens=stored(demo(), TOKENS), token_type=[1] * 4096, bos_token_id=0, eos_token_id=1, unknown_token_id=2
        ),
        UNNEEDED,
        "tokenizer kind",
        "'llama', SentencePiece",
    ),
    "scores of zero": (lambda: spm_settings(scores=[0.0] * 4096), UNNEEDED, "tokenizer scores", "are all 0"),
    "bytes missing": (
        lambda: spm_settings(token_type=[2, 3, 3, *[6] * 200, *[3] * 56, *[1] * 3837]),
        UNNEEDED,
        "byte tokens",
        "lacks 56 of 256 byte tokens (first: <0xC8>)",
    ),
    "a character as end": (
        lambda: {"tokenizer.ggml.eos_token_id": 40},
        ("tokenizer.ggml.eot_token_id",),
        "end of text",
        "eos_token_id is 40, which is the character",
    ),
}


@pytest.mark.filterwarnings("ignore:tokenizer.ggml.tokens lacks")
@pytest.mark.parametrize("name", list(VOCABULARIES))
def test_a_vocabulary_that_contradicts_itself_is_found(name: str, tmp_path: Path) -> None:
    settings, without, wanted, words = VOCABULARIES[name]
    path = edited(demo(), tmp_path / "broken.gguf", settings=settings(), without=without)
    check, message = only(path)
    assert check == wanted and words in message


def test_a_vocabulary_of_sentencepiece_is_none(tmp_path: Path) -> None:
    assert findings_of(edited(demo(), tmp_path / "good.gguf", settings=spm_settings(), without=UNNEEDED)) == []


@pytest.mark.parametrize(
    ("template", "check", "words"),
    [
        (LLAMA3_TURNS, "chat template", "is Llama 3's, whose <|start_header_id|> is no token .* has <|im_start|>"),
        (
            TURNS.replace("BEGIN", "'### '").replace("END", "'<end_of_turn>'"),
            "end of turn",
            "closes replies with <end_of_turn>, which is no token",
        ),
    ],
)
def test_a_template_of_another_family_is_found(template: str, check: str, words: str, tmp_path: Path) -> None:
    found, message = only(edited(demo(), tmp_path / "broken.gguf", settings={TEMPLATE: template}))
    assert found == check
    assert all(part in message for part in words.split(" .* "))


def test_a_template_whose_turns_end_otherwise_than_generations_is_found(tmp_path: Path) -> None:
    tokens = ["<|TURN_END|>" if token == "<|im_end|>" else token for token in stored(demo(), TOKENS)]
    template = TURNS.replace("BEGIN", "'<|im_start|>'").replace("END", "'<|TURN_END|>'")
    settings = {TOKENS: tokens, TEMPLATE: template, "tokenizer.ggml.eot_token_id": 3}
    assert findings_of(edited(demo(), tmp_path / "good.gguf", settings=settings)) == []
    del settings["tokenizer.ggml.eot_token_id"]
    path = edited(demo(), tmp_path / "bad.gguf", settings=settings, without=("tokenizer.ggml.eot_token_id",))
    check, message = only(path)
    assert check == "end of turn" and "<|TURN_END|>, which ends no generation here (<|end_of_text|>" in message
    assert "eot_token_id=3 (--set)" in message


def narrow(file_tensors: dict[str, Any] | None = None, **metadata: Any) -> Any:
    return SimpleNamespace(tensors=file_tensors or {"output.weight": None}, metadata=metadata)


LLAMA3_8B, QWEN2_05B, GEMMA3_1B = (32, 4096, 14336, 128256), (24, 896, 4864, 151936), (26, 1152, 6912, 262144)


@pytest.mark.parametrize(
    ("architecture", "sizes", "context", "base", "epsilon", "check", "words"),
    [
        ("llama", LLAMA3_8B, 8192, None, 1e-5, "RoPE base", "missing, which means 10000, but Llama 3 8B .* 500000"),
        ("llama", LLAMA3_8B, 8192, 1e6, 1e-5, "RoPE base", "1e+06"),
        ("llama", LLAMA3_8B, 131072, 5e5, 1e-5, "context length", "knows 8192 tokens without the divisors"),
        ("llama", (22, 2048, 5632, 32000), 32768, 1e4, 1e-5, "context length", "TinyLlama 1.1B knows 2048"),
        ("qwen2", QWEN2_05B, 32768, 1e4, 1e-6, "RoPE base", "Qwen2 0.5B was trained with 1e+06"),
        ("gemma3", GEMMA3_1B, 32768, None, 1e-6, "RoPE base", "Gemma 3 1B was trained with 1e+06"),
        ("llama", LLAMA3_8B, 8192, 5e5, 1e-3, "norm epsilon", "Llama 3 8B was trained with 1e-05"),
        ("llama", (2, 128, 256, 100), 512, 1e4, 0.0, "norm epsilon", "models have 1e-12 to 1e-3"),
    ],
)
def test_settings_that_a_known_model_was_not_trained_with_are_found(
    architecture: str,
    sizes: tuple[int, int, int, int],
    context: int,
    base: float | None,
    epsilon: float,
    check: str,
    words: str,
) -> None:
    metadata, config = sized_config(architecture, sizes, context, base=base, epsilon=epsilon)
    (finding,) = check_hyperparameters(narrow(**metadata), config)
    assert finding.check == check and all(part in finding.message for part in words.split(" .* "))


@pytest.mark.parametrize(
    ("architecture", "sizes", "context", "base", "tensors"),
    [
        ("llama", LLAMA3_8B, 8192, 5e5, ()),
        ("llama", LLAMA3_8B, 131072, 5e5, ("rope_freqs.weight",)),
        ("llama", LLAMA3_8B, 1048576, 3.58e9, ()),
        ("llama", (32, 4096, 14336, 32000), 32768, 1e6, ()),
        ("llama", (32, 4096, 11008, 32016), 16384, 1e6, ()),
        ("llama", (32, 4096, 11008, 32256), 16384, 1e5, ()),
        ("llama", (30, 576, 1536, 128256), 8192, 1e5, ()),
        ("qwen2", QWEN2_05B, 131072, 1e6, ()),
        ("qwen2", (28, 1536, 8960, 151936), 131072, 1e4, ()),
        ("gemma", (18, 2048, 16384, 256000), 8192, None, ()),
    ],
)
def test_settings_of_published_models_and_their_longer_kin_are_none(
    architecture: str, sizes: tuple[int, int, int, int], context: int, base: float | None, tensors: tuple[str, ...]
) -> None:
    metadata, config = sized_config(architecture, sizes, context, base=base, epsilon=1e-6)
    file = narrow(dict.fromkeys(("output.weight", *tensors)), **metadata)
    assert list(check_hyperparameters(file, config)) == []


def test_settings_of_the_user_are_theirs_and_a_missing_output_matrix_is_found() -> None:
    metadata, config = sized_config("llama", LLAMA3_8B, 8192, base=1e4)

    class Replaced(dict[str, Any]):
        replaced_keys = frozenset({"llama.rope.freq_base"})

    file = SimpleNamespace(tensors={"token_embd.weight": None}, metadata=Replaced(metadata))
    (finding,) = check_hyperparameters(file, config)  # type: ignore[arg-type]
    assert finding.check == "output matrix" and "output.weight is missing" in finding.message


def fill(value: float, where: Any = slice(None)) -> Callable[[Any], None]:
    def change(weights: Any) -> None:
        weights[where] = value

    return change


TENSORS: dict[str, tuple[dict[str, Any], str, str]] = {
    "NaN": ({"blk.2.ffn_down.weight": fill(np.nan, (slice(None), 3))}, "weights not finite", "blk.2.ffn_down.weight"),
    "infinite": ({"blk.1.attn_norm.weight": fill(np.inf, 9)}, "weights not finite", "whatever it computes"),
    "zero matrix": ({"blk.3.attn_k.weight": fill(0.0)}, "weights zero", "blk.3.attn_k.weight is zero"),
    "zero norm": ({"output_norm.weight": fill(0.0)}, "weights zero", "output_norm.weight is zero"),
    "larger": ({"blk.1.ffn_up.weight": lambda w: w * 100}, "weights scale", "times larger than ffn_up"),
    "smaller": ({"blk.1.attn_q.weight": lambda w: w / 100}, "weights scale", "times smaller than attn_q"),
    "all larger": (
        {f"blk.{layer}.attn_v.weight": lambda w: w * 100 for layer in range(4)},
        "weights scale",
        "the weights of attn_v are 1",
    ),
}


@pytest.mark.parametrize("name", list(TENSORS))
def test_weights_that_cannot_be_right_are_found(name: str, tmp_path: Path) -> None:
    good = small_llama(tmp_path)
    assert findings_of(good) == []
    changes, wanted, words = TENSORS[name]
    check, message = only(edited(good, tmp_path / "broken.gguf", changes=changes))
    assert check == wanted and words in message


def test_a_model_whose_weights_are_not_finite_is_refused_unless_it_is_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"blk.0.attn_q.weight": fill(np.nan)}
    path = edited(small_llama(tmp_path), tmp_path / "broken.gguf", changes=changes)
    with pytest.raises(CorruptFileError, match=r"broken.gguf: blk.0.attn_q.weight has .* with verify=False"):
        localinfer.load(path, device="cpu", may_measure=False)
    with localinfer.load(path, device="cpu", may_measure=False, verify=False) as llm:
        assert llm.info.warnings == ()
    path = edited(small_llama(tmp_path), tmp_path / "warned.gguf", changes={"blk.0.attn_q.weight": fill(0.0)})
    caplog.clear()
    with localinfer.load(path, device="cpu", may_measure=False) as llm:
        (warning,) = llm.info.warnings
    assert [record.getMessage() for record in caplog.records if "zero" in record.getMessage()] == [
        f"warned.gguf: {warning}"
    ]


def nowhere(name: str) -> None:
    return None


def later(name: str) -> str:
    """A tensor's name in a model of which this is the second part."""
    first, _, rest = name.partition(".")
    return name if first != "blk" else f"blk.{int(rest.split('.')[0]) + 4}.{rest.split('.', 1)[1]}"


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "adapter": (
        {"settings": {"general.type": "adapter", "adapter.type": "lora", "general.base_model.0.name": "Base"}},
        "is an adapter .* of 'Base'. Merge it into its base model",
    ),
    "unnamed adapter": ({"renames": lambda name: f"{name}.lora_a"}, "is an adapter"),
    "control vector": ({"renames": lambda name: f"direction.{name}"}, "is a control vector"),
    "projector": (
        {"settings": {"general.architecture": "clip"}, "renames": lambda name: f"v.{name}"},
        r"projector \(mmproj\) .* without mmproj in its name",
    ),
    "importance matrix": ({"settings": {"general.type": "imatrix"}}, "is an importance matrix"),
    "vocabulary": (
        {"settings": {TOKENS: ["a"]}, "renames": nowhere},
        "is a vocabulary without weights, which 'localinfer tokenize' takes",
    ),
    "draft layers": (
        {"renames": lambda name: name.replace("blk.0.", "blk.9.nextn.") if "blk.0." in name else None},
        "next-token prediction .* Choose a file that holds both",
    ),
    "part": ({"renames": later}, r"one part of a model \(2 of 3 by its name\)"),
}


@pytest.mark.parametrize("name", list(KINDS))
def test_another_kind_of_file_is_named_with_what_to_get(name: str, tmp_path: Path) -> None:
    changes, words = KINDS[name]
    path = edited(small_llama(tmp_path), tmp_path / "other-00002-of-00003.gguf", **changes)
    file = open_model_file(path)
    with pytest.raises(UnsupportedFormatError, match=words):
        read_config(file)
    file.close()
