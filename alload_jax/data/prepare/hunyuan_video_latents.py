"""`--vae hunyuan_video`: latents of HunyuanVideo 1.5's VAE, and what its models are given."""

from dataclasses import dataclass

from alload_jax.data.prepare.given_frames import GivenFrames
from alload_jax.data.prepare.vae_latents import VaeLatents
from alload_jax.encoders.hunyuan_video_vae import HunyuanVideoVae
from alload_jax.encoders.siglip_image import SiglipImage


@dataclass(frozen=True)
class HunyuanVideoLatents(VaeLatents):
    """Stores normalised latents of HunyuanVideo 1.5's VAE as float16; see `VaeEncoder`."""

    patch_size = (1, 1, 1)
    vae_class = HunyuanVideoVae


@dataclass(frozen=True)
class HunyuanVideoGivenFrames(GivenFrames):
    """Latents of the first frame and its mask, and SigLIP's embeddings; see `GivenEncoder`."""

    vae_class = HunyuanVideoVae
    image_class = SiglipImage
    needs_image = True
