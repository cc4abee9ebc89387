"""Samples on disk, and their way to the devices."""
