"""GGUF's names of what the towers of Hugging Face folders are made of, by the folders' own.

Kernels of patches become [out, channels, rows, columns], one for each frame; what lies otherwise is moved on the way.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.changes import FIRST_HALF, SECOND_HALF, Change, Moved
from localinfer.models.media.tower_file import Targets, To


def block_names(root: str, targets: Targets, prefix: str = "v.blk.*") -> dict[str, str | To | tuple[To, ...]]:
    """Names inside the blocks that are numbered after a root."""
    found: dict[str, str | To | tuple[To, ...]] = {}
    for name, entry in targets.items():
        entries = entry if isinstance(entry, tuple) else (To(entry) if isinstance(entry, str) else entry,)
        found[f"{root}.*.{name}"] = tuple(To(f"{prefix}.{one.name}", one.change) for one in entries)
    return found


# Rows of a matrix of patches as [row, column, channel], and kernels of two frames.
FRAME_KERNELS = (
    To("v.patch_embd.weight", Moved(lambda values: values[:, :, 0])),
    To("v.patch_embd.weight.1", Moved(lambda values: values[:, :, 1])),
)


FLAT_ROW = Moved(lambda values: values.reshape(-1))


POSITION_TABLE = Moved(lambda values: values.reshape(values.shape[-2:]))


def patches_last(patch: int) -> Change:
    """Kernels [out, row * column * channel] as [out, channel, row, column]."""
    return Moved(lambda values: values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2))


def columns_of_patches_last(side: int) -> Change:
    """Columns [row * column * channel] of a matrix or a vector as [channel * row * column]."""
    return Moved(
        lambda values: np.moveaxis(values.reshape(*values.shape[:-1], side, side, 3), -1, -3).reshape(values.shape)
    )


ATTENTION_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
}


SIGLIP_BLOCKS = ATTENTION_NAMES | {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def siglip_names(root: str, has_last_norm: bool = True) -> dict[str, str | To | tuple[To, ...]]:
    """SigLIP's and CLIP's names."""
    found: dict[str, str | To | tuple[To, ...]] = {
        f"{root}.embeddings.patch_embedding": "v.patch_embd",
        f"{root}.embeddings.position_embedding": "v.position_embd",
        f"{root}.embeddings.class_embedding": "v.class_embd",
        f"{root}.pre_layrnorm": "v.pre_ln",
        **block_names(f"{root}.encoder.layers", SIGLIP_BLOCKS),
    }
    return found | ({f"{root}.post_layernorm": "v.post_ln"} if has_last_norm else {})


POOLING_HEAD: Targets = {
    "vision_model.head.probe": To("v.head.probe", FLAT_ROW),
    "vision_model.head.attention.in_proj_weight": "v.head.attn_qkv.weight",
    "vision_model.head.attention.in_proj_bias": "v.head.attn_qkv.bias",
    "vision_model.head.attention.out_proj": "v.head.attn_out",
    "vision_model.head.layernorm": "v.head.ln",
    "vision_model.head.mlp.fc1": "v.head.ffn_up",
    "vision_model.head.mlp.fc2": "v.head.ffn_down",
}


QWEN_BLOCKS: Targets = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.proj": "attn_out",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def qwen_names(root: str) -> dict[str, str | To | tuple[To, ...]]:
    """Qwen's names with another first word."""
    return {name.replace("visual", root, 1): target for name, target in QWEN_NAMES.items()}


QWEN_NAMES: Targets = {
    "visual.patch_embed.proj.weight": FRAME_KERNELS,
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.pos_embed": "v.position_embd",
    **block_names("visual.blocks", QWEN_BLOCKS),
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "visual.deepstack_merger_list.*.norm": "v.deepstack.*.norm",
    "visual.deepstack_merger_list.*.linear_fc1": "v.deepstack.*.fc1",
    "visual.deepstack_merger_list.*.linear_fc2": "v.deepstack.*.fc2",
    "visual.merger_list.*.ln_q": "v.deepstack.*.norm",
    "visual.merger_list.*.mlp.0": "v.deepstack.*.fc1",
    "visual.merger_list.*.mlp.2": "v.deepstack.*.fc2",
}


GLM_NAMES: Targets = {
    "visual.patch_embed.proj.weight": FRAME_KERNELS,
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.embeddings.position_embedding": "v.position_embd",
    "visual.post_conv_layernorm": "v.norm_embd",
    **block_names("visual.blocks", QWEN_BLOCKS),
    "visual.post_layernorm": "v.post_ln",
    "visual.downsample": "mm.patch_merger",
    "visual.merger.proj": "mm.model.fc",
    "visual.merger.post_projection_norm": "mm.post_norm",
    "visual.merger.gate_proj": "mm.gate",
    "visual.merger.up_proj": "mm.up",
    "visual.merger.down_proj": "mm.down",
}


LLAVA_PROJECTOR: Targets = {
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "image_newline": "model.image_newline",
}


def pixtral_projector(root: str) -> Targets:
    return {
        f"{root}.norm": "mm.input_norm",
        f"{root}.patch_merger.merging_layer": "mm.patch_merger",
        f"{root}.linear_1": "mm.1",
        f"{root}.linear_2": "mm.2",
    }


