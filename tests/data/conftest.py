import pytest
from data_helpers import random_samples, write_store


@pytest.fixture(scope="session")
def samples():
    return random_samples(11)


@pytest.fixture
def media(tmp_path):
    """An empty folder."""
    folder = tmp_path / "media"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path, samples):
    return write_store(tmp_path / "store", samples, samples_per_shard=4)
