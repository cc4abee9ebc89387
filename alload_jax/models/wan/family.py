"""Wan as a model family.

The table follows diffusers' WanTransformer3DModel (0.42.1) and the Wan 2.1 repository's WanModel,
which compute the same function with different names and layouts.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.safetensor_files import Naming
from alload_jax.models.families import SamplingDefaults, TransformerFamily, require_fields
from alload_jax.models.wan.transformer import WanConfig, WanTransformer

DIFFUSERS_CLASS, ORIGINAL_CLASS = "WanTransformer3DModel", "WanModel"
_ROPE_MAX_SEQ_LEN = 1024
_HEAD_DIM, _EPS = 128, 1e-6
_COUNTS = (
    *("num_attention_heads", "attention_head_dim", "ffn_dim", "num_layers", "in_channels"),
    *("num_heads", "dim", "in_dim", "out_dim", "freq_dim", "text_dim", "text_len"),
    *("out_channels", "image_dim", "pos_embed_seq_len"),
)
_OPTIONAL = _COUNTS[-3:]
"""Those that may be null."""
_QUERY = re.compile(r"blocks\.\d+\.self_attn\.q\.weight")
_TEXT_LENGTH = 512
"""Number of tokens to which Wan's pipelines pad texts; diffusers' config does not contain it."""


_IMAGE, _CROSS = "condition_embedder.image_embedder", "blocks.{}.attn2"
_THERE = "blocks.{}.cross_attn"
_NAMES = {
    "patch_embedding": ("patch_embedding", "patch_embedding"),
    "time_embedding/hidden": ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    "time_embedding/out": ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    "time_embedding/modulation": ("condition_embedder.time_proj", "time_projection.1"),
    "condition_embedding/hidden": ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    "condition_embedding/out": ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    "image_embedding/norm_in": ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
    "image_embedding/hidden": (f"{_IMAGE}.ff.net.0.proj", "img_emb.proj.1"),
    "image_embedding/out": ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
    "image_embedding/norm_out": ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
    "image_embedding/position": ("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
    "head/out": ("proj_out", "head.head"),
    "head/modulation": ("scale_shift_table", "head.modulation"),
    "blocks/modulation": ("blocks.{}.scale_shift_table", "blocks.{}.modulation"),
    "blocks/self_attention/query": ("blocks.{}.attn1.to_q", "blocks.{}.self_attn.q"),
    "blocks/self_attention/key": ("blocks.{}.attn1.to_k", "blocks.{}.self_attn.k"),
    "blocks/self_attention/value": ("blocks.{}.attn1.to_v", "blocks.{}.self_attn.v"),
    "blocks/self_attention/out": ("blocks.{}.attn1.to_out.0", "blocks.{}.self_attn.o"),
    "blocks/self_attention/query_norm": ("blocks.{}.attn1.norm_q", "blocks.{}.self_attn.norm_q"),
    "blocks/self_attention/key_norm": ("blocks.{}.attn1.norm_k", "blocks.{}.self_attn.norm_k"),
    "blocks/cross_attention/query": ("blocks.{}.attn2.to_q", "blocks.{}.cross_attn.q"),
    "blocks/cross_attention/key": ("blocks.{}.attn2.to_k", "blocks.{}.cross_attn.k"),
    "blocks/cross_attention/value": ("blocks.{}.attn2.to_v", "blocks.{}.cross_attn.v"),
    "blocks/cross_attention/out": ("blocks.{}.attn2.to_out.0", "blocks.{}.cross_attn.o"),
    "blocks/cross_attention/query_norm": ("blocks.{}.attn2.norm_q", "blocks.{}.cross_attn.norm_q"),
    "blocks/cross_attention/key_norm": ("blocks.{}.attn2.norm_k", "blocks.{}.cross_attn.norm_k"),
    "blocks/cross_attention/image_key": (f"{_CROSS}.add_k_proj", f"{_THERE}.k_img"),
    "blocks/cross_attention/image_value": (f"{_CROSS}.add_v_proj", f"{_THERE}.v_img"),
    "blocks/cross_attention/image_key_norm": (f"{_CROSS}.norm_added_k", f"{_THERE}.norm_k_img"),
    # The original numbers its norms in another order.
    "blocks/cross_norm": ("blocks.{}.norm2", "blocks.{}.norm3"),
    "blocks/feed_forward/hidden": ("blocks.{}.ffn.net.0.proj", "blocks.{}.ffn.0"),
    "blocks/feed_forward/out": ("blocks.{}.ffn.net.2", "blocks.{}.ffn.2"),
}
"""Our layers and parameters; their names in diffusers and in Wan's repository."""


_VAE_STRIDES = {1: (1, 1, 1), 3: (1, 1, 1), 48: (4, 16, 16)}
"""VAE strides by number of channels: pixels, and Wan 2.2's VAE; others are of Wan 2.1's VAE."""
_FPS = {48: 24.0}
"""Frames per second of Wan 2.2's 5B model by its number of channels; of the others of latents it is
16."""


