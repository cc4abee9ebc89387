"""Registers a family, an objective, a callback, a data set and an evaluator from outside."""

import pooling
import pytest
import yaml
from counting import CountConfig, HalfVelocity, MeanBrightness, Ramps
from training_runs import in_this_process

from alload_jax.data.datasets import DATASETS
from alload_jax.models.families import FAMILIES
from alload_jax.objectives import OBJECTIVES
from alload_jax.planning.architecture import register_architecture
from alload_jax.run import main
from alload_jax.sampling.evaluators import EVALUATORS
from alload_jax.training.callbacks import CALLBACKS


@pytest.fixture(scope="session", autouse=True)
def registered():
    FAMILIES.register("pooling", pooling.PoolingFamily())
    register_architecture("pooling", pooling.PoolingArchitecture, {"pooling-small": pooling.SMALL})
    register_architecture("without named models", pooling.PoolingArchitecture)
    OBJECTIVES.register("half_velocity", HalfVelocity)
    CALLBACKS.register("count", CountConfig)
    DATASETS.register("ramps", Ramps)
    EVALUATORS.register("mean_brightness", MeanBrightness)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ramps") / "data"
    Ramps().write(folder)
    return folder


@pytest.fixture
def train(tmp_path, data):
    """Runs train.py in this process on the pooling family; changes are sections of the config."""

    def run(*flags, folder="run", devices=1, **changes):
        config = {
            "run": {"folder": str(tmp_path / folder), "steps": 6},
            "data": {"folder": str(data)},
            "planning": {"policy": "dual_constraint", "m_mem": 48, "ranks": 8},
            "model": {"family": "pooling", "patch_size": [1, 2, 2], "num_classes": 4},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
            "checkpoint": {"every": 2, "keep": 9},
            "sampling": {"steps": 2},
        }
        for section, values in changes.items():
            config[section] = (
                values if isinstance(values, list) else config.get(section, {}) | values
            )
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        with in_this_process(devices):
            assert main(["--config", str(path), *flags]) == 0
        return tmp_path / folder

    return run
