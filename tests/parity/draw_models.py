"""Draws the golden files that the models are compared with, from diffusers' own models.

    python tests/parity/draw_models.py [--out tests/golden]

Needs torch and diffusers, no GPU and no network; run twice on one machine, it writes the same
bytes. A case is a small model with random float32 weights, and some calls of it. Its folder holds
`transformer/` as `save_pretrained` writes it, and for each call n

- `inputs.safetensors`: `n.latents` [B, C, F, H, W], `n.timestep` [B] or [B, S], `n.text` [B, L,
  width], with images `n.image` [B, N, width] (the tokens of all images of a sample), and
  `n.cotangent`, of the output's shape. HunyuanVideo 1.5 has `n.text_length` [B] as well, the same
  of `n.glyphs`, and zeros where there is no image; the width of its glyphs' hidden layers is
  GLYPH_HIDDEN in place of 2048. HunyuanVideo's first model has `n.pooled` [B, width] in place of
  glyphs and image, and a guidance of GUIDANCE;
- `expected.safetensors`: `n.output`, and for every parameter `grad.<its key>`, the gradient of
  Σ_n Σ(n.output · n.cotangent), zeros where the output does not depend on it.
"""

import argparse
import dataclasses
import math
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import (
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15ByT5TextProjection,
)
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = 1 / 32
"""Variance 1e-3, of which an epsilon of 1e-5 or 1e-6 is a visible part."""
HARD_CODED_TEXT_LENGTH = 512
"""With images, diffusers' Wan takes the last 512 tokens for text and all before them for images."""
IMAGE_TOKENS = 5
GLYPH_HIDDEN = 12
GUIDANCE = 1.0
TEXT, GLYPHS, IMAGE = 7, 5, 4
"""Tokens of each kind of condition of HunyuanVideo, with padding."""


class Call(NamedTuple):
    """One call: frames, height and width of the latents, and a timestep for each sample.

    HunyuanVideo has lengths of both texts for each sample, too.
    """

    size: tuple[int, int, int]
    timesteps: tuple[float, ...]
    text: tuple[int, ...] = ()
    glyphs: tuple[int, ...] = ()
    with_image: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its calls; names that match `small` are drawn smaller, so that epsilons show.

    Wan has a number of text tokens and of images, and may have a timestep for each token.
    """

    name: str
    config: dict[str, object]
    calls: tuple[Call, ...]
    small: str = "(?!)"
    text_length: int = TEXT
    images: int = 0
    timestep_per_token: bool = False

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal values that depend on the names alone, not on the order of drawing."""
        values = self.generator(name).standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values) * (SMALL if re.search(self.small, name) else 1.0)

    def generator(self, name: str) -> np.random.Generator:
        """NumPy's, because torch's normal values differ between CPUs in their last bits."""
        return np.random.default_rng([zlib.crc32(self.name.encode()), zlib.crc32(name.encode())])


# ---------------------------------------------------------------- Wan


