"""Flax NNX transformers and their parts."""
