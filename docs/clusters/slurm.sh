#!/bin/bash
# Two nodes of eight GPUs each, a process per GPU: sbatch docs/clusters/slurm.sh
#SBATCH --job-name=alload
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --output=alload-%j.log
# --gpus-per-node, not --gpus-per-task: JAX gives each task the GPU of its own number, for which
# every task must see all GPUs of its node.
set -euo pipefail

CONFIG=${CONFIG:-configs/wan2_1_t2v_1_3b.yaml}

# JAX finds the processes by what srun tells them. --kill-on-bad-exit: when one is lost, the others
# end by themselves with a line that names it; this makes sure of it.
srun --kill-on-bad-exit=1 .venv/bin/python train.py --config "$CONFIG" "$@"
