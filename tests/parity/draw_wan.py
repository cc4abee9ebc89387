"""Draws the golden files that the Wan model is compared with, from diffusers' own model.

    python tests/parity/draw_wan.py [--out tests/golden/wan]

Needs torch and diffusers, which alload-jax itself doesn't; no GPU, no network. Every case is a
small `WanTransformer3DModel` with random float32 weights, and some calls of it on a CPU. A case's
folder holds

- `transformer/`: `config.json` and `diffusion_pytorch_model.safetensors` as `save_pretrained`
  writes them;
- `inputs.safetensors`: for each call n `n.latents` [B, C, F, H, W], `n.timestep` [B] or [B, S],
  `n.text` [B, L, text_dim], with images `n.image` [B, N, image_dim] (the tokens of all images of
  a sample), and `n.cotangent`, of the output's shape;
- `expected.safetensors`: `n.output`, and for every parameter `grad.<its key>`, the gradient of
  Σ_n Σ(n.output · n.cotangent).

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
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "wan"
HARD_CODED_TEXT_LENGTH = 512
"""With images, diffusers takes the last 512 tokens for text and all before them for images."""
SMALL = 1 / 32
"""Variance 1e-3, of which an epsilon of 1e-5 or 1e-6 is a visible part."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the model; a timestep in 0..1000 for each sample."""

    frames: int
    height: int
    width: int
    timesteps: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its calls.

    Parameters and inputs whose names match `small` are drawn by the factor SMALL smaller: norms
    behind them then show their epsilon, which those of values of order one would hide.
    """

    name: str
    config: dict[str, object]
    text_length: int
    calls: tuple[Call, ...]
    images: int = 0
    image_tokens: int = 5
    timestep_per_token: bool = False
    small: str = "(?!)"


def _config(heads: int, head_dim: int, layers: int, **others: object) -> dict[str, object]:
    common = {"in_channels": 4, "out_channels": 4, "text_dim": 10, "freq_dim": 16, "ffn_dim": 40}
    sizes = {"num_attention_heads": heads, "attention_head_dim": head_dim, "num_layers": layers}
    return common | sizes | others


_IMAGES = {"image_dim": 10, "added_kv_proj_dim": 24, "text_dim": 6, "in_channels": 9}

CASES = (
    Case(
        "t2v",
        _config(2, 12, 2, cross_attn_norm=True),
        text_length=7,
        calls=(
            Call(1, 2, 2, (0.0, 1000.0)),
            Call(5, 4, 6, (312.5, 37.25, 999.0)),
            Call(2, 6, 4, (0.37, 640.0)),
        ),
    ),
    Case(
        "t2v_plain_cross",
        _config(3, 8, 3, ffn_dim=33, cross_attn_norm=False, qk_norm=None, patch_size=(1, 1, 2)),
        text_length=11,
        calls=(Call(1, 3, 4, (875.0, 12.5)), Call(3, 2, 6, (500.0, 250.75, 981.3))),
    ),
    Case(
        "t2v_wide",
        _config(4, 16, 1, in_channels=3, out_channels=5, eps=1e-5, patch_size=(2, 2, 2)),
        text_length=6,
        calls=(Call(2, 4, 4, (20.0, 720.5)), Call(4, 2, 6, (450.0, 991.25))),
        small=r"patch_embedding|to_[qk]\.|to_out\.0|ffn\.net\.2",
    ),
    Case(
        "i2v",
        _config(2, 12, 2, **_IMAGES),
        text_length=HARD_CODED_TEXT_LENGTH,
        calls=(Call(1, 4, 4, (333.25, 900.0)), Call(3, 2, 4, (66.5, 1000.0))),
        images=1,
        small=r"\.image$|image_embedder\.ff\.net\.2|add_k_proj",
    ),
    Case(
        "flf2v",
        _config(2, 12, 1, pos_embed_seq_len=10, **_IMAGES),
        text_length=HARD_CODED_TEXT_LENGTH,
        calls=(Call(2, 4, 2, (150.0, 810.5)), Call(3, 2, 4, (5.75, 600.0))),
        images=2,
    ),
    Case(
        "ti2v",
        _config(2, 14, 2, in_channels=6, out_channels=6),
        text_length=7,
        calls=(Call(3, 4, 4, (1000.0, 480.5)), Call(1, 2, 6, (90.0, 702.25, 955.0))),
        timestep_per_token=True,
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
    model = WanTransformer3DModel(**case.config)
    _randomise(case, model)
    inputs = {}
    for number, call in enumerate(case.calls):
        drawn = _inputs(case, call, number)
        inputs |= {f"{number}.{name}": value for name, value in drawn.items()}
    model.save_pretrained(folder / "transformer")
    save_file(inputs, folder / "inputs.safetensors")
    save_file(_expected(case, model, inputs), folder / "expected.safetensors")


def _normal(case: Case, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal values that depend on the names alone, not on the order of drawing."""
    values = _generator(case, name).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values) * (SMALL if re.search(case.small, name) else 1.0)


