"""Live comparisons: collected only where they run, for their imports take long."""

import os
from importlib.util import find_spec

import pytest

EXTRAS = ("torch", "diffusers", "transformers", "peft", "accelerate", "sentencepiece")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors; threads of each worker only wait


def pytest_ignore_collect(config):
    """The folder is left out without alload-jax[parity], and where the tier is not asked for."""
    left_out = "not parity" in config.option.markexpr
    return True if left_out or not all(map(find_spec, EXTRAS)) else None


@pytest.fixture(scope="session")
def wan(tmp_path_factory):
    """The folder of Wan 2.1's pipeline, its parts, and the pipeline."""
    from encoder_folders import pipeline_of, write_pipeline

    folder = tmp_path_factory.mktemp("wan")
    parts = write_pipeline(folder)
    return folder, parts, pipeline_of(parts)


@pytest.fixture(scope="session")
def hunyuan(tmp_path_factory):
    """The folder of HunyuanVideo 1.5's pipeline, its parts, and the pipeline."""
    from diffusers import HunyuanVideo15ImageToVideoPipeline
    from hunyuan_video_folders import write_pipeline

    folder = tmp_path_factory.mktemp("hunyuan")
    parts, unused = write_pipeline(folder), ("transformer", "scheduler", "guider")
    return folder, parts, HunyuanVideo15ImageToVideoPipeline(**parts, **dict.fromkeys(unused))
