"""How drawn walks compare with rendered ones: what a classifier reads, distances, motion, faults.

    python benchmarks/walks.py learn --train data/walks/media --reader runs/walks/reader.safetensors
    python benchmarks/walks.py list --out runs/walks/drawn --clips 500
    python benchmarks/walks.py list --out runs/walks/continued --first-of data/walks/held_out
    alload sample --checkpoint runs/walks --list runs/walks/drawn/list.jsonl
    python benchmarks/walks.py score --reader runs/walks/reader.safetensors \
        --real data/walks/held_out --drawn runs/walks/drawn --out benchmarks/results/walks.json
    python benchmarks/walks.py trained --runs runs/walks --score benchmarks/results/walks.json
    python benchmarks/walks.py picture --real data/walks/held_out --drawn runs/walks/drawn \
        --numbers 0 1 2 3 4 5 --out docs/images/walks.webp

A small 3D network, the reader, learns the place and the movement of rendered clips. It then reads
drawn clips and rendered ones of another seed. The Fréchet distance of its features between drawn
and rendered clips is compared with that between two halves of the rendered ones. Clips are .mp4
files of at least 33 frames with the caption beside them; every fourth of their first 33 frames is
looked at. With --first-of, drawn clips begin with the first frames of rendered ones.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import av
import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from av.video.reformatter import VideoReformatter
from flax import nnx
from PIL import Image, ImageDraw, ImageFont, ImageOps
from simulator import FPS, MOVES, PLACES

from alload_jax.bench.harness import Record
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json

SIZE = (48, 64)
"""Height and width that the network sees."""
SHAPES = ((96, 128), (80, 144), (112, 112))
"""Heights and widths of the clips that are drawn: those of the prepared ones."""
CELL = (160, 120)
"""Width and height of a clip in a picture."""
CAPTIONS = [place["caption"] for place in PLACES]
WAYS = list(MOVES)


class Clips(NamedTuple):
    """Clips as the network and the measures need them.

    Attributes:
      seen: [N, 9, 48, 64, 3] uint8.
      place, move: [N] int, by the caption.
      motion: [N, 4] float, see `motion_of`.
    """

    seen: np.ndarray
    place: np.ndarray
    move: np.ndarray
    motion: np.ndarray


def motion_of(frames: np.ndarray) -> np.ndarray:
    """Of [T, H, W] grey frames: jerk over travel, flicker, least contrast and most grain.

    Travel is the mean change from a frame to the next and jerk the mean third difference. Flicker
    is the mean second difference of the brightness. Contrast is a frame's standard deviation, and
    grain its mean difference from its four neighbours' mean.
    """
    values = frames.astype(np.float32)
    travel = np.abs(np.diff(values, axis=0)).mean()
    jerk = np.abs(np.diff(values, 3, axis=0)).mean()
    flicker = np.abs(np.diff(values.mean((1, 2)), 2)).mean()
    contrast = values.std((1, 2)).min()
    inner = values[:, 1:-1, 1:-1]
    around = values[:, :-2, 1:-1] + values[:, 2:, 1:-1] + values[:, 1:-1, :-2] + values[:, 1:-1, 2:]
    grain = np.abs(inner - around / 4).mean((1, 2)).max()
    return np.array([jerk / max(travel, 0.05), flicker, contrast, grain])


def read_clip(path: Path) -> tuple[np.ndarray, int, int, np.ndarray] | None:
    """What `Clips` holds of a file; None for a clip of fewer than 33 frames."""
    caption = path.with_suffix(".txt").read_text(encoding="utf-8")
    place, _, move = caption.partition("; ")
    with av.open(str(path)) as file:
        frames = [frame for frame, _ in zip(file.decode(video=0), range(33), strict=False)]
    if len(frames) < 33:
        return None
    height, width = SIZE
    small, pale = VideoReformatter(), VideoReformatter()
    seen = [small.reformat(f, width, height, "rgb24", threads=1).to_ndarray() for f in frames[::4]]
    grey = [pale.reformat(f, 128, 96, "gray", threads=1).to_ndarray() for f in frames]
    return np.stack(seen), CAPTIONS.index(place), WAYS.index(move), motion_of(np.stack(grey))


def read_clips(folder: Path, workers: int) -> Clips:
    """All clips of a folder that are long enough, in the order of their names."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        found = list(filter(None, pool.map(read_clip, sorted(folder.glob("*.mp4")), chunksize=16)))
    if not found:
        raise InputError(f"{folder}: holds no .mp4 of 33 frames or more; name another folder")
    return Clips(*(np.array(column) for column in zip(*found, strict=True)))


