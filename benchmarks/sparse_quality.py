"""Compares what a model learns from videos with sparse attention and with dense attention.

    python benchmarks/moving_pictures.py VIDEOS --out clips.npz
    python benchmarks/sparse_quality.py --clips clips.npz --time-limit 480

Trains the model of benchmarks/sparse_quality.yaml, with three seeds of each variant:

- `dense`: dense attention, measured as the others;
- `predictor`, `pooled`: layers become sparse by their measured profile, with these selectors and
  the same thresholds: the highest of a few pairs that half of the layers of the first dense run
  pass midway;
- `random`: a control. Its lists are as long as those of `predictor` in the same step, layer and
  head, but name random blocks beside a block's own.

Each seed first trains on short clips with dense attention. All of its variants go on from there on
long clips: the same ones in the same order, with the same noise. The loss on videos that no run
trains on is measured at fixed noise levels with fixed noise. `--steps 0` takes as many steps as fit
`--time-limit`. Results are written after each run: the JSON to `--out`, and pictures to
`--pictures`. `--draw` draws them again from the JSON. Arguments behind `--` override keys of the
config, such as `-- --model.dim 64`.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from moving_pictures import Clips, read_clips

from alload_jax.errors import InputError, run_command
from alload_jax.sharding.xla_flags import set_xla_flags

ROOT = Path(__file__).parents[1]
VARIANTS = ("dense", "predictor", "pooled", "random")
FIRST = "short clips"
"""Name of the programs that train on short clips first."""
FIRST_SAMPLES, FIRST_RATE = 4000, 2e-3
PLAIN = "no sparse attention"
"""Name of the timing of a model that measures nothing."""
THRESHOLDS = ((0.5, 0.9), (0.5, 0.85), (0.5, 0.75), (0.3, 0.85), (0.3, 0.75), (0.2, 0.6))
"""Pairs of min_sparsity and min_recall to choose from, in this order."""
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels of held-out losses."""
LIST_LEVELS = (0.3, 0.7)
"""Noise levels at which the attention is measured that lists hold."""
DENSE_SHARE, ANNEAL_SHARE = 0.2, 0.1
"""Shares of the steps: of those before which no layer switches, of those of annealing."""
EVALUATIONS = 5
"""Measurements of the held-out loss in a run."""
DRAWS, DRAW_STEPS, DRAW_LEVEL = 4, 30, 0.7
"""Clips drawn with the first seed, evaluations of each, noise level that clips restart from."""
OTHER_SECONDS, EXTRA_SECONDS = 80, 40
"""For what is not training: all of it, and least for what lists hold, samples and pictures."""
_CROP_SEED = 0


def main(argv: list[str]) -> int:
    """Trains, measures, writes."""
    began = time.monotonic()
    argv, overrides = (argv, []) if "--" not in argv else _split(argv, "--")
    options = _parser().parse_args(argv)
    if options.draw:
        from sparse_quality_report import draw, table

        content = json.loads(options.out.read_text())
        draw(content, options.pictures)
        print(table(content))
        return 0
    set_xla_flags()
    study = Study(options, overrides, began)
    study.run()
    return 0


def _split(argv: list[str], mark: str) -> tuple[list[str], list[str]]:
    place = argv.index(mark)
    return argv[:place], argv[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--clips", type=Path, help="NPZ of moving_pictures.py")
    add("--frames", type=int, default=20, help="frames of a sample (default 20)")
    add("--size", type=int, default=64, help="pixels of a side (default 64)")
    add("--samples", type=int, default=600, help="crops to train on (default 600)")
    add("--held-out", type=int, default=12, help="held-out clips to measure at a time (default 12)")
    add("--first", type=int, nargs=3, default=[8, 32, 32], help="frames and sides of short clips")
    add("--first-tokens", type=int, default=16_384, help="their tokens in a step (default 16384)")
    add("--first-steps", type=int, default=1500, help="steps on short clips (default 1500)")
    add("--steps", type=int, default=0, help="steps of a run; 0 for what fits (default 0)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--time-limit", type=float, default=480, help="seconds of the whole program (default 480)")
    add("--config", type=Path, default=ROOT / "benchmarks" / "sparse_quality.yaml")
    add("--runs", type=Path, default=ROOT / "runs" / "sparse_quality", help="folder of the runs")
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results / "sparse_quality_h200.json", help="the JSON")
    add("--pictures", type=Path, default=ROOT / "docs" / "results" / "sparse_quality")
    add("--show", nargs="+", default=[""], help="parts of names of held-out videos to restore")
    add("--draw", action="store_true", help="only draw the pictures of --out")
    return parser


