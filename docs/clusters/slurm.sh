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
#SBATCH --open-mode=append
# --gpus-per-node, not --gpus-per-task: JAX gives each task the GPU of its own number, for which
# every task must see all GPUs of its node.
set -euo pipefail

CONFIG=${CONFIG:-configs/wan2_1_t2v_1_3b.yaml}

# With Pyxis: CONTAINER=image.sqsh PYTHON=python sbatch docs/clusters/slurm.sh. It sees this folder;
# add other folders, such as that of the data, to the mounts.
container=()
if [ -n "${CONTAINER:-}" ]; then
    container=(--container-image="$CONTAINER" --container-mounts="$PWD:$PWD" --container-workdir="$PWD")
fi

# JAX finds the processes by what srun tells them. --kill-on-bad-exit=0: when one is lost, the others
# end by themselves, with a line that names it, for which srun must leave them some time.
# --cpus-per-task: since Slurm 22.05 srun does not take it from the job.
status=0
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" "${container[@]}" \
    "${PYTHON:-.venv/bin/python}" train.py --config "$CONFIG" --run.status_when_stopped 75 "$@" || status=$?

# Slurm sent SIGTERM before the time was over, and the run is saved: it goes on from there. (What
# was preempted, or lost a node, Slurm puts into the queue again by itself.)
if [ "$status" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
