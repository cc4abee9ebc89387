"""Train video diffusion transformers in JAX on mixed images and clips, planned by cost."""
