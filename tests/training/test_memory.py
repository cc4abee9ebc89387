"""The memory that a run is predicted to need, what layers keep of it, and what it is told."""

import dataclasses
import json
import os
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import yaml
from flax.traverse_util import flatten_dict
from layouts import mesh_of
from training_runs import errors

from alload_jax.errors import InputError
from alload_jax.models.common.config import TextConfig
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.families import abstract_model, gradient_dtypes
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching
from alload_jax.planning.analytic import ALL_TRAINED, GRADIENT_BYTES, state_bytes
from alload_jax.planning.remat import LADDER
from alload_jax.run import training
from alload_jax.run.training import require_same_tables, share_comparisons
from alload_jax.sharding.mesh import MeshConfig
from alload_jax.training import memory, trial_step
from alload_jax.training.callbacks import GradientNoiseConfig
from alload_jax.training.memory import (
    STATE_REMEDY,
    RunMemory,
    memory_named,
    replicas_of,
    require_fit,
    run_memory,
    size_in_words,
    trained_of,
)
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.state import TrainingSpec, TrainState, abstract_state
from pallas_kernels.first_use import COMPARISONS
from pallas_kernels.layernorm_modulate import tuning

# ---------------------------------------------------------------- of a state

PLAIN = WanConfig(dim=128, ffn_dim=256, num_heads=2, num_layers=2, freq_dim=8, dtype="float32")
LORA = WanConfig(**{**vars(PLAIN), "lora": LoraConfig(rank=8)})
ADAPTERS = ParametersConfig().with_lora()


@pytest.mark.parametrize(
    ("model", "parameters", "optimizer"),
    [
        (PLAIN, ParametersConfig(), {}),
        (LORA, ADAPTERS, {}),
        (PLAIN, ParametersConfig(), {"ema_decay": None}),
        (LORA, ADAPTERS, {"name": "adamw8bit", "ema_decay": None}),
        (PLAIN, ParametersConfig(), {"name": "adamw8bit"}),
        (PLAIN, ParametersConfig(), {"name": "adafactor", "accumulate_dtype": "bfloat16"}),
        (LORA, ADAPTERS, {"name": "adafactor"}),
        (PLAIN, ParametersConfig(), {"name": "lion", "mu_dtype": "bfloat16"}),
        (PLAIN, ParametersConfig(), {"name": "muon"}),
        (LORA, ADAPTERS, {"name": "muon"}),
    ],
    ids=str,
)
def test_it_is_that_of_the_state_that_is_made(model, parameters, optimizer):
    config = OptimizerConfig(**optimizer)
    params = abstract_model(model).params
    trained = trained_of(model, parameters, config)
    assert (trained == ALL_TRAINED) == (config == OptimizerConfig() and model is PLAIN)
    optimizer = make_optimizer(config, 10)
    spec = TrainingSpec(model, FlowMatching(), optimizer, config.ema_decay, parameters)
    state = abstract_state(spec, mesh_of(), 0)
    made = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    sums = {"float32": 4, "bfloat16": 2}[config.accumulate_dtype]
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    predicted = state_bytes(total, trained) - count * (GRADIENT_BYTES + sums)
    assert abs(predicted - made) < 200  # the step, the key and counters of the optimizer


def test_gradients_that_stay_in_16_bits_take_half_of_their_bytes():
    model = dataclasses.replace(PLAIN, dtype="bfloat16")
    wide, less = (
        trained_of(each, ParametersConfig(), OptimizerConfig(), single=True)
        for each in (PLAIN, model)
    )
    flat = flatten_dict(abstract_model(model).params, sep="/")
    count = sum(leaf.size for leaf in flat.values())
    halved = sum(flat[name].size for name in gradient_dtypes(model))
    assert 0 < halved < count
    assert (wide.bytes_each - less.bytes_each) * count == pytest.approx(2 * halved)


# ---------------------------------------------------------------- what fits


LARGE = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40, "in_channels": 16}
WAN_14B = WanConfig(**LARGE, remat="full")
H100 = 63.5e9
"""Of 80 GB, what JAX uses unless it is told otherwise."""


def refusal(
    model=WAN_14B, tokens=32_760, budget=H100, fsdp=4, replicas=1, single=True, kept=0, **optimizer
):
    """What is said of a step; empty if it may fit."""
    try:
        require_fit(
            *(model, tokens, budget, ParametersConfig(), OptimizerConfig(**optimizer)),
            MeshConfig(fsdp=fsdp),
            replicas=replicas,
            single=single,
            kept=kept,
        )
    except InputError as error:
        return str(error)
    return ""


