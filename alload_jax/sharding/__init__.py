"""The device mesh, its shape groups, and the partition rules of arrays."""
