"""HunyuanVideo's two models as families.

The tables follow diffusers' HunyuanVideo15Transformer3DModel and HunyuanVideoTransformer3DModel
(0.42.1), and the names that diffusers' `convert_hunyuan_video1_5_to_diffusers.py` and
`single_file_utils.py` read, those of HunyuanVideo's repositories.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.safetensor_files import Naming
from alload_jax.models.families import SWAPPED, SamplingDefaults, TransformerFamily, require_fields
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig, HunyuanVideoTransformer
from alload_jax.models.hunyuan_video.transformer_13b import (
    HunyuanVideo13bConfig,
    HunyuanVideo13bTransformer,
)

DIFFUSERS_CLASS = "HunyuanVideo15Transformer3DModel"
_COUNTS = (
    *("num_attention_heads", "attention_head_dim", "num_layers", "num_refiner_layers"),
    *("in_channels", "out_channels", "patch_size", "patch_size_t", "text_embed_dim"),
)
_TEXT_LENGTH, _GLYPH_LENGTH = 1000, 256
"""Most tokens of both texts in diffusers' pipelines; its config does not contain them."""
_GLYPH_HIDDEN = 2048
_SIZE = 640
"""Default of `target_size`, for which pipelines choose a resolution; the model does not use it."""


_TEXT, _REFINER = "condition_embedding/text", "context_embedder.token_refiner.refiner_blocks.{}"
_REFINING = "txt_in.individual_token_refiner.blocks.{}"
_TIMES, _BLOCK = "context_embedder.time_text_embed", "transformer_blocks.{}"
_DOUBLE, _FORWARD = "double_blocks.{}", "blocks/condition/feed_forward"
_NAMES = {
    "patch_embedding": ("x_embedder.proj", "img_in.proj"),
    "time_embedding/hidden": ("time_embed.timestep_embedder.linear_1", "time_in.mlp.0"),
    "time_embedding/out": ("time_embed.timestep_embedder.linear_2", "time_in.mlp.2"),
    "head/modulation": ("norm_out.linear", f"final_layer.adaLN_modulation.1{SWAPPED}"),
    "head/out": ("proj_out", "final_layer.linear"),
    "condition_embedding/kind": ("cond_type_embed", "cond_type_embedding"),
    f"{_TEXT}/time_hidden": (f"{_TIMES}.timestep_embedder.linear_1", "txt_in.t_embedder.mlp.0"),
    f"{_TEXT}/time_out": (f"{_TIMES}.timestep_embedder.linear_2", "txt_in.t_embedder.mlp.2"),
    f"{_TEXT}/mean_hidden": (f"{_TIMES}.text_embedder.linear_1", "txt_in.c_embedder.linear_1"),
    f"{_TEXT}/mean_out": (f"{_TIMES}.text_embedder.linear_2", "txt_in.c_embedder.linear_2"),
    f"{_TEXT}/inner": ("context_embedder.proj_in", "txt_in.input_embedder"),
    f"{_TEXT}/blocks/attention_norm": (f"{_REFINER}.norm1", f"{_REFINING}.norm1"),
    f"{_TEXT}/blocks/feed_forward_norm": (f"{_REFINER}.norm2", f"{_REFINING}.norm2"),
    f"{_TEXT}/blocks/query": (f"{_REFINER}.attn.to_q", f"{_REFINING}.self_attn_qkv"),
    f"{_TEXT}/blocks/key": (f"{_REFINER}.attn.to_k", f"{_REFINING}.self_attn_qkv"),
    f"{_TEXT}/blocks/value": (f"{_REFINER}.attn.to_v", f"{_REFINING}.self_attn_qkv"),
    f"{_TEXT}/blocks/out": (f"{_REFINER}.attn.to_out.0", f"{_REFINING}.self_attn_proj"),
    f"{_TEXT}/blocks/feed_forward/hidden": (f"{_REFINER}.ff.net.0.proj", f"{_REFINING}.mlp.fc1"),
    f"{_TEXT}/blocks/feed_forward/out": (f"{_REFINER}.ff.net.2", f"{_REFINING}.mlp.fc2"),
    f"{_TEXT}/blocks/gates": (f"{_REFINER}.norm_out.linear", f"{_REFINING}.adaLN_modulation.1"),
    "condition_embedding/glyphs/norm": ("context_embedder_2.norm", "byt5_in.layernorm"),
    "condition_embedding/glyphs/inner": ("context_embedder_2.linear_1", "byt5_in.fc1"),
    "condition_embedding/glyphs/hidden": ("context_embedder_2.linear_2", "byt5_in.fc2"),
    "condition_embedding/glyphs/out": ("context_embedder_2.linear_3", "byt5_in.fc3"),
    "condition_embedding/image/norm_in": ("image_embedder.norm_in", "vision_in.proj.0"),
    "condition_embedding/image/hidden": ("image_embedder.linear_1", "vision_in.proj.1"),
    "condition_embedding/image/out": ("image_embedder.linear_2", "vision_in.proj.3"),
    "condition_embedding/image/norm_out": ("image_embedder.norm_out", "vision_in.proj.4"),
    "blocks/video/modulation": (f"{_BLOCK}.norm1.linear", f"{_DOUBLE}.img_mod.linear"),
    "blocks/video/query": (f"{_BLOCK}.attn.to_q", f"{_DOUBLE}.img_attn_q"),
    "blocks/video/key": (f"{_BLOCK}.attn.to_k", f"{_DOUBLE}.img_attn_k"),
    "blocks/video/value": (f"{_BLOCK}.attn.to_v", f"{_DOUBLE}.img_attn_v"),
    "blocks/video/out": (f"{_BLOCK}.attn.to_out.0", f"{_DOUBLE}.img_attn_proj"),
    "blocks/video/query_norm": (f"{_BLOCK}.attn.norm_q", f"{_DOUBLE}.img_attn_q_norm"),
    "blocks/video/key_norm": (f"{_BLOCK}.attn.norm_k", f"{_DOUBLE}.img_attn_k_norm"),
    "blocks/video/feed_forward/hidden": (f"{_BLOCK}.ff.net.0.proj", f"{_DOUBLE}.img_mlp.fc1"),
    "blocks/video/feed_forward/out": (f"{_BLOCK}.ff.net.2", f"{_DOUBLE}.img_mlp.fc2"),
    "blocks/condition/modulation": (f"{_BLOCK}.norm1_context.linear", f"{_DOUBLE}.txt_mod.linear"),
    "blocks/condition/query": (f"{_BLOCK}.attn.add_q_proj", f"{_DOUBLE}.txt_attn_q"),
    "blocks/condition/key": (f"{_BLOCK}.attn.add_k_proj", f"{_DOUBLE}.txt_attn_k"),
    "blocks/condition/value": (f"{_BLOCK}.attn.add_v_proj", f"{_DOUBLE}.txt_attn_v"),
    "blocks/condition/out": (f"{_BLOCK}.attn.to_add_out", f"{_DOUBLE}.txt_attn_proj"),
    "blocks/condition/query_norm": (f"{_BLOCK}.attn.norm_added_q", f"{_DOUBLE}.txt_attn_q_norm"),
    "blocks/condition/key_norm": (f"{_BLOCK}.attn.norm_added_k", f"{_DOUBLE}.txt_attn_k_norm"),
    f"{_FORWARD}/hidden": (f"{_BLOCK}.ff_context.net.0.proj", f"{_DOUBLE}.txt_mlp.fc1"),
    f"{_FORWARD}/out": (f"{_BLOCK}.ff_context.net.2", f"{_DOUBLE}.txt_mlp.fc2"),
}
"""Our layers; their names in diffusers and in HunyuanVideo 1.5's repository."""
_JOINED = {ours: re.sub("_attn_[qkv]$", "_attn_qkv", names[1]) for ours, names in _NAMES.items()}
"""The names of ComfyUI, and of HunyuanVideo's first repository."""


