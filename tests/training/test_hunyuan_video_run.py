"""Whole runs of a small HunyuanVideo in this process: trained, validated, drawn, adapted, exported.

Nothing of what runs them names the family.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from layouts import normal, write_samples
from safetensors.numpy import load_file, save_file
from training_runs import Sections, computed, metrics_of

from alload_jax import cli
from alload_jax.errors import InputError
from alload_jax.models.common.safetensor_files import STEM

MODEL = {"family": "hunyuan_video", "dim": 16, "ffn_dim": 24, "num_heads": 2, "num_layers": 1}
MODEL |= {"refiner_layers": 1, "in_channels": 5, "out_channels": 2, "patch_size": [1, 1, 1]}
MODEL |= {"text": {"dim": 6, "length": 9}, "glyphs": {"dim": 5, "length": 7}, "glyph_hidden": 12}
MODEL |= {"image": {"dim": 4}, "dtype": "float32"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts of 1 to 8 tokens, glyphs of 0 to 3, and no images."""

    def sample(rng, n):
        more = {"parts": {"glyphs": normal(rng, n % 4, 5)}}
        return (1 + n % 2, 2, 3), normal(rng, n % 8 + 1, 6), more

    origin = {"text": {"name": "bytes", "width": 6, "length": 9}}
    folder = tmp_path_factory.mktemp("hunyuan") / "data"
    write_samples(folder, 16, sample, stride=(4, 16, 16), origin=origin)
    return folder


@pytest.fixture
def hunyuan(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Sections(
        run={"steps": 4},
        data={"folder": str(data)},
        planning={"policy": "dual_constraint", "m_mem": 96, "p": 2.0},
        model=MODEL,
        optimizer={"learning_rate": 0.01, "warmup_steps": 0},
        checkpoint={"every": 2},
        sampling={"steps": 2},
    )


SIZE = ["--frames", "5", "--height", "32", "--width", "48", "--sampler", "euler", "--steps", "2"]


def drawn(name, place, *flags):
    """The latents of `alload sample` with a text of three tokens."""
    if not Path("text.safetensors").exists():
        text = np.random.default_rng(5).normal(size=(3, 6)).astype(np.float32)
        save_file({"text": text}, "text.safetensors")
    command = ["sample", "--checkpoint", str(place), "--prompt-embeds", "text.safetensors"]
    out = f"{name}.safetensors"
    assert cli.main([*command, *SIZE, "--shift", "1", "--out", out, *flags]) == 0
    return load_file(out)["latents"]


@pytest.mark.slow
def test_a_run_is_validated_resumed_and_drawn(hunyuan):
    validation = {"share": 0.3, "every": 2, "noise_levels": [0.3, 0.8]}
    prompt = {"prompt": "a cat", "frames": 5, "height": 32, "width": 48}
    sampling = {"steps": 2, "sampler": "euler", "prompts": [prompt]}
    folder = hunyuan.train(validation=validation, sampling=sampling)
    trained = computed(folder)
    validated = [row for row in metrics_of(folder) if "loss" not in row]
    assert [row[0] for row in trained] == [1, 2, 3, 4]
    assert [row["validation/samples"] for row in validated] == [6, 6]
    assert all(np.isfinite(row["validation/loss"]) for row in validated)
    (in_training,) = (folder / "samples" / "step_0000004").glob("prompt_0*")
    words = ["sample", "--checkpoint", str(folder), *SIZE, "--prompt", "a cat"]
    assert cli.main([*words, "--out", "words.safetensors"]) == 0
    found, shown = map(load_file, ("words.safetensors", in_training))
    np.testing.assert_array_equal(found["latents"], shown["latents"])
    hunyuan.train("--run.steps", "6", validation=validation, sampling=sampling)
    assert computed(folder)[:4] == trained
    clip = drawn("run", folder)
    assert clip.shape == (2, 2, 3, 2)
    assert np.isfinite(clip).all()
    # A file of text may hold glyphs too, and those that do not fit are refused.
    text = load_file("text.safetensors")
    glyphs = np.ones((3, 5), np.float32)
    save_file(text | {"glyphs": glyphs}, "text.safetensors")
    assert np.abs(drawn("fits", folder) - clip).max() > 1e-5
    for wrong, words in (
        ({"glyphs": glyphs[:, :4]}, r"glyphs has shape \[3, 4\].*\[7, 5\]"),
        ({"glyph": glyphs}, "holds glyph, but the model takes text, glyphs from it"),
    ):
        save_file(text | wrong, "text.safetensors")
        with pytest.raises(InputError, match=words):
            drawn("wrong", folder)


@pytest.mark.slow
def test_plans_count_conditions_where_a_model_says_so(data, tmp_path, capsys):
    """16 samples: 144 tokens of latents, 72 of text (8 at most) and 24 of glyphs (3 at most)."""
    model, packed, bucketed = MODEL | {"dtype": "bfloat16"}, 144 + 72 + 24, 144 + 16 * (8 + 3)
    config = {"model": model, "data": {"folder": str(data)}, "run": {"folder": "r", "steps": 1}}
    config["planning"] = {"m_mem": 48, "p": 1.0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def planned(place, *flags):
        usual = ["--manifest", str(place), "--ranks", "1", "--m-mem", "48"]
        assert cli.main(["plan", *usual, *flags]) == 0
        return capsys.readouterr().out

    config = ["--config", str(tmp_path / "config.yaml"), "--json", "--policy"]
    for place, policy, tokens in (
        (data, "balanced", packed),
        (data / "manifest.parquet", "auto", packed),  # on an H200, which the arithmetic takes
        (data, "equal_tokens", bucketed),
    ):
        assert json.loads(planned(place, *config, policy))["metrics"]["tokens"] == tokens
    plain = planned(data, "--policy", "balanced", "--patch-size", "1,1,1")
    assert "without the tokens of their conditions, which --config" in plain
    compared = ["auto", "--compare", "equal_tokens", "balanced"]
    report = planned(data, *config, *compared, "--report", str(tmp_path / "report.html"))
    cases = json.loads(report)["cases"]
    assert [case["metrics"]["tokens"] for case in cases] == [bucketed, packed]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": {"dim": 6, "length": 7}}, "text of 8 tokens, but model.text.length is 7"),
        ({"glyphs": {"dim": 3, "length": 7}}, "3 tokens of glyphs of width 5"),
        ({"glyphs": {"dim": 5, "length": 2}}, "3 tokens of glyphs of width 5"),
        ({"glyphs": None}, "holds tokens of glyphs, which the model does not take"),
        ({"sparse_attention": {"forced": [0.5, 1]}}, "forced is 2 densities"),
    ],
)
def test_what_does_not_fit_is_one_line(changes, words, hunyuan):
    assert words in hunyuan.refused(model=MODEL | changes)


