"""`--vae wan`: latents of Wan's VAE, and what Wan's image-to-video models are given."""

from dataclasses import dataclass

from alload_jax.data.prepare.given_frames import GivenFrames
from alload_jax.data.prepare.vae_latents import VaeLatents
from alload_jax.encoders.clip_image import ClipImage
from alload_jax.encoders.vae import Vae
from alload_jax.encoders.wan_vae import WanVae
from alload_jax.errors import InputError

_NEEDS_NONE = 48  # channels of the VAE of Wan 2.2's 5B model


@dataclass(frozen=True)
class WanLatents(VaeLatents):
    """Stores normalised latents of Wan 2.1's or 2.2's VAE as float16; see `VaeEncoder`."""

    patch_size = (1, 2, 2)
    vae_class = WanVae


@dataclass(frozen=True)
class WanGivenFrames(GivenFrames):
    """Mask and latents of the given frames, and CLIP's embeddings; see `GivenEncoder`."""

    vae_class = WanVae
    image_class = ClipImage

    @classmethod
    def check_vae(cls, kind: str, vae: Vae) -> None:
        """See `GivenFrames.check_vae`."""
        if vae.channels == _NEEDS_NONE:
            raise InputError(
                f"--image-to-video {kind}: {vae.folder} is the VAE of Wan 2.2's 5B model, which "
                "takes its first frame from the latents themselves; leave it out and train with "
                "objective.given_first_frame"
            )
