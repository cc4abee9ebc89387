"""What cannot fit a device is refused before anything is compiled, with what would."""

import dataclasses
import re

import pytest
from training_runs import errors

from alload_jax.errors import InputError, run_command
from alload_jax.models.common.config import TextConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.run import main
from alload_jax.sharding.mesh import MeshConfig
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.remat_choice import require_fit

WAN_14B = WanConfig(
    dim=5120, ffn_dim=13824, num_heads=40, num_layers=40, in_channels=16, remat="full"
)
H100 = 63.5e9
"""Of 80 GB, what JAX uses unless it is told otherwise."""


def refusal(model=WAN_14B, tokens=32_760, budget=H100, fsdp=4, replicas=1, **optimizer):
    """What is said of a step; empty if it may fit."""
    try:
        require_fit(
            *(model, tokens, budget, ParametersConfig(), OptimizerConfig(**optimizer)),
            MeshConfig(fsdp=fsdp),
            replicas=replicas,
        )
    except InputError as error:
        return str(error)
    return ""


def test_a_state_that_cannot_fit_is_told_with_what_would():
    said = refusal()
    assert re.search(
        r"predicted to need \d+\.\d GB of a device, [67]\d\.\d GB of them before", said
    )
    assert "it has 63.5 GB" in said
    assert "\n" not in said
    assert "what fits: mesh.fsdp 16, or model.remat offload with mesh.fsdp 8" in said


@pytest.mark.parametrize("budget", [H100, 105e9])
@pytest.mark.parametrize(("fsdp", "remat"), [(4, "full"), (8, "full"), (4, "attention")])
def test_all_that_is_named_fits(budget, fsdp, remat):
    model = dataclasses.replace(WAN_14B, remat=remat)
    said = refusal(model, budget=budget, fsdp=fsdp)
    for each in said.partition("what fits: ")[2].split(", or ") if said else ():
        words = each.replace("with ", "").split()
        named = dict(zip(words[::2], words[1::2], strict=True))
        taken = {"model": dataclasses.replace(model, remat=named.get("model.remat", remat))}
        taken |= {"fsdp": int(named.get("mesh.fsdp", fsdp)), "budget": budget}
        taken |= {"tokens": int(named.get("planning.m_mem", 32_760))}
        if "optimizer.name" in named:
            taken["name"] = named["optimizer.name"]
        assert refusal(**taken) == "", each


def test_fewer_tokens_or_less_that_is_kept_are_named_where_activations_are_too_many():
    model = dataclasses.replace(WAN_14B, remat="none")
    said = refusal(model, fsdp=16)
    named = dict(each.rsplit(" ", 1) for each in said.partition("what fits: ")[2].split(", or "))
    assert refusal(dataclasses.replace(model, remat=named["model.remat"]), fsdp=16) == ""
    assert refusal(model, int(named["planning.m_mem"]), fsdp=16) == ""
    assert refusal(model, 2 * int(named["planning.m_mem"]), fsdp=16)


def test_replicas_share_the_state_but_not_the_weights():
    """1.3B on 24 GB: 5.7 GB of weights, and 28 GB of state that eight replicas split."""
    small = WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30, in_channels=16)
    small = dataclasses.replace(small, remat="full", text=TextConfig(dim=4096, length=512))
    assert refusal(small, 8_000, 22.7e9, fsdp=1)
    assert refusal(small, 8_000, 22.7e9, fsdp=1, replicas=8) == ""
    assert refusal(small, 8_000, 6e9, fsdp=1, replicas=10_000)


@pytest.mark.parametrize("fsdp", [16, 32])
def test_what_fits_is_left_alone(fsdp):
    assert refusal(fsdp=fsdp) == ""


def test_a_run_is_refused_before_it_compiles(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs.folder)
    flags = ["--config", str(runs.config), "--model.memory_budget", "0.1"]
    assert run_command(main, flags) == 2
    out, err = capsys.readouterr()
    (line,) = errors(err)
    assert "before any token, and it has 0.1 GB" in line
    assert "compiling" not in out