def named_in(said):
    """What is said to fit: the words of each way."""
    ways = said.partition("what fits: ")[2].split(", or ") if said else ()
    words = [way.replace("with ", "").split() for way in ways]
    return [dict(zip(each[::2], each[1::2], strict=True)) for each in words]


def test_a_state_that_cannot_fit_is_told_with_what_would():
    said = refusal()
    assert re.search(
        r"predicted to need \d+\.\d GB of a device, [67]\d\.\d GB of them before", said
    )
    assert "it has 63.5 GB" in said
    assert "\n" not in said
    assert named_in(said) == [{"mesh.fsdp": "16"}, {"model.remat": "offload", "mesh.fsdp": "8"}]
    assert refusal(fsdp=16) == refusal(fsdp=32) == ""


@pytest.mark.parametrize(
    ("budget", "fsdp", "remat"),
    [
        *((H100, 4, "full"), (H100, 8, "full"), (H100, 4, "attention"), (105e9, 4, "full")),
        (H100, 16, "none"),  # whose activations are too many
    ],
)
def test_all_that_is_named_fits(budget, fsdp, remat):
    model = dataclasses.replace(WAN_14B, remat=remat)
    said = refusal(model, budget=budget, fsdp=fsdp)
    for named in named_in(said):
        taken = {"model": dataclasses.replace(model, remat=named.get("model.remat", remat))}
        taken |= {"fsdp": int(named.get("mesh.fsdp", fsdp)), "budget": budget}
        taken |= {"tokens": int(named.get("planning.m_mem", 32_760))}
        if "optimizer.name" in named:
            taken["name"] = named["optimizer.name"]
        assert refusal(**taken) == "", named
        if "planning.m_mem" in named:
            assert refusal(**taken | {"tokens": 2 * taken["tokens"]})
    assert remat != "none" or {"model.remat", "planning.m_mem"} <= set().union(*named_in(said))


def test_replicas_share_the_state_but_not_the_weights():
    """1.3B on 24 GB: 5.7 GB of weights, and 28 GB of state that eight replicas split."""
    small = WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30, in_channels=16)
    small = dataclasses.replace(small, remat="full", text=TextConfig(dim=4096, length=512))
    assert refusal(small, 8_000, 22.7e9, fsdp=1)
    assert refusal(small, 8_000, 22.7e9, fsdp=1, replicas=8) == ""
    assert refusal(small, 8_000, 6e9, fsdp=1, replicas=10_000)
    for axes, expected in (({}, 8), ({"fsdp": 2, "tensor": 2}, 2), ({"fsdp": 8}, 1)):
        assert replicas_of(MeshConfig(**axes)) == expected
    # Of several micro-batches, one gradient more is held.
    assert refusal(small, 8_000, 10.5e9, fsdp=1, replicas=8) == ""
    assert refusal(small, 8_000, 10.5e9, fsdp=1, replicas=8, single=False)
    assert refusal(small, 8_000, 10.5e9, fsdp=1, replicas=8, kept=4)


def test_a_run_is_refused_before_it_compiles(runs, monkeypatch):
    monkeypatch.setattr(GradientNoiseConfig, "kept_bytes", 10**7)  # of each of few parameters
    for remat in ("full", "auto"):
        flags = ("--model.memory_budget", "2", "--model.remat", remat)
        (line,) = errors(runs.here(*flags, "--callbacks", "[{name: gradient_noise}]").stderr)
        assert "2.0 GB" in line
    refused = runs.here("--model.memory_budget", "0.1")
    (line,) = errors(refused.stderr)
    assert "before any token, and it has 0.1 GB" in line
    assert (refused.returncode, "compiling" in refused.stdout) == (2, False)


# ---------------------------------------------------------------- of a device


def test_it_is_what_the_arrays_and_the_program_take():
    size = 64
    zeros = {"w": jnp.zeros((size, size))}
    step, key = jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32)
    state = TrainState(step, key, params=zeros, ema=zeros, opt_state=zeros, frozen={}, variables={})

    def gradient(weights, accumulator, batch):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) ** 2))(weights.params["w"])
        return accumulator + grads

    accumulator, batch = jnp.zeros((size, size)), jnp.ones((8, size))
    lowered = jax.jit(gradient, donate_argnums=1).lower(state.weights, accumulator, batch)
    program = lowered.compile()
    found = run_memory(state, [program])
    assert found.state == 3 * 4 * size**2 + 4 + 8
    least = accumulator.nbytes + batch.nbytes  # and what the program computes in between
    temporary = program.memory_analysis().temp_size_in_bytes
    assert least + temporary <= found.step <= least + temporary + accumulator.nbytes
    silent = SimpleNamespace(memory_analysis=lambda: None)
    assert run_memory(state, []) is run_memory(state, [silent]) is None