class WanFamily(TransformerFamily):
    """Wan 2.1's models, and Wan 2.2's 5B model; see `Family`."""

    name = "wan"
    config, model = WanConfig, WanTransformer
    folder_classes = (DIFFUSERS_CLASS, ORIGINAL_CLASS)
    # Some released files contain this tensor, which no model uses; diffusers ignores it too.
    ignored_tensors = ("norm_added_q",)
    tensor_names: ClassVar[Mapping[Naming, Mapping[str, str]]] = {
        "diffusers": {ours: names[0] for ours, names in _NAMES.items()},
        "original": {ours: names[1] for ours, names in _NAMES.items()},
    }
    has_first_frame_timestep = True
    lora_targets = ("^blocks/(self_attention|cross_attention|feed_forward)/",)

    @override
    def sampling_defaults(self, config: WanConfig) -> SamplingDefaults:
        """Guidance and shift are those recommended for 720p."""
        stride = _VAE_STRIDES.get(config.latent_channels, (4, 8, 8))
        fps = None if stride == (1, 1, 1) else _FPS.get(config.latent_channels, 16.0)
        return SamplingDefaults(5.0, 5.0, stride, fps)

    @override
    def config_of_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> WanConfig | None:
        """Of the original repository's names; heads of all released models have 128 channels."""
        block = "blocks.0."
        embedding = shapes.get("patch_embedding.weight", ())
        if len(embedding) != 5 or embedding[0] % _HEAD_DIM:
            return None
        if f"{block}self_attn.q.weight" not in shapes:
            return None
        dim, channels, *patch = embedding
        kind = "flf2v" if "img_emb.emb_pos" in shapes else "i2v"
        return self.read_fields(
            {
                "_class_name": ORIGINAL_CLASS,
                "model_type": kind if "img_emb.proj.1.weight" in shapes else "t2v",
                "dim": dim,
                "in_dim": channels,
                "patch_size": patch,
                "out_dim": shapes["head.head.weight"][0] // math.prod(patch),
                "ffn_dim": shapes[f"{block}ffn.0.weight"][0],
                "freq_dim": shapes["time_embedding.0.weight"][1],
                "text_dim": shapes["text_embedding.0.weight"][1],
                "text_len": _TEXT_LENGTH,
                "num_heads": dim // _HEAD_DIM,
                "num_layers": len([key for key in shapes if _QUERY.fullmatch(key)]),
                "qk_norm": f"{block}self_attn.norm_q.weight" in shapes,
                "cross_attn_norm": f"{block}norm3.weight" in shapes,
                "eps": _EPS,
            }
        )

    @override
    def read_fields(self, fields: dict[str, Any]) -> WanConfig:
        """Reads a config.json of diffusers or of Wan's repository."""
        given = {name for name in fields if name not in _OPTIONAL or fields[name] is not None}
        require_fields(fields, [name for name in _COUNTS if name in given], "count")
        for name, kind in (
            ("eps", "number"),
            ("cross_attn_norm", "flag"),
            ("patch_size", "triple"),
        ):
            require_fields(fields, {name} & given, kind)
        if fields["_class_name"] == DIFFUSERS_CLASS:
            heads, length = fields["num_attention_heads"], _TEXT_LENGTH
            dim, text_dim = heads * fields["attention_head_dim"], fields["text_dim"]
            channels, outputs = fields["in_channels"], fields.get("out_channels")
            image_dim, positions = fields.get("image_dim"), fields.get("pos_embed_seq_len")
            image = ImageConfig(image_dim, positions) if image_dim else None
            patch, qk_norm, cross_norm = fields["patch_size"], True, fields["cross_attn_norm"]
        else:
            heads, length = fields["num_heads"], fields["text_len"]
            dim, text_dim = fields["dim"], fields.get("text_dim", 4096)
            channels, outputs = fields["in_dim"], fields["out_dim"]
            positions = 2 * 257 if fields["model_type"] == "flf2v" else None
            with_image = fields["model_type"] in ("i2v", "flf2v")
            image = ImageConfig(positions=positions) if with_image else None
            patch, qk_norm = fields.get("patch_size", (1, 2, 2)), fields.get("qk_norm", True)
            cross_norm = fields.get("cross_attn_norm", True)
        frames, height, width = patch
        return WanConfig(
            dim=dim,
            ffn_dim=fields["ffn_dim"],
            num_heads=heads,
            num_layers=fields["num_layers"],
            in_channels=channels,
            out_channels=None if outputs == channels else outputs,
            patch_size=(frames, height, width),
            text=TextConfig(text_dim, length),
            image=image,
            qk_norm=qk_norm,
            cross_norm=cross_norm,
            freq_dim=fields["freq_dim"],
            eps=fields["eps"],
        )

    @override
    def export_fields(self, config: WanConfig) -> dict[str, Any]:
        """Fields for diffusers' WanTransformer3DModel."""
        if config.text is None:
            raise InputError(
                "model.text is null: diffusers does not support class conditions; "
                "only models with text embeddings can be exported"
            )
        if not config.qk_norm:
            raise InputError("model.qk_norm is false: diffusers' Wan requires these norms")
        if not config.predicts_velocity:
            raise InputError("model.prediction is data: diffusers' Wan predicts the velocity")
        if config.position_embedding:
            raise InputError("model.position_embedding is true: diffusers' Wan has none")
        image = config.image
        return {
            "_class_name": DIFFUSERS_CLASS,
            "_diffusers_version": "0.42.1",
            "added_kv_proj_dim": config.dim if image else None,
            "attention_head_dim": config.dim // config.num_heads,
            "cross_attn_norm": config.cross_norm,
            "eps": config.eps,
            "ffn_dim": config.ffn_dim,
            "freq_dim": config.freq_dim,
            "image_dim": image.dim if image else None,
            "in_channels": config.in_channels,
            "num_attention_heads": config.num_heads,
            "num_layers": config.num_layers,
            "out_channels": config.latent_channels,
            "patch_size": list(config.patch_size),
            "pos_embed_seq_len": image.positions if image else None,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": _ROPE_MAX_SEQ_LEN,
            "text_dim": config.text.dim,
        }


FAMILY = WanFamily()