class HunyuanVideoFamily(TransformerFamily):
    """HunyuanVideo 1.5's models for text and images to video; see `Family`."""

    name = "hunyuan_video"
    config, model = HunyuanVideoConfig, HunyuanVideoTransformer
    folder_classes = (DIFFUSERS_CLASS,)
    tensor_names: ClassVar[Mapping[Naming, Mapping[str, str]]] = {
        "diffusers": {ours: names[0] for ours, names in _NAMES.items()},
        "original": {ours: names[1] for ours, names in _NAMES.items()},
        "comfyui": _JOINED,
    }
    namings = ("diffusers", "original", "comfyui")
    lora_targets = (r"^blocks/(video|condition)/(query|key|value|out|feed_forward)(/|$)",)

    @override
    def sampling_defaults(self, config: HunyuanVideoConfig) -> SamplingDefaults:
        """Guidance and shift are those of the 720p models."""
        if config.latent_channels in (1, 3):
            return SamplingDefaults(6.0, 1.0, (1, 1, 1))
        return SamplingDefaults(6.0, 9.0, (4, 16, 16), 24.0)

    @override
    def read_fields(self, fields: dict[str, Any]) -> HunyuanVideoConfig:
        """Reads a config.json of diffusers."""
        require_fields(fields, ("text_embed_2_dim", "image_embed_dim"), "count")
        if fields.get("use_meanflow"):
            raise InputError(
                "use_meanflow is true: models with a second timestep, such as those for "
                "super-resolution, are not supported; name another model"
            )
        return HunyuanVideoConfig(
            text=TextConfig(fields["text_embed_dim"], _TEXT_LENGTH),
            glyphs=TextConfig(fields["text_embed_2_dim"], _GLYPH_LENGTH),
            image=ImageConfig(fields["image_embed_dim"]),
            **_read_common(fields),
        )

    @override
    def export_fields(self, config: HunyuanVideoConfig) -> dict[str, Any]:
        """Fields for diffusers' HunyuanVideo15Transformer3DModel."""
        text, glyphs, image = config.text, config.glyphs, config.image
        if text is None or glyphs is None or image is None:
            raise InputError(
                "model.text, model.glyphs or model.image is null: diffusers' HunyuanVideo has all "
                "three; only such models can be exported"
            )
        fields = _common_fields(DIFFUSERS_CLASS, config, text)
        if config.glyph_hidden != _GLYPH_HIDDEN:
            raise InputError(
                f"model.glyph_hidden is {config.glyph_hidden}: in diffusers it is {_GLYPH_HIDDEN}"
            )
        return fields | {
            "image_embed_dim": image.dim,
            "target_size": _SIZE,
            "task_type": "i2v",
            "text_embed_2_dim": glyphs.dim,
            "use_meanflow": False,
        }


