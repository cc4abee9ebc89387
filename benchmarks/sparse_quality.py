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
trains on is measured at fixed noise levels with fixed noise. Results are written after each run:
the JSON to `--out`, and pictures to `--pictures`. `--draw` draws them again from the JSON.
Arguments behind `--` override keys of the config, such as `-- --model.dim 64`.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from moving_pictures import Clips, read_clips
from sparse_quality_report import draw, draw_samples, summary, table

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.config import Config, read_config, use_compilation_cache, values_of
from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.loader import PlacedStep, place_ahead
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.diffusion.samplers import sample
from alload_jax.diffusion.schedules import noise_levels
from alload_jax.diffusion.timesteps import TIMESTEP_SCALE, interpolate, squared_error, velocity
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.common.segments import AttentionSegments, TileLayout, whole_blocks
from alload_jax.models.common.sparse_attention import layer
from alload_jax.models.common.sparse_attention.selectors import Profile, sample_attention
from alload_jax.models.families import abstract_model
from alload_jax.planning.factory import make_plan
from alload_jax.sharding.host_memory import set_xla_flags
from alload_jax.sharding.mesh import batch_sharding, local_plan_ranks, make_mesh, ranks_of
from alload_jax.training.callbacks import Callback, Run
from alload_jax.training.callbacks.telemetry import LayerLog, Telemetry
from alload_jax.training.loop import Loop
from alload_jax.training.optimizer import learning_rate_schedule
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import TrainState, Weights, init_state, training_spec
from alload_jax.training.step import make_accumulate, zero_accumulator
from alload_jax.training.trackers import TensorBoard
from alload_jax.training.trainer import Trainer, on_mesh

ROOT = Path(__file__).parents[1]
VARIANTS = ("dense", "predictor", "pooled", "random")
FIRST_SAMPLES, FIRST_RATE = 4000, 2e-3
"""Of training on short clips."""
PLAIN = "no sparse attention"
"""Name of the timing of a model that measures nothing."""
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
DRAWS, DRAW_STEPS, DRAW_LEVEL = 4, 30, 0.7
"""Clips drawn with the first seed, evaluations of each, and the level that clips restart from."""
LIST_LEVELS = (0.3, 0.7)
"""Noise levels at which the attention is measured that lists hold."""


def main(argv: list[str]) -> int:
    """Trains, measures, writes."""
    argv, overrides = argv, []
    if "--" in argv:
        argv, overrides = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    results = ROOT / "benchmarks" / "results"
    parser = benchmark_parser(__doc__, results / "sparse_quality_h200.json")
    add = parser.add_argument
    add("--clips", type=Path, help="NPZ of moving_pictures.py")
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
    add("--config", type=Path, default=ROOT / "benchmarks" / "sparse_quality.yaml")
    add("--runs", type=Path, default=ROOT / "runs" / "sparse_quality", help="folder of the runs")
    add("--pictures", type=Path, default=ROOT / "docs" / "results" / "sparse_quality")
    add("--show", nargs="+", default=[""], help="parts of names of held-out videos to restore")
    add("--draw", action="store_true", help="only draw the pictures of --out")
    options = parser.parse_args(argv)
    if options.draw:
        content = json.loads(options.out.read_text())
        draw(content, options.pictures)
        print(table(content))
    else:
        set_xla_flags()
        Study(options, read_config(["--config", str(options.config), *overrides])).run()
    return 0


# ---------------------------------------------------------------- configs


def selector_of(variant: str) -> str:
    """The selector whose programs a variant runs."""
    return "predictor" if variant == "dense" else variant


def replaced(config: Config, part: str, **values: Any) -> Config:
    """The config with other values of one of its parts."""
    changed: Any = dataclasses.replace(getattr(config, part), **values)
    return dataclasses.replace(config, **{part: changed})


