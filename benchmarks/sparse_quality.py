"""Compares what a model learns from videos with sparse attention and with dense attention.

    python benchmarks/moving_pictures.py VIDEOS --out clips.npz
    python benchmarks/sparse_quality.py --clips clips.npz

Trains the model of benchmarks/sparse_quality.yaml, with three seeds of each variant:

- `dense`: dense attention, measured as the others;
- `predictor`, `pooled`: layers become sparse by their measured profile, with these selectors and
  the same thresholds: the highest of a few pairs that half of the layers of the first dense run
  pass midway;
- `random`: a control. Its lists are as long as those of `predictor` in the same step, layer and
  head, but name random blocks beside a block's own.

Each seed first trains on short clips with dense attention. All of its variants go on from there on
long clips: the same ones in the same order, with the same noise. The loss on videos that no run
trains on is measured at fixed noise levels with fixed noise. The JSON is written after each run,
and the picture of `--picture` at the end. Arguments behind `--` override keys of the config, such
as `-- --model.dim 64`.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from moving_pictures import Clips, read_clips

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.config import Config, read_config, use_compilation_cache, values_of
from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.loader import PlacedStep, place_ahead
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.diffusion.timesteps import interpolate, squared_error, velocity
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.common.embedding import TIMESTEP_SCALE
from alload_jax.models.families import abstract_model
from alload_jax.planning.factory import make_plan
from alload_jax.sharding.host_memory import set_xla_flags
from alload_jax.sharding.mesh import local_plan_ranks, make_mesh, ranks_of
from alload_jax.training.callbacks import Callback
from alload_jax.training.callbacks.telemetry import LayerLog, Telemetry
from alload_jax.training.loop import Loop
from alload_jax.training.optimizer import learning_rate_schedule
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import TrainState, Weights, init_state, training_spec
from alload_jax.training.trackers import TensorBoard
from alload_jax.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
VARIANTS = ("dense", "predictor", "pooled", "random")
FIRST_SAMPLES, FIRST_RATE = 4000, 2e-3
"""Of training on short clips."""
THRESHOLDS = ((0.5, 0.9), (0.5, 0.85), (0.5, 0.75), (0.3, 0.85), (0.3, 0.75), (0.2, 0.6))
"""Pairs of min_sparsity and min_recall to choose from, in this order."""
DENSE_SHARE, ANNEAL_SHARE = 0.2, 0.1
"""Shares of the steps: of those before which no layer switches, of those of annealing."""
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels of held-out losses."""
EVALUATIONS = 5
"""Measurements of the held-out loss in a run."""
NOISE_SEED = 20_000
"""Seed of the noise of held-out clips; no run trains with it."""
COLOURS = {"dense": "#444444", "predictor": "#d1495b", "pooled": "#3b7dd8", "random": "#c9a227"}
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for 95 % by number of seeds."""


def main(argv: list[str]) -> int:
    """Trains, measures, writes."""
    overrides: list[str] = []
    if "--" in argv:
        argv, overrides = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = benchmark_parser(__doc__, ROOT / "benchmarks/results/sparse_quality_h200.json")
    add = parser.add_argument
    add("--clips", type=Path, required=True, help="NPZ of moving_pictures.py")
    add("--frames", type=int, default=20, help="frames of a sample (default 20)")
    add("--size", type=int, default=64, help="pixels of a side (default 64)")
    add("--samples", type=int, default=600, help="crops to train on (default 600)")
    add("--held-out", type=int, default=12, help="held-out clips to measure at a time (default 12)")
    add("--first", type=int, nargs=3, default=[8, 32, 32], help="frames and sides of short clips")
    add("--first-tokens", type=int, default=16_384, help="their tokens in a step (default 16384)")
    add("--first-steps", type=int, default=1500, help="steps on short clips (default 1500)")
    add("--steps", type=int, default=310, help="steps of a run (default 310)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--runs", type=Path, default=ROOT / "runs" / "sparse_quality", help="folder of the runs")
    add("--picture", type=Path, default=ROOT / "docs/results/sparse_quality/loss.png")
    options = parser.parse_args(argv)
    set_xla_flags()
    config = ["--config", str(ROOT / "benchmarks" / "sparse_quality.yaml")]
    Study(options, read_config([*config, *overrides])).run()
    return 0


# ---------------------------------------------------------------- configs


def replaced(config: Config, part: str, **values: Any) -> Config:
    """The config with other values of one of its parts."""
    changed: Any = dataclasses.replace(getattr(config, part), **values)
    return dataclasses.replace(config, **{part: changed})


def variant_config(
    config: Config, variant: str, steps: int, thresholds: dict[str, float]
) -> Config:
    """The config of a variant for a number of steps."""
    values: Json = {
        "selector": "predictor" if variant == "dense" else variant,
        "dense_steps": round(DENSE_SHARE * steps),
        "anneal_steps": round(ANNEAL_SHARE * steps),
    } | thresholds
    if variant == "dense":  # measures, but never switches
        values |= {"min_sparsity": 1.0, "min_recall": 1.0}
    if variant == "random":  # no layer would switch otherwise
        values |= {"min_recall": 0.0}
    sparse: Any = config.model.sparse_attention
    config = replaced(config, "model", sparse_attention=dataclasses.replace(sparse, **values))
    # The other selectors have no parameters of their own.
    groups = config.optimizer.groups if values["selector"] == "predictor" else ()
    return replaced(replaced(config, "optimizer", groups=groups), "run", steps=steps)


def plain_config(config: Config) -> Config:
    """The config of a model without sparse attention, which measures nothing."""
    return replaced(replaced(config, "model", sparse_attention=None), "optimizer", groups=())


def passed_thresholds(layers: Json) -> dict[str, float]:
    """The highest of THRESHOLDS that half of a run's layers pass midway, or else the lowest."""
    middle = len(layers["step"]) // 2
    found = np.array([layers["sparsity"][middle], layers["recall"][middle]])
    passed = (p for p in THRESHOLDS if np.mean((found >= np.array(p)[:, None]).all(axis=0)) >= 0.5)
    pair = next(passed, THRESHOLDS[-1])
    return dict(zip(("min_sparsity", "min_recall"), pair, strict=True))