def _read_common(fields: dict[str, Any]) -> dict[str, Any]:
    """What both of diffusers' classes say in a config.json, as fields of our configs."""
    require_fields(fields, _COUNTS, "count")
    require_fields(fields, ("mlp_ratio", "rope_theta"), "positive")
    require_fields(fields, ["rope_axes_dim"], "triple")
    if fields["qk_norm"] != "rms_norm":
        raise InputError(f"qk_norm is {fields['qk_norm']!r}; only rms_norm is supported")
    heads, patch = fields["num_attention_heads"], fields["patch_size"]
    dim = heads * fields["attention_head_dim"]
    channels, out_channels = fields["in_channels"], fields["out_channels"]
    return {
        "dim": dim,
        "ffn_dim": int(dim * fields["mlp_ratio"]),
        "num_heads": heads,
        "num_layers": fields["num_layers"],
        "refiner_layers": fields["num_refiner_layers"],
        "in_channels": channels,
        "out_channels": None if out_channels == channels else out_channels,
        "patch_size": (fields["patch_size_t"], patch, patch),
        "rotary_dims": tuple(fields["rope_axes_dim"]),
        "rotary_theta": float(fields["rope_theta"]),
    }


def _common_fields(name: str, config: HunyuanVideoConfig, text: TextConfig) -> dict[str, Any]:
    """The inverse of `_read_common`, with the name of the class."""
    frames, height, width = config.patch_size
    if height != width:
        raise InputError(f"model.patch_size is {config.patch_size}: diffusers' patches are square")
    ratio = config.ffn_dim / config.dim
    while int(config.dim * ratio) < config.ffn_dim:  # readers round `ffn_dim` down
        ratio = math.nextafter(ratio, math.inf)
    return {
        "_class_name": name,
        "_diffusers_version": "0.42.1",
        "attention_head_dim": config.head_dim,
        "in_channels": config.in_channels,
        "mlp_ratio": ratio,
        "num_attention_heads": config.num_heads,
        "num_layers": config.num_layers,
        "num_refiner_layers": config.refiner_layers,
        "out_channels": config.latent_channels,
        "patch_size": height,
        "patch_size_t": frames,
        "qk_norm": "rms_norm",
        "rope_axes_dim": list(config.rotary_sizes),
        "rope_theta": config.rotary_theta,
        "text_embed_dim": text.dim,
    }


