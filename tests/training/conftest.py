import pytest
from training_runs import Runs

from alload_jax.data.datasets.digits import Digits

MIX = ((1, 8, 8, 10), (5, 8, 8, 5), (1, 8, 16, 6))


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    Digits(mix=MIX, frames_per_latent=1).write(folder)
    return folder


@pytest.fixture
def runs(tmp_path, digits_folder):
    return Runs(tmp_path, digits_folder)
