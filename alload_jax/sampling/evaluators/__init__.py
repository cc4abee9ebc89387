"""Evaluators: metrics of generated samples, selected by name."""
