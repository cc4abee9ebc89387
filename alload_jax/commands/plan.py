"""`alload plan`: what a policy makes of a data set, before anything is trained."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from alload_jax.errors import InputError
from alload_jax.planning.files import plan_table, write_plan
from alload_jax.planning.geometry import Geometry
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.policies.bucketed import RanksMode
from alload_jax.planning.samples import read_samples
from alload_jax.planning.settings import PlanningConfig, PolicyName, make_plan

HELP = "Plan an epoch and measure the plan: balance, padding, use of memory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--manifest", required=True, help="Parquet or CSV: frames, height, width, or seq_len")
    add("--config", help="a training config, whose planning section and model these flags override")
    add("--policy", choices=get_args(PolicyName), help="how micro-batches are made")
    add("--ranks", type=int, help="data-parallel ranks (GPUs)")
    add("--ranks-mode", choices=get_args(RanksMode), help="whether ranks share a bucket")
    add("--m-mem", type=int, help="most tokens of a micro-batch")
    add("--m-comp", type=float, help="most B·S^p of a micro-batch; default: the longest's at B = 1")
    add("--p", type=float, help="exponent of cost over sequence length; default 2")
    add("--rows", type=int, help="batch size of every bucket, for --policy fixed")
    add("--micro-batches-per-step", type=int, help="that a rank accumulates before an update")
    add("--cost-model", help="JSON of a cost model")
    add("--vae-stride", type=_triple, help="pixels per latent, as 4,8,8 (frames, height, width)")
    add("--patch-size", type=_triple, help="latents per token, as 1,2,2")
    add("--seed", type=int, help="of the order of samples")
    add("--epoch", type=int, default=0, help="which epoch to plan")
    add("--out", help="write the plan to this Parquet file, a row for every placed sample")
    add("--json", action="store_true", help="print the metrics as JSON")


def run(options: argparse.Namespace) -> int:
    """Plans, prints the metrics, writes the plan."""
    planning, geometry, seed = _settings(options)
    for name, value in (("seed", seed), ("epoch", options.epoch)):
        if value < 0:
            raise InputError(f"alload plan: --{name} is {value}; it must be 0 or more")
    if options.out and Path(options.out).resolve() == Path(options.manifest).resolve():
        raise InputError(f"alload plan: --out {options.out} is the manifest; name another file")
    samples = read_samples(options.manifest, geometry)
    if planning.ranks is None:
        raise InputError("alload plan: --ranks is not given; give the number of ranks (GPUs)")
    plan = make_plan(planning, samples, planning.ranks, seed)
    epoch = plan.epoch(options.epoch)
    m_mem = planning.tokens_bound()
    predictor = planning.predictor()
    metrics = plan_metrics(epoch, samples.seq_len, predictor, m_mem)
    settings = plan.identity() | {
        "manifest": options.manifest,
        "epoch": options.epoch,
        "m_mem": m_mem,
        "sample_count": len(samples),
        "cost_model": {"kind": type(predictor).__name__, **vars(predictor)},
    }
    figures = dataclasses.asdict(metrics)
    if options.json:
        print(json.dumps({"plan": settings, "metrics": figures}, indent=2))
    else:
        _print_table(settings, figures)
    if options.out:
        write_plan(options.out, plan_table(epoch, samples.seq_len, settings))
        if not options.json:
            print(f"plan: {options.out}")
    return 0


def _settings(options: argparse.Namespace) -> tuple[PlanningConfig, Geometry, int]:
    """The config's settings, if there is one, overridden by the flags."""
    base: dict[str, Any] = {}
    patch_size, seed = Geometry().patch_size, 0
    if options.config:
        # Only now: reading a whole training config needs JAX, which takes a second to import.
        from alload_jax.config import read_config

        config = read_config(["--config", options.config], prog="alload plan")
        base = {
            f.name: getattr(config.planning, f.name) for f in dataclasses.fields(PlanningConfig)
        }
        patch_size, seed = config.model.patch_size, config.run.seed
    given = {f.name: getattr(options, f.name, None) for f in dataclasses.fields(PlanningConfig)}
    planning = PlanningConfig(**base | {k: v for k, v in given.items() if v is not None})
    geometry = Geometry(
        options.vae_stride or _stored_stride(options.manifest) or Geometry().vae_stride,
        options.patch_size or patch_size,
    )
    return planning, geometry, seed if options.seed is None else options.seed


def _stored_stride(manifest: str) -> tuple[int, int, int] | None:
    """The VAE stride that our own writer notes in a manifest."""
    from alload_jax.data.manifest import manifest_metadata

    stride = manifest_metadata(Path(manifest)).get("vae_stride")
    return tuple(stride) if stride else None


def _triple(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not three whole numbers such as 4,8,8")
    return (int(parts[0]), int(parts[1]), int(parts[2]))


def _bound(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{bucket}: {rows}" for bucket, rows in value.items())
    return f"{value:,}"


def _print_table(settings: dict[str, Any], figures: dict[str, Any]) -> None:
    bounds = " · ".join(
        f"{name} {_bound(settings[name])}"
        for name in ("m_mem", "m_comp", "p", "rows")
        if settings.get(name)
    )
    title = f"{settings['policy']} · {settings['ranks']} ranks, {settings['mode']} · {bounds}"
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), _readable(name, value))
    Console(soft_wrap=True).print(table)


def _readable(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if name == "cost" else f"{value:.2%}"
