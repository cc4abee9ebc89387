"""Counts FLOPs, bytes and parameters of models from their shape; one file per family, no JAX.

To add a family, write a frozen dataclass that is an `Architecture` (`architecture.py`), and name it
in `registry.py`, or call `register_architecture` in code of your own.
"""
