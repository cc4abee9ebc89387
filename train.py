"""Train a video diffusion transformer: `python train.py --config configs/digits.yaml`.

Flags such as `--run.steps 200` override keys of the config; `--help` lists all keys. To continue a
stopped run, run the same command again. In a cluster, run the same command in every process
(docs/many-gpus.md). `alload train` is the same program.
"""

from alload_jax.processes import quiet_imports

with quiet_imports():
    from alload_jax.run import entry

if __name__ == "__main__":
    entry()
