"""Trackers: where the figures and pictures of a run are shown."""
