"""The models whose training steps `alload bench` measures."""

from typing import Any

from alload_jax.planning.architectures.hunyuan_video import HUNYUAN_VIDEO_1_5

MODELS: dict[str, dict[str, int]] = {
    "1.3b": {"num_heads": 12, "head_dim": 128, "ffn_dim": 8960, "num_layers": 30},
    "14b": {"num_heads": 40, "head_dim": 128, "ffn_dim": 13824, "num_layers": 40},
    "tiny": {"num_heads": 2, "head_dim": 16, "ffn_dim": 64, "num_layers": 2},
}
"""Shapes of Wan 2.1's models, and of a tiny one for tests."""

TEXT = {"dim": 4096, "length": 512}


HUNYUAN_VIDEO: dict[str, dict[str, Any]] = {
    "hunyuan-1.5": HUNYUAN_VIDEO_1_5.fields(),
    "hunyuan-tiny": {
        "family": "hunyuan_video",
        "dim": 32,
        "ffn_dim": 64,
        "num_heads": 2,
        "num_layers": 2,
        "refiner_layers": 1,
        "in_channels": 4,
        "patch_size": [1, 1, 1],
        "text": {"dim": 16, "length": 8},
    },
}
"""Fields of the configs of HunyuanVideo 1.5, and of a tiny model for tests."""


def shape_of(name: str, layers: int | None = None) -> dict[str, Any]:
    """The shape of a model of `MODELS` or `HUNYUAN_VIDEO`, with `layers` layers if given."""
    return (MODELS | HUNYUAN_VIDEO)[name] | ({"num_layers": layers} if layers else {})


def config_fields(shape: dict[str, Any]) -> dict[str, Any]:
    """Fields of the config of a model with a shape of `shape_of`."""
    if "family" in shape:
        return shape
    fields: dict[str, Any] = {k: v for k, v in shape.items() if k != "head_dim"}
    return fields | {
        "dim": shape["num_heads"] * shape["head_dim"],
        "in_channels": 16,
        "text": TEXT,
    }


def training_fields(
    shape: dict[str, Any], remat: str = "attention", residual: str = "compute"
) -> dict[str, Any]:
    """`config_fields` for training: bfloat16, and the given remat policy and residual dtype."""
    trained = {"remat": remat, "residual_dtype": residual, "dtype": "bfloat16"}
    return config_fields(shape) | trained
