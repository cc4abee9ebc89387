import subprocess

import jax
import pytest
from training_runs import Runs

from alload_jax.data.datasets.digits import Digits
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, init_state

MIX = ((1, 8, 8, 10), (5, 8, 8, 5), (1, 8, 16, 6))


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    Digits(mix=MIX, frames_per_latent=1).write(folder)
    return folder


@pytest.fixture
def runs(tmp_path, digits_folder):
    return Runs(tmp_path, digits_folder)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, digits_folder):
    """Runs whose first one has ended at step 14, which tests leave as it is; and that one."""
    runs = Runs(tmp_path_factory.mktemp("unbroken"), digits_folder)
    return runs, runs.finish()


@pytest.fixture(scope="session")
def tiny_state():
    """The training state of a tiny model, for what only stores it; and its spec."""
    model = WanConfig(dim=16, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8)
    spec = TrainingSpec(model, FlowMatching(), make_optimizer(OptimizerConfig(), 10), 0.99)
    return init_state(spec, make_mesh(MeshConfig(), jax.devices()[:1]), 0), spec
