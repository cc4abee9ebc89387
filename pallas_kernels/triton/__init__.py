"""What the Triton backends of several kernels share: tiles of rows, sums of partial rows."""