ALLOCATING = "Out of memory while trying to allocate"


ON_HOST = "2.00GiB with allocator xla_gpu_host_bfc on device 0."
OF_HOST = (
    f"a step does not fit the host's memory ({ALLOCATING} 2.00GiB); lower planning.m_mem, set "
    "model.remat to offload or full, or raise XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
)


@pytest.mark.parametrize(
    ("said", "named", "words"),
    [
        (
            "19.72GiB with allocator GPU_0_bfc on device 0. [executable_name='jit_update']",
            (),
            f"memory ({ALLOCATING} 19.72GiB); lower planning.m_mem",
        ),
        ("1GiB.\n\nSuggestions:\n…", (), f"a device's memory ({ALLOCATING} 1GiB"),
        ("2GiB", ("the state", STATE_REMEDY), "the state does not fit a device's memory"),
        (ON_HOST, (), OF_HOST),
    ],
)
def test_memory_that_is_spent_is_one_line_with_a_remedy(said, named, words):
    with pytest.raises(InputError) as error, memory_named(*named):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {ALLOCATING} {said}")
    (line,) = str(error.value).splitlines()
    assert words in line
    assert ("planning.m_mem" in line) == (not named)


def test_other_errors_of_the_runtime_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_named():
        raise jax.errors.JaxRuntimeError("INTERNAL: the driver is gone")


def test_it_warns_where_a_step_is_larger_than_the_host_or_the_device():
    for limit, host_limit, words in (
        (20, 4e9, ""),
        (19, 4e9, "a step needs 0.0 MB and a device has 0.0 MB"),
        (None, 3e9, ""),
        (None, 2e9, "a step needs 3.0 GB of the host's memory and a device may use 2.0 GB of it"),
    ):
        found = RunMemory(10, 10, limit, 3_000_000_000, host_limit)
        assert found.warning().startswith(words)
        assert bool(found.warning()) == bool(words)
        assert (", of 0.0 MB" in found.line()) == (limit is not None)
        assert found.line().endswith("; 3.0 GB of the host's memory")
    assert "host" not in RunMemory(10, 10, None).line()


def test_sizes_are_written_in_the_unit_that_suits_them():
    sizes = (142_600_000_000, 1_000_000_000, 2e6)
    assert [size_in_words(size) for size in sizes] == ["142.6 GB", "1.0 GB", "2.0 MB"]


# ---------------------------------------------------------------- what layers keep


AUTO = ("--model.remat", "auto", "--sampling.grids", "[]", "--evaluators", "[]")
BUDGET = ("--model.memory_budget", "2")


@pytest.fixture
def train(runs, monkeypatch):
    """What a run prints until it would compile, with what layers keep chosen."""

    def compiled(*_):
        raise InputError("it would compile now")

    monkeypatch.chdir(runs.folder)
    monkeypatch.setattr(training, "_compile", compiled)

    def train(*flags):
        ended = runs.here(*AUTO, *flags)
        assert "it would compile now" in ended.stderr
        return ended.stdout

    return train


def model_of(runs):
    return yaml.safe_load((runs.folder / "run" / "config.yaml").read_text())["model"]