def variant_config(
    config: Config, variant: str, steps: int, thresholds: dict[str, float]
) -> Config:
    """The config of a variant for a number of steps."""
    values: Json = {
        "selector": selector_of(variant),
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


def to_bytes(clips: np.ndarray) -> np.ndarray:
    """Pixels of the model as bytes."""
    return np.clip((clips + 1) * 127.5, 0, 255).round().astype(np.uint8)


# ---------------------------------------------------------------- measures of weights

Picked = Callable[[Any, jax.Array, jax.Array], Any]
"""(what the model returns, a clip, its noise) → what is kept."""


def evaluated(
    config: Config, pick: Picked, weights: Weights, clips: jax.Array, levels: jax.Array
) -> Any:
    """What is picked of the model's forward of each clip at each level: [levels, clips, …].

    Args:
      config: of the model.
      pick: what is kept.
      weights: of the model.
      clips: [clips, frames, height, width, 3] uint8; each has the same noise in every call.
      levels: [levels] float32.
    """
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(NOISE_SEED)))(jnp.arange(len(clips)))
    data = clips.astype(jnp.float32) / 127.5 - 1

    def of_clip(level: jax.Array, part: tuple[jax.Array, jax.Array]) -> Any:
        clip, noise = part[0][None], jax.random.normal(part[1], part[0].shape)[None]
        sigma = jnp.full(1, level)
        latents = interpolate(clip, noise, sigma)
        found = model.forward(latents, sigma * TIMESTEP_SCALE, jnp.zeros((1, 1), jnp.int32))
        return jax.tree.map(lambda value: value[0], pick(found, clip, noise))

    return jax.lax.map(lambda level: jax.lax.map(partial(of_clip, level), (data, keys)), levels)


def loss(found: Any, clip: jax.Array, noise: jax.Array) -> jax.Array:
    """The loss of a clip, to be picked."""
    return squared_error(found.velocity, velocity(clip, noise))


def drawn(config: Config, weights: Weights, latents: jax.Array, levels: jax.Array) -> jax.Array:
    """Follows the flow from the first level to the last, from data at the first."""
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())

    def slope(latents: jax.Array, sigma: jax.Array, condition: jax.Array) -> jax.Array:
        return model.forward(latents, sigma * TIMESTEP_SCALE, condition).velocity

    null = jnp.zeros((len(latents), 1), jnp.int32)
    return sample("euler", slope, latents, null, levels)


@contextmanager
def measuring_lists() -> Iterator[None]:
    """What is traced meanwhile measures lists in place of sparsity and recall.

    The auxiliary value of recall is then the share of the attention that the layer's lists hold,
    and that of sparsity what the best lists of the same lengths would hold.
    """
    before = layer.measure
    layer.measure = _measure_lists
    try:
        yield
    finally:
        layer.measure = before


def _measure_lists(
    heads: layer.Heads,
    layout: TileLayout | None,
    segments: AttentionSegments | None,
    choice: layer.Choice,
) -> Profile:
    del segments
    assert layout is not None
    query, key = (whole_blocks(x, layout) for x in (heads.query, heads.key))
    found = sample_attention(query, key, layout, choice.measured, choice.config)
    longest = choice.config.list_densities()[0]
    lists = layer._lists(heads, layout, choice._replace(list_density=longest))
    place = found.block[:, None, :, None]
    indices = jnp.take_along_axis(lists.indices, place, axis=2)
    count = jnp.take_along_axis(lists.counts, place[..., 0], axis=2)
    listed = jnp.arange(indices.shape[-1]) < count[..., None]
    held = jnp.take_along_axis(found.mass, jnp.where(listed, indices, 0), axis=-1)
    best = jnp.sort(found.mass, axis=-1, descending=True)[..., : indices.shape[-1]]

    def mean(mass: jax.Array) -> jax.Array:
        return jnp.where(listed, mass, 0).sum(axis=-1).mean(axis=-1)[:, None]

    some = jnp.ones((len(query), 1))
    return Profile(some, mean(best), mean(held), jnp.zeros_like(mean(held)))


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
      found: (step, seconds of training so far, losses [levels, clips]) of each measurement.
    """

    def __init__(self, measure: Callable[[Weights], np.ndarray], steps: int, log: MetricsLog):
        self._measure, self._log = measure, log
        self._at = {round(steps * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)}
        self.found: list[tuple[int, float, np.ndarray]] = []

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`."""
        self.act(run)

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return run.done in self._at

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        seconds = sum(row["step_seconds"] for row in self._log.rows)
        self.found.append((run.done, seconds, self._measure(run.state.weights)))

    def on_stop(self, run: Run) -> None:
        """See `Callback.on_stop`."""
        if self.found[-1][0] != run.done:
            self.act(run)


