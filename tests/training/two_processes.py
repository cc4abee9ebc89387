"""One process of two that train an independent plan together; see test_shape_groups.py."""

import json
import sys
from pathlib import Path

import jax


def main(coordinator, process, data, out):
    jax.distributed.initialize(coordinator, 2, int(process))
    from group_cases import figures, plan_for, steps_on, trainer_on

    from alload_jax.data.manifest import read_manifest
    from alload_jax.sharding.mesh import MeshConfig, make_mesh

    mesh = make_mesh(MeshConfig())
    manifest = read_manifest(data)
    plan = plan_for(manifest, 2)
    trainer = trainer_on(manifest, plan, mesh)
    placed = steps_on(manifest, plan, mesh, steps=5)
    found = {
        "metrics": [figures(trainer.step(step)) for step in placed],
        "programs": len(trainer.programs),
        "groups": [step.groups for step in placed],
        "devices": jax.device_count(),
    }
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