@pytest.mark.slow
def test_samples_without_any_text_are_trained_on(hunyuan, tmp_path):
    def sample(*_):
        return (1, 2, 3), np.zeros((0, 6)), {"parts": {"glyphs": np.zeros((0, 5))}}

    write_samples(tmp_path / "silent", 2, sample, stride=(4, 16, 16))
    folder = hunyuan.train(data={"folder": str(tmp_path / "silent")}, run={"steps": 1})
    assert np.isfinite(computed(folder)[0][2])


# ---------------------------------------------------------------- blocks of one stream

SINGLE = MODEL | {"family": "hunyuan_video_13b", "single_layers": 2, "patch_size": [1, 2, 2]}
SINGLE |= {"in_channels": 2, "out_channels": None, "pooled_dim": 5, "embedded_guidance": 1.0}
SINGLE |= {"glyphs": None, "image": None, "glyph_hidden": 2048}


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    """Texts of 1 to 8 tokens with their pooled ones."""

    def sample(rng, n):
        more = {"parts": {"pooled": normal(rng, 1, 5)}}
        return (1 + n % 2, 4, 8), normal(rng, n % 8 + 1, 6), more

    folder = tmp_path_factory.mktemp("pooled") / "data"
    write_samples(folder, 12, sample, stride=(4, 8, 8))
    return folder


@pytest.mark.slow
def test_adapters_and_all_weights_of_a_single_stream_go_from_data_to_clips(hunyuan, pooled):
    size = ["--width", "64"]
    text = np.random.default_rng(5).normal(size=(3, 6)).astype(np.float32)
    save_file({"text": text, "pooled": np.ones((1, 5), np.float32)}, "text.safetensors")
    usual = {"model": SINGLE, "data": {"folder": str(pooled)}}
    validation = {"share": 0.3, "every": 2, "noise_levels": [0.3, 0.8]}
    packed = {"policy": "balanced", "m_mem": 96}
    folder = hunyuan.train(**usual, planning=packed, validation=validation)
    assert all(np.isfinite(row[2]) for row in computed(folder))
    assert cli.main(["export", "--checkpoint", str(folder), "--out", "exported"]) == 0
    there = ["export", "--checkpoint", str(folder), "--keys", "original", "--out", "there"]
    assert cli.main(there) == 0
    assert "single_blocks.1.linear1.weight" in load_file(f"there/{STEM}.safetensors")
    clip = drawn("run", folder, *size, "--guidance", "1")
    np.testing.assert_allclose(drawn("exported", "exported", *size), clip, rtol=1e-4, atol=1e-5)
    told = drawn("told", "exported", *size, "--embedded-guidance", "1")
    assert np.abs(told - clip).max() > 1e-5

    model = SINGLE | {"lora": {"rank": 2}, "remat": "full"}
    initial = {"steps": 4, "initial_weights": "exported"}
    exact = {"parameters": {"frozen_dtype": "float32"}, "data": usual["data"]}
    adapted = hunyuan.train(folder="adapted", run=initial, model=model, **exact)
    expected = drawn("adapted", adapted, *size, "--guidance", "1")
    assert np.abs(expected - clip).max() > 1e-5
    export = ["lora", "export", "--checkpoint", str(adapted), "--keys", "original"]
    assert cli.main([*export, "--out", "x.safetensors"]) == 0
    found = drawn("added", "exported", *size, "--lora", "x.safetensors")
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_data_without_the_pooled_text_is_one_line(hunyuan, tmp_path):
    sample = (1, 4, 8), np.zeros((3, 6)), {}
    write_samples(tmp_path / "bare", 1, lambda *_: sample, stride=(4, 8, 8))
    words = "sample 0 has no tokens of pooled, which the model takes; write [1, 5] of each"
    assert words in hunyuan.refused(model=SINGLE, data={"folder": str(tmp_path / "bare")})
