"""The implementations that there are. A further one is a line here."""

from pallas_kernels.bias_gelu.implementation import Implementation
from pallas_kernels.bias_gelu.reference import XlaImplementation
from pallas_kernels.bias_gelu.triton import TritonImplementation
from pallas_kernels.registry import Registry

REGISTRY: Registry[Implementation] = Registry(reference=XlaImplementation())
REGISTRY.register(TritonImplementation())
