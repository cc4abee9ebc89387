"""The implementations that there are. A further one is a line here, or registers itself."""

from pallas_kernels.layernorm_modulate.implementation import Implementation
from pallas_kernels.layernorm_modulate.mosaic import MosaicImplementation
from pallas_kernels.layernorm_modulate.reference import XlaImplementation
from pallas_kernels.layernorm_modulate.triton import TritonImplementation
from pallas_kernels.registry import Registry

REGISTRY: Registry[Implementation] = Registry(reference=XlaImplementation())
REGISTRY.register(TritonImplementation())
REGISTRY.register(MosaicImplementation())


def implementation_names() -> tuple[str, ...]:
    """The values that `implementation=` takes, "auto" first."""
    return REGISTRY.names()


def register_implementation(implementation: Implementation) -> None:
    """Makes an implementation known to `implementation=`, and to "auto" where it is faster.

    Raises:
      ValueError: its name is taken.
    """
    REGISTRY.register(implementation)


def unregister_implementation(name: str) -> None:
    """Removes what `register_implementation` added."""
    REGISTRY.unregister(name)
