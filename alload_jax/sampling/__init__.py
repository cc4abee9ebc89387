"""Sampling: requests, generation, clips, pictures and evaluators."""
