"""The models whose training steps `alload bench` measures."""

from typing import Any

_WAN = {"in_channels": 16, "text": {"dim": 4096, "length": 512}}
_HUNYUAN_VIDEO = {
    "family": "hunyuan_video",
    "in_channels": 65,
    "out_channels": 32,
    "patch_size": (1, 1, 1),
    "text": {"dim": 3584, "length": 1000},
    "glyphs": {"dim": 1472, "length": 256},
    "image": {"dim": 1152},
}

MODELS: dict[str, dict[str, Any]] = {
    "1.3b": _WAN | {"dim": 1536, "num_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "14b": _WAN | {"dim": 5120, "num_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "tiny": _WAN | {"dim": 32, "num_heads": 2, "ffn_dim": 64, "num_layers": 2},
    "hunyuan-video-1.5": _HUNYUAN_VIDEO
    | {"dim": 2048, "num_heads": 16, "ffn_dim": 8192, "num_layers": 54},
    "tiny-mmdit": {
        "family": "hunyuan_video",
        "dim": 32,
        "num_heads": 2,
        "ffn_dim": 64,
        "num_layers": 2,
        "refiner_layers": 1,
        "in_channels": 4,
        "patch_size": (1, 1, 1),
        "text": {"dim": 16, "length": 8},
    },
}
"""Fields of the configs of Wan 2.1's models and of HunyuanVideo 1.5's (image-to-video), and of tiny
ones for tests."""

NAMES = "Wan 2.1's 1.3B or 14B, HunyuanVideo 1.5's, or a tiny one for trying"


def model_fields(name: str, layers: int | None = None) -> dict[str, Any]:
    """Fields of the config of a model of `MODELS`, with `layers` layers if given."""
    return MODELS[name] | ({"num_layers": layers} if layers else {})


def training_fields(
    model: dict[str, Any],
    remat: str = "attention",
    residual: str = "compute",
    scan_layers: bool = True,
) -> dict[str, Any]:
    """`model_fields` for training: in bfloat16, and otherwise as given."""
    given = {"remat": remat, "residual_dtype": residual, "scan_layers": scan_layers}
    return model | given | {"dtype": "bfloat16"}
