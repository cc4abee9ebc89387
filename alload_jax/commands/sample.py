"""`alload sample`: draws samples from a model and writes a file for each."""

import argparse
from typing import get_args

from alload_jax.commands.flags import (
    ABOVE_0,
    FROM_0,
    add_run_flags,
    add_skip_unknown,
    number,
    up_to,
)
from alload_jax.diffusion.schedules import Sampler
from alload_jax.encoders.loading import share_memory
from alload_jax.errors import InputError
from alload_jax.training import expert_places

_LARGEST = 1000
"""Maximum of --steps, --batch, --zoom and the parts of --vae-stride."""

_FINITE = number(float, "a finite number", lambda _: True)
_BOUNDARY = number(float, "a number between 0 and 1", lambda value: 0 < value < 1)
_FPS = number(float, f"a number above 0, at most {_LARGEST}", lambda value: 0 < value <= _LARGEST)
_LIST = """\
JSON lines with one object per sample; its keys (class, prompt, negative_prompt, prompt_embeds,
negative_embeds, image, last_image, image_embeds, frames, height, width, seed, out) override the
flags; paths are relative to the list's folder"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--checkpoint", required=True, help="run folder, transformer folder of diffusers, or file "
        "of weights; of two experts: their run folder, or a pipeline of diffusers")  # fmt: skip
    add_run_flags(add)
    add("--lora", metavar="FILE[:SCALE]", nargs="+", default=[], help="LoRA files to add, with "
        "factors; default 1")  # fmt: skip
    add_skip_unknown(add)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--class", dest="classes", metavar="N", nargs="+", type=int,
        help="classes of one sample")  # fmt: skip
    what.add_argument("--prompt", action="append", metavar="WORDS", help="what the sample shows, "
        "in words")  # fmt: skip
    what.add_argument("--prompt-embeds", metavar="FILE",
        help="safetensors with `text` [L, width]; padded with zeros")  # fmt: skip
    what.add_argument("--list", metavar="FILE", help=_LIST)
    add("--negative-prompt", metavar="WORDS",
        help="what guidance leads away from; default: an empty text, or zeros where the run was "
        "trained with them")  # fmt: skip
    add("--negative-embeds", metavar="FILE",
        help="the same as embeddings")  # fmt: skip
    add("--image-embeds", metavar="FILE",
        help="safetensors with `image` [N, width], for models with image embeddings")  # fmt: skip
    add("--image", metavar="FILE", help="picture of the first frame")
    add("--last-image", metavar="FILE", help="picture of the last frame, for "
        "models that take one")  # fmt: skip
    add("--text-encoder", metavar="DIR", help="local folder of the model's text encoder, for "
        "--prompt: umT5 for Wan, HunyuanVideo's pipeline; bytes for the embedding of --text "
        "bytes, which runs on such data have without it")  # fmt: skip
    add("--vae", metavar="DIR", help="local folder of the model's VAE, which turns latents into "
        "pictures")  # fmt: skip
    add("--image-encoder", metavar="DIR", help="local folder of the model's image encoder, CLIP or "
        "SigLIP, for --image with models that take image embeddings")  # fmt: skip
    add("--low-noise-checkpoint", metavar="DIR", help="second of two experts, as in Wan 2.2's A14B "
        "models: it takes the lower noise levels")  # fmt: skip
    add("--boundary", type=_BOUNDARY, help="noise level below which it does; Wan 2.2 uses 0.875, "
        "for image-to-video 0.9; default: as trained, or the pipeline's")  # fmt: skip
    add("--low-noise-lora", metavar="FILE[:SCALE]", nargs="+", default=[], help="LoRA files to add "
        "to it, in place of those of --lora that are no pair")  # fmt: skip
    add("--low-noise-guidance", type=_FINITE, help="its guidance; default: that of the first")
    add("--frames", type=int, help="frames of the clip; 1 for an image")
    add("--height", type=int, help="height in pixels")
    add("--width", type=int, help="width in pixels")
    add("--vae-stride", nargs="+", metavar="N", help="pixels per latent, T H W; default: the "
        "data's, else by the channels: 1 1 1 for 1 or 3, 4 16 16 for 48, else 4 8 8")  # fmt: skip
    add("--steps", type=up_to(_LARGEST), default=30, help="evaluations of the model; default 30")
    add("--sampler", choices=get_args(Sampler), help="default: the run's; unipc for diffusers")
    add("--round-timesteps", action="store_true", help="give the model whole timesteps, as "
        "diffusers' pipelines do with unipc: 1000 times the noise level, rounded down")  # fmt: skip
    add(
        "--guidance",
        type=_FINITE,
        help="scale of classifier-free guidance, 1 for none; default: the run's, else 5",
    )
    add("--embedded-guidance", type=FROM_0, help="scale that models are told which take one as an "
        "input, such as HunyuanVideo's first; default: the run's, else 6")  # fmt: skip
    add("--shift", type=ABOVE_0, help="shift of noise levels; default: the run's at this size, "
        "else 5, which Wan recommends for 720p; for 480p it recommends 3")  # fmt: skip
    add("--dtype", choices=["auto", "float32", "bfloat16"], help="compute dtype; default: "
        "the run's, else auto: bfloat16 on a GPU")  # fmt: skip
    add("--dense-attention", action="store_true", help="dense attention in all layers; default: "
        "sparse in those that are sparse in the checkpoint")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the noise; default 0")
    add("--batch", type=up_to(_LARGEST), default=1, help="samples per batch, default 1; the last "
        "batch is padded, so that a sample depends only on its seed and this number")  # fmt: skip
    add("--zoom", type=up_to(_LARGEST), default=1, help="enlarges pictures; default 1")
    add("--out", help="file to write: x.png (one frame), x.gif, x.mp4, or x.safetensors (latents)")
    add("--fps", type=_FPS, help="frames per second of GIF and MP4; default: the data's, "
        "else those of the model's family, else 9")  # fmt: skip
    add("--force", action="store_true", help="replace files that exist")


def run(options: argparse.Namespace) -> int:
    """Checks the flags, and draws."""
    _check_flags(options)
    if options.text_encoder or options.vae or options.image_encoder:
        share_memory()
    # Imported here because JAX takes a second to import.
    from alload_jax.commands.sample_draw import sample

    sample(options)
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Checks the flags that no model is needed to check.

    Raises:
      InputError: flags do not go together, or --vae-stride is wrong.
    """
    if len(options.prompt or ()) > 1:
        raise InputError("alload sample: --prompt is given twice; --list draws several samples")
    options.prompt = options.prompt and options.prompt[0]
    both = len(expert_places(options.checkpoint)) > 1
    if both and options.low_noise_checkpoint:
        raise InputError(
            f"alload sample: --checkpoint {options.checkpoint} holds two experts; leave out "
            "--low-noise-checkpoint, or name one expert's folder"
        )
    if not both and (options.boundary is None) != (options.low_noise_checkpoint is None):
        raise InputError(
            "alload sample: --boundary and --low-noise-checkpoint go together; give both or neither"
        )
    for name in ("lora", "guidance"):
        is_given = getattr(options, f"low_noise_{name}") not in (None, [])
        if is_given and not both and options.low_noise_checkpoint is None:
            raise InputError(
                f"alload sample: --low-noise-{name} goes with --low-noise-checkpoint; leave it out"
            )
    if options.vae_stride is not None:  # `4 8 8`, or `4,8,8` as in `alload plan`
        parts = ",".join(options.vae_stride).split(",")
        if len(parts) != 3 or not all(part in map(str, range(1, _LARGEST + 1)) for part in parts):
            raise InputError(
                f"alload sample: --vae-stride is {' '.join(options.vae_stride)}; give three whole "
                f"numbers from 1 to {_LARGEST}, such as 4 8 8"
            )
        options.vae_stride = tuple(map(int, parts))