class Result(NamedTuple):
    """What a run leaves.

    Attributes:
      rows: lines of metrics.jsonl.
      held_out: see `HeldOut.found`; empty where nothing was measured.
      choices: the layers' choice after each step.
      state: the last state.
    """

    rows: list[Json]
    held_out: list[tuple[int, float, np.ndarray]]
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
    folder, steps, mesh = Path(config.run.folder), config.run.given_steps, make_mesh(config.mesh)
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
    held_out = [HeldOut(measure, steps, log)] if measure else []
    loop = Loop(trainer, 0, steps, [telemetry, LayerLog(folder, config.model, 0), *held_out])
    with closing(run_plan.steps(0, steps, collator, config.data.loader)) as planned:
        loop.run(place_ahead(planned, mesh))
    loop.finish()
    return Result(log.rows, held_out[0].found if measure else [], trainer.choices, trainer.state)


def gradient_seconds(config: Config, manifest: Manifest, given: Any) -> dict[str, float]:
    """Median seconds of a gradient by density of all layers; 1 is dense attention."""
    mesh = make_mesh(config.mesh)
    parts = (config.model, config.optimizer, config.objective, config.parameters)
    spec = training_spec(*parts, 1)
    samples = manifest.samples(config.model.patch_size)
    plan = make_plan(config.planning, samples, ranks_of(mesh), 0)
    collation = collation_for(plan, manifest, config.model, conditions_for(config.model, manifest))
    batch: Any = collation.shapes(plan)[0]
    values = np.random.default_rng(0).uniform(-1, 1, batch.latents.shape).astype(np.float32)
    filled = jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), batch)
    filled = filled._replace(latents=values, weight=filled.weight + 1)
    filled = jax.device_put(filled, batch_sharding(mesh))
    weights = init_state(spec, mesh, 0, jax.tree.map(jnp.copy, given)).weights
    key = jax.random.key_data(jax.random.key(0))
    sums = zero_accumulator(spec, mesh, weights, on_mesh(batch, mesh))
    accumulate: Any = make_accumulate(spec, mesh)
    found = {}
    for density in (1.0, 0.5, 0.2) if config.model.sparse_attention else (1.0,):
        if config.model.sparse_attention:
            old = switch_of(weights.variables)
            changed = {
                "sparse": jnp.full_like(old["sparse"], density < 1),
                "density": jnp.full_like(old["density"], density),
            }
            weights = weights._replace(variables=with_switch(weights.variables, **changed))
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            sums = jax.block_until_ready(accumulate(weights, sums, filled, key))
            seconds.append(time.perf_counter() - began)
        found[str(density)] = float(np.median(seconds[1:]))
    return found


# ---------------------------------------------------------------- what the JSON says


def rounded(values: Any, digits: int = 6) -> Any:
    """The values as nested lists of rounded numbers."""
    return np.round(np.asarray(values, np.float64), digits).tolist()


