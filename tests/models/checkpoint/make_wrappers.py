"""Writes tests/data/checkpoint/wrappers.*; needs transformers and torch. Model types may follow; others stay.

The settings of each are those of its own class, with small sizes: what a wrapper is made of, the class decides.
"""

import json
import lzma
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.checkpoint.published_models import TOKEN_IDS, weights
from tests.models.checkpoint.wrapper_cases import CASES_FILE, LOGITS_FILE, ROWS, read_wrappers
from tests.support.checkpoint_files import safetensors_bytes

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "moe_shared_expert_intermediate_size": 24,
}
"""Sizes of text models, where their class has such a setting."""
OTHERS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 40),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    "out_hidden_size": 64,
    "num_mel_bins": 16,
    "image_size": 56,
    "patch_size": 14,
    "vocab_size": 96,
}
"""Sizes of other parts."""


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **settings}}


_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "global_head_dim": 32,
    "sliding_window": 12,
}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("aya_vision", "cohere2_vision"), {"text_config": {"logit_scale": 1.0}}),
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "gemma4": {"text_config": {**_GEMMA4, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}},
    "gemma4_unified": {"text_config": _GEMMA4},
    **dict.fromkeys(
        ("glm4v", "glm46v", "glmga", "glm4v_moe"),
        {"text_config": _rope(mrope_section=[1, 1, 2], partial_rotary_factor=0.5)},
    ),
    "glm_ocr": {"text_config": _rope(mrope_section=[2, 3, 3], partial_rotary_factor=1.0)},
    "hunyuan_vl": {"text_config": {**_rope(mrope_section=[2, 2, 2, 2]), "head_dim": 16}},
    "kimi_k25": {"text_config": {**_rope(), "head_dim": None, "num_key_value_heads": 4}},
    "nemotron_h_omni": {
        "text_config": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        "vision_config": {"video_temporal_patch_size": 2},
    },
    **dict.fromkeys(
        ("paddleocr_vl", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"),
        {"text_config": _rope(mrope_section=[2, 3, 3])},
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"),
        {"text_config": _rope(mrope_section=[3, 3, 2], mrope_interleaved=True)},
    ),
}
"""What does not follow from sizes, by model type and record; None for what the class shall set itself."""
MODEL_TYPES = (
    "audioflamingo3 aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid exaone4_5 fun_asr_nano gemma3 gemma4 "
    "gemma4_unified glm46v glm4v glm4v_moe glm_ocr glmasr glmga got_ocr2 granite_docling granite_speech "
    "granite_speech_plus hunyuan_vl hyperclovax_vision_v2 idefics2 idefics3 internvl kimi_k25 lfm2_vl lfm3_vl "
    "lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 "
    "minimax_m3_vl mistral3 moss_transcribe_diarize musicflamingo nemotron_h_omni omniasr ovis2 paddleocr_vl "
    "paligemma pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe "
    "qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava voxtral "
).split()
_TABLES = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
)


def small_config(model_type: str) -> Any:
    """A configuration of transformers, with small sizes in every record of it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    whole = kind()
    own = SETTINGS.get(model_type, {})
    records: dict[str, Any] = {}
    for name in kind.sub_configs:
        part = getattr(whole, name, None)
        if part is None:
            continue
        is_text = name == "text_config"
        made = _smaller(part.to_dict(), TEXT if is_text else OTHERS) | own.get(name, {})
        if is_text:
            made |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        records[name] = {"model_type": part.model_type} | {key: made[key] for key in made if made[key] is not None}
    # Marks of pictures and sounds, within the small vocabulary.
    ids = {
        key: 90
        for key, value in whole.to_dict().items()
        if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    return kind(**(ids | records | own.get("", {})))


def _smaller(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: sizes[key] for key, value in settings.items() if key in sizes and type(value) is int}


def model_class(model_type: str) -> Any:
    """The class that transformers has for such a model, one that generates."""
    import transformers
    from transformers.models.auto import modeling_auto

    found: list[str] = []
    for table in _TABLES:
        names = getattr(modeling_auto, table, {}).get(model_type, ())
        found += [names] if isinstance(names, str) else names
    found.sort(key=lambda name: not name.endswith("ForConditionalGeneration"))
    return getattr(transformers, found[0])


def compute(model_type: str, folder: Path) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Save a model, give it other weights, compute; returns config.json and shapes, and float32[T, vocab_size]."""
    import safetensors
    import torch
    import transformers

    # The class of Llama 4 of 5.24 asks its output for a field that it lacks.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]
    kind = model_class(model_type)
    options: dict[str, Any] = {"attn_implementation": "eager"}
    model = kind._from_config(small_config(model_type), **options)
    model.float().save_pretrained(folder)
    path = folder / "model.safetensors"
    with safetensors.safe_open(path, "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    path.write_bytes(safetensors_bytes(weights(shapes)))
    model = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(TOKEN_IDS.astype(np.int64))[None]).logits[0].float().numpy()
    saved = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "transformers_version", "dtype"):
        saved.pop(key, None)
    return {"config": saved, "shapes": shapes}, logits


def main(names: list[str]) -> None:
    """Compute the models of these types, or all."""
    warnings.simplefilter("ignore")
    cases = read_wrappers() if CASES_FILE.exists() and names else {}
    logits: dict[str, Any] = {}
    if names and LOGITS_FILE.exists():
        with np.load(LOGITS_FILE) as file:
            logits = dict(file)
    for name in names or MODEL_TYPES:
        with tempfile.TemporaryDirectory() as folder:
            cases[name], result = compute(name, Path(folder))
        logits[name] = result[ROWS]
        print(name, float(np.abs(result).max()), flush=True)
    CASES_FILE.write_bytes(lzma.compress(json.dumps(cases, sort_keys=True).encode(), preset=9))
    np.savez_compressed(LOGITS_FILE, **dict(sorted(logits.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
