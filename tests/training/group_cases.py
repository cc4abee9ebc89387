"""Small independent plans, and training of them on meshes."""

import numpy as np

from alload_jax.data.collate import Collator
from alload_jax.data.condition import conditions_for
from alload_jax.data.layout import layout_for
from alload_jax.data.manifest import read_manifest
from alload_jax.data.placement import place_ahead
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.models.config import DiTConfig
from alload_jax.planning.settings import PlanningConfig, make_plan
from alload_jax.sharding.groups import group_meshes, ranks_per_group
from alload_jax.sharding.mesh import local_plan_ranks, ranks_of
from alload_jax.training.objective import DiffusionConfig
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.shape_groups import make_trainer
from alload_jax.training.state import init_state

MODEL = DiTConfig(dim=16, ffn_dim=24, num_heads=2, num_layers=1, freq_dim=8, dtype="float32")
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_steps=0)
SIZES = ((1, 4, 4), (3, 4, 2))


def write_data(folder, count=21):
    """Samples of two shapes, of which the second comes up in every third sample."""
    rng = np.random.default_rng(0)
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for n in range(count):
            size = SIZES[n % 3 == 2]
            latents = rng.normal(size=(*size, 1)).astype(np.float32)
            writer.add(latents, rng.integers(0, 10, 2).astype(np.int32), size)
    return read_manifest(folder)


def plan_for(manifest, mesh, **options):
    """Two rows of a micro-batch for each rank, unless `options` say otherwise."""
    config = {"policy": "fixed", "rows": 2, "ranks_mode": "independent"} | options
    samples = manifest.samples(MODEL.patch_size)
    return make_plan(
        PlanningConfig(**config), samples, ranks_of(mesh), 3, None, ranks_per_group(mesh)
    )


def steps_on(manifest, plan, mesh, steps, reader=None):
    """The first steps of a plan, placed on a mesh."""
    layout = layout_for(plan, manifest, MODEL, conditions_for(MODEL, manifest))
    ranks = local_plan_ranks(mesh, plan.layout.ranks)
    collate = Collator(reader or StoreReader(manifest), ranks, layout, plan.group_ranks)
    host = (collate(plan.step(number)) for number in range(steps))
    return place_ahead(host, mesh, groups=group_meshes(mesh, plan))


def trainer_on(manifest, plan, mesh):
    """With every program compiled."""
    optimizer = make_optimizer(OPTIMIZER, 100)
    state = init_state(MODEL, optimizer, mesh, seed=0)
    groups = group_meshes(mesh, plan)
    trainer = make_trainer(MODEL, DiffusionConfig(), optimizer, OPTIMIZER, mesh, state, groups)
    layout = layout_for(plan, manifest, MODEL, conditions_for(MODEL, manifest))
    assert len(list(trainer.compile(layout.shapes(plan)))) == len(SIZES)
    return trainer


def train(manifest, plan, mesh, steps):
    """The trainer, and the losses and gradient norms of its first steps."""
    trainer = trainer_on(manifest, plan, mesh)
    found = [trainer.step(step) for step in steps_on(manifest, plan, mesh, steps)]
    return trainer, [(float(m["loss"]), float(m["grad_norm"])) for m in found]
