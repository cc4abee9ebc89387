"""Draws the golden files that the Wan model is compared with, from diffusers' own model.

    python tests/parity/draw_wan.py [--out tests/golden/wan]

Needs torch and diffusers, no GPU and no network; run twice on one machine, it writes the same
bytes. A case is a small model with random float32 weights, and some calls of it. Its folder holds
`transformer/` as `save_pretrained` writes it, and for each call n

- `inputs.safetensors`: `n.latents` [B, C, F, H, W], `n.timestep` [B] or [B, S], `n.text` [B, L,
  text_dim], with images `n.image` [B, N, image_dim] (the tokens of all images of a sample), and
  `n.cotangent`, of the output's shape;
- `expected.safetensors`: `n.output`, and for every parameter `grad.<its key>`, the gradient of
  Σ_n Σ(n.output · n.cotangent).
"""

import dataclasses
from pathlib import Path

import golden_drawing
import numpy as np
import torch
from diffusers import WanTransformer3DModel
from golden_drawing import draw_case, generator, normal

GOLDEN = Path(__file__).parents[1] / "golden" / "wan"
HARD_CODED_TEXT_LENGTH = 512
"""With images, diffusers takes the last 512 tokens for text and all before them for images."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the model; a timestep in 0..1000 for each sample."""

    frames: int
    height: int
    width: int
    timesteps: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its calls; see `golden_drawing.Case`."""

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


def draw(case: Case, folder: Path) -> None:
    """Writes one case's files into `folder`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = WanTransformer3DModel(**case.config)

    def call(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        image = inputs.get("image")
        if image is not None:  # [B, images · N, d]; diffusers has images in the batch
            image = image.reshape(-1, case.image_tokens, image.shape[-1])
        return model(
            hidden_states=inputs["latents"],
            timestep=inputs["timestep"],
            encoder_hidden_states=inputs["text"],
            encoder_hidden_states_image=image,
        ).sample

    draw_case(case, folder, model, _inputs, call)


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
    drawn = {name: normal(case, f"{number}.{name}", shape) for name, shape in shapes.items()}
    return drawn | {"timestep": _timestep(case, call, number)}


def _timestep(case: Case, call: Call, number: int) -> torch.Tensor:
    """[B], or [B, S]: some part of the sample's timestep for each token, 0 in the first frame."""
    timestep = torch.tensor(call.timesteps, dtype=torch.float32)
    if not case.timestep_per_token:
        return timestep
    frame = (call.height // 2) * (call.width // 2)
    parts = generator(case, f"{number}.timestep").random(
        (len(timestep), call.frames * frame), dtype=np.float32
    )
    if call.frames > 1:
        parts[:, :frame] = 0.0
    return timestep[:, None] * torch.from_numpy(parts)


if __name__ == "__main__":
    golden_drawing.main(GOLDEN, CASES, draw, __doc__)
