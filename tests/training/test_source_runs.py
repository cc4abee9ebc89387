"""Training on files of other trainers as they are, by command."""

import pytest
import yaml
from source_files import make_samples, write_fastvideo, write_musubi, write_tensor_files
from training_runs import Runs

from alload_jax.data.store import StoreWriter

SAMPLES = make_samples(12)
KINDS = {
    "musubi": (write_musubi, None),
    "fastvideo": (write_fastvideo, {"name": "parquet", "normalize": "none"}),
    "tensors": (
        write_tensor_files,
        {"name": "safetensors", "normalize": "none", "mask": "prompt_attention_mask"},
    ),
}


@pytest.fixture
def runs(tmp_path):
    """Runs of a small model of texts and latents on a store of the samples."""
    with StoreWriter(tmp_path / "store", vae_stride=(4, 8, 8)) as writer:
        for sample in SAMPLES:
            writer.add(sample.latents, sample.text, sample.size)
    runs = Runs(tmp_path, tmp_path / "store")
    config = runs.tiny()
    config["model"] |= {"in_channels": 16, "patch_size": [1, 2, 2]}
    config["model"]["text"] = {"dim": 6, "length": 8}
    config["run"]["steps"] = 4
    config["planning"] = {"m_mem": 24}
    del config["sampling"]
    runs.config.write_text(yaml.safe_dump(config))
    return runs


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_others_files_is_that_on_the_same_samples_in_a_store(runs, kind):
    write, source = KINDS[kind]
    write(runs.folder / "data", SAMPLES)
    runs.finish("--run.folder", "stored")
    if source:
        config = yaml.safe_load(runs.config.read_text())
        refused = runs.here("--run.folder", "refused", "--data.folder", "data")
        assert refused.returncode == 2
        assert "data.source.normalize" in refused.stderr
        config["data"]["source"] = source
        runs.config.write_text(yaml.safe_dump(config))
    place = ("--run.folder", "run", "--data.folder", "data")
    runs.finish(*place, "--data.loader.processes", "1")
    losses = [[row["loss"] for row in runs.metrics(name)] for name in ("run", "stored")]
    assert losses[0] == losses[1]
    # Other content of the same sizes is another run's.
    changed = SAMPLES[-1]._replace(latents=-SAMPLES[-1].latents)
    write(runs.folder / "data", [*SAMPLES[:-1], changed])
    refused = runs.here(*place, "--run.steps", "5")
    assert refused.returncode == 2
    assert "data.folder now has as many of other content" in refused.stderr