class Study:
    """The runs of one command, and what they found so far."""

    def __init__(self, options: argparse.Namespace, overrides: list[str], began: float):
        """Writes the data, compiles and times the programs, and chooses the steps."""
        import sparse_quality_runs as runs

        from alload_jax.bench.provenance import provenance
        from alload_jax.config import read_config, values_of
        from alload_jax.sharding.mesh import make_mesh

        self.options, self.began, self.lib = options, began, runs
        flags = ["--config", str(options.config), *overrides]
        self.config = read_config(flags)
        first = first_config(self.config, options.first_tokens, options.first_steps)
        self.mesh = make_mesh(self.config.mesh)
        clips = read_clips(options.clips)
        shape = (options.frames, options.size, options.size)
        self.log("writing samples")
        self.manifest, batch = self.data("data", self.config, clips, shape, options.samples)
        short = self.data("first", first, clips, tuple(options.first), FIRST_SAMPLES)
        self.first_manifest, first_batch = short
        self.rows = len(batch.weight)
        chosen = one_of_each(clips, clips.of(held_out=True))
        chosen = chosen[: min(2, len(chosen) // options.held_out) * options.held_out]
        self.held_out = middle(clips.pixels[chosen], shape)
        files = [clips.videos[clips.video[n]]["file"] for n in chosen]
        wanted = [n for n, file in enumerate(files) if any(part in file for part in options.show)]
        self.shown = [*wanted, *(n for n in range(len(files)) if n not in wanted)][:DRAWS]
        self.log("compiling")
        given = runs.parameter_shapes(first, self.mesh)
        configs = {
            name: variant_config(self.config, name, 1) for name in selectors(options.variants)
        }
        configs |= {PLAIN: plain_config(self.config)}
        self.kinds = {name: runs.Kind(each, batch, given) for name, each in configs.items()}
        self.kinds |= {FIRST: runs.Kind(first, first_batch, None)}
        self.sizes = runs.Sizes(options.held_out, len(LEVELS), DRAWS, DRAW_STEPS, (*shape, 3))
        used = {name: kind for name, kind in self.kinds.items() if name != PLAIN}
        parts = runs.compile_programs(used, ("gradient", "start", "losses"), self.mesh, self.sizes)
        self.programs = {name: runs.Programs(**each) for name, each in parts.items()}
        self.updates: dict[str, Any] = runs.compile_updates(
            {FIRST: runs.training_spec(first, options.first_steps)}, first_batch, self.mesh
        )
        seq_len = self.manifest.samples(self.config.model.patch_size).seq_len
        self.content = provenance(["jax", "jaxlib", "flax", "numpy"]) | {
            "command": " ".join(["python", "benchmarks/sparse_quality.py", *sys.argv[1:]]),
            "config": values_of(self.config),
            "shape": [*shape, 3],
            "tokens": int(seq_len[0]),
            "rows": self.rows,
            "clips": describe_clips(options.clips, clips, chosen),
            "levels": list(LEVELS),
            "setup_seconds": round(time.monotonic() - began, 1),
            "first": {
                "shape": [*options.first, 3],
                "rows": len(first_batch.weight),
                "steps": options.first_steps,
                "learning_rate": FIRST_RATE,
                "runs": [],
            },
            "gradient_seconds": {},
            "draws": [],
            "runs": [],
        }
        self.kept: list[tuple[str, int, Any, dict[str, Any]]] = []
        self.thresholds: dict[str, float] = {}
        self.steps = 0

    def data(
        self, name: str, config: Any, clips: Clips, shape: tuple[int, int, int], number: int
    ) -> tuple[Any, Any]:
        """Writes crops of a shape; their manifest and the shapes of a micro-batch."""
        from alload_jax.data.manifest import read_manifest

        folder = self.options.runs / name
        write_samples(folder, clips, shape, number)
        manifest = read_manifest(folder)
        plan, collation = self.lib.planned(config, manifest, self.mesh)
        return manifest, collation.shapes(plan)[0]

    def log(self, text: str) -> None:
        """Prints what is done, with the seconds so far."""
        print(f"{time.monotonic() - self.began:6.1f} s: {text}", file=sys.stderr, flush=True)

    def left(self) -> float:
        """Seconds until the time limit."""
        return self.options.time_limit - (time.monotonic() - self.began)

    def measure(self, name: str, weights: Any, part: int = 0) -> np.ndarray:
        """Losses of the first held-out clips, or of the second ones, [levels, clips]."""
        losses, number = self.programs[selector_of(name)].losses, self.options.held_out
        clips = self.held_out[part * number : (part + 1) * number]
        return np.asarray(losses(weights, clips, np.asarray(LEVELS, np.float32)))

    def first_run(self, seed: int) -> Any:
        """Trains on short clips; the parameters at the end, copied for each call of `given`."""
        began = time.monotonic()
        config = self.kinds[FIRST].config
        folder = str(self.options.runs / f"first_{seed}")
        config = self.lib.replaced(config, "run", folder=folder, seed=seed)
        task = self.lib.Task(config, self.programs[FIRST], self.updates[FIRST], self.first_manifest)
        result = self.lib.train(task, None, self.mesh)
        losses = [row["loss"] for row in result.rows]
        entry = {
            "seed": seed,
            "loss": [
                rounded(np.mean(part)) for part in np.array_split(losses, min(40, len(losses)))
            ],
            "seconds": round(sum(row["step_seconds"] for row in result.rows), 3),
        }
        self.content["first"]["runs"].append(entry)
        self.log(f"short clips, seed {seed}: loss {entry['loss'][-1]}, {entry['seconds']} s")
        self.first_seconds = time.monotonic() - began
        return result.state.params

    def time_gradients(self, names: list[str], given: Any) -> None:
        """Seconds of a gradient by selector, with dense layers and with sparse ones."""
        for name in names:
            kind, programs = self.kinds[name], self.programs[name]
            densities = (1.0, 0.5, 0.2) if kind.config.model.sparse_attention else (1.0,)
            self.content["gradient_seconds"][name] = found = {
                str(each): self.lib.time_gradient(programs, kind, given, self.mesh, each)
                for each in densities
            }
            self.log(f"{name}: {found}")

    def steps_that_fit(self, given: Any) -> int:
        """Steps of each run such that all runs end in time."""
        name = next(iter(self.programs))
        weights = self.programs[name].start(np.int32(0), given).weights
        self.measure(name, weights)
        began = time.perf_counter()
        self.measure(name, weights)
        evaluating = time.perf_counter() - began
        seeds, variants = len(self.options.seeds), self.options.variants
        # Beside the curve: its first point, more clips, the last weights with dense attention.
        fixed = seeds * len(variants) * ((EVALUATIONS + 3) * evaluating + 1)
        fixed += (seeds - 1) * self.first_seconds + OTHER_SECONDS
        seconds = self.content["gradient_seconds"]
        slowest = [max(seconds[selector_of(name)].values()) for name in variants]
        each = seeds * sum(1.03 * worst + 0.004 for worst in slowest)
        steps = int((self.left() - fixed) / each) // 10 * 10
        if steps < 10:
            raise InputError(f"--time-limit {self.options.time_limit} leaves no time for ten steps")
        return steps

    def run(self) -> None:
        """Trains all variants of all seeds, as long as time is left; then does the rest."""
        longest = 0.0
        given = follow = None
        for seed in self.options.seeds:
            for name in self.options.variants:
                if self.left() < 1.05 * longest + 5:
                    self.log(f"no time left for {name}, seed {seed}")
                    self.content.setdefault("stopped", f"before {name}, seed {seed}")
                    continue
                if name == self.options.variants[0]:
                    given = self.first_run(seed)
                    self.prepare(given)
                began = time.monotonic()
                result = self.train(name, seed, given, follow if name == "random" else None)
                if name == "predictor":
                    follow = result.choices
                if not self.thresholds:
                    self.choose_thresholds()
                longest = max(longest, time.monotonic() - began)
                self.write()
        self.pictures()
        self.extras(given)
        self.content["seconds"] = round(time.monotonic() - self.began, 1)
        self.write()
        self.pictures()

    def extras(self, given: Any) -> None:
        """What the study can do without, in the time that is left."""
        if self.left() < EXTRA_SECONDS:
            self.log("no time left for samples, lists and the model without sparse attention")
            return
        self.log("compiling the rest")
        parts = self.lib.compile_programs(self.kinds, ("draw", "mass"), self.mesh, self.sizes)
        for name in selectors(self.options.variants):
            self.programs[name] = self.programs[name]._replace(**parts[name])
        self.log("measuring what lists hold")
        clips = self.held_out[: self.options.held_out]
        for name, _, weights, entry in self.kept:
            mass = self.programs[selector_of(name)].mass
            found = [mass(weights, clips, np.float32(at)) for at in LIST_LEVELS]
            entry["lists"] = [{key: rounded(each[key]) for key in each} for each in found]
        self.write()
        self.log("drawing samples")
        for name, seed, weights, _ in self.kept:
            if seed == self.options.seeds[0]:
                self.draw(name, weights)
        self.write()
        self.pictures()
        if self.left() > EXTRA_SECONDS / 2:
            plain = {PLAIN: self.kinds[PLAIN]}
            parts = self.lib.compile_programs(plain, ("gradient", "start"), self.mesh, self.sizes)
            self.programs[PLAIN] = self.lib.Programs(**parts[PLAIN])
            self.time_gradients([PLAIN], given)

    def prepare(self, given: Any) -> None:
        """Times the programs and chooses the steps, before the first run."""
        if self.steps:
            return
        self.time_gradients(selectors(self.options.variants), given)
        self.steps = self.options.steps or self.steps_that_fit(given)
        self.content |= {"steps": self.steps, "samples": self.steps * self.rows}
        self.log(f"{self.steps} steps of {self.rows} × {self.content['tokens']} tokens")
        self.compile_updates(["dense"])

    def compile_updates(self, names: list[str]) -> None:
        """Compiles the updates of some variants, which know their steps and thresholds."""
        configs = {name: self.config_of(name) for name in names}
        specs = {
            name: self.lib.training_spec(config, self.steps) for name, config in configs.items()
        }
        batch = self.kinds[PLAIN].batch
        self.updates |= self.lib.compile_updates(specs, batch, self.mesh)

    def config_of(self, name: str) -> Any:
        """The config of a variant, with the steps and the thresholds of this study."""
        return variant_config(self.config, name, self.steps, self.thresholds)

    def choose_thresholds(self) -> None:
        """The highest of THRESHOLDS that half of the layers of the first dense run pass midway."""
        layers = self.content["runs"][0]["layers"]
        middle = len(layers["step"]) // 2
        found = np.array([layers["sparsity"][middle], layers["recall"][middle]])
        for pair in THRESHOLDS:
            if np.mean((found >= np.array(pair)[:, None]).all(axis=0)) >= 0.5:
                break
        self.thresholds = dict(zip(("min_sparsity", "min_recall"), pair, strict=True))
        self.content["thresholds"] = self.thresholds
        self.log(f"thresholds {self.thresholds}; midway {rounded(found, 3)}")
        self.compile_updates([name for name in self.options.variants if name != "dense"])

    def train(self, name: str, seed: int, given: Any, follow: Any) -> Any:
        """One run; adds what it found to the content."""
        config = self.config_of(name)
        folder = str(self.options.runs / f"{name}_{seed}")
        config = self.lib.replaced(config, "run", folder=folder, seed=seed, steps=self.steps)
        programs = self.programs[selector_of(name)]
        at = sorted({round(self.steps * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)})
        task = self.lib.Task(config, programs, self.updates[name], self.manifest, given, follow, at)
        result = self.lib.train(task, lambda weights: self.measure(name, weights), self.mesh)
        weights = result.state.weights
        entry: dict[str, Any] = {"variant": name, "seed": seed} | describe_run(result, config)
        if len(self.held_out) > self.options.held_out:
            entry["last_by_clip"] = [
                first + second
                for first, second in zip(
                    entry["last_by_clip"], rounded(self.measure(name, weights, 1)), strict=True
                )
            ]
        state = self.lib.switch_of(weights.variables)
        if name != "dense":
            dense = self.lib.with_switch(weights.variables, sparse=state["sparse"] & False)
            losses = self.measure(name, weights._replace(variables=dense))
            entry["last_with_dense_attention"] = rounded(losses.mean(axis=1))
        entry["lists"] = []
        self.kept.append((name, seed, weights, entry))
        self.content["runs"].append(entry)
        self.log(f"{name}, seed {seed}: held-out loss {entry['held_out'][-1]['mean']:.5f}")
        return result

    def draw(self, name: str, weights: Any) -> None:
        """Draws clips from noise, and restores held-out clips from noise."""
        from alload_jax.diffusion.schedules import noise_levels

        programs = self.programs[selector_of(name)]
        shape = (DRAWS, *self.held_out.shape[1:])
        noise = np.random.default_rng(self.lib.NOISE_SEED).standard_normal(shape, np.float32)
        levels = noise_levels("euler", DRAW_STEPS, 1.0)
        drawn = np.asarray(programs.draw(weights, noise, levels))
        true = self.held_out[self.shown]
        noised = (1 - DRAW_LEVEL) * (true / np.float32(127.5) - 1) + DRAW_LEVEL * noise
        restored = np.asarray(programs.draw(weights, noised, levels * np.float32(DRAW_LEVEL)))
        path = self.options.runs / "drawn.npz"
        arrays = dict(np.load(path)) if path.exists() and self.content["draws"] else {}
        arrays |= {f"{name}_drawn": to_bytes(drawn), f"{name}_restored": to_bytes(restored)}
        arrays |= {"true": true, "noised": to_bytes(noised)}
        np.savez(path, **arrays)
        self.content["draws"].append(name)

    def write(self) -> None:
        """Writes the JSON."""
        from sparse_quality_report import summary

        self.content["summary"] = summary(self.content)
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.options.out.with_suffix(".partial")
        lines = (f" {json.dumps(key)}: {text(value)}" for key, value in self.content.items())
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        partial.replace(self.options.out)

    def pictures(self) -> None:
        """Draws the pictures and prints the table."""
        from sparse_quality_report import draw, draw_samples, table

        draw(self.content, self.options.pictures)
        draw_samples(self.options.runs / "drawn.npz", self.content["draws"], self.options.pictures)
        print(table(self.content))


def selector_of(variant: str) -> str:
    """The selector whose programs a variant runs."""
    return "predictor" if variant == "dense" else variant


def selectors(variants: list[str]) -> list[str]:
    """The distinct selectors of some variants."""
    return list(dict.fromkeys(map(selector_of, variants)))


def variant_config(
    config: Any, variant: str, steps: int, thresholds: dict[str, float] | None = None
) -> Any:
    """The config of a variant for a number of steps."""
    selector = selector_of(variant)
    values: dict[str, Any] = {
        "selector": selector,
        "dense_steps": round(DENSE_SHARE * steps),
        "anneal_steps": round(ANNEAL_SHARE * steps),
    } | (thresholds or {})
    if variant == "dense":  # measures, but never switches
        values |= {"min_sparsity": 1.0, "min_recall": 1.0}
    if variant == "random":  # no layer would switch otherwise
        values |= {"min_recall": 0.0}
    sparse = dataclasses.replace(config.model.sparse_attention, **values)
    model = dataclasses.replace(config.model, sparse_attention=sparse)
    optimizer = config.optimizer
    if selector != "predictor":  # the others have no parameters of their own
        optimizer = dataclasses.replace(optimizer, groups=())
    return dataclasses.replace(config, model=model, optimizer=optimizer)


def first_config(config: Any, tokens: int, steps: int) -> Any:
    """The config of training on short clips."""
    config = plain_config(config)
    return dataclasses.replace(
        config,
        planning=dataclasses.replace(config.planning, m_mem=tokens),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=FIRST_RATE, warmup_steps=50),
        run=dataclasses.replace(config.run, steps=steps),
    )


def plain_config(config: Any) -> Any:
    """The config of a model without sparse attention, which measures nothing."""
    model = dataclasses.replace(config.model, sparse_attention=None)
    optimizer = dataclasses.replace(config.optimizer, groups=())
    return dataclasses.replace(config, model=model, optimizer=optimizer)


def write_samples(folder: Path, clips: Clips, shape: tuple[int, int, int], number: int) -> None:
    """Writes random crops of the clips that are not held out, flipped or not, as a data folder."""
    from alload_jax.data.store import StoreWriter

    if (folder / "manifest.parquet").exists():
        return
    rng = np.random.default_rng(_CROP_SEED)
    chosen = clips.of(held_out=False)
    order = np.concatenate([rng.permutation(chosen) for _ in range(-(-number // len(chosen)))])
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for clip in order[:number]:
            room = np.subtract(clips.pixels.shape[1:4], shape)
            t, y, x = rng.integers(room + 1)
            cut = clips.pixels[clip, t : t + shape[0], y : y + shape[1], x : x + shape[2]]
            cut = cut[:, :, ::-1] if rng.integers(2) else cut
            writer.add((cut / 127.5 - 1).astype(np.float16), np.zeros(1, np.int32), size=shape)


def one_of_each(clips: Clips, chosen: np.ndarray) -> np.ndarray:
    """The chosen clips, the first of each video before the second of each."""
    turn = [int(np.sum(clips.video[:n] == clips.video[n])) for n in chosen]
    return chosen[np.lexsort((chosen, np.array(turn)))]


def middle(pixels: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """The middle of clips [N, frames, height, width, 3]."""
    t, y, x = (np.subtract(pixels.shape[1:4], shape) // 2).tolist()
    return pixels[:, t : t + shape[0], y : y + shape[1], x : x + shape[2]]


def describe_clips(path: Path, clips: Clips, measured: np.ndarray) -> dict[str, Any]:
    """What the JSON says of the data; `measured` are the held-out clips whose loss is measured."""
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "trained": len(clips.of(held_out=False)),
        "measured": len(measured),
        "measured_videos": clips.video[measured].tolist(),
        "videos": clips.videos,
    }


def describe_run(result: Any, config: Any) -> dict[str, Any]:
    """What the JSON says of a run."""
    rows = result.rows
    seconds = np.array([row["step_seconds"] for row in rows])
    dense_steps = config.model.sparse_attention.dense_steps
    layers = [
        json.loads(line)
        for line in (Path(config.run.folder) / "layers.jsonl").read_text().splitlines()
    ]
    mean = {
        name: [rounded(np.mean(row[name], axis=-1), 4) for row in layers]
        for name in ("sparsity", "recall", "density")
    }
    last = {name: [rounded(each, 4) for each in layers[-1][name]] for name in mean}
    return {
        "loss": rounded([row["loss"] for row in rows]),
        "predictor_loss": rounded(
            [row.get("attention_predictor_loss", 0.0) for row in rows[::10]], 4
        ),
        "step_seconds": {
            "dense": round(float(np.median(seconds[1 : max(2, dense_steps)])), 5),
            "last": round(float(np.median(seconds[-max(1, len(seconds) // 5) :])), 5),
            "total": round(float(seconds.sum()), 3),
        },
        "held_out": [
            {
                "step": step,
                "seconds": round(at, 3),
                "levels": rounded(losses.mean(axis=1)),
                "mean": float(losses.mean()),
            }
            for step, at, losses in result.held_out
        ],
        "last_by_clip": [rounded(each) for each in result.held_out[-1][2]],
        "layers": {"step": [row["step"] for row in layers]} | mean,
        "sparse_from": switched_at(result.choices),
        "last_layers": last,
    }


def switched_at(choices: list[Any]) -> list[list[int]]:
    """The steps after which each layer became sparse, or dense again."""
    sparse = np.stack([np.asarray(each.sparse) for each in choices])
    before = np.vstack([np.zeros_like(sparse[:1]), sparse[:-1]])
    return [(np.flatnonzero(column) + 1).tolist() for column in (sparse != before).T]


def rounded(values: Any, digits: int = 6) -> Any:
    """The values as nested lists of rounded numbers."""
    return np.round(np.asarray(values, np.float64), digits).tolist()


def text(value: Any) -> str:
    """JSON with a line for each entry of a list of objects."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)


def to_bytes(clips: np.ndarray) -> np.ndarray:
    """Pixels of the model as bytes."""
    return np.clip((clips + 1) * 127.5, 0, 255).round().astype(np.uint8)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
