"""Training objectives, selected by name."""
