"""Partition rules of HunyuanVideo's parameters."""

from jax.sharding import PartitionSpec

from alload_jax.sharding.rules import Rules

_COLUMN_PARALLEL = r"(query|key|value|feed_forward/hidden)"
_ROW_PARALLEL = r"(/out|feed_forward/out)"

PARTITION_RULES: Rules = (
    (r"head/out/kernel$", PartitionSpec("fsdp", None)),
    (rf"blocks/.*{_COLUMN_PARALLEL}/kernel$", PartitionSpec(None, None, ("tensor", "fsdp"))),
    (rf"blocks/.*{_ROW_PARALLEL}/kernel$", PartitionSpec(None, "tensor", "fsdp")),
    (rf"blocks/.*{_COLUMN_PARALLEL}/bias$", PartitionSpec(None, "tensor")),
    (r"blocks/.*kernel$", PartitionSpec(None, None, "fsdp")),
    (r"kernel$|embedding$", PartitionSpec(None, "fsdp")),
    (r".", PartitionSpec()),
)
"""(pattern, rule) pairs; the first pattern found in a path applies. Blocks have a leading layer
axis. `tensor` splits heads and the hidden width as in Megatron-LM (arXiv 1909.08053)."""