def _generator(case: Case, name: str) -> np.random.Generator:
    """NumPy's, because torch's normal values differ between CPUs in their last bits."""
    return np.random.default_rng([zlib.crc32(case.name.encode()), zlib.crc32(name.encode())])


@torch.no_grad()
def _randomise(case: Case, model: WanTransformer3DModel) -> None:
    """Draws all parameters such that activations stay of order one; none is left at 0 or 1."""
    for key, parameter in model.named_parameters():
        values = _normal(case, key, parameter.shape)
        if not key.endswith((".weight", ".bias")):  # scale_shift_table, pos_embed
            values = values / 2
        elif parameter.ndim == 1:
            values = values / 4 + (1.0 if key.endswith(".weight") else 0.0)
        else:
            values = values / math.sqrt(math.prod(parameter.shape[1:]))
        parameter.copy_(values)


def _inputs(case: Case, call: Call, number: int) -> dict[str, torch.Tensor]:
    """latents, timestep, text, cotangent and, where the case has some, image."""
    batch, clip = len(call.timesteps), (call.frames, call.height, call.width)
    shapes = {
        "latents": (batch, case.config["in_channels"], *clip),
        "text": (batch, case.text_length, case.config["text_dim"]),
        "cotangent": (batch, case.config["out_channels"], *clip),
    }
    if case.images:
        shapes["image"] = (batch, case.images * case.image_tokens, case.config["image_dim"])
    drawn = {name: _normal(case, f"{number}.{name}", shape) for name, shape in shapes.items()}
    return drawn | {"timestep": _timestep(case, call, number)}


def _timestep(case: Case, call: Call, number: int) -> torch.Tensor:
    """[B], or [B, S]: some part of the sample's timestep for each token, 0 in the first frame."""
    timestep = torch.tensor(call.timesteps, dtype=torch.float32)
    if not case.timestep_per_token:
        return timestep
    frame = (call.height // 2) * (call.width // 2)
    parts = _generator(case, f"{number}.timestep").random(
        (len(timestep), call.frames * frame), dtype=np.float32
    )
    if call.frames > 1:
        parts[:, :frame] = 0.0
    return timestep[:, None] * torch.from_numpy(parts)


def _expected(
    case: Case, model: WanTransformer3DModel, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`n.output` for each call, and `grad.<key>` of all calls together for each parameter."""
    expected = {}
    for number in range(len(case.calls)):
        image = inputs.get(f"{number}.image")
        if image is not None:  # [B, images · N, d]; diffusers has images in the batch
            image = image.reshape(-1, case.image_tokens, image.shape[-1])
        output = model(
            hidden_states=inputs[f"{number}.latents"],
            timestep=inputs[f"{number}.timestep"],
            encoder_hidden_states=inputs[f"{number}.text"],
            encoder_hidden_states_image=image,
        ).sample
        (output * inputs[f"{number}.cotangent"]).sum().backward()
        expected[f"{number}.output"] = output.detach().contiguous()
    grads = {f"grad.{key}": value.grad for key, value in model.named_parameters()}
    return expected | grads


if __name__ == "__main__":
    main()
