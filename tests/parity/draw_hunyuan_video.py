"""Draws the golden files that HunyuanVideo is compared with, from diffusers' own model.

    python tests/parity/draw_hunyuan_video.py [--out tests/golden/hunyuan_video]

As draw_wan.py; the width of the glyphs' hidden layers is GLYPH_HIDDEN in place of 2048. The inputs
of call n are `n.latents`, `n.timestep`, `n.text` [B, L, width] and `n.text_length` [B], the same of
`n.glyphs`, `n.image` [B, N, width] (zeros where there is none), and `n.cotangent`. Gradients are
zeros where the output does not depend on a parameter.
"""

import dataclasses
from functools import partial
from pathlib import Path

import golden_drawing
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15ByT5TextProjection,
)
from golden_drawing import draw_case, normal

GOLDEN = Path(__file__).parents[1] / "golden" / "hunyuan_video"
GLYPH_HIDDEN = 12
TEXT, GLYPHS, IMAGE = 7, 5, 4
"""Tokens of each kind of condition, with padding."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the model; a timestep and the lengths of both texts for each sample."""

    size: tuple[int, int, int]
    timesteps: tuple[float, ...]
    text: tuple[int, ...]
    glyphs: tuple[int, ...]
    with_image: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its calls; see `golden_drawing.Case`."""

    name: str
    config: dict[str, object]
    calls: tuple[Call, ...]
    small: str = "(?!)"


def _config(heads: int, axes: tuple[int, int, int], layers: int, **others: object) -> dict:
    sizes = {"num_attention_heads": heads, "attention_head_dim": sum(axes), "num_layers": layers}
    channels = {"in_channels": 9, "out_channels": 4, "rope_axes_dim": axes}
    widths = {"text_embed_dim": 6, "text_embed_2_dim": 5, "image_embed_dim": 10}
    return sizes | channels | widths | others


CASES = (
    Case(
        "t2v",
        _config(2, (4, 2, 2), 2),
        (
            Call((1, 3, 5), (0.0, 1000.0), (7, 3), (0, 5)),
            Call((5, 3, 2), (312.5, 37.25, 999.0), (1, 7, 4), (2, 0, 3)),
        ),
    ),
    Case(
        "i2v",
        _config(2, (4, 2, 2), 2, task_type="i2v"),
        (
            Call((3, 2, 5), (333.25, 900.0), (5, 7), (0, 2), with_image=True),
            Call((1, 4, 3), (66.5, 1000.0), (2, 6), (5, 0), with_image=True),
        ),
    ),
    Case(
        "both",
        _config(3, (4, 2, 4), 1, in_channels=4, num_refiner_layers=3, mlp_ratio=2.5),
        (
            Call((2, 3, 3), (875.0, 12.5), (4, 4), (1, 5)),
            Call((3, 1, 5), (500.0, 250.75, 981.3), (7, 1, 3), (0, 0, 0), with_image=True),
        ),
    ),
    Case(
        "patches",
        _config(2, (2, 4, 2), 1, in_channels=3, out_channels=5, patch_size=2, patch_size_t=2),
        (
            Call((2, 6, 10), (20.0, 720.5), (3, 6), (4, 1)),
            Call((6, 2, 6), (450.0, 991.25), (7, 2), (0, 3), with_image=True),
        ),
    ),
    Case(
        "small",
        _config(1, (2, 4, 4), 3, num_refiner_layers=1, rope_theta=100.0),
        (
            Call((3, 3, 3), (150.0, 810.5), (6, 2), (5, 2), with_image=True),
            Call((1, 1, 7), (5.75, 600.0), (1, 1), (1, 1)),
        ),
        small=r"x_embedder|to_[qk]\.|add_[qk]_proj|to_out|to_add_out|\.image$|\.glyphs$|linear_2",
    ),
)


def draw(case: Case, folder: Path) -> None:
    """Writes one case's files into `folder`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = HunyuanVideo15Transformer3DModel(**case.config)
    model.context_embedder_2 = HunyuanVideo15ByT5TextProjection(
        case.config["text_embed_2_dim"],
        GLYPH_HIDDEN,
        case.config["num_attention_heads"] * case.config["attention_head_dim"],
    )
    draw_case(case, folder, model, _inputs, partial(call_model, model))


def _inputs(case: Case, call: Call, number: int) -> dict[str, torch.Tensor]:
    """The inputs of a call, by name."""
    batch, config = len(call.timesteps), case.config
    shapes = {
        "latents": (batch, config["in_channels"], *call.size),
        "text": (batch, TEXT, config["text_embed_dim"]),
        "glyphs": (batch, GLYPHS, config["text_embed_2_dim"]),
        "image": (batch, IMAGE, config["image_embed_dim"]),
        "cotangent": (batch, config["out_channels"], *call.size),
    }
    drawn = {name: normal(case, f"{number}.{name}", shape) for name, shape in shapes.items()}
    if not call.with_image:
        drawn["image"] = torch.zeros_like(drawn["image"])
    return drawn | {
        "timestep": torch.tensor(call.timesteps, dtype=torch.float32),
        "text_length": torch.tensor(call.text, dtype=torch.int32),
        "glyphs_length": torch.tensor(call.glyphs, dtype=torch.int32),
    }


def call_model(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Calls diffusers' model on the inputs of a call, by name."""
    masks = {
        name: (torch.arange(inputs[name].shape[1]) < inputs[f"{name}_length"][:, None]).long()
        for name in ("text", "glyphs")
    }
    return model(
        hidden_states=inputs["latents"],
        timestep=inputs["timestep"],
        encoder_hidden_states=inputs["text"],
        encoder_attention_mask=masks["text"],
        encoder_hidden_states_2=inputs["glyphs"],
        encoder_attention_mask_2=masks["glyphs"],
        image_embeds=inputs["image"],
    ).sample


if __name__ == "__main__":
    golden_drawing.main(GOLDEN, CASES, draw, __doc__)
