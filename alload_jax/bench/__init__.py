"""Benchmarks that users run on their own device."""
