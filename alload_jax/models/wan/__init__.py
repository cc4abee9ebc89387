"""The transformer of Wan 2.1 and of Wan 2.2's 5B model."""