# ---------------------------------------------------------------- clips


def write_samples(folder: Path, clips: Clips, shape: tuple[int, int, int], number: int) -> Manifest:
    """Writes random crops of the clips that are not held out, flipped or not, as a data folder."""
    if not (folder / "manifest.parquet").exists():
        rng = np.random.default_rng(0)
        chosen = clips.of(held_out=False)
        order = np.concatenate([rng.permutation(chosen) for _ in range(-(-number // len(chosen)))])
        with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
            for clip in order[:number]:
                free = np.subtract(clips.pixels.shape[1:4], shape)
                cut = crop(clips.pixels[clip : clip + 1], rng.integers(free + 1).tolist(), shape)[0]
                cut = cut[:, :, ::-1] if rng.integers(2) else cut
                writer.add((cut / 127.5 - 1).astype(np.float16), np.zeros(1, np.int32), size=shape)
    return read_manifest(folder)


def crop(pixels: np.ndarray, begin: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """A part of clips [N, frames, height, width, 3]."""
    slices = (slice(first, first + size) for first, size in zip(begin, shape, strict=True))
    return pixels[:, *slices]


def held_out_clips(clips: Clips, number: int) -> np.ndarray:
    """So many indices of held-out clips, of as many videos as possible, or twice as many."""
    chosen = clips.of(held_out=True)
    # The first of each video before the second of each.
    turn = [int(np.sum(clips.video[:n] == clips.video[n])) for n in chosen]
    chosen = chosen[np.lexsort((chosen, np.array(turn)))]
    return chosen[: min(2, len(chosen) // number) * number]


def held_out_losses(
    config: Config, clips: np.ndarray, weights: Weights, levels: jax.Array
) -> jax.Array:
    """The loss of each clip at each level, with the same noise in every call: [levels, clips].

    Args:
      config: of the model.
      clips: [clips, frames, height, width, 3] uint8.
      weights: of the model.
      levels: [levels] float32.
    """
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(NOISE_SEED)))(jnp.arange(len(clips)))
    data = jnp.asarray(clips, jnp.float32) / 127.5 - 1

    def of_clip(level: jax.Array, part: tuple[jax.Array, jax.Array]) -> Any:
        clip, noise = part[0][None], jax.random.normal(part[1], part[0].shape)[None]
        sigma = jnp.full(1, level)
        latents = interpolate(clip, noise, sigma)
        found = model.forward(latents, sigma * TIMESTEP_SCALE, jnp.zeros((1, 1), jnp.int32))
        return squared_error(found.velocity, velocity(clip, noise))[0]

    return jax.lax.map(lambda level: jax.lax.map(partial(of_clip, level), (data, keys)), levels)


# ---------------------------------------------------------------- runs


def switch_of(variables: Any) -> dict[str, jax.Array]:
    """The state by which layers switch, stacked over layers."""
    return variables["blocks"]["sparse_attention"]["switch"]


def with_switch(variables: Any, **values: jax.Array) -> Any:
    """The variables with other values of that state."""
    blocks = variables["blocks"]
    sparse = blocks["sparse_attention"]
    sparse = sparse | {"switch": sparse["switch"] | values}
    return variables | {"blocks": blocks | {"sparse_attention": sparse}}


Choice = dict[str, jax.Array]
"""`sparse`: [layers] bool, and `density`: [layers, num_heads], of the layers after a step."""


class FollowingTrainer(Trainer):
    """Notes the layers' choice after each step, or replaces it by those of another run."""

    choices: Sequence[Choice] = ()
    follow: Sequence[Choice] | None = None

    def step(self, step: PlacedStep) -> dict[str, jax.Array]:
        """Dispatches a step; see `Trainer.step`."""
        metrics = super().step(step)
        variables = self.state.variables
        if self.follow is not None:
            chosen = self.follow[min(step.number, len(self.follow) - 1)]
            # Copies, because the next update takes the arrays of the state.
            variables = with_switch(variables, **jax.tree.map(jnp.copy, chosen))
            self.state = self.state._replace(variables=variables)
        if variables:
            choice = {name: jnp.copy(switch_of(variables)[name]) for name in ("sparse", "density")}
            self.choices = [*self.choices, choice]
        return metrics


class HeldOut(Callback):
    """Measures the loss on held-out clips before the first step, at some steps and at the end.

    Attributes:
      found: step → losses [levels, clips].
    """

    def __init__(self, measure: Callable[[Weights], np.ndarray], steps: int):
        self._measure = measure
        self._at = {round(steps * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)}
        self.found: dict[int, np.ndarray] = {}

    def on_start(self, run: Loop) -> None:
        """See `Callback.on_start`."""
        self.act(run)

    def due(self, run: Loop) -> bool:
        """See `Callback.due`."""
        return run.done in self._at

    def act(self, run: Loop) -> None:
        """See `Callback.act`."""
        self.found[run.done] = self._measure(run.state.weights)


class Result(NamedTuple):
    """What a run leaves.

    Attributes:
      rows: lines of metrics.jsonl.
      held_out: see `HeldOut.found`; empty where nothing was measured.
      choices: the layers' choice after each step.
      state: the last state.
    """

    rows: list[Json]
    held_out: dict[int, np.ndarray]
    choices: Sequence[Choice]
    state: TrainState


def train(
    config: Config,
    manifest: Manifest,
    given: Any = None,
    follow: Sequence[Choice] | None = None,
    measure: Callable[[Weights], np.ndarray] | None = None,
) -> Result:
    """Trains as train.py does, without checkpoints.

    Args:
      config: with folder, steps and seed of the run.
      manifest: of the data.
      given: parameters to start from; None for random ones.
      follow: the layers' choices to follow instead of its own; None for its own.
      measure: gives losses on held-out clips; None to measure none.
    """
    folder, steps, mesh = Path(config.run.folder), config.run.steps or 0, make_mesh(config.mesh)
    folder.mkdir(parents=True, exist_ok=True)
    samples = manifest.samples(config.model.patch_size)
    plan = make_plan(config.planning, samples, ranks_of(mesh), config.run.seed)
    collation = collation_for(plan, manifest, config.model, conditions_for(config.model, manifest))
    cluster = Cluster()
    run_plan = RunPlan(plan, config.planning, cluster)
    collator = Collator(
        StoreReader(manifest), local_plan_ranks(mesh, plan.topology.ranks), collation
    )
    parts = (config.model, config.optimizer, config.objective, config.parameters)
    spec = training_spec(*parts, steps)
    copies = given and jax.tree.map(jnp.copy, given)
    trainer = FollowingTrainer(spec, mesh, init_state(spec, mesh, config.run.seed, copies))
    trainer.follow = follow
    list(trainer.compile(collation.shapes(plan)))
    log = MetricsLog(folder, resumed_at=0)
    telemetry = Telemetry(
        run_plan,
        learning_rate_schedule(config.optimizer, steps),
        log,
        TensorBoard(folder / "tensorboard", resumed_at=0),
        BadRecords(folder / "bad_records.txt", cluster),
        config.data.loader.max_bad_records,
        ProgressBar(folder.name, steps),
    )
    held_out = [HeldOut(measure, steps)] if measure else []
    loop = Loop(trainer, 0, steps, [telemetry, LayerLog(folder, config.model, 0), *held_out])
    with closing(run_plan.steps(0, steps, collator, config.data.loader)) as planned:
        loop.run(place_ahead(planned, mesh))
    loop.finish()
    return Result(log.rows, held_out[0].found if measure else {}, trainer.choices, trainer.state)


# ---------------------------------------------------------------- what the JSON says


def rounded(values: Any, digits: int = 6) -> Any:
    """The values as nested lists of rounded numbers."""
    return np.round(np.asarray(values, np.float64), digits).tolist()


def describe_run(result: Result, config: Config) -> Json:
    """What the JSON says of a run."""
    rows, sparse = result.rows, config.model.sparse_attention
    assert sparse is not None
    seconds = np.array([row["step_seconds"] for row in rows])
    lines = (Path(config.run.folder) / "layers.jsonl").read_text().splitlines()
    layers = [json.loads(line) for line in lines]
    names = ("sparsity", "recall", "density")
    chosen = np.stack([np.asarray(each["sparse"]) for each in result.choices])
    before = np.vstack([np.zeros_like(chosen[:1]), chosen[:-1]])
    return {
        "loss": rounded([row["loss"] for row in rows]),
        "step_seconds": {
            "dense": round(float(np.median(seconds[1 : max(2, sparse.dense_steps)])), 5),
            "last": round(float(np.median(seconds[-max(1, len(seconds) // 5) :])), 5),
        },
        "held_out": [
            {"step": step, "mean": float(losses.mean())} for step, losses in result.held_out.items()
        ],
        "layers": {"step": [row["step"] for row in layers]}
        | {name: [rounded(np.mean(row[name], axis=-1), 4) for row in layers] for name in names},
        # The steps after which each layer became sparse, or dense again.
        "sparse_from": [(np.flatnonzero(each) + 1).tolist() for each in (chosen != before).T],
    }


def summary(content: Json) -> Json:
    """Compares each variant with `dense`, seed by seed; above 0 the variant is worse."""
    dense = {run["seed"]: run for run in content["runs"] if run["variant"] == "dense"}
    found: Json = {}
    for variant in dict.fromkeys(run["variant"] for run in content["runs"]):
        own = [run for run in content["runs"] if run["variant"] == variant]
        steps = [run["step_seconds"] for run in own]
        found[variant] = {
            "held_out": spread([last_levels(run).mean() for run in own]),
            "step_seconds": {
                part: statistics.median(each[part] for each in steps) for part in steps[0]
            },
            "density": rounded(np.mean([run["layers"]["density"][-1] for run in own], axis=0), 4),
        }
        pairs = [(dense[run["seed"]], run) for run in own if run["seed"] in dense]
        if variant == "dense" or not pairs:
            continue
        shares = [last_levels(v).mean() / last_levels(d).mean() - 1 for d, v in pairs]
        attended = [
            np.mean(v["last_with_dense_attention"]) - d["held_out"][-1]["mean"] for d, v in pairs
        ]
        found[variant] |= {
            "held_out_percent": spread([100 * share for share in shares]),
            "with_dense_attention": spread(attended),
        }
    return found


def last_levels(run: Json) -> np.ndarray:
    """Last loss at each noise level, mean over all held-out clips."""
    return np.mean(run["last_by_clip"], axis=1)


def spread(values: Sequence[float]) -> Json:
    """Mean, and half the 95 % interval of the mean, with the values."""
    half = (
        _T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5 if values[1:] else None
    )
    return {
        "mean": rounded(statistics.fmean(values)),
        "half_interval_95": half and rounded(half),
        "values": rounded(values),
    }


def draw(content: Json, path: Path) -> None:
    """Draws held-out losses, mean and range of the seeds."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    dense = {run["seed"]: run for run in content["runs"] if run["variant"] == "dense"}
    for name in content["summary"]:
        own = [run for run in content["runs"] if run["variant"] == name]
        steps = [each["step"] for each in own[0]["held_out"]]
        _band(left, steps, [_curve(run) for run in own], name)
        pairs = [(dense[run["seed"]], run) for run in own if run["seed"] in dense]
        if name == "dense" or not pairs:
            continue
        _band(middle, steps, [100 * (_curve(v) / _curve(d) - 1) for d, v in pairs], name)
        levels = [100 * (last_levels(v) / last_levels(d) - 1) for d, v in pairs]
        _band(right, content["levels"], levels, name, marker="o")
    left.set(xlabel="step", ylabel="loss on held-out videos", title="Held-out loss")
    middle.set(xlabel="step", ylabel="above dense of the same seed, %", title="Against dense")
    right.set(xlabel="noise level σ", ylabel="above dense, %", title="Against dense, at the end")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _curve(run: Json) -> np.ndarray:
    return np.array([each["mean"] for each in run["held_out"]])


def _band(
    axes: Axes, x: Sequence[float], curves: Sequence[np.ndarray], name: str, **options: Any
) -> None:
    values = np.array(curves)
    axes.plot(x, values.mean(axis=0), color=COLOURS[name], label=name, **options)
    low, high = values.min(axis=0), values.max(axis=0)
    axes.fill_between(x, low, high, color=COLOURS[name], alpha=0.2, lw=0)


# ---------------------------------------------------------------- the study


class Study:
    """The runs of one command, and what they found so far."""

    def __init__(self, options: argparse.Namespace, config: Config):
        """Writes the data."""
        use_compilation_cache(config.run)
        self._options, self._config = options, config
        clips, shape = read_clips(options.clips), (options.frames, options.size, options.size)
        self._data = write_samples(options.runs / "data", clips, shape, options.samples)
        first = write_samples(options.runs / "first", clips, tuple(options.first), FIRST_SAMPLES)
        self._first = first
        chosen = held_out_clips(clips, options.held_out)
        middle = np.subtract(clips.pixels.shape[1:4], shape) // 2
        self._pixels = crop(clips.pixels[chosen], middle.tolist(), shape)
        self._thresholds: dict[str, float] = {}
        self._record = Record(
            options.out,
            ["jax", "jaxlib", "flax", "numpy"],
            config=values_of(config),
            shape=[*shape, 3],
            clips={
                "sha256": hashlib.sha256(options.clips.read_bytes()).hexdigest(),
                "trained": len(clips.of(held_out=False)),
                "measured": len(chosen),
                "measured_videos": clips.video[chosen].tolist(),
                "videos": clips.videos,
            },
            levels=list(LEVELS),
            steps=options.steps,
            first={"shape": [*options.first, 3], "steps": options.first_steps},
            runs=[],
        )

    def run(self) -> None:
        """Trains all variants of all seeds, and draws."""
        content, follow = self._record.content, None
        for seed in self._options.seeds:
            given = self._first_parameters(seed)
            for name in self._options.variants:
                result = self._train(name, seed, given, follow if name == "random" else None)
                if name == "predictor":
                    follow = result.choices
                if not self._thresholds:
                    self._thresholds = passed_thresholds(content["runs"][0]["layers"])
                    content["thresholds"] = self._thresholds
                content["summary"] = summary(content)
                self._record.write()
        draw(content, self._options.picture)

    def _first_parameters(self, seed: int) -> Any:
        """Trains on short clips; the parameters at the end."""
        options = self._options
        config = replaced(plain_config(self._config), "planning", m_mem=options.first_tokens)
        config = replaced(config, "optimizer", learning_rate=FIRST_RATE, warmup_steps=50)
        folder = str(options.runs / f"first_{seed}")
        config = replaced(config, "run", steps=options.first_steps, folder=folder, seed=seed)
        return train(config, self._first).state.params

    def _train(self, name: str, seed: int, given: Any, follow: Sequence[Choice] | None) -> Result:
        """One run; adds what it found to the record."""
        config = variant_config(self._config, name, self._options.steps, self._thresholds)
        folder = str(self._options.runs / f"{name}_{seed}")
        config = replaced(config, "run", folder=folder, seed=seed)
        levels, few = np.asarray(LEVELS, np.float32), self._pixels[: self._options.held_out]
        losses_of_few = jax.jit(partial(held_out_losses, config, few))
        result = train(
            config, self._data, given, follow, lambda w: np.asarray(losses_of_few(w, levels))
        )
        weights = result.state.weights
        entry: Json = {"variant": name, "seed": seed} | describe_run(result, config)
        losses_of_all = jax.jit(partial(held_out_losses, config, self._pixels))
        entry["last_by_clip"] = rounded(losses_of_all(weights, levels))
        if name != "dense":
            sparse = switch_of(weights.variables)["sparse"]
            variables = with_switch(weights.variables, sparse=sparse & False)
            losses = np.asarray(losses_of_few(weights._replace(variables=variables), levels))
            entry["last_with_dense_attention"] = rounded(losses.mean(axis=1))
        self._record.content["runs"].append(entry)
        print(f"{name}, seed {seed}: loss {entry['held_out'][-1]['mean']:.5f}", flush=True)
        return result


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
