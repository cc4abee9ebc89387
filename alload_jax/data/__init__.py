"""Samples on disk, and the input pipeline to the devices."""
