"""Data sets that a run makes for itself, found by name."""
