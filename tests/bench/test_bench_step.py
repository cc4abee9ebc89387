"""`alload bench step` and benchmarks around it: what they measure, and how they refuse."""

import json
import math
import sys
import time
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from alload_jax.bench import harness, step_process
from alload_jax.bench.harness import MODELS, Record, measured, training_fields, typed
from alload_jax.bench.step_process import Settings
from alload_jax.cli import main
from alload_jax.commands import bench_step
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields, parameter_count
from alload_jax.planning.remat import LADDER
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training import trial_step
from alload_jax.training.parameters import ALL_TRAINED, ParametersConfig, merge_parameters
from alload_jax.training.state import TrainState, abstract_state, init_state
from alload_jax.training.step import make_accumulate, zero_accumulator
from alload_jax.training.trial_step import (
    any_matrices,
    layer_seconds,
    measurable,
    random_batch,
    square_latents,
    training_spec,
    with_density,
)


def test_the_command_is_recorded_without_absolute_folders(monkeypatch):
    for argv, command in (
        (["benchmarks/table.py", "--out", "a b"], "python benchmarks/table.py --out 'a b'"),
        (["/home/someone/.venv/bin/alload", "bench", "step"], "alload bench step"),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert typed() == command


def test_a_file_holds_every_result_as_soon_as_it_is_known(tmp_path):
    record = Record(tmp_path / "found.json", ["numpy", "no-such-package"], cases=[])
    for number in range(3):
        record.add({"number": number})
        content = json.loads(record.path.read_text())
        assert [case["number"] for case in content["cases"]] == list(range(number + 1))
    assert content["versions"]["numpy"]
    assert content["versions"]["no-such-package"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_what_fails_in_a_process_is_told_in_a_line(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('too small')\n")
    found = measured(script, {"size": 1})
    assert found == {"error": "ended with status 1: ValueError: too small", "settings": {"size": 1}}


ONE_STEP = ["--model", "tiny", "--layers", "1", "--latents", "1", "4", "4", "--steps", "1"]


@pytest.mark.slow
def test_a_step_is_measured_and_what_auto_keeps_is_told(in_process, tmp_path, capsys):
    out = tmp_path / "step.json"
    flags = ["--remat", "auto", "--memory-budget", "2", "--out", str(out)]
    began = time.perf_counter()
    assert main(["bench", "step", *ONE_STEP, *flags]) == 0
    most = time.perf_counter() - began
    [case] = json.loads(out.read_text())["cases"]
    assert 0 < case["seconds_least"] <= case["seconds"] <= case["seconds_most"] < most
    assert (case["tokens"], case["tokens_beside"], case["policies"]) == (4, 0, ["none"])
    printed = capsys.readouterr().out
    assert "auto keeps none" in printed
    assert "| alload, keep auto" in printed


def test_a_budget_in_which_nothing_fits_ends_no_other_case(tmp_path, monkeypatch):
    def measured(_, settings):
        if settings["model"]["remat"] == "auto":
            return step_process.measure(**settings)
        return {"seconds": 1.0, "tokens": 4, "tokens_beside": 0, "settings": settings}

    monkeypatch.setattr(harness, "measured", measured)
    flags = ["--remat", "auto", "full", "--memory-budget", "0.1"]
    assert main(["bench", "step", *ONE_STEP, *flags, "--out", str(tmp_path / "step.json")]) == 0
    first, second = json.loads((tmp_path / "step.json").read_text())["cases"]
    assert "auto finds nothing that fits" in first["error"]
    assert second["seconds"] > 0


def test_a_model_that_fills_a_host_without_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(step_process, "host_bytes", lambda: 24e9)
    monkeypatch.setattr(step_process, "Step", lambda *_: pytest.fail("weights are made"))
    fields = training_fields(MODELS["1.3b"], "none")
    with pytest.raises(InputError, match=r"take 34 of this host's 24 GB; give --model tiny"):
        step_process.measure(model=fields, batch=1, latents=(21, 60, 104))


@pytest.mark.parametrize(
    ("model", "parameters", "variants"),
    [("1.3b", 1_418_996_800, 6), ("hunyuan-video-1.5", 8_326_608_160, 6)],
)
def test_the_measured_model_is_the_published_one(program, tmp_path, model, parameters, variants):
    diffusers_step = program("diffusers_step")
    options = diffusers_step.parse(["--model", model, "--out", str(tmp_path / "step.json")])
    _, _, ours = next(bench_step.cases(options))
    assert parameter_count(Settings(**ours).config()) == parameters
    torch = [settings for _, _, settings in diffusers_step.torch_cases(options)]
    assert len(torch) == variants
    assert all(t["latents"] == ours["latents"] and t["batch"] == ours["batch"] for t in torch)


def test_pytorchs_steps_are_measured_by_a_script_beside_ours(
    program, tmp_path, monkeypatch, capsys
):
    diffusers_step, script = program("diffusers_step"), tmp_path / "torch_step.py"
    script.write_text(
        "import json, sys\n"
        "settings = json.loads(sys.argv[1])\n"
        "print(json.dumps({'seconds': 2, 'tokens': 4, 'tokens_beside': 0, 'settings': settings}))\n"
    )
    monkeypatch.setattr(diffusers_step, "TORCH_STEP", script)
    monkeypatch.setattr(diffusers_step.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench_step, "cases", lambda options: [("ours", script, {})])
    out = tmp_path / "step.json"
    flags = ["--model", "tiny", "--torch-cases", "1", "4", "5", "--out", str(out)]
    assert diffusers_step.main(flags) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [case["name"] for case in cases] == [
        "ours",
        "diffusers, bf16_copy, cudnn, compiled whole, checkpointing full",
        "diffusers, bf16_copy, cudnn, compiled blocks, checkpointing none",
        "diffusers, bf16_copy, cudnn, compiled blocks, checkpointing attention",
    ]
    model = cases[1]["settings"]["model"]
    assert (model["num_attention_heads"], model["attention_head_dim"]) == (2, 16)
    assert "| diffusers, bf16_copy" in capsys.readouterr().out
    with pytest.raises(InputError, match="--torch-cases 6 is unknown; there are 0 to 5"):
        diffusers_step.parse(["--torch-cases", "6"])


FIELDS = {"in_channels": 1, "dim": 16, "ffn_dim": 32, "num_heads": 2, "num_layers": 5}
AUTO = config_from_fields(FIELDS | {"memory_budget": 40.0, "remat": "auto"})


@pytest.mark.slow
def test_policies_have_a_time_each():
    found = layer_seconds(AUTO, (2, 1, 4, 4), ["none", "attention", "full"])
    assert list(found) == ["none", "attention", "full"]
    assert all(0 < seconds < math.inf for seconds in found.values())


def test_what_does_not_fit_has_no_time(monkeypatch):
    def out_of_memory(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def seconds(step, program, batch):
        return out_of_memory() if program in ("none", "matmuls_and_attention") else 3.0

    step = SimpleNamespace(batch=lambda latents: None, renew=lambda: None)
    monkeypatch.setattr(trial_step, "Step", lambda *_: step)
    monkeypatch.setattr(trial_step, "_compiled", lambda step, spec, latents: spec.model.remat)
    monkeypatch.setattr(trial_step, "_run", seconds)
    found = layer_seconds(AUTO, (2, 1, 4, 4), LADDER)
    assert found == {each: 1.5 for each in LADDER if each not in ("none", "matmuls_and_attention")}
    monkeypatch.setattr(trial_step, "Step", out_of_memory)
    assert layer_seconds(AUTO, (2, 1, 4, 4), LADDER) is None


def test_a_density_is_that_of_all_layers():
    assert with_density(AUTO, 0.5) is AUTO
    sparse = config_from_fields(FIELDS | {"sparse_attention": {"selector": "pooled"}})
    assert with_density(sparse, 0.5).sparse_attention.forced == (0.5,) * 5


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 1000, 32_760, 99_991])
def test_a_square_row_has_about_as_many_tokens(tokens):
    rows, *latents = square_latents(AUTO, tokens)
    found = math.prod(latents) / math.prod(AUTO.patch_size)
    assert rows == 1
    assert found % 2 == 0
    assert abs(latents[1] - latents[2]) <= 8
    assert tokens - math.isqrt(tokens) - 2 <= found <= max(2, tokens)


def test_a_measured_step_takes_the_policy_of_least_measured_time(monkeypatch):
    assert not measurable(AUTO)  # on a CPU
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert measurable(AUTO)
    assert not measurable(ModelConfig(family="without_layers"))
    monkeypatch.undo()
    asked, times = [], dict.fromkeys(LADDER, 2.0) | {"feed_forward_and_attention": 1.0}
    monkeypatch.setattr(step_process, "measurable", lambda model: True)
    monkeypatch.setattr(
        step_process,
        "layer_seconds",
        lambda model, latents, *_, **__: asked.append(latents) or times,
    )
    fields = FIELDS | {"remat": "auto", "memory_budget": 9.0}
    model, seconds = step_process.resolved(Settings(fields, 3, (1, 8, 8)))
    assert (model.remat, model.policies) == ("none", ("feed_forward_and_attention",))
    assert (seconds, asked) == (times, [(3, 1, 8, 8)])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [None, "bfloat16", "float8"])
def test_a_step_to_measure_has_no_matrix_of_zeros_and_keeps_all_shardings(frozen):
    small = {"num_layers": 1, "text": {"dim": 16, "length": 8}}
    model = config_from_fields(training_fields(MODELS["tiny"] | small))
    parameters = ALL_TRAINED if frozen is None else ParametersConfig(("bias",), frozen_dtype=frozen)
    spec = training_spec(model, parameters=parameters)
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    shapes = abstract_state(spec, mesh, 0)
    matrices = any_matrices(merge_parameters(shapes.params, shapes.frozen))
    fresh, given = init_state(spec, mesh, 0), init_state(spec, mesh, 0, matrices)
    assert frozen or not np.asarray(fresh.params["head"]["out"]["kernel"]).any()
    for before, after in zip(*map(jax.tree.leaves, (fresh, given)), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert after.sharding == before.sharding
    for leaf in jax.tree.leaves(given.weights.merged()):
        if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating):
            assert 0 < np.abs(np.asarray(leaf, np.float32)).max() <= 1


def test_the_ends_of_the_model_are_dense_and_switches_are_set_beside_what_else_there_is(program):
    sparse_step = program("sparse_step")
    assert sparse_step.ENDS.densities(30) == [1, 1, *([0.1] * 25), 1, 1, 1]
    assert sparse_step.Case(False, 0.05).densities(3) == [0.05] * 3
    assert sparse_step.ENDS.name(30) == "25 of 30 layers at 10%"
    switch = {"sparse": jnp.zeros(2, bool), "density": jnp.ones((2, 3)), "layer": jnp.arange(2)}
    blocks = {"sparse_attention": {"switch": switch | {"step": jnp.zeros(2, jnp.int32)}}}
    step = SimpleNamespace(state=TrainState(*[None] * 6, variables={"blocks": blocks}))
    sparse_step.set_switches(step, [1.0, 0.05], 7)
    found = step.state.variables["blocks"]["sparse_attention"]["switch"]
    found = {name: value.tolist() for name, value in found.items()}
    density = [[1.0] * 3, [pytest.approx(0.05)] * 3]
    assert found == {"sparse": [0, 1], "density": density, "step": [7, 7], "layer": [0, 1]}


@pytest.mark.parametrize(
    ("remat", "forwards"), [("attention", 1), pytest.param("full", 2, marks=pytest.mark.slow)]
)
def test_only_full_recomputation_attends_twice(program, monkeypatch, remat, forwards):
    model = MODELS["tiny"] | {"num_heads": 2, "dim": 128, "ffn_dim": 64, "num_layers": 2}
    monkeypatch.setattr("pallas_kernels.devices.unsupported_triton_device", lambda: None)
    spec = program("sparse_step").make_spec("sparse", harness.training_fields(model, remat))
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract_state(spec, mesh, 0)
    )
    batch = jax.eval_shape(lambda: random_batch(spec.model, (1, 4, 16, 16)))
    sums = jax.eval_shape(lambda: zero_accumulator(spec, mesh, state.weights, batch))
    step = make_accumulate(spec, mesh).trace(state.weights, sums, batch, state.key)
    found = kernels_of(step.jaxpr.jaxpr)
    assert found == {"forward": forwards, "dq": 1, "dkv": 1, "choose_blocks": 1}


def kernels_of(jaxpr):
    """How often a step's program has each kernel of sparse attention, and the choice of blocks.

    JAX keeps kernels whose results nothing uses; XLA leaves them out.
    """
    found, used = Counter(), {id(var) for eqn in jaxpr.eqns for var in eqn.invars}
    used |= {id(var) for var in jaxpr.outvars}
    for equation in jaxpr.eqns:
        name = str(equation.params.get("name_and_src_info", equation.params.get("name", "")))
        if equation.primitive.name == "pallas_call" and used & set(map(id, equation.outvars)):
            found[name.split()[0].removeprefix("block_sparse_attention_")] += 1
        for inner in jaxprs_in_params(equation.params):
            found += kernels_of(inner)
    return found
