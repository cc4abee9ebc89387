"""What models compute and hold, counted from their shape: one file for each family; no JAX.

To add a family, write a frozen dataclass that is an `Architecture` (`architecture.py`), and name it
in `registry.py`, or call `register_architecture` in code of your own.
"""
