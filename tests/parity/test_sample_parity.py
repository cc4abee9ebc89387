"""`alload sample --prompt --image` against diffusers' image-to-video pipeline of the same parts."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from alload_jax import cli
from alload_jax.errors import InputError

for package in ("torch", "diffusers", "transformers"):
    pytest.importorskip(package, reason=f"needs {package}: install alload-jax[parity]")

import diffusers  # noqa: E402
import torch  # noqa: E402
from diffusers.pipelines.wan import pipeline_wan_i2v  # noqa: E402
from encoder_folders import SENTENCE, write_pipeline  # noqa: E402

pytestmark = pytest.mark.parity

FRAMES, HEIGHT, WIDTH, STEPS, SHIFT = 9, 32, 64, 4, 3.0
MODELS = {
    "Wan 2.1": {"in_channels": 36, "out_channels": 16, "image_dim": 10, "added_kv_proj_dim": 16},
    "Wan 2.1, last frame": {
        "in_channels": 36,
        "out_channels": 16,
        "image_dim": 10,
        "added_kv_proj_dim": 16,
        "pos_embed_seq_len": 10,
    },
    "Wan 2.2 A14B": {"in_channels": 36, "out_channels": 16},
    "Wan 2.2 5B": {"in_channels": 48, "out_channels": 48},
}


class ExactTimesteps(diffusers.UniPCMultistepScheduler):
    """Without the rounding of timesteps to whole numbers, which ours are not rounded to."""

    def set_timesteps(self, *args, **options):
        super().set_timesteps(*args, **options)
        self.timesteps = self.sigmas[:-1] * 1000


def transformer(fields):
    torch.manual_seed(1)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        ffn_dim=24,
        freq_dim=16,
        text_dim=12,
        **fields,
    )
    with torch.no_grad():
        for part in model.parameters():
            part.add_(0.05 * torch.randn_like(part))
    return model.eval()


@pytest.mark.parametrize(
    ("scheduler", "flags"),
    [(ExactTimesteps, []), (diffusers.UniPCMultistepScheduler, ["--round-timesteps"])],
    ids=["exact", "rounded"],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_clip_is_that_of_the_pipeline(name, scheduler, flags, tmp_path, monkeypatch):
    # This pipeline calls ftfy even where it is not installed; it leaves plain words as they are.
    plain = SimpleNamespace(fix_text=str)
    monkeypatch.setattr(pipeline_wan_i2v, "ftfy", plain, raising=False)
    is_5b, has_last = name.endswith("5B"), "last" in name
    kind = "2.2" if is_5b else "2.1"
    negative = "blue" if is_5b else None  # without one, guidance leads away from an empty text
    parts = write_pipeline(tmp_path / "wan", kind)
    model = transformer(MODELS[name])
    model.save_pretrained(tmp_path / "wan" / "transformer")
    rng, pictures = np.random.default_rng(0), []
    for number in range(2):
        pictures.append(Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)))
        pictures[-1].save(tmp_path / f"{number}.png")

    stride = (4, 16, 16) if is_5b else (4, 8, 8)
    channels = 48 if is_5b else 16
    grid = (1 + (FRAMES - 1) // 4, HEIGHT // stride[1], WIDTH // stride[2])
    noise = np.asarray(jax.random.normal(jax.random.key(7), (*grid, channels)))
    embeds_image = model.config.image_dim is not None
    pipeline = diffusers.WanImageToVideoPipeline(
        tokenizer=parts["tokenizer"],
        text_encoder=parts["text_encoder"],
        vae=parts["vae"],
        scheduler=scheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
        ),
        image_processor=parts["image_processor"] if embeds_image else None,
        image_encoder=parts["image_encoder"] if embeds_image else None,
        transformer=model,
        expand_timesteps=is_5b,
    )
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        image=pictures[0],
        last_image=pictures[1] if has_last else None,
        prompt=SENTENCE,
        negative_prompt=negative,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=2.0,
        latents=torch.from_numpy(noise.copy()).permute(3, 0, 1, 2)[None],
        output_type="latent",
    ).frames[0]
    expected = expected.permute(1, 2, 3, 0).numpy()

    folder = str(tmp_path / "wan")
    command = ["sample", "--checkpoint", f"{folder}/transformer", "--prompt", SENTENCE]
    command += ["--negative-prompt", negative] if negative else []
    command += ["--text-encoder", folder, "--vae", folder]
    command += ["--image", str(tmp_path / "0.png"), "--steps", str(STEPS), "--guidance", "2"]
    command += ["--last-image", str(tmp_path / "1.png")] if has_last else []
    command += ["--image-encoder", folder] if embeds_image else []
    command += ["--frames", str(FRAMES), "--height", str(HEIGHT), "--width", str(WIDTH)]
    command += ["--seed", "7", "--shift", str(SHIFT), "--dtype", "float32", *flags]
    out = tmp_path / "clip.safetensors"
    assert cli.main([*command, "--out", str(out)]) == 0
    found = load_file(out)["latents"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.abs(noise - expected).mean() > 0.1

    contrary = [*command, "--vae-stride", "1", "1", "1", "--out", str(tmp_path / "x.gif")]
    with pytest.raises(InputError, match=f"that of --vae {folder} is"):
        cli.main(contrary)

    decoded = tmp_path / "clip.gif"
    assert cli.main([*command, "--out", str(decoded)]) == 0
    with Image.open(decoded) as clip:
        assert (clip.n_frames, clip.size) == (FRAMES, (WIDTH, HEIGHT))
