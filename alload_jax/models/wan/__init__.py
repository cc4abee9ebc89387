"""Wan 2.1's transformer, and Wan 2.2's 5B model."""