def test_a_budget_is_filled_and_the_run_goes_on_with_what_it_chose(runs, train):
    assert "model.remat: none (predicted 0.5 of 2.0 GB)" in train(*BUDGET)
    written = model_of(runs)
    assert (written["remat"], written["remat_layers"]) == ("auto", [])
    path = runs.folder / "run" / "remat.json"
    content = json.loads(path.read_text())
    assert (content["policies"], content["for"]["samples"]) == (["none"], 40 // 4)
    # Another would fit, too; and an older version did not count samples.
    del content["for"]["samples"], content["for"]["work_space"]
    path.write_text(json.dumps(content | {"policies": ["full"]}))
    assert "model.remat: full, as this run began" in train(*BUDGET)
    # Another budget is told and chosen for, and what callbacks keep.
    assert "; kept was 0 and is 4" in train(*BUDGET, "--callbacks", "[{name: gradient_noise}]")
    out = train("--model.memory_budget", "3")
    assert "(predicted 0.5 of 3.0 GB); budget was 2000000000.0 and is 3000000000.0" in out
    assert "model.remat: " not in train("--model.remat", "full", "--model.memory_budget", "3")
    assert model_of(runs)["remat"] == "full"


def test_on_a_gpu_measured_times_choose_and_stay(runs, train, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    times = dict.fromkeys(LADDER, 2.0) | {"feed_forward_and_attention": 1.0}
    asked = []

    def layer_seconds(model, latents, policies, *, optimizer, parameters):
        asked.append(latents)
        return times

    monkeypatch.setattr(trial_step, "measurable", lambda model: True)
    monkeypatch.setattr(trial_step, "layer_seconds", layer_seconds)
    out = train(*BUDGET)
    assert f"model.remat: auto times two layers with {', '.join(LADDER)}" in out
    assert "model.remat: feed_forward_and_attention (by measured time, predicted 0." in out
    stored = json.loads((runs.folder / "run" / "remat.json").read_text())
    assert stored["policies"] == ["feed_forward_and_attention"]
    assert stored["layer_seconds"] == times
    # What the run began with is not timed again, nor is it for another run of the model.
    train(*BUDGET)
    (cached,) = cache.rglob("layers/*.json")
    for options in ((), ("--run.seed", "1")):
        shutil.rmtree(runs.folder / "run")
        out = train(*BUDGET, *options)
        assert "(by measured time, " in out
        assert f"takes times of layers from {cached}; delete it to measure again" in out
    assert len(asked) == 1
    for damage in ("{", cached.read_text().replace("2.0", "-2.0", 1)):
        cached.write_text(damage)
        shutil.rmtree(runs.folder / "run")
        with pytest.warns(UserWarning, match="holds no times of layers"):
            train(*BUDGET)
    # Another version of models or steps is timed for itself.
    monkeypatch.setattr(memory, "versions", lambda package: f"{(package / 'models').is_dir()}")
    shutil.rmtree(runs.folder / "run")
    train(*BUDGET)
    assert len(asked) == 4
    assert "('True', " in max(cache.rglob("layers/*.json"), key=os.path.getmtime).read_text()
    # A policy that lacked memory, perhaps another process's, is asked for again.
    del times["none"]
    for count in (5, 6):
        shutil.rmtree(runs.folder / "run")
        train(*BUDGET, "--model.dim", "64")
        assert len(asked) == count


def test_without_a_limit_of_memory_it_says_what_it_takes(train):
    assert "model.remat: attention, as auto knows no limit" in train()


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{}", "?"),
        '{"for": {"tokens": 9}, "policies": ["most"]}',
        '{"for": {"tokens": 9}, "policies": []}',
    ],
)
def test_another_file_in_its_place_is_named(runs, content):
    (runs.folder / "run").mkdir()
    (runs.folder / "run" / "remat.json").write_text(content)
    assert "run/remat.json: is not" in runs.refused(*AUTO, *BUDGET)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model.memory_budget", "0.2"), "model.remat: auto finds nothing that fits: "),
        (("--model.remat_layers", "[full,none]"), "model.remat is auto and model.remat_layers"),
        (("--model.remat_layers", "[most]"), "model.remat_layers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(runs, flags, words):
    assert words in runs.refused(*AUTO, *flags)


@pytest.mark.usefixtures("own_comparisons")
def test_hosts_with_other_tables_of_kernels_are_refused():
    """Their programs would differ, and XLA would wait for a day for results of the same one."""
    told = []
    cluster = SimpleNamespace(require_same=lambda values, remedy: told.append((values, remedy)))
    for ratios in ({}, {64: (1.5, 2.0)}, {64: (1.5, 2.0)}, {64: (1.5, 2.5)}):
        tuning.write("NVIDIA L4", tuning.Tuned({}, ratios), {})
        require_same_tables(cluster, "NVIDIA L4")
    tuning.read.cache_clear()
    values = [found["the table of kernels of NVIDIA L4"] for found, _ in told]
    assert len(set(values)) == 3
    assert values[1] == values[2]
    assert f"copy {tuning.path_of('NVIDIA L4')} of one host" in told[0][1]


@pytest.mark.usefixtures("own_comparisons")
@pytest.mark.parametrize("process", [0, 1, None])
def test_processes_take_the_times_of_kernels_that_process_0_measures(process):
    told, case = [], "bias_gelu 1536 bfloat16"

    def broadcast(compute):
        told.append(compute() if process == 0 else {case: 1.5})
        return json.loads(json.dumps(told[0]))

    cluster = SimpleNamespace(num_processes=1 if process is None else 2, broadcast=broadcast)
    share_comparisons(cluster, lambda: COMPARISONS.ratio(case, lambda: (3.0, 2.0)))
    assert told == ([] if process is None else [{case: 1.5}])
    alone = 9.0 if process is None else 1.5
    assert COMPARISONS.ratio(case, lambda: (9.0, 1.0)) == alone
    assert COMPARISONS.ratio("another", lambda: (9.0, 1.0)) == (9.0 if process is None else 1.0)
