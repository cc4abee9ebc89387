"""Validation: the loss on held-out samples at fixed noise levels with fixed noise."""
