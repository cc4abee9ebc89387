"""Trains on a Ray cluster by Ray Train, a process for each GPU of two hosts of eight.

    ray job submit --working-dir . -- python docs/clusters/ray_train.py --config /shared/config.yaml

Ray starts all processes again where one fails or a host is lost, and the run goes on from its
newest checkpoint. All hosts need a folder that they share, and:
  pip install -c constraints.txt -e '.[cuda12]' 'ray[train]'
"""

import argparse
import subprocess
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

TRAIN = "from alload_jax.run import entry; entry()"


def one_process(settings: dict) -> None:
    """Runs a process of the run. It is one of its own, which a signal tells to save and end."""
    context = get_context()
    address = broadcast_from_rank_zero(f"{ray.util.get_node_ip_address()}:{settings['port']}")
    flags = ["--cluster.coordinator", address]
    flags += ["--cluster.processes", str(context.get_world_size())]
    flags += ["--cluster.process", str(context.get_world_rank())]
    subprocess.run([sys.executable, "-c", TRAIN, *settings["flags"], *flags], check=True)


def main() -> None:
    """Unknown flags are those of train.py."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--gpus", type=int, default=1, help="of a process; 0 to train on CPUs")
    parser.add_argument("--port", type=int, default=9876, help="of the first host")
    parser.add_argument("--restarts", type=int, default=3)
    options, flags = parser.parse_known_args()
    resources = {"CPU": 1, "GPU": options.gpus}
    DataParallelTrainer(
        one_process,
        train_loop_config={"flags": flags, "port": options.port},
        scaling_config=ScalingConfig(
            num_workers=options.processes,
            use_gpu=options.gpus > 0,
            resources_per_worker={name: number for name, number in resources.items() if number},
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.restarts)),
    ).fit()


if __name__ == "__main__":
    main()
