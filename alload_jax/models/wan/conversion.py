"""Converts config.json of diffusers and of Wan's repository to our config, and exports ours."""

from typing import Any

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.wan.config import WanConfig

DIFFUSERS_CLASS, ORIGINAL_CLASS = "WanTransformer3DModel", "WanModel"
_ROPE_MAX_SEQ_LEN = 1024
_COUNTS = frozenset(
    (
        *("num_attention_heads", "attention_head_dim", "ffn_dim", "num_layers", "in_channels"),
        *("num_heads", "dim", "in_dim", "out_dim", "freq_dim", "text_dim", "text_len"),
    )
)
_OPTIONAL_COUNTS = frozenset(["out_channels", "image_dim", "pos_embed_seq_len"])
_TEXT_LENGTH = 512
"""Number of tokens to which Wan's pipelines pad texts; diffusers' config does not contain it."""


def read_fields(fields: dict[str, Any]) -> WanConfig:
    """Reads the architecture from a config.json of diffusers or of Wan's repository.

    Raises:
      InputError: a field has the wrong type.
      KeyError: a field is missing.
    """
    _check_types(fields)
    if fields["_class_name"] == DIFFUSERS_CLASS:
        return _from_diffusers(fields)
    return _from_original(fields)


def _check_types(fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        if key in _COUNTS or (key in _OPTIONAL_COUNTS and value is not None):
            good = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
            wanted = "a whole number above 0"
        elif key == "eps":
            good, wanted = isinstance(value, int | float), "a number"
        elif key == "cross_attn_norm":
            good, wanted = isinstance(value, bool), "true or false"
        elif key == "patch_size":
            good = isinstance(value, list) and [type(part) for part in value] == [int] * 3
            wanted = "three whole numbers"
        else:
            continue
        if not good:
            raise InputError(f"{key} is {value!r}; it must be {wanted}: download the file again")


def _from_diffusers(fields: dict[str, Any]) -> WanConfig:
    image = fields.get("image_dim")
    positions = fields.get("pos_embed_seq_len")
    return WanConfig(
        dim=fields["num_attention_heads"] * fields["attention_head_dim"],
        ffn_dim=fields["ffn_dim"],
        num_heads=fields["num_attention_heads"],
        num_layers=fields["num_layers"],
        in_channels=fields["in_channels"],
        out_channels=_none_if_default(fields.get("out_channels"), fields["in_channels"]),
        patch_size=_triple(fields["patch_size"]),
        text=TextConfig(fields["text_dim"], _TEXT_LENGTH),
        image=ImageConfig(image, positions) if image else None,
        cross_norm=fields["cross_attn_norm"],
        freq_dim=fields["freq_dim"],
        eps=fields["eps"],
    )


def _from_original(fields: dict[str, Any]) -> WanConfig:
    with_image = fields["model_type"] in ("i2v", "flf2v")
    positions = 2 * 257 if fields["model_type"] == "flf2v" else None
    return WanConfig(
        dim=fields["dim"],
        ffn_dim=fields["ffn_dim"],
        num_heads=fields["num_heads"],
        num_layers=fields["num_layers"],
        in_channels=fields["in_dim"],
        out_channels=_none_if_default(fields["out_dim"], fields["in_dim"]),
        patch_size=_triple(fields.get("patch_size", (1, 2, 2))),
        text=TextConfig(fields.get("text_dim", 4096), fields["text_len"]),
        image=ImageConfig(positions=positions) if with_image else None,
        qk_norm=fields.get("qk_norm", True),
        cross_norm=fields.get("cross_attn_norm", True),
        freq_dim=fields["freq_dim"],
        eps=fields["eps"],
    )


def export_fields(config: WanConfig) -> dict[str, Any]:
    """Returns the config.json with which diffusers' WanTransformer3DModel loads such a model.

    Raises:
      InputError: diffusers does not support such a model.
    """
    if config.text is None:
        raise InputError(
            "model.text is null: diffusers does not support class conditions; "
            "only models with text embeddings can be exported"
        )
    if not config.qk_norm:
        raise InputError("model.qk_norm is false: diffusers' Wan requires these norms")
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


def _none_if_default(value: int | None, default: int) -> int | None:
    return None if value in (None, default) else value


def _triple(value: Any) -> tuple[int, int, int]:
    frames, height, width = value
    return (frames, height, width)
