"""Data sets that a run can generate, selected by name."""
