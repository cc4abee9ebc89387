"""`alload data` and `alload plan` on files of other trainers."""

import numpy as np
import pytest
import yaml
from PIL import Image
from source_files import make_samples, write_fastvideo, write_musubi, write_tensor_files

from alload_jax.data.store import StoreWriter

SAMPLES = make_samples(6)
WRITERS = {"musubi": write_musubi, "fastvideo": write_fastvideo, "tensors": write_tensor_files}


@pytest.fixture(autouse=True)
def files(tmp_path):
    for name, write in WRITERS.items():
        write(tmp_path / name, SAMPLES)
    with StoreWriter(tmp_path / "store", vae_stride=(4, 8, 8)) as writer:
        for sample in SAMPLES:
            writer.add(sample.latents, sample.text, sample.size)


def write_config(path, **source):
    content = {
        "run": {"folder": "run"},
        "data": {"folder": "unused", "source": source},
        "planning": {"m_mem": 24},
        "model": {"in_channels": 16, "text": {"dim": 6, "length": 8}},
    }
    path.write_text(yaml.safe_dump(content))


@pytest.mark.parametrize("name", WRITERS)
def test_data_shows_and_checks_them(alload, tmp_path, name):
    status, out, err = alload("data", name, "--check", "--sheet", "sheet.png")
    assert (status, err) == (0, "")
    for words in ("text of width 6", "files", "4,8,8", "6 records read, 0 damaged"):
        assert words in out
    assert Image.open(tmp_path / "sheet.png").width == 1200
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["fastvideo", "musubi", "sheet.png", "store", "tensors"]
    )


def test_data_names_a_damaged_sample(alload, tmp_path):
    file = tmp_path / "tensors" / "00002.safetensors"
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin : begin + 2000] = np.full(1000, 0x7FC0, "<u2").tobytes()  # NaN in bfloat16
    file.write_bytes(content)
    status, out, _ = alload("data", "tensors", "--check")
    assert status == 1
    assert f"{file.relative_to(tmp_path)} (sample 2) holds" in out
    assert "6 records read, 1 damaged" in out


def test_plans_equal_those_of_a_store(figures, refused):
    def metrics(place):
        flags = ["--m-mem", 24, "--ranks", 2, "--policy", "dual_constraint", "--p", 2]
        return figures("--manifest", place, *flags)["metrics"]

    for name in [*WRITERS, "store/manifest.parquet"]:
        assert metrics(name) == metrics("store")
    assert metrics("fastvideo/worker_0/data_chunk_0.parquet")["samples"] == 3
    said = "--vae-stride does not apply"
    refused(said, "plan", "--manifest", "musubi", "--vae-stride", "4,8,8")


def test_a_config_says_how_files_are_read(alload, refused, tmp_path):
    write_config(tmp_path / "c.yaml", name="safetensors", vae_stride=[8, 16, 16])
    status, out, err = alload("data", "tensors", "--config", "c.yaml")
    assert (status, err) == (0, "")
    assert "8,16,16" in out
    write_config(tmp_path / "c.yaml", name="safetensors", latents="z")
    for command in (["data", "tensors"], ["plan", "--manifest", "tensors"]):
        said = "lacks the tensor z, and holds latents, prompt_attention_mask"
        refused(said, *command, "--config", "c.yaml")


def test_only_the_section_of_the_source_is_read(alload, refused, tmp_path):
    path = tmp_path / "source.yaml"
    source = {"name": "parquet", "normalize": "none"}
    command = ["data", "fastvideo", "--config", "source.yaml"]
    path.write_text(yaml.safe_dump({"data": {"source": source}, "other": 1}))
    status, out, err = alload(*command)
    assert (status, err) == (0, "")
    assert "text of width 6" in out
    path.write_text(yaml.safe_dump({"data": {"source": source | {"normal": 1}}}))
    refused("source.yaml: data.source: parquet: key normal is unknown", *command)
    path.write_text("data: .nan")
    refused("alload data: source.yaml: data is nan; write its keys below it", *command)
