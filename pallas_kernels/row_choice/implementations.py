"""The implementations that there are. A further one is a line here."""

from pallas_kernels.registry import Registry
from pallas_kernels.row_choice.implementation import Implementation
from pallas_kernels.row_choice.reference import XlaImplementation
from pallas_kernels.row_choice.triton import TritonImplementation

REGISTRY: Registry[Implementation] = Registry(reference=XlaImplementation())
REGISTRY.register(TritonImplementation())
