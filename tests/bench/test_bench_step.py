"""`alload bench step`: what it measures here, and how it refuses."""

import json
from typing import get_args

import jax
import pytest

from alload_jax.bench.jax_step import Settings
from alload_jax.cli import main
from alload_jax.commands import bench_step
from alload_jax.errors import InputError
from alload_jax.models.remat import RematPolicy
from alload_jax.models.weights import parameter_count


def test_a_tiny_step_is_measured_and_written(tmp_path, capsys):
    out = tmp_path / "step.json"
    flags = ["--model", "tiny", "--latents", "1", "4", "4", "--steps", "1", "--remat", "full"]
    assert main(["bench", "step", *flags, "--out", str(out)]) == 0
    [case] = json.loads(out.read_text())["cases"]
    assert case["seconds"] > 0
    assert case["tokens"] == 4
    assert case["settings"]["model"]["remat"] == "full"
    assert "| alload, keep full" in capsys.readouterr().out


def test_policies_are_those_of_the_model():
    assert set(bench_step._POLICIES) == set(get_args(RematPolicy))


def test_the_measured_model_is_wans():
    parser = bench_step.argparse.ArgumentParser()
    bench_step.add_arguments(parser)
    options = parser.parse_args(["--against", "diffusers"])
    cases = list(bench_step._cases(options))
    _, _, ours = cases[0]
    assert parameter_count(Settings(**ours).config()) == 1_418_996_800
    torch = [settings for _, module, settings in cases if module.endswith("torch_step")]
    assert len(torch) == len(bench_step._TORCH_CASES)
    assert all(t["latents"] == ours["latents"] and t["batch"] == ours["batch"] for t in torch)


def test_flops_are_those_of_the_compiled_forward():
    """XLA's own count of a forward without softmax: the formula holds matrix products alone."""
    dim, text, seq_len = 32, 512, 64
    model = {"num_heads": 2, "head_dim": 16, "ffn_dim": 64, "num_layers": 3}

    def forward(x, context):
        for _ in range(4):  # query, key, value, out
            x = x @ jax.numpy.ones((dim, dim))
        for _ in range(2):  # query and out of cross-attention
            x = x @ jax.numpy.ones((dim, dim))
        x = (x @ x.T) @ x
        for _ in range(2):
            context = context @ jax.numpy.ones((dim, dim))
        x = (x @ context.T) @ context
        return x @ jax.numpy.ones((dim, 64)) @ jax.numpy.ones((64, dim))

    shapes = [jax.ShapeDtypeStruct((rows, dim), "float32") for rows in (seq_len, text)]
    counted = jax.jit(forward).lower(*shapes).cost_analysis()["flops"]
    formula = bench_step.step_flops(model, 1, seq_len) / 3 / 3
    assert counted == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--remat", "most"], "invalid choice: 'most'"),
        (["--out", "/no/such/step.json"], "no file in an existing folder"),
        (["--steps", "0"], "are at least 1"),
        (["--latentz", "1", "1", "1"], "--latentz is unknown; did you mean --latents"),
    ],
)
def test_wrong_flags_are_one_line(flags, words):
    with pytest.raises(InputError, match=words) as raised:
        main(["bench", "step", *flags])
    assert "\n" not in str(raised.value)