FAMILY = HunyuanVideoFamily()


# ---------------------------------------------------------------- the first model, of 13 billion

DIFFUSERS_CLASS_13B = "HunyuanVideoTransformer3DModel"
_HEAD_DIM, _TEXT_LENGTH_13B = 128, 256
_EMBEDDED = "time_text_embed"
_SINGLE, _SINGLE_THERE = "single_transformer_blocks.{}", "single_blocks.{}"
_NAMES_13B = {
    "guidance_embedding/hidden": (f"{_EMBEDDED}.guidance_embedder.linear_1", "guidance_in.mlp.0"),
    "guidance_embedding/out": (f"{_EMBEDDED}.guidance_embedder.linear_2", "guidance_in.mlp.2"),
    "pooled_hidden": (f"{_EMBEDDED}.text_embedder.linear_1", "vector_in.in_layer"),
    "pooled_out": (f"{_EMBEDDED}.text_embedder.linear_2", "vector_in.out_layer"),
    "single_blocks/modulation": (f"{_SINGLE}.norm.linear", f"{_SINGLE_THERE}.modulation.linear"),
    "single_blocks/query": (f"{_SINGLE}.attn.to_q", f"{_SINGLE_THERE}.linear1"),
    "single_blocks/key": (f"{_SINGLE}.attn.to_k", f"{_SINGLE_THERE}.linear1"),
    "single_blocks/value": (f"{_SINGLE}.attn.to_v", f"{_SINGLE_THERE}.linear1"),
    "single_blocks/feed_forward/hidden": (f"{_SINGLE}.proj_mlp", f"{_SINGLE_THERE}.linear1"),
    "single_blocks/feed_forward/out": (f"{_SINGLE}.proj_out", f"{_SINGLE_THERE}.linear2"),
    "single_blocks/query_norm": (f"{_SINGLE}.attn.norm_q", f"{_SINGLE_THERE}.q_norm"),
    "single_blocks/key_norm": (f"{_SINGLE}.attn.norm_k", f"{_SINGLE_THERE}.k_norm"),
}
"""Layers that HunyuanVideo 1.5 lacks; their names in diffusers and in HunyuanVideo's repository."""