def _wan(heads: int, head_dim: int, layers: int, **others: object) -> dict[str, object]:
    common = {"in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 40}
    sizes = {"num_attention_heads": heads, "attention_head_dim": head_dim, "num_layers": layers}
    return common | sizes | others


_IMAGES = {"image_dim": 10, "added_kv_proj_dim": 24, "text_dim": 6, "in_channels": 9}

WAN = (
    Case(
        "t2v",
        _wan(2, 12, 2, cross_attn_norm=True),
        (
            Call((1, 2, 2), (0.0, 1000.0)),
            Call((5, 4, 6), (312.5, 37.25, 999.0)),
            Call((2, 6, 4), (0.37, 640.0)),
        ),
    ),
    Case(
        "t2v_plain_cross",
        _wan(3, 8, 3, ffn_dim=33, cross_attn_norm=False, qk_norm=None, patch_size=(1, 1, 2)),
        (Call((1, 3, 4), (875.0, 12.5)), Call((3, 2, 6), (500.0, 250.75, 981.3))),
        text_length=11,
    ),
    Case(
        "t2v_wide",
        _wan(4, 16, 1, in_channels=3, out_channels=5, eps=1e-5, patch_size=(2, 2, 2)),
        (Call((2, 4, 4), (20.0, 720.5)), Call((4, 2, 6), (450.0, 991.25))),
        small=r"patch_embedding|to_[qk]\.|to_out\.0|ffn\.net\.2",
        text_length=6,
    ),
    Case(
        "i2v",
        _wan(2, 12, 2, **_IMAGES),
        (Call((1, 4, 4), (333.25, 900.0)), Call((3, 2, 4), (66.5, 1000.0))),
        small=r"\.image$|image_embedder\.ff\.net\.2|add_k_proj",
        text_length=HARD_CODED_TEXT_LENGTH,
        images=1,
    ),
    Case(
        "flf2v",
        _wan(2, 12, 1, pos_embed_seq_len=10, **_IMAGES),
        (Call((2, 4, 2), (150.0, 810.5)), Call((3, 2, 4), (5.75, 600.0))),
        text_length=HARD_CODED_TEXT_LENGTH,
        images=2,
    ),
    Case(
        "ti2v",
        _wan(2, 14, 2, in_channels=6, out_channels=6),
        (Call((3, 4, 4), (1000.0, 480.5)), Call((1, 2, 6), (90.0, 702.25, 955.0))),
        timestep_per_token=True,
    ),
)


def _wan_inputs(case: Case, call: Call, number: int) -> dict[str, torch.Tensor]:
    batch = len(call.timesteps)
    shapes = {
        "latents": (batch, case.config["in_channels"], *call.size),
        "text": (batch, case.text_length, case.config["text_dim"]),
        "cotangent": (batch, case.config["out_channels"], *call.size),
    }
    if case.images:
        shapes["image"] = (batch, case.images * IMAGE_TOKENS, case.config["image_dim"])
    drawn = {name: case.normal(f"{number}.{name}", shape) for name, shape in shapes.items()}
    timestep = torch.tensor(call.timesteps, dtype=torch.float32)
    if case.timestep_per_token:
        # [B, S]: some part of the sample's timestep for each token, 0 in the first frame.
        frames, height, width = call.size
        frame = (height // 2) * (width // 2)
        generator = case.generator(f"{number}.timestep")
        parts = generator.random((batch, frames * frame), dtype=np.float32)
        if frames > 1:
            parts[:, :frame] = 0.0
        timestep = timestep[:, None] * torch.from_numpy(parts)
    return drawn | {"timestep": timestep}


def call_wan(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Calls diffusers' model on the inputs of a call, by name."""
    image = inputs.get("image")
    if image is not None:  # [B, images · N, d]; diffusers has images in the batch
        image = image.reshape(-1, IMAGE_TOKENS, image.shape[-1])
    return model(
        hidden_states=inputs["latents"],
        timestep=inputs["timestep"],
        encoder_hidden_states=inputs["text"],
        encoder_hidden_states_image=image,
    ).sample


# ---------------------------------------------------------------- HunyuanVideo


def _hunyuan(heads: int, axes: tuple[int, int, int], layers: int, **others: object) -> dict:
    sizes = {"num_attention_heads": heads, "attention_head_dim": sum(axes), "num_layers": layers}
    channels = {"in_channels": 9, "out_channels": 4, "rope_axes_dim": axes}
    widths = {"text_embed_dim": 6, "text_embed_2_dim": 5, "image_embed_dim": 10}
    return sizes | channels | widths | others


HUNYUAN = (
    Case(
        "t2v",
        _hunyuan(2, (4, 2, 2), 2),
        (
            Call((1, 3, 5), (0.0, 1000.0), (7, 3), (0, 5)),
            Call((5, 3, 2), (312.5, 37.25, 999.0), (1, 7, 4), (2, 0, 3)),
        ),
    ),
    Case(
        "i2v",
        _hunyuan(2, (4, 2, 2), 2, task_type="i2v"),
        (
            Call((3, 2, 5), (333.25, 900.0), (5, 7), (0, 2), with_image=True),
            Call((1, 4, 3), (66.5, 1000.0), (2, 6), (5, 0), with_image=True),
        ),
    ),
    Case(
        "both",
        _hunyuan(3, (4, 2, 4), 1, in_channels=4, num_refiner_layers=3, mlp_ratio=2.5),
        (
            Call((2, 3, 3), (875.0, 12.5), (4, 4), (1, 5)),
            Call((3, 1, 5), (500.0, 250.75, 981.3), (7, 1, 3), (0, 0, 0), with_image=True),
        ),
    ),
    Case(
        "patches",
        _hunyuan(2, (2, 4, 2), 1, in_channels=3, out_channels=5, patch_size=2, patch_size_t=2),
        (
            Call((2, 6, 10), (20.0, 720.5), (3, 6), (4, 1)),
            Call((6, 2, 6), (450.0, 991.25), (7, 2), (0, 3), with_image=True),
        ),
    ),
    Case(
        "small",
        _hunyuan(1, (2, 4, 4), 3, num_refiner_layers=1, rope_theta=100.0),
        (
            Call((3, 3, 3), (150.0, 810.5), (6, 2), (5, 2), with_image=True),
            Call((1, 1, 7), (5.75, 600.0), (1, 1), (1, 1)),
        ),
        small=r"x_embedder|to_[qk]\.|add_[qk]_proj|to_out|to_add_out|\.image$|\.glyphs$|linear_2",
    ),
)


def _hunyuan_model(**config: object) -> torch.nn.Module:
    model = HunyuanVideo15Transformer3DModel(**config)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    glyphs = HunyuanVideo15ByT5TextProjection(config["text_embed_2_dim"], GLYPH_HIDDEN, width)
    model.context_embedder_2 = glyphs
    return model


def _hunyuan_inputs(case: Case, call: Call, number: int) -> dict[str, torch.Tensor]:
    batch, config = len(call.timesteps), case.config
    shapes = {
        "latents": (batch, config["in_channels"], *call.size),
        "text": (batch, TEXT, config["text_embed_dim"]),
        "glyphs": (batch, GLYPHS, config["text_embed_2_dim"]),
        "image": (batch, IMAGE, config["image_embed_dim"]),
        "cotangent": (batch, config["out_channels"], *call.size),
    }
    drawn = {name: case.normal(f"{number}.{name}", shape) for name, shape in shapes.items()}
    if not call.with_image:
        drawn["image"] = torch.zeros_like(drawn["image"])
    return drawn | {
        "timestep": torch.tensor(call.timesteps, dtype=torch.float32),
        "text_length": torch.tensor(call.text, dtype=torch.int32),
        "glyphs_length": torch.tensor(call.glyphs, dtype=torch.int32),
    }


def call_hunyuan(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
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


# ---------------------------------------------------------------- HunyuanVideo's first model


def _hunyuan_13b(heads: int, axes: tuple[int, int, int], layers: int, **others: object) -> dict:
    sizes = {"num_attention_heads": heads, "attention_head_dim": sum(axes), "num_layers": layers}
    channels = {"in_channels": 4, "out_channels": 4, "rope_axes_dim": axes}
    widths = {"text_embed_dim": 6, "pooled_projection_dim": 5, "num_single_layers": 2 * layers}
    return sizes | channels | widths | others


HUNYUAN_13B = (
    Case(
        "guided",
        _hunyuan_13b(2, (4, 2, 2), 2),
        (
            Call((1, 4, 6), (0.0, 1000.0), (7, 3)),
            Call((5, 4, 2), (312.5, 37.25, 999.0), (1, 7, 4)),
        ),
    ),
    Case(
        "plain",
        _hunyuan_13b(
            3, (4, 2, 4), 1, num_single_layers=3, num_refiner_layers=1, mlp_ratio=2.5,
            guidance_embeds=False, patch_size=1, patch_size_t=2, rope_theta=100.0,
        ),
        (Call((2, 3, 5), (20.0, 720.5), (3, 6)), Call((4, 2, 3), (450.0, 991.25), (7, 1))),
        small=r"x_embedder|to_[qk]\.|add_[qk]_proj|to_out|proj_out|linear_2",
    ),
)  # fmt: skip


def _hunyuan_13b_inputs(case: Case, call: Call, number: int) -> dict[str, torch.Tensor]:
    batch, config = len(call.timesteps), case.config
    shapes = {
        "latents": (batch, config["in_channels"], *call.size),
        "text": (batch, TEXT, config["text_embed_dim"]),
        "pooled": (batch, config["pooled_projection_dim"]),
        "cotangent": (batch, config["out_channels"], *call.size),
    }
    drawn = {name: case.normal(f"{number}.{name}", shape) for name, shape in shapes.items()}
    return drawn | {
        "timestep": torch.tensor(call.timesteps, dtype=torch.float32),
        "text_length": torch.tensor(call.text, dtype=torch.int32),
    }


def call_hunyuan_13b(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Calls diffusers' model on the inputs of a call, by name."""
    mask = torch.arange(inputs["text"].shape[1]) < inputs["text_length"][:, None]
    return model(
        hidden_states=inputs["latents"],
        timestep=inputs["timestep"],
        encoder_hidden_states=inputs["text"],
        encoder_attention_mask=mask.long(),
        pooled_projections=inputs["pooled"],
        guidance=torch.full_like(inputs["timestep"], 1000.0 * GUIDANCE),
    ).sample


# ---------------------------------------------------------------- all

FAMILIES = {
    "wan": (WAN, WanTransformer3DModel, _wan_inputs, call_wan),
    "hunyuan_video": (HUNYUAN, _hunyuan_model, _hunyuan_inputs, call_hunyuan),
    "hunyuan_video_13b": (
        HUNYUAN_13B,
        HunyuanVideoTransformer3DModel,
        _hunyuan_13b_inputs,
        call_hunyuan_13b,
    ),
}
"""Cases, what makes a model of a config, what makes the inputs of a call, and what calls it."""


def draw(family: str, case: Case, folder: Path) -> None:
    """Writes one case's files into `folder`."""
    _, model_of, inputs_of, call = FAMILIES[family]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = model_of(**case.config)
    folder.mkdir(parents=True, exist_ok=True)
    _randomise(case, model)
    drawn = [inputs_of(case, each, number) for number, each in enumerate(case.calls)]
    model.save_pretrained(folder / "transformer")
    inputs = {f"{n}.{name}": value for n, each in enumerate(drawn) for name, value in each.items()}
    save_file(inputs, folder / "inputs.safetensors")
    expected = {}
    for number, arrays in enumerate(drawn):
        output = call(model, arrays)
        (output * arrays["cotangent"]).sum().backward()
        expected[f"{number}.output"] = output.detach().contiguous()
    for key, value in model.named_parameters():
        expected[f"grad.{key}"] = torch.zeros_like(value) if value.grad is None else value.grad
    save_file(expected, folder / "expected.safetensors")


@torch.no_grad()
def _randomise(case: Case, model: torch.nn.Module) -> None:
    """Draws all parameters such that activations stay of order one; none is left at 0 or 1."""
    for key, parameter in model.named_parameters():
        values = case.normal(key, parameter.shape)
        if not key.endswith((".weight", ".bias")):  # scale_shift_table, pos_embed
            values = values / 2
        elif parameter.ndim == 1:
            values = values / 4 + (1.0 if key.endswith(".weight") else 0.0)
        else:
            values = values / math.sqrt(math.prod(parameter.shape[1:]))
        parameter.copy_(values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=GOLDEN)
    out = parser.parse_args().out
    for name, (cases, *_) in FAMILIES.items():
        for each in cases:
            draw(name, each, out / name / each.name)