def describe_first(seed: int, rows: list[Json]) -> Json:
    """What the JSON says of training on short clips, from the lines of its metrics."""
    losses = [row["loss"] for row in rows]
    parts = np.array_split(losses, min(40, len(losses)))
    seconds = round(sum(row["step_seconds"] for row in rows), 3)
    return {"seed": seed, "loss": [rounded(np.mean(part)) for part in parts], "seconds": seconds}


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
        "predictor_loss": rounded(
            [row.get("attention_predictor_loss", 0.0) for row in rows[::10]], 4
        ),
        "step_seconds": {
            "dense": round(float(np.median(seconds[1 : max(2, sparse.dense_steps)])), 5),
            "last": round(float(np.median(seconds[-max(1, len(seconds) // 5) :])), 5),
            "total": round(float(seconds.sum()), 3),
        },
        "held_out": [
            {"step": step, "seconds": round(at, 3), "levels": rounded(losses.mean(axis=1))}
            | {"mean": float(losses.mean())}
            for step, at, losses in result.held_out
        ],
        "layers": {"step": [row["step"] for row in layers]}
        | {name: [rounded(np.mean(row[name], axis=-1), 4) for row in layers] for name in names},
        # The steps after which each layer became sparse, or dense again.
        "sparse_from": [(np.flatnonzero(each) + 1).tolist() for each in (chosen != before).T],
        "last_layers": {name: [rounded(each, 4) for each in layers[-1][name]] for name in names},
        "lists": [],
    }


# ---------------------------------------------------------------- the study


class Study:
    """The runs of one command, and what they found so far."""

    def __init__(self, options: argparse.Namespace, config: Config):
        """Writes the data."""
        use_compilation_cache(config.run)
        self._options, self._config, self._began = options, config, time.monotonic()
        clips, shape = read_clips(options.clips), (options.frames, options.size, options.size)
        self._data = write_samples(options.runs / "data", clips, shape, options.samples)
        self._first = write_samples(
            options.runs / "first", clips, tuple(options.first), FIRST_SAMPLES
        )
        chosen = held_out_clips(clips, options.held_out)
        middle = np.subtract(clips.pixels.shape[1:4], shape) // 2
        self._pixels = crop(clips.pixels[chosen], middle.tolist(), shape)
        files = [clips.videos[clips.video[n]]["file"] for n in chosen]
        wanted = [n for n, file in enumerate(files) if any(part in file for part in options.show)]
        self._shown = [*wanted, *(n for n in range(len(files)) if n not in wanted)][:DRAWS]
        self._thresholds: dict[str, float] = {}
        self._trained: list[tuple[str, int, Weights, Json]] = []
        first: Json = {"shape": [*options.first, 3], "steps": options.first_steps}
        tokens = int(self._data.samples(config.model.patch_size).seq_len[0])
        self._record = Record(
            options.out,
            ["jax", "jaxlib", "flax", "numpy"],
            config=values_of(config),
            shape=[*shape, 3],
            tokens=tokens,
            rows=config.planning.required_m_mem() // tokens,
            clips={
                "sha256": hashlib.sha256(options.clips.read_bytes()).hexdigest(),
                "trained": len(clips.of(held_out=False)),
                "measured": len(chosen),
                "measured_videos": clips.video[chosen].tolist(),
                "videos": clips.videos,
            },
            levels=list(LEVELS),
            steps=options.steps,
            first=first | {"learning_rate": FIRST_RATE, "runs": []},
            gradient_seconds={},
            draws=[],
            runs=[],
        )

    def run(self) -> None:
        """Trains all variants of all seeds; then measures lists and draws samples."""
        content, follow = self._record.content, None
        for seed in self._options.seeds:
            given = self._first_parameters(seed)
            if not content["gradient_seconds"]:
                self._time_gradients(given)
            for name in self._options.variants:
                result = self._train(name, seed, given, follow if name == "random" else None)
                if name == "predictor":
                    follow = result.choices
                if not self._thresholds:
                    self._thresholds = passed_thresholds(content["runs"][0]["layers"])
                    content["thresholds"] = self._thresholds
                self._write()
        for name, seed, weights, entry in self._trained:
            entry["lists"] = self._mass_of_lists(name, weights)
            if seed == self._options.seeds[0]:
                self._draw_clips(name, weights)
        content["seconds"] = round(time.monotonic() - self._began, 1)
        self._write()
        draw(content, self._options.pictures)
        draw_samples(self._options.runs / "drawn.npz", content["draws"], self._options.pictures)
        print(table(content))

    def _write(self) -> None:
        self._record.content["summary"] = summary(self._record.content)
        self._record.write()

    def _log(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s: {text}", file=sys.stderr, flush=True)

    def _first_parameters(self, seed: int) -> Any:
        """Trains on short clips; the parameters at the end."""
        options = self._options
        config = replaced(plain_config(self._config), "planning", m_mem=options.first_tokens)
        config = replaced(config, "optimizer", learning_rate=FIRST_RATE, warmup_steps=50)
        folder = str(options.runs / f"first_{seed}")
        config = replaced(config, "run", steps=options.first_steps, folder=folder, seed=seed)
        result = train(config, self._first)
        entry = describe_first(seed, result.rows)
        self._record.content["first"]["runs"].append(entry)
        self._log(f"short clips, seed {seed}: loss {entry['loss'][-1]}, {entry['seconds']} s")
        return result.state.params

    def _time_gradients(self, given: Any) -> None:
        selectors = dict.fromkeys(map(selector_of, self._options.variants))
        configs = {name: variant_config(self._config, name, 1, {}) for name in selectors}
        for name, config in (configs | {PLAIN: plain_config(self._config)}).items():
            found = gradient_seconds(config, self._data, given)
            self._record.content["gradient_seconds"][name] = found
            self._log(f"{name}: {found}")

    def _train(self, name: str, seed: int, given: Any, follow: Sequence[Choice] | None) -> Result:
        """One run; adds what it found to the record."""
        config = variant_config(self._config, name, self._options.steps, self._thresholds)
        folder = str(self._options.runs / f"{name}_{seed}")
        config = replaced(config, "run", folder=folder, seed=seed)
        jitted = jax.jit(partial(evaluated, config, loss))
        levels, few = np.asarray(LEVELS, np.float32), self._pixels[: self._options.held_out]
        result = train(
            config, self._data, given, follow, lambda w: np.asarray(jitted(w, few, levels))
        )
        weights = result.state.weights
        entry: Json = {"variant": name, "seed": seed} | describe_run(result, config)
        entry["last_by_clip"] = rounded(jitted(weights, self._pixels, levels))
        if name != "dense":
            sparse = switch_of(weights.variables)["sparse"]
            variables = with_switch(weights.variables, sparse=sparse & False)
            losses = np.asarray(jitted(weights._replace(variables=variables), few, levels))
            entry["last_with_dense_attention"] = rounded(losses.mean(axis=1))
        self._trained.append((name, seed, weights, entry))
        self._record.content["runs"].append(entry)
        self._log(f"{name}, seed {seed}: held-out loss {entry['held_out'][-1]['mean']:.5f}")
        return result

    def _mass_of_lists(self, name: str, weights: Weights) -> list[Json]:
        """What attention and lists hold, at each of LIST_LEVELS: means, [layers, num_heads]."""
        config = variant_config(self._config, name, self._options.steps, self._thresholds)
        none = jnp.zeros_like(switch_of(weights.variables)["step"])
        # The same blocks of queries for all runs.
        variables = with_switch(weights.variables, step=none, measured=none)
        levels, few = np.asarray(LIST_LEVELS, np.float32), self._pixels[: self._options.held_out]
        mass = jax.jit(partial(evaluated, config, lambda found, *_: found.auxiliary))
        with measuring_lists():
            found = mass(weights._replace(variables=variables), few, levels)
        return [
            {name: rounded(np.mean(value[n], axis=0)) for name, value in found.items()}
            for n in range(len(levels))
        ]

    def _draw_clips(self, name: str, weights: Weights) -> None:
        """Draws clips from noise, and held-out clips from a level of noise."""
        config = variant_config(self._config, name, self._options.steps, self._thresholds)
        draw_from = jax.jit(partial(drawn, config))
        true = self._pixels[self._shown]
        noise = np.random.default_rng(NOISE_SEED).standard_normal(true.shape, np.float32)
        noised = (1 - DRAW_LEVEL) * (true / np.float32(127.5) - 1) + DRAW_LEVEL * noise
        levels = noise_levels("euler", DRAW_STEPS, 1.0)
        restored = draw_from(weights, noised, levels * np.float32(DRAW_LEVEL))
        arrays = {
            f"{name}_drawn": to_bytes(np.asarray(draw_from(weights, noise, levels))),
            f"{name}_restored": to_bytes(np.asarray(restored)),
            "true": true,
            "noised": to_bytes(noised),
        }
        file, drawn_before = self._options.runs / "drawn.npz", self._record.content["draws"]
        np.savez(file, **((dict(np.load(file)) if drawn_before else {}) | arrays))
        drawn_before.append(name)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
