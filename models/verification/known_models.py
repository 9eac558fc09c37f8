"""Published models that are known by their sizes, and what they were trained with.

From the config.json of each. Sizes are (layers, width, width of the feed-forward blocks, tokens): models that were
trained further keep them.
"""

from dataclasses import dataclass

from localinfer.models.decoder.config import ModelConfig

_TOLERANCE = 0.005
"""Share by which a vocabulary may differ: further training adds tokens, conversion pads. DeepSeek Coder 6.7B has the
sizes of Llama 2 7B and 0.8 % more tokens, and another base."""


@dataclass(frozen=True)
class KnownModel:
    """What models of one size were trained with.

    contexts: the longest context that was trained for with each base of the rotary embedding, without scaling.
    epsilon: of the norms. has_output: an output matrix of its own; None where some have and some have not.
    factors: longer contexts come with a divisor for each frequency (`rope_freqs.weight`).
    """

    name: str
    contexts: dict[float, int]
    epsilon: float
    has_output: bool | None = None
    factors: bool = False


_LLAMA3 = {5e5: 8192}
_QWEN2 = {1e6: 131072}
_QWEN2_MATH = {1e4: 131072, 1e6: 131072}
_QWEN3 = {1e6: 40960}

_KNOWN: dict[str, dict[tuple[int, int, int, int], KnownModel]] = {
    "llama": {
        (22, 2048, 5632, 32000): KnownModel("TinyLlama 1.1B", {1e4: 2048}, 1e-5, has_output=True),
        (32, 4096, 11008, 32000): KnownModel("Llama 2 7B", {1e4: 4096, 1e6: 16384}, 1e-5, has_output=True),
        (40, 5120, 13824, 32000): KnownModel("Llama 2 13B", {1e4: 4096, 1e6: 16384}, 1e-5, has_output=True),
        (80, 8192, 28672, 32000): KnownModel("Llama 2 70B", {1e4: 4096, 1e6: 32768}, 1e-5, has_output=True),
        (32, 4096, 14336, 128256): KnownModel("Llama 3 8B", _LLAMA3, 1e-5, has_output=True, factors=True),
        (80, 8192, 28672, 128256): KnownModel("Llama 3 70B", _LLAMA3, 1e-5, has_output=True, factors=True),
        (126, 16384, 53248, 128256): KnownModel("Llama 3 405B", _LLAMA3, 1e-5, has_output=True, factors=True),
        (16, 2048, 8192, 128256): KnownModel("Llama 3.2 1B", _LLAMA3, 1e-5, factors=True),
        (28, 3072, 8192, 128256): KnownModel("Llama 3.2 3B", _LLAMA3, 1e-5, factors=True),
        (32, 4096, 14336, 32000): KnownModel("Mistral 7B", {1e4: 32768, 1e6: 65536}, 1e-5, has_output=True),
        (40, 5120, 14336, 131072): KnownModel("Mistral Nemo 12B", {1e6: 1024000}, 1e-5, has_output=True),
        (40, 5120, 32768, 131072): KnownModel("Mistral Small 24B", {1e8: 32768, 1e9: 131072}, 1e-5, has_output=True),
        (32, 4096, 11008, 64000): KnownModel("Yi 6B", {5e6: 200000}, 1e-5, has_output=True),
        (60, 7168, 20480, 64000): KnownModel("Yi 34B", {5e6: 200000}, 1e-5, has_output=True),
    },
    "qwen2": {
        (24, 896, 4864, 151936): KnownModel("Qwen2 0.5B", _QWEN2, 1e-6),
        (28, 1536, 8960, 151936): KnownModel("Qwen2 1.5B", _QWEN2_MATH, 1e-6),
        (36, 2048, 11008, 151936): KnownModel("Qwen2.5 3B", _QWEN2, 1e-6),
        (28, 3584, 18944, 152064): KnownModel("Qwen2 7B", _QWEN2_MATH, 1e-6, has_output=True),
        (48, 5120, 13824, 152064): KnownModel("Qwen2.5 14B", _QWEN2, 1e-5, has_output=True),
        (64, 5120, 27648, 152064): KnownModel("Qwen2.5 32B", _QWEN2, 1e-5, has_output=True),
        (80, 8192, 29568, 152064): KnownModel("Qwen2 72B", _QWEN2_MATH, 1e-6, has_output=True),
    },
    "qwen3": {
        (28, 1024, 3072, 151936): KnownModel("Qwen3 0.6B", _QWEN3, 1e-6),
        (28, 2048, 6144, 151936): KnownModel("Qwen3 1.7B", _QWEN3, 1e-6),
        (36, 2560, 9728, 151936): KnownModel("Qwen3 4B", {1e6: 40960, 5e6: 262144}, 1e-6),
        (36, 4096, 12288, 151936): KnownModel("Qwen3 8B", _QWEN3, 1e-6),
        (40, 5120, 17408, 151936): KnownModel("Qwen3 14B", _QWEN3, 1e-6, has_output=True),
        (64, 5120, 25600, 151936): KnownModel("Qwen3 32B", _QWEN3, 1e-6, has_output=True),
    },
    "gemma": {
        (18, 2048, 16384, 256000): KnownModel("Gemma 2B", {1e4: 8192}, 1e-6),
        (28, 3072, 24576, 256000): KnownModel("Gemma 7B", {1e4: 8192}, 1e-6),
    },
    "gemma2": {
        (26, 2304, 9216, 256000): KnownModel("Gemma 2 2B", {1e4: 8192}, 1e-6),
        (42, 3584, 14336, 256000): KnownModel("Gemma 2 9B", {1e4: 8192}, 1e-6),
        (46, 4608, 36864, 256000): KnownModel("Gemma 2 27B", {1e4: 8192}, 1e-6),
    },
    "gemma3": {
        (18, 640, 2048, 262144): KnownModel("Gemma 3 270M", {1e6: 32768}, 1e-6),
        (26, 1152, 6912, 262144): KnownModel("Gemma 3 1B", {1e6: 32768}, 1e-6),
        (34, 2560, 10240, 262144): KnownModel("Gemma 3 4B", {1e6: 131072}, 1e-6),
        (48, 3840, 15360, 262144): KnownModel("Gemma 3 12B", {1e6: 131072}, 1e-6),
        (62, 5376, 21504, 262144): KnownModel("Gemma 3 27B", {1e6: 131072}, 1e-6),
    },
    "phi3": {
        (40, 5120, 17920, 100352): KnownModel("Phi-4", {2.5e5: 32768, 5e5: 32768}, 1e-5, has_output=True),
    },
    "gpt-oss": {
        (24, 2880, 2880, 201088): KnownModel("gpt-oss 20B", {1.5e5: 131072}, 1e-5, has_output=True),
        (36, 2880, 2880, 201088): KnownModel("gpt-oss 120B", {1.5e5: 131072}, 1e-5, has_output=True),
    },
}


def known_model(config: ModelConfig) -> KnownModel | None:
    """The published model that has these sizes, or None; mixtures of experts have those of other models."""
    sizes = (config.num_main_layers, config.hidden_size, max(config.intermediate_size, default=0))
    if (config.experts is not None) != (config.architecture == "gpt-oss"):
        return None
    for (*others, vocab_size), known in _KNOWN.get(config.architecture, {}).items():
        if sizes == tuple(others) and abs(config.vocab_size - vocab_size) <= _TOLERANCE * vocab_size:
            return known
    return None
