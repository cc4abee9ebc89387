"""`benchmarks/sparse_step.py`: which layers its cases make sparse, and what its step recomputes."""

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from alload_jax.bench import harness
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.state import TrainState, abstract_state
from alload_jax.training.step import make_accumulate, zero_accumulator
from alload_jax.training.trial_step import random_batch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KERNEL = "block_sparse_attention_"


@pytest.fixture
def sparse_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("sparse_step")


def test_the_ends_of_the_model_are_dense(sparse_step):
    assert sparse_step.ENDS.densities(30) == [1, 1, *([0.1] * 25), 1, 1, 1]
    assert sparse_step.Case(False, 0.05).densities(3) == [0.05] * 3
    assert sparse_step.ENDS.name(30) == "25 of 30 layers at 10%"


def test_switches_are_set_beside_what_else_there_is(sparse_step):
    switch = {"sparse": jnp.zeros(2, bool), "density": jnp.ones((2, 3)), "layer": jnp.arange(2)}
    blocks = {"sparse_attention": {"switch": switch | {"step": jnp.zeros(2, jnp.int32)}}}
    state = TrainState(*[None] * 6, variables={"blocks": blocks})
    step = SimpleNamespace(state=state)
    sparse_step.set_switches(step, [1.0, 0.05], 7)
    found = step.state.variables["blocks"]["sparse_attention"]["switch"]
    assert found["sparse"].tolist() == [False, True]
    assert found["density"].tolist() == [[1.0] * 3, [pytest.approx(0.05)] * 3]
    assert found["step"].tolist() == [7, 7]
    assert found["layer"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("remat", "forwards"),
    [
        ("attention", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("none", 1), ("full", 2))),
    ],
)
def test_only_full_recomputation_attends_twice(sparse_step, monkeypatch, remat, forwards):
    shape = {"num_heads": 2, "dim": 128, "ffn_dim": 64, "num_layers": 2}
    model = harness.MODELS["tiny"] | shape
    monkeypatch.setattr("pallas_kernels.devices.unsupported_triton_device", lambda: None)
    spec = sparse_step.make_spec("sparse", harness.training_fields(model, remat))
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract_state(spec, mesh, 0)
    )
    batch = jax.eval_shape(lambda: random_batch(spec.model, (1, 4, 16, 16)))
    sums = jax.eval_shape(lambda: zero_accumulator(spec, mesh, state.weights, batch))
    step = make_accumulate(spec, mesh).trace(state.weights, sums, batch, state.key)
    found = kernels_of(step.jaxpr.jaxpr)
    assert found == {"forward": forwards, "dq": 1, "dkv": 1, "top_k": 1}


def kernels_of(jaxpr):
    """How often a step's program has each kernel of sparse attention, and the choice of blocks."""
    found = Counter()
    for equation in jaxpr.eqns:
        name = str(equation.params.get("name_and_src_info", equation.params.get("name", "")))
        if equation.primitive.name == "pallas_call" and KERNEL in name:
            found[name.split()[0].removeprefix(KERNEL)] += 1
        elif equation.primitive.name == "top_k":
            found["top_k"] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += kernels_of(inner)
    return found
