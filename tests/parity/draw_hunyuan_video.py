"""Draws the golden files that HunyuanVideo is compared with, from diffusers' own model.

    python tests/parity/draw_hunyuan_video.py [--out tests/golden/hunyuan_video]

Needs torch and diffusers, which alload-jax itself doesn't; no GPU, no network. Every case is a
small `HunyuanVideo15Transformer3DModel` with random float32 weights, and some calls of it on a CPU.
A case's folder holds

- `transformer/`: `config.json` and `diffusion_pytorch_model.safetensors` as `save_pretrained`
  writes them, but for the width of the glyphs' hidden layers, GLYPH_HIDDEN in place of 2048;
- `inputs.safetensors`: for each call n `n.latents` [B, C, F, H, W], `n.timestep` [B], `n.text`
  [B, L, width] and `n.text_length` [B], the same of `n.glyphs`, `n.image` [B, N, width] (zeros
  where there is none), and `n.cotangent`, of the output's shape;
- `expected.safetensors`: `n.output`, and for every parameter `grad.<its key>`, the gradient of
  Σ_n Σ(n.output · n.cotangent), zeros where the output does not depend on it.

Run twice on one machine, it writes the same bytes.
"""

import argparse
import dataclasses
import math
import re
import zlib
from pathlib import Path

import numpy as np
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15ByT5TextProjection,
)
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "hunyuan_video"
GLYPH_HIDDEN = 12
TEXT, GLYPHS, IMAGE = 7, 5, 4
"""Tokens of each kind of condition, with padding."""
SMALL = 1 / 32
"""Variance 1e-3, of which an epsilon of 1e-5 or 1e-6 is a visible part."""


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
    """A model and its calls; what matches `small` is drawn by the factor SMALL smaller."""

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


def main() -> None:
    """Draws all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=GOLDEN)
    out = parser.parse_args().out
    for case in CASES:
        draw(case, out / case.name)
        size = sum(file.stat().st_size for file in (out / case.name).rglob("*") if file.is_file())
        print(f"{case.name:16} {size:8,} bytes")


def draw(case: Case, folder: Path) -> None:
    """Writes one case's files into `folder`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    model = HunyuanVideo15Transformer3DModel(**case.config)
    model.context_embedder_2 = HunyuanVideo15ByT5TextProjection(
        case.config["text_embed_2_dim"],
        GLYPH_HIDDEN,
        case.config["num_attention_heads"] * case.config["attention_head_dim"],
    )
    _randomise(case, model)
    inputs = {}
    for number, call in enumerate(case.calls):
        drawn = _inputs(case, call, number)
        inputs |= {f"{number}.{name}": value for name, value in drawn.items()}
    model.save_pretrained(folder / "transformer")
    save_file(inputs, folder / "inputs.safetensors")
    save_file(_expected(case, model, inputs), folder / "expected.safetensors")


def _normal(case: Case, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal values that depend on the names alone, drawn by NumPy: torch's differ by CPU."""
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), zlib.crc32(name.encode())])
    values = rng.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values) * (SMALL if re.search(case.small, name) else 1.0)


@torch.no_grad()
def _randomise(case: Case, model: torch.nn.Module) -> None:
    """Draws all parameters such that activations stay of order one; none is left at 0 or 1."""
    for key, parameter in model.named_parameters():
        values = _normal(case, key, parameter.shape)
        if parameter.ndim == 1:
            values = values / 4 + (1.0 if key.endswith(".weight") else 0.0)
        else:
            values = values / math.sqrt(math.prod(parameter.shape[1:]))
        parameter.copy_(values)


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
    drawn = {name: _normal(case, f"{number}.{name}", shape) for name, shape in shapes.items()}
    if not call.with_image:
        drawn["image"] = torch.zeros_like(drawn["image"])
    return drawn | {
        "timestep": torch.tensor(call.timesteps, dtype=torch.float32),
        "text_length": torch.tensor(call.text, dtype=torch.int32),
        "glyphs_length": torch.tensor(call.glyphs, dtype=torch.int32),
    }


def _expected(
    case: Case, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`n.output` for each call, and `grad.<key>` of all calls together for each parameter."""
    expected = {}
    for number in range(len(case.calls)):
        output = call_model(model, {k: inputs[f"{number}.{k}"] for k in _NAMES})
        (output * inputs[f"{number}.cotangent"]).sum().backward()
        expected[f"{number}.output"] = output.detach().contiguous()
    named = model.named_parameters()
    grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in named}
    return expected | {f"grad.{key}": value for key, value in grads.items()}


_NAMES = ("latents", "timestep", "text", "text_length", "glyphs", "glyphs_length", "image")


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
    main()
