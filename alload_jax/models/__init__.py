"""Flax NNX transformers and their building blocks."""