INTERNVL_NAMES: Targets = {
    "vision_tower.embeddings.cls_token": To("v.class_embd", FLAT_ROW),
    "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
    "vision_tower.embeddings.position_embeddings": To("v.position_embd.weight", POSITION_TABLE),
    **block_names(
        "vision_tower.encoder.layer",
        {
            "attention.q_proj": "attn_q",
            "attention.k_proj": "attn_k",
            "attention.v_proj": "attn_v",
            "attention.projection_layer": "attn_out",
            "attention.q_norm": "attn_q_norm",
            "attention.k_norm": "attn_k_norm",
            "lambda_1": "ls1.weight",
            "lambda_2": "ls2.weight",
            "layernorm_before": "ln1",
            "layernorm_after": "ln2",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
    ),
    "vision_tower.layernorm": "v.post_ln",
    "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3",
}


INTERNVL_FIRST_NAMES: Targets = {
    "vision_model.embeddings.class_embedding": To("v.class_embd", FLAT_ROW),
    "vision_model.embeddings.patch_embedding": "v.patch_embd",
    "vision_model.embeddings.position_embedding": To("v.position_embd.weight", POSITION_TABLE),
    **block_names(
        "vision_model.encoder.layers",
        {
            "attn.qkv": "attn_qkv",
            "attn.proj": "attn_out",
            "attn.q_norm": "attn_q_norm",
            "attn.k_norm": "attn_k_norm",
            "ls1": "ls1.weight",
            "ls2": "ls2.weight",
            "norm1": "ln1",
            "norm2": "ln2",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
    ),
    "mlp1.0": "mm.model.mlp.0",
    "mlp1.1": "mm.model.mlp.1",
    "mlp1.3": "mm.model.mlp.3",
}
"""Names of InternVL's own folders, whose layers of a kind are fused."""


GEMMA4_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


GATED_PROJECTOR: Targets = {
    "multi_modal_projector.layernorm": "mm.input_norm",
    "multi_modal_projector.linear_1": (To("mm.up", FIRST_HALF), To("mm.gate", SECOND_HALF)),
    "multi_modal_projector.linear_2": "mm.down",
}


def columns_first(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Rows of queries and keys with the pairs that turn by columns before those that turn by rows, which alternate."""
    rows = np.arange(num_rows).reshape(3, num_heads, -1)
    pairs = rows[:2].reshape(2, num_heads, -1, 2, 2)
    return np.concatenate([pairs.swapaxes(2, 3).reshape(-1), rows[2].reshape(-1)])


MINICPM_NAMES: Targets = {
    "vision_tower.vit_merger.layer_norm1": "v.vit_merger.ln1",
    **{f"vision_tower.vit_merger.{name}": f"v.vit_merger.{target}" for name, target in ATTENTION_NAMES.items()},
    "vision_tower.vit_merger.pre_norm": "v.vit_merger.ds_ln",
    "vision_tower.vit_merger.linear_1": "v.vit_merger.ds_ffn_up",
    "vision_tower.vit_merger.linear_2": "v.vit_merger.ds_ffn_down",
    "merger.mlp.0.pre_norm": "mm.input_norm",
    "merger.mlp.0.linear_1": "mm.up",
    "merger.mlp.0.linear_2": "mm.down",
}


PADDLE_NAMES: Targets = {"mlp_AR.pre_norm": "mm.input_norm", "mlp_AR.linear_1": "mm.1", "mlp_AR.linear_2": "mm.2"}


def ovis_names(num_marks: int) -> Targets:
    """Ovis's names; the last rows of its table are those of marks."""
    blocks: Targets = {
        "attention.q_proj": "attn_q",
        "attention.k_proj": "attn_k",
        "attention.v_proj": "attn_v",
        "attention.out_proj": "attn_out",
        "rms_norm1": "ln1",
        "rms_norm2": "ln2",
        "ffn.gate_proj": "ffn_gate",
        "ffn.up_proj": "ffn_up",
        "ffn.down_proj": "ffn_down",
    }
    root = "vision_tower.transformer"
    return {
        f"{root}.embeddings.patch_embedding": "v.patch_embd",
        f"{root}.embeddings.position_embedding": "v.position_embd",
        f"{root}.embeddings.rms_norm": "v.norm_embd",
        **block_names(f"{root}.encoder.layers", blocks),
        f"{root}.rms_norm": "v.post_ln",
        "vision_tower.head_linear": "mm.head",
        "vision_tower.head_norm": "mm.head_norm",
        "visual_embeddings_table.weight": (
            To("mm.embd.weight", Moved(lambda values: values[:-num_marks].T)),
            To("v.mark_embd.weight", Moved(lambda values: values[-num_marks:])),
        ),
    }


LLAMA4_NAMES: Targets = {
    "vision_model.patch_embedding.linear": "v.patch_embd",
    "vision_model.class_embedding": "v.class_embd",
    "vision_model.positional_embedding_vlm": "v.position_embd.weight",
    "vision_model.layernorm_pre": "v.pre_ln",
    "vision_model.layernorm_post": "v.post_ln",
    **block_names(
        "vision_model.model.layers",
        ATTENTION_NAMES
        | {
            "self_attn.o_proj": "attn_out",
            "input_layernorm": "ln1",
            "post_attention_layernorm": "ln2",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
    ),
    "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
    "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
    "multi_modal_projector.linear_1": "mm.model.fc",
}
