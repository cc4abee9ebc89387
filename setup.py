"""Puts the folder of example configs into the wheel; all else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["alload_jax*", "pallas_kernels*"]), "alload_jax.configs"],
    package_dir={"alload_jax.configs": "configs"},
)