class HunyuanVideo13bFamily(TransformerFamily):
    """HunyuanVideo's first model for text to video; see `Family`."""

    name = "hunyuan_video_13b"
    config, model = HunyuanVideo13bConfig, HunyuanVideo13bTransformer
    folder_classes = (DIFFUSERS_CLASS_13B,)
    namings = ("diffusers", "original")
    tensor_names: ClassVar[Mapping[Naming, Mapping[str, str]]] = {
        "diffusers": {
            ours: re.sub("^time_embed", _EMBEDDED, names[0])
            for ours, names in (_NAMES | _NAMES_13B).items()
        },
        "original": _JOINED | {ours: names[1] for ours, names in _NAMES_13B.items()},
    }
    lora_targets = (
        r"^(blocks/(video|condition)|single_blocks)/(query|key|value|out|feed_forward)(/|$)",
    )

    @override
    def sampling_defaults(self, config: HunyuanVideo13bConfig) -> SamplingDefaults:
        """Those of the pipeline, whose model needs no other guidance than that it is told."""
        if config.latent_channels in (1, 3):
            return SamplingDefaults(6.0, 1.0, (1, 1, 1))
        guidance = 6.0 if config.embedded_guidance is None else 1.0
        return SamplingDefaults(guidance, 7.0, (4, 8, 8), 24.0)

    @override
    def config_of_tensors(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> HunyuanVideo13bConfig | None:
        """Of the original repository's names; heads of the released model have 128 channels."""
        embedding = shapes.get("img_in.proj.weight", ())
        is_known = len(embedding) == 5 and "single_blocks.0.linear1.weight" in shapes
        if not is_known or embedding[0] % _HEAD_DIM:
            return None
        dim, channels, *patch = embedding

        def count(pattern: str) -> int:
            return len([key for key in shapes if re.fullmatch(pattern, key)])

        return self.read_fields(
            {
                "attention_head_dim": _HEAD_DIM,
                "guidance_embeds": "guidance_in.mlp.0.weight" in shapes,
                "in_channels": channels,
                "mlp_ratio": shapes["double_blocks.0.img_mlp.fc1.weight"][0] / dim,
                "num_attention_heads": dim // _HEAD_DIM,
                "num_layers": count(r"double_blocks\.\d+\.img_attn_qkv\.weight"),
                "num_refiner_layers": count(_REFINING.replace("{}", r"\d+") + r"\.norm1\.weight"),
                "num_single_layers": count(r"single_blocks\.\d+\.linear1\.weight"),
                "out_channels": shapes["final_layer.linear.weight"][0] // math.prod(patch),
                "patch_size": patch[1],
                "patch_size_t": patch[0],
                "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
                "qk_norm": "rms_norm",
                "rope_axes_dim": [16, 56, 56],
                "rope_theta": 256.0,
                "text_embed_dim": shapes["txt_in.input_embedder.weight"][1],
            }
        )

    @override
    def read_fields(self, fields: dict[str, Any]) -> HunyuanVideo13bConfig:
        """Reads a config.json of diffusers."""
        require_fields(fields, ("num_single_layers", "pooled_projection_dim"), "count")
        require_fields(fields, ["guidance_embeds"], "flag")
        channels = fields["in_channels"], fields["out_channels"]
        kind = fields.get("image_condition_type")
        if kind is not None or channels[0] != channels[1]:
            raise InputError(
                f"image_condition_type is {kind} with {channels[0]} channels for {channels[1]}: "
                "image-to-video models of HunyuanVideo's first size are not supported; name one of "
                "text-to-video, or HunyuanVideo 1.5"
            )
        return HunyuanVideo13bConfig(
            single_layers=fields["num_single_layers"],
            text=TextConfig(fields["text_embed_dim"], _TEXT_LENGTH_13B),
            pooled_dim=fields["pooled_projection_dim"],
            embedded_guidance=1.0 if fields["guidance_embeds"] else None,
            **_read_common(fields),
        )

    @override
    def export_fields(self, config: HunyuanVideo13bConfig) -> dict[str, Any]:
        """Fields for diffusers' HunyuanVideoTransformer3DModel."""
        if config.text is None or config.pooled_dim is None:
            raise InputError(
                "model.text or model.pooled_dim is null: diffusers' HunyuanVideo has both; only "
                "such models can be exported"
            )
        return _common_fields(DIFFUSERS_CLASS_13B, config, config.text) | {
            "guidance_embeds": config.embedded_guidance is not None,
            "image_condition_type": None,
            "num_single_layers": config.single_layers,
            "pooled_projection_dim": config.pooled_dim,
        }


FAMILY_13B = HunyuanVideo13bFamily()
