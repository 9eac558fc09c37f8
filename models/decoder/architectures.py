"""The supported architectures: GGUF's name of each, and its record.

An architecture whose record depends on the model's sizes has a function from `ModelConfig` to the record. The tables
are in files by family: an entry belongs in `hybrid_architectures.py` if it has recurrent layers, experts or latent
attention, and in `dense_architectures.py` otherwise; encoders are in `encoder_architectures.py`.

Others are refused with the reason where their kind is known, else with the nearest names: GGUF's
`general.architecture` and config.json's `model_type` in the same words. `localinfer list --architectures` prints both.
"""

from collections.abc import Callable, Collection, Mapping

from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE
from localinfer.models.decoder.config import ModelConfig
from localinfer.system.registry import Registry

_HERE = "localinfer.models.decoder"
NUM_NEAREST = 3
WHERE_ALL_ARE = "`localinfer list --architectures` has all"
_TOO_FAR = 0.3
"""Share of letters in common below which a name says nothing."""

CROSS_ATTENTION = "whose layers also attend to images (cross attention)"
DIFFUSION = "a model that writes by diffusion, not token after token"
ENCODER_DECODER = "an encoder and a decoder that attends to it (cross attention)"
HEARS = "a model that turns speech into text"
SPEAKS = "a model that makes sound"
SEES = "a model that reads images"
COMPARES = "a model that compares images, sounds or videos with texts by their vectors"
RETRIEVES = "a model that gives a vector per token of a page or a query, for retrieval"
OWN_TEXT = "a model that sees or hears around a text model of a kind of its own"
DRAFTS = "a model that drafts from the hidden states of another one"
REPEATED = "whose layers run several times"
HYPER_CONNECTIONS = "whose layers are joined by hyper-connections of several streams"
COMPRESSED = "whose attention reads compressed stretches of keys, in layers joined by hyper-connections"
BLOCK_RESIDUALS = "whose layers attend to the results of former layers"
GROUPED_EXPERTS = "whose experts share smaller experts in groups"
EARLIER_RWKV = "with recurrent layers of an earlier kind (RWKV 6)"
SPARSE_DELTA = "with n-gram embeddings, and an indexer beside its delta nets"


def named(reasons: Mapping[str, str]) -> dict[str, str]:
    """Reasons by name, of the names that each reason has, in one text."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


NOT_RUN = named(
    {
        DIFFUSION: "diffusion-gemma dream llada llada-moe rnd1",
        DRAFTS: "dflash eagle3",
        SPEAKS: "pockettts qwen3tts wavtokenizer-dec",
        SEES: "clip",
        ENCODER_DECODER: "t5 t5encoder",
        REPEATED: "hrm_text",
        HYPER_CONNECTIONS: "glm5-next hy_v4",
        COMPRESSED: "deepseek4 deepseek4v",
        BLOCK_RESIDUALS: "kimi-k3",
        SPARSE_DELTA: "qwen4exp",
        "with recurrent layers in the place of another model's attention": "arwkv7 rwkv6qwen2",
        EARLIER_RWKV: "rwkv6",
        GROUPED_EXPERTS: "grovemoe",
    }
)
"""Architectures of GGUF files that do not run, and why: what follows their names in a sentence."""


def spelling(name: str) -> str:
    """A name's letters and digits alone: kinds are spelled with dashes, underscores and capitals, or without."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def nearest_names(name: str, known: Collection[str]) -> list[str]:
    """Up to three of the known names that are spelled most like one, the likest first."""
    # Most models are known by their names.
    from difflib import SequenceMatcher

    wanted = spelling(name)

    def likeness(other: str) -> float:
        letters = spelling(other)
        common = next((n for n, (a, b) in enumerate(zip(wanted, letters, strict=False)) if a != b), None)
        start = (min(len(wanted), len(letters)) if common is None else common) / max(len(wanted), len(letters), 1)
        matcher = SequenceMatcher(None, wanted, letters, autojunk=False)
        # A name of a file may have megabytes: letters of one that is far too long are not compared.
        is_near = matcher.real_quick_ratio() + start >= 2 * _TOO_FAR
        # Names of a family begin alike, and differ in a generation or a size.
        return ((matcher.ratio() if is_near else 0.0) + start) / 2

    # Of names that are as like, the later in the alphabet has the higher number.
    found = sorted(((likeness(other), other) for other in known), reverse=True)[:NUM_NEAREST]
    return [other for score, other in found if score >= _TOO_FAR]


