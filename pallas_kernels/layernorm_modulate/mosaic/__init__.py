"""The backward pass through Mosaic GPU, on Hopper.

A program walks through consecutive rows. Each of its groups of 128 threads has columns of its own:
it copies its part of the rows to come into shared memory with the tensor memory accelerator, and
registers hold little more than its columns of scale, gate and the float32 sums of the tables'
gradients. (The Triton kernel has rows to come in registers as well, and wide rows do not fit.)
Gradients of a row are written where the row stood and copied from there. The groups exchange the
two sums over a row that the norm's gradient takes.

Where a segment ends within a program's rows it writes its sums and goes on, so that programs are as
long as those of rows without segments. Nothing is atomic: equal inputs give equal bits.

The forward is the Triton kernels', and so is the backward of what this kernel does not take: a
scale for each token, an x of another dtype than h, and widths that are no multiple of 128 or whose
rows do not fit.
"""

from pallas_kernels.layernorm_modulate.mosaic.implementation import MosaicImplementation

__all__ = ["MosaicImplementation"]
