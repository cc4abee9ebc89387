"""Evaluators: figures of what a model draws, found by name."""
