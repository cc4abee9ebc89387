"""Small independent plans, and training of them."""

import jax
import jax.numpy as jnp
import numpy as np
from layouts import SMALL, write_samples

from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.loader import place_ahead
from alload_jax.data.store import StoreReader
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import MeshConfig, group_meshes, local_plan_ranks, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, init_state, state_to_draw
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator
from alload_jax.training.trainer import Trainer

MODEL = WanConfig(**SMALL, num_layers=1, freq_dim=8)
OPTIMIZER = OptimizerConfig(learning_rate=0.03, warmup_steps=0, eps=1e-2)
SPEC = TrainingSpec(MODEL, FlowMatching(), make_optimizer(OPTIMIZER, 100), OPTIMIZER.ema_decay)
SIZES = ((1, 4, 4), (3, 4, 2))
ROWS, SAMPLES = 4, 18


def write_data(folder, samples=SAMPLES, huge=None):
    """Samples of one shape and half as many of another; some are multiplied by `huge`."""

    def sample(rng, n):
        return SIZES[n % 3 == 2], rng.integers(0, 10, 2).astype(np.int32), {}

    return write_samples(folder, samples, sample, channels=1, scales=huge or {})


def plan_for(manifest, groups, ranks_per_group=1, **options):
    """Micro-batches of four rows: five in an epoch, so that the last turn is short."""
    config = PlanningConfig(
        policy="fixed",
        rows=ROWS // ranks_per_group,
        ranks_mode="independent",
        ranks_per_group=ranks_per_group,
        **options,
    )
    ranks = groups * ranks_per_group
    return make_plan(config, manifest.samples(MODEL.patch_size), ranks, seed=3)


def collation_of(manifest, plan):
    return collation_for(plan, manifest, MODEL, conditions_for(MODEL, manifest))


def host_steps(manifest, plan, ranks, steps):
    collation = collation_of(manifest, plan)
    collate = Collator(StoreReader(manifest), ranks, collation, plan.group_ranks)
    return [collate(plan.step(number)) for number in range(steps)]


def steps_on(manifest, plan, mesh, steps, change=lambda step: step):
    """The first steps of a plan, placed on a mesh."""
    ranks = local_plan_ranks(mesh, plan.topology.ranks)
    host = map(change, host_steps(manifest, plan, ranks, steps))
    return list(place_ahead(host, mesh, groups=group_meshes(mesh, plan)))


def trainer_on(manifest, plan, mesh):
    """With every program compiled, while the state is not drawn yet."""
    shapes, draw = state_to_draw(SPEC, mesh, seed=0)
    trainer = Trainer(SPEC, mesh, shapes, group_meshes(mesh, plan))
    assert len(list(trainer.compile(collation_of(manifest, plan).shapes(plan)))) == len(SIZES)
    trainer.begin(draw())
    return trainer


def figures(metrics):
    return [float(metrics["loss"]), float(metrics["grad_norm"])]


class OneDevice:
    """Takes all micro-batches of a plan's step one after another."""

    def __init__(self):
        self.mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self.accumulate = make_accumulate(SPEC, self.mesh)
        self.update = make_update(SPEC, self.mesh)
        self.start = jax.tree.map(np.asarray, init_state(SPEC, self.mesh, seed=0))
        self.zeros = None

    def train(self, manifest, plan, steps):
        """The state after some steps, and their losses and gradient norms."""
        state = jax.device_put(self.start, self.mesh.devices.flat[0])
        host = host_steps(manifest, plan, frozenset(range(plan.topology.ranks)), steps)
        if self.zeros is None:  # for which a step is traced
            zeros = zero_accumulator(SPEC, self.mesh, state.weights, host[0].batches[0])
            self.zeros = jax.tree.map(np.array, zeros)
        sums, found = jax.device_put(self.zeros, self.mesh.devices.flat[0]), []
        for step in host:
            for batch in step.batches:
                batch = jax.tree.map(jnp.asarray, batch)
                sums = self.accumulate(state.weights, sums, batch, state.key)
            state, sums, metrics = self.update(state, sums)
            found.append(figures(metrics))
        return state, found