class Reader(nnx.Module):
    """Names the place and the movement of a clip."""

    def __init__(self, rngs: nnx.Rngs):
        conv = partial(nnx.Conv, kernel_size=(3, 3, 3), padding="SAME", rngs=rngs)
        layers = ((3, 48, 1), (48, 96, 1), (96, 192, 2), (192, 384, 2))
        self.convolutions = nnx.List([conv(n, m, strides=(s, 2, 2)) for n, m, s in layers])
        norm = partial(nnx.GroupNorm, num_groups=16, rngs=rngs)
        self.norms = nnx.List([norm(width) for _, width, _ in layers])
        self.place = nnx.Linear(384, len(CAPTIONS), rngs=rngs)
        self.move = nnx.Linear(384, len(WAYS), rngs=rngs)

    def features(self, clips: jax.Array) -> jax.Array:
        """[N, 9, 48, 64, 3] uint8 → [N, 384]."""
        x = clips.astype(jnp.float32) / 127.5 - 1
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.gelu(norm(convolution(x)))
        return x.mean((1, 2, 3))


def train(clips: Clips, steps: int, batch: int = 128) -> Reader:
    """A reader that was trained on rendered clips, with random brightness and shifts."""
    reader = Reader(nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0, 2e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(reader, optax.adamw(schedule, weight_decay=0.05), wrt=nnx.Param)

    @nnx.jit
    def step(reader: Reader, optimizer: nnx.Optimizer, seen: jax.Array, named: jax.Array) -> None:
        def loss(reader: Reader) -> jax.Array:
            features = reader.features(seen)
            logits = reader.place(features), reader.move(features)
            found = map(optax.softmax_cross_entropy_with_integer_labels, logits, named)
            return jnp.mean(sum(found))

        optimizer.update(reader, nnx.grad(loss)(reader))

    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.choice(len(clips.place), batch)
        seen = clips.seen[chosen]
        top, left = rng.integers(-4, 5, 2)
        seen = np.roll(seen, (top, left), (2, 3)).astype(np.float32)
        seen = np.clip(seen * rng.uniform(0.8, 1.2, (batch, 1, 1, 1, 1)), 0, 255).astype(np.uint8)
        named = jnp.asarray([clips.place[chosen], clips.move[chosen]])
        step(reader, optimizer, jnp.asarray(seen), named)
    return reader


@nnx.jit
def look(reader: Reader, seen: jax.Array) -> tuple[jax.Array, ...]:
    """Features, place and movement of clips [N, 9, 48, 64, 3]."""
    features = reader.features(seen)
    return features, reader.place(features).argmax(-1), reader.move(features).argmax(-1)


def read(reader: Reader, clips: Clips) -> tuple[dict[str, float], np.ndarray]:
    """Shares of clips whose place, movement and both are read as captioned; features [N, 384]."""
    batches = (jnp.asarray(clips.seen[n : n + 64]) for n in range(0, len(clips.seen), 64))
    parts = zip(*(look(reader, batch) for batch in batches), strict=True)
    features, place, move = (np.concatenate(part) for part in parts)
    right = place == clips.place, move == clips.move
    shares = np.mean([*right, right[0] & right[1]], axis=1).tolist()
    return dict(zip(("place", "move", "both"), shares, strict=True)), features


def frechet(one: np.ndarray, other: np.ndarray) -> float:
    """The Fréchet distance of normal distributions fitted to features [N, 384]."""
    mean = one.mean(0) - other.mean(0)
    first, second = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = np.sqrt(np.linalg.eigvals(first @ second).real.clip(0)).sum()  # the trace of the root
    return float(mean @ mean + np.trace(first + second) - 2 * root)


def compare(reader: Reader, real: Clips, of_real: np.ndarray, drawn: Clips) -> dict[str, object]:
    """The figures of drawn clips beside as many rendered ones, whose features are `of_real`."""
    order = np.random.default_rng(0).permutation(len(real.place))
    half = min(len(drawn.place), len(order) // 2)
    shares, of_drawn = read(reader, drawn)
    one, other = of_real[order[:half]], of_real[order[half : 2 * half]]
    among_real, to_drawn = frechet(one, other), frechet(one, of_drawn[:half])
    jerk, flicker = (np.median(drawn.motion, 0) / np.median(real.motion, 0))[:2].tolist()
    flat = drawn.motion[:, 2] < 0.8 * real.motion[:, 2].min()
    grainy = drawn.motion[:, 3] > 1.25 * real.motion[:, 3].max()
    return {
        "clips": len(drawn.place),
        "read_as_captioned": shares,
        "frechet": to_drawn,
        "frechet_of_real": among_real,
        "frechet_ratio": to_drawn / among_real,
        "jerk_over_travel_ratio": jerk,
        "flicker_ratio": flicker,
        "flat_clips": int(flat.sum()),
        "grainy_clips": int(grainy.sum()),
    }


def learn(options: argparse.Namespace) -> None:
    """Trains the reader and writes its weights."""
    reader = train(read_clips(options.train, options.workers), options.steps)
    options.reader.parent.mkdir(parents=True, exist_ok=True)
    flat = nnx.to_flat_state(nnx.state(reader, nnx.Param))
    arrays = {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in flat}
    safetensors.numpy.save_file(arrays, options.reader)


def read_reader(path: Path) -> Reader:
    """The reader of weights that `learn` wrote."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; write it with `walks.py learn`")
    reader, weights = Reader(nnx.Rngs(0)), safetensors.numpy.load_file(path)
    for name, variable in nnx.to_flat_state(nnx.state(reader, nnx.Param)):
        variable[...] = jnp.asarray(weights[".".join(map(str, name))])
    return reader


def score(options: argparse.Namespace) -> None:
    """Writes the figures of each folder of drawn clips."""
    reader, real = read_reader(options.reader), read_clips(options.real, options.workers)
    held_out, of_real = read(reader, real)
    report = Record(options.out, ["jax", "flax"], real=held_out, real_clips=len(real.place))
    for folder in options.drawn:
        found = compare(reader, real, of_real, read_clips(folder, options.workers))
        report.add({"folder": folder.name, **found}, to="drawn")
        print(json.dumps(found, indent=1))


def trained(options: argparse.Namespace) -> None:
    """Adds to a score how long its runs took and what their validations measured."""
    report = Record(options.score, ("jax", "jaxlib", "flax"))
    if options.score.exists():
        report.content = json.loads(options.score.read_text())
    for folder in options.runs:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = {line["step"]: line for line in lines if "step_seconds" in line}
        found = {"folder": folder.name, "steps": len(steps)}
        for name in ("samples", "tokens", "step_seconds"):
            found[name] = sum(line[name] for line in steps.values())
        found["validation"] = [
            {"seconds": sum(each["step_seconds"] for n, each in steps.items() if n <= at), **line}
            for line in lines
            if "validation/loss" in line and (at := line["step"])
        ]
        found["starts"] = json.loads((folder / "environment.json").read_text())
        report.add(found, to="runs")
    for run in (runs := report.content["runs"]):
        run["time_to_last_loss_of"] = {other["folder"]: time_to_last(run, other) for other in runs}
    report.write()


def time_to_last(run: Json, other: Json) -> float | None:
    """Seconds of steps until a run's held-out loss is another's last, over those of the other."""
    for last in other["validation"][-1:]:
        for at in run["validation"]:
            if at["validation/loss"] <= last["validation/loss"]:
                return at["seconds"] / last["seconds"]
    return None


def wanted(clips: int) -> Iterator[dict[str, object]]:
    """Every place and movement in turn, in three shapes."""
    for number in range(clips):
        place = CAPTIONS[number % len(CAPTIONS)]
        move = WAYS[(number // len(CAPTIONS) + number) % len(WAYS)]
        height, width = SHAPES[number // 144 % 3]
        yield {"prompt": f"{place}; {move}", "frames": 65, "height": height, "width": width}


def continued(clips: int, rendered: Path, out: Path) -> Iterator[dict[str, object]]:
    """The captions of rendered clips of 65 frames and their first frames, written as pictures.

    Names begin with the place and the part: in another order, all would be of few places.
    """
    for path in np.random.default_rng(0).permutation(sorted(rendered.glob("*.mp4"))):
        with av.open(str(path)) as file:
            if file.streams.video[0].frames != 65:
                continue
            first = next(file.decode(video=0))
        name, ratio = f"first_{path.stem}.png", first.width / first.height
        first.to_image().save(out / name)
        height, width = min(SHAPES, key=lambda shape: abs(shape[1] / shape[0] - ratio))
        caption = path.with_suffix(".txt").read_text(encoding="utf-8")
        line = {"prompt": caption, "frames": 65, "height": height, "width": width}
        yield {**line, "image": name}
        if not (clips := clips - 1):
            return


def write_list(options: argparse.Namespace) -> None:
    """Writes a list for `alload sample`, and the captions."""
    options.out.mkdir(parents=True)
    clips, rendered = options.clips, options.first_of
    each = continued(clips, rendered, options.out) if rendered else wanted(clips)
    lines = []
    for number, line in enumerate(each):
        (options.out / f"{number:04}.txt").write_text(str(line["prompt"]), encoding="utf-8")
        lines.append(json.dumps({**line, "seed": number, "out": f"{number:04}.mp4"}))
    (options.out / "list.jsonl").write_text("\n".join(lines), encoding="utf-8")


def draw_picture(options: argparse.Namespace) -> None:
    """Writes an animation of drawn clips, each beside a rendered one of its caption and shape."""
    cells = []
    for number in options.numbers:
        drawn = options.drawn / f"{number:04}.mp4"
        if not drawn.is_file():
            raise InputError(f"{drawn}: no such file; give --numbers of drawn clips")
        caption, frames = drawn.with_suffix(".txt").read_text(encoding="utf-8"), frames_of(drawn)
        cells.append((caption, frames, rendered_like(frames, caption, options.real)))
    (width, height), gap, line = CELL, 6, 18
    across, down = 2 * width + 3 * gap, height + line + gap
    size = (min(3, len(cells)) * across, -(-len(cells) // 3) * down + gap)
    pages = []
    for moment in range(min(len(clip) for _, *clips in cells for clip in clips)):
        page = Image.new("RGB", size, "white")
        for place, (caption, *clips) in enumerate(cells):
            left, top = place % 3 * across + gap, place // 3 * down + gap
            for side, clip in enumerate(clips):
                picture = ImageOps.pad(clip[moment], CELL, Image.Resampling.LANCZOS, "white")
                page.paste(picture, (left + side * (width + gap // 2), top))
            font = ImageFont.load_default(12)
            ImageDraw.Draw(page).text((left, top + height + 2), caption, "black", font)
        pages.append(page)
    pages[0].save(
        options.out,
        save_all=True,
        append_images=pages[1:],
        duration=1000 // FPS,
        loop=0,
        quality=80,
        method=6,
    )


def rendered_like(frames: list[Image.Image], caption: str, folder: Path) -> list[Image.Image]:
    """The first rendered clip of this caption and as many frames, of nearly the same ratio."""
    ratio = frames[0].width / frames[0].height
    for text in sorted(folder.glob("*.txt")):
        clip = text.with_suffix(".mp4")
        if text.read_text(encoding="utf-8") != caption or not clip.exists():
            continue
        found = frames_of(clip)
        if len(found) == len(frames) and abs(found[0].width / found[0].height / ratio - 1) < 0.05:
            return found
    raise InputError(f"{folder}: holds no such clip of {caption!r}; leave it out of --numbers")


def frames_of(path: Path) -> list[Image.Image]:
    """The frames of a clip."""
    with av.open(str(path)) as file:
        return [frame.to_image() for frame in file.decode(video=0)]


def main(argv: list[str]) -> int:
    """Trains the reader, lists, scores or shows samples, or sums up a run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    learning, listing, scoring, noting, drawing = map(
        commands.add_parser, ("learn", "list", "score", "trained", "picture")
    )
    learning.add_argument("--train", type=Path, required=True, help="rendered clips to learn")
    learning.add_argument("--steps", type=int, default=1500)
    learning.set_defaults(run=learn)
    listing.add_argument("--out", type=Path, required=True, help="folder to make")
    listing.add_argument("--clips", type=int, default=500)
    listing.add_argument("--first-of", type=Path, help="rendered clips, whose first frames begin")
    listing.set_defaults(run=write_list)
    scoring.add_argument("--real", type=Path, required=True, help="rendered clips of another seed")
    scoring.add_argument("--drawn", type=Path, nargs="+", required=True)
    scoring.add_argument("--out", type=Path, required=True)
    scoring.set_defaults(run=score)
    noting.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of train.py")
    noting.add_argument("--score", type=Path, required=True, help="file to which it is added")
    noting.set_defaults(run=trained)
    drawing.add_argument("--real", type=Path, required=True, help="rendered clips to stand beside")
    drawing.add_argument("--drawn", type=Path, required=True)
    drawing.add_argument("--numbers", type=int, nargs="+", required=True, help="of drawn clips")
    drawing.add_argument("--out", type=Path, required=True, help=".webp or .gif to write")
    drawing.set_defaults(run=draw_picture)
    for each in (learning, scoring):
        each.add_argument("--reader", type=Path, required=True, help="file of its weights")
        each.add_argument("--workers", type=int, default=8)
    options = parser.parse_args(argv)
    options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
