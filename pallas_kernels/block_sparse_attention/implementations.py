"""The implementations that there are. A further one is a line here, or registers itself."""

from pallas_kernels.block_sparse_attention.implementation import Implementation
from pallas_kernels.block_sparse_attention.mosaic import MosaicImplementation
from pallas_kernels.block_sparse_attention.reference import XlaImplementation
from pallas_kernels.block_sparse_attention.triton import TritonImplementation
from pallas_kernels.registry import Registry

REGISTRY: Registry[Implementation] = Registry(reference=XlaImplementation())
REGISTRY.register(TritonImplementation())
REGISTRY.register(MosaicImplementation())