def refuse_kind(where: str, name: object, known: Collection[str], reason: str | None, way_out: str) -> Exception:
    """The error for a kind of model that does not run. where: what names it; reason: what follows its name, if known;
    way_out: what to do instead, as a sentence."""
    if reason is not None:
        return UnsupportedFormatError(f"{where} is {name!r:.60}, {reason}, which this version does not run. {way_out}")
    nearest = nearest_names(name, known) if isinstance(name, str) else []
    near = f", the nearest of them {_joined([repr(other) for other in nearest])}" if nearest else ""
    return UnsupportedFormatError(
        f"{where} is {name!r:.60}, not one of the {len(known)} that this version runs{near} ({WHERE_ALL_ARE}). "
        f"{way_out}"
    )


def _joined(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


ARCHITECTURES: Registry[str, Architecture | Callable[[ModelConfig], Architecture]] = Registry(
    tables={
        f"{_HERE}.dense_architectures:LLAMA_FAMILY": (
            "apertus arcee baichuan bitnet cogvlm chatglm ernie4_5 exaone glm4 granite hunyuan-dense "
            "hunyuan_vl hyperclovax internlm2 llama maincoder minicpm mistral3 nanbeige nanochat paddleocr "
            "pangu-embedded plamo phi3 qwen qwen2 qwen2vl qwen3vl qwen3 refact seed_oss spark2_5 xverse"
        ).split(),
        f"{_HERE}.dense_architectures:GPT_FAMILY": (
            "bloom codeshell command-r falcon gpt2 gptneox jais jais2 mpt nemotron olmo orion phi2 stablelm "
            "starcoder starcoder2"
        ).split(),
        f"{_HERE}.dense_architectures:WINDOWED": (
            "cohere2 deci exaone4 gemma gemma2 gemma3 gemma3n gemma4 muse-glimmer olmo2 openelm plamo3 "
            "smollm3 vaultgemma"
        ).split(),
        f"{_HERE}.hybrid_architectures:MIXTURES": (
            "afmoe arctic bailingmoe bailingmoe2 cohere2moe dbrx deepseek deepseek2-ocr dots1 ernie4_5-moe "
            "exaone-moe flex-olmo glm4moe gpt-oss granite_swa granitemoe grok hunyuan-moe hy_v3 laguna llama4 "
            "maple mellum mimo2 minimax-m2 minimax-m3 olmoe phimoe qwen2moe qwen3moe qwen3vlmoe smallthinker "
            "step35"
        ).split(),
        f"{_HERE}.hybrid_architectures:LATENT": ("deepseek2 deepseek32 glm-dsa minicpm3 mistral4 plm").split(),
        f"{_HERE}.hybrid_architectures:RECURRENT_ARCHITECTURES": (
            "bailingmoe3 clef kimi-linear lfm2 lfm2moe lfm3 minimax-01 olmo-hybrid qwen35 qwen35moe qwen3next rwkv7"
        ).split(),
        f"{_HERE}.hybrid_architectures:STATE_SPACE_ARCHITECTURES": (
            "falcon-h1 granitehybrid jamba mamba mamba2 nemotron_h nemotron_h_moe plamo2 zamba2"
        ).split(),
        f"{_HERE}.encoder_architectures:ENCODERS": (
            "bert clip-text colpali colqwen2 deberta-v2 eurobert gemma-embedding gemma-embedding2 gte jina-bert-v2 "
            "jina-bert-v3 modern-bert mpnet neo-bert nomic-bert nomic-bert-moe siglip-text"
        ).split(),
        f"{_HERE}.encoder_architectures:DECODERS_OF_THEIR_KIND": ("modern-bert-decoder").split(),
    }
)
"""Records by name, of which a load imports those of the model's family."""


def check_architecture(name: str) -> None:
    """Raise UnsupportedFormatError, with the reason or the nearest names, unless this version runs it."""
    if name in OF_ANOTHER_CACHE:
        raise UnsupportedFormatError(
            f"general.architecture is {name!r}, a draft model without keys and values: it attends to those of the "
            f"{OF_ANOTHER_CACHE[name]!r} model that it drafts for, and runs beside that only. Load that model, and "
            "give this file as its draft (--draft)."
        )
    if name not in ARCHITECTURES:
        way_out = "Update localinfer or choose another model."
        raise refuse_kind("general.architecture", name, ARCHITECTURES, NOT_RUN.get(name), way_out)


def find_architecture(config: ModelConfig) -> Architecture:
    """Describe a model. Raises: as `check_architecture`."""
    check_architecture(config.architecture)
    found = ARCHITECTURES[config.architecture]
    return found if isinstance(found, Architecture) else found(config)
