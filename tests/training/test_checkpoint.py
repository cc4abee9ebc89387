import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from alload_jax.errors import InputError
from alload_jax.models.wan.config import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.checkpoint import CheckpointConfig, Checkpoints
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import ALL_TRAINED
from alload_jax.training.restore import one_device_mesh, restore_weights
from alload_jax.training.state import TrainingSpec, abstract_state, init_state

MODEL = WanConfig(dim=16, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8)
IDENTITY = {"model": {"dim": 16}, "plan": {"m_mem": 40, "seed": 0}}


@pytest.fixture(scope="module")
def made():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    spec = TrainingSpec(MODEL, FlowMatching(), make_optimizer(OptimizerConfig(), 10), 0.99)
    return init_state(spec, mesh, 0), abstract_state(spec, mesh, 0)


def opened(folder, identity=IDENTITY, **settings):
    return Checkpoints(folder, CheckpointConfig(**settings), identity, MODEL.later_fields)


def test_a_state_comes_back_bit_for_bit(tmp_path, made):
    state, like = made
    checkpoints = opened(tmp_path)
    checkpoints.save(3, state)
    checkpoints.close()
    again = opened(tmp_path)
    restored = again.restore(again.latest(), like)
    again.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_the_newest_and_every_so_many_are_kept(tmp_path, made):
    checkpoints = opened(tmp_path, keep=2, keep_every=4)
    for step in range(1, 11):
        checkpoints.save(step, made[0])
    checkpoints.close()
    kept = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert kept == [4, 8, 9, 10]


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (
            {"model": {"dim": 32}, "plan": IDENTITY["plan"]},
            "another model: dim was 16 and is now 32",
        ),
        (
            {"model": {"dim": 16}, "plan": {"m_mem": 80, "seed": 0}},
            "another plan: m_mem was 40 and is now 80",
        ),
        (
            {"model": {"dim": 16, "cross_norm": False}, "plan": IDENTITY["plan"]},
            "another model: cross_norm was True and is now False",
        ),
    ],
)
def test_another_models_or_plans_checkpoint_is_refused(tmp_path, made, identity, words):
    state, like = made
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state)
    checkpoints.close()
    other = opened(tmp_path, identity)
    with pytest.raises(InputError, match=words):
        other.restore(1, like)
    other.close()
    assert (tmp_path / "1").exists()


def test_a_plan_for_other_ranks_says_how_to_go_on(tmp_path, made):
    state, like = made
    four, two = ({"model": {"dim": 16}, "plan": {"ranks": count}} for count in (4, 2))
    checkpoints = opened(tmp_path, four)
    checkpoints.save(1, state)
    checkpoints.close()
    other = opened(tmp_path, two)
    words = "ranks was 4 and is now 2; on another number of devices give --planning.ranks 4"
    with pytest.raises(InputError, match=words):
        other.restore(1, like)
    other.close()


def remove_arrays(folder):
    for found in list(folder.rglob("d")):
        shutil.rmtree(found)


def garble_arrays(folder):
    for found in folder.rglob("d/*"):
        found.write_bytes(bytes(reversed(found.read_bytes())))


def garble_manifest(folder):
    (folder / "state" / "manifest.ocdbt").write_bytes(b"x")


def garble_identity(folder):
    (folder / "identity" / "metadata").write_text("[1]")


@pytest.mark.parametrize("damage", [remove_arrays, garble_arrays, garble_manifest, garble_identity])
def test_a_damaged_checkpoint_is_one_line(tmp_path, made, damage):
    state, like = made
    identity = {"model": MODEL.architecture()}
    with opened(tmp_path, identity) as checkpoints:
        checkpoints.save(1, state)
    damage(tmp_path / "1")
    with opened(tmp_path, identity) as checkpoints:
        with pytest.raises(InputError, match="1: this checkpoint cannot be read") as refused:
            checkpoints.restore(1, like)
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="choose another with --step") as refused:
        restore_weights(tmp_path, 1, MODEL, ALL_TRAINED, one_device_mesh())
    assert "\n" not in str(refused.value)


def test_what_orbax_raises_is_an_input_error(tmp_path, made, monkeypatch):
    def fail(*_, **__):
        raise Exception("bare\nand long")

    with opened(tmp_path, {"model": MODEL.architecture()}) as checkpoints:
        checkpoints.save(1, made[0])
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with pytest.raises(InputError, match=r"cannot be read \(bare\); choose"):
        restore_weights(tmp_path, 1, MODEL, ALL_TRAINED, one_device_mesh())
