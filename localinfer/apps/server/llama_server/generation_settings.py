"""The settings of a generation under llama-server's names, as it says what it worked with."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localinfer.apps.server.llama_server.samplers import OFF_VALUES
from localinfer.engine.sampling.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

_SAME = (
    "temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p"
    " presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length mirostat mirostat_tau mirostat_eta"
).split()
_OTHER = {
    "repeat_last_n": "repetition_last_n",
    "repeat_penalty": "repetition_penalty",
    "dry_penalty_last_n": "dry_last_n",
}


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """The sampler's part of the engine's options. Raises: RequestError."""
    names = SamplingOptions.__annotations__
    return SamplingParams(**{name: value for name, value in options.items() if name in names})


def generation_settings(
    options: Mapping[str, Any], tokenizer: "Tokenizer | None", *, seed: int | None, **more: Any
) -> dict[str, Any]:
    """What llama-server calls `generation_settings`.

    options: the engine's. tokenizer: whose end tokens `ignore_eos` forbids. seed: the one that was drawn or given, None
    for one that will be drawn. more: of the request, under its own names.
    """
    params = sampling_params(options)
    most = options.get("max_tokens")
    n_predict = -1 if most is None else most
    stop = options.get("stop") or []
    # JSON has no infinity.
    finite = {token_id: None if math.isinf(value) else value for token_id, value in params.logit_bias.items()}
    bias: list[dict[str, Any]] = [{"token": token_id, "bias": value} for token_id, value in finite.items()]
    if options.get("ignore_eos") and tokenizer is not None:
        bias += [{"token": token_id, "bias": None} for token_id in sorted(tokenizer.eog_token_ids)]
    return {
        "seed": params.seed if seed is None else seed,
        **{name: getattr(params, name) for name in _SAME},
        **{name: getattr(params, ours) for name, ours in _OTHER.items()},
        # Neither is a step here, which these values say.
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": bool(options.get("ignore_eos")),
        "logit_bias": bias,
        "min_keep": 0,
        "samplers": list(OFF_VALUES),
        "lora": [],
        **more,
    }
