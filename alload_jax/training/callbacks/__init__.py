"""Callbacks: small classes with hooks on the training loop."""
