"""Lets all processes of a run choose the same kernels on GPUs that no table knows."""

from collections.abc import Callable
from typing import Any

from alload_jax.distributed.cluster import Cluster
from pallas_kernels.first_use import COMPARISONS


def share_comparisons(cluster: Cluster, trace: Callable[[], Any]) -> None:
    """Measures in process 0 what a program asks for, and takes its results in all processes.

    In a run of one process the kernels measure by themselves.

    Args:
      cluster: the processes.
      trace: traces a program, which asks for the comparisons that it needs.
    """
    if cluster.num_processes == 1:
        return

    def measured() -> dict[str, float]:
        COMPARISONS.use(None)
        trace()
        return COMPARISONS.known()

    COMPARISONS.use(cluster.broadcast(measured))
