"""Renders walks through 24 places of Freedoom's maps, with captions: stills and clips, by ViZDoom.

    python benchmarks/simulator.py --out data/walks/media --samples 30000 --workers 16

writes .jpg and .mp4 files and a .txt with the caption beside each. ViZDoom's package holds the
maps; no display is needed.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import av
import numpy as np
import yaml
from PIL import Image

from alload_jax.errors import InputError, run_command

FPS = 16
TICS = 2
"""Steps of the simulator, of 1/35 s, from a frame to the next."""
RATIOS = {(240, 320): 0.5, (180, 320): 0.3, (240, 240): 0.2}
"""Height and width that are cut from the screen, and how often."""
FRAMES = {1: 0.35, 17: 0.2, 33: 0.2, 65: 0.25}
"""Frames of a sample, and how often."""
SMALL = 0.3
"""Share of the stills that are a quarter as wide as the screen."""
WALK, TURN = 7.0, 1.0
"""Units and degrees of a step of the simulator."""
MOVES = {
    "walks ahead": (WALK, 0, 0),
    "walks back": (-WALK, 0, 0),
    "steps left": (0, -WALK, 0),
    "steps right": (0, WALK, 0),
    "turns left": (0, 0, -TURN),
    "turns right": (0, 0, TURN),
}
"""Forward, right and turn of each step, by what the caption says."""
_REACHED = 0.29 * 0.75
"""Of `WALK`, that a step moves at least on the way of a clip that nothing stops."""


PLACES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
"""Captions of places, and where walks begin near, in which direction and of which map."""


class Walker:
    """Walks from near a place on, seen by who walks."""

    def __init__(self, place: dict[str, Any]):
        import vizdoom  # scores need the captions alone

        self._place = place
        game = vizdoom.DoomGame()
        wad = str(Path(vizdoom.__file__).parent / f"{place['wad']}.wad")
        game.set_doom_game_path(wad)
        game.set_doom_scenario_path(wad)
        game.set_doom_map(place["map"])
        game.set_doom_config_path(f"{tempfile.gettempdir()}/vizdoom-{os.getpid()}.ini")
        game.set_window_visible(False)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_320X240)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        for shown in ("hud", "weapon", "crosshair", "decals", "particles", "messages", "corpses"):
            getattr(game, f"set_render_{shown}")(False)
        ways = ("MOVE_FORWARD_BACKWARD", "MOVE_LEFT_RIGHT", "TURN_LEFT_RIGHT")
        game.set_available_buttons([getattr(vizdoom.Button, f"{way}_DELTA") for way in ways])
        known = ("POSITION_X", "POSITION_Y", "ANGLE")
        game.set_available_game_variables([getattr(vizdoom.GameVariable, n) for n in known])
        game.set_episode_timeout(0)
        game.set_seed(0)
        game.add_game_args("-nomonsters +sv_cheats 1 +sv_nohealth 1 +sv_noitems 1 +sv_noarmor 1")
        game.init()
        for command in ("con_midtime 0", "blood_fade_scalar 0", "pickup_fade_scalar 0", "god"):
            game.send_game_command(command)
        self._game = game

    def walk(self, move: str, frames: int, rng: np.random.Generator) -> np.ndarray | None:
        """Frames [T, 240, 320, 3] of a walk from a random point near the place.

        None where something is in the way.
        """
        place, game = self._place, self._game
        x, y = place["x"] + rng.uniform(-32, 32), place["y"] + rng.uniform(-32, 32)
        game.send_game_command(f"warp {x:.0f} {y:.0f}")
        game.make_action([0, 0, 0], TICS)
        angle = place["angle"] + rng.uniform(-30, 30)
        game.make_action([0, 0, self._state()[2] - angle], 1)
        game.make_action([0, 0, 0], 20)  # falls to the ground, and fades of things taken up end
        begun = self._state()
        action, pictures = list(MOVES[move]), []
        for _ in range(frames):
            pictures.append(game.get_state().screen_buffer.copy())
            game.make_action(action, TICS)
        way = math.dist(begun[:2], self._state()[:2])
        least = _REACHED * max(map(abs, action[:2])) * TICS * (frames - 1)
        return None if way < least else np.stack(pictures)

    def _state(self) -> Any:
        return self._game.get_state().game_variables

    def close(self) -> None:
        """Ends the simulator."""
        self._game.close()


def draw_sample(walker: Walker, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """A clip [T, H, W, 3], half as large as the screen or smaller, and how one walks in it."""
    (height, width) = list(RATIOS)[rng.choice(len(RATIOS), p=list(RATIOS.values()))]
    frames = int(rng.choice(list(FRAMES), p=list(FRAMES.values())))
    clip = None
    while clip is None:
        move = str(rng.choice(list(MOVES)))
        clip = walker.walk(move, frames, rng)
    top, left = (240 - height) // 2, (320 - width) // 2
    clip = clip[:, top : top + height, left : left + width]
    by = 4 if frames == 1 and rng.uniform() < SMALL else 2
    return reduced(clip, by), move if frames > 1 else "stands still"


def reduced(clip: np.ndarray, by: int) -> np.ndarray:
    """Means of squares of `by` pixels of a clip [T, H, W, 3]; pixels left over are cut off."""
    height, width = (side // by * by for side in clip.shape[1:3])
    corners = ((i, j) for i in range(by) for j in range(by))
    parts = [clip[:, i:height:by, j:width:by] for i, j in corners]
    total = np.stack(parts).sum(axis=0, dtype=np.uint16)
    return ((total + by * by // 2) // (by * by)).astype(np.uint8)


def write_clip(path: Path, clip: np.ndarray) -> None:
    """Writes frames [T, H, W, 3] as .mp4."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=FPS, options={"crf": "14", "preset": "veryfast"})
        stream.height, stream.width = clip.shape[1:3]
        stream.pix_fmt, stream.thread_count = "yuv420p", 1
        for picture in clip:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())


def render(job: tuple[int, int, int], out: Path, seed: int) -> int:
    """Renders `samples` of a place as part `part`: (place, part, samples)."""
    place, part, samples = job
    os.chdir(tempfile.gettempdir())  # ViZDoom leaves a folder where it runs
    rng = np.random.default_rng((seed, place, part))
    walker = Walker(PLACES[place])
    for number in range(samples):
        clip, move = draw_sample(walker, rng)
        name = f"{place:02}_{part:03}_{number:04}"
        if len(clip) == 1:
            Image.fromarray(clip[0]).save(out / f"{name}.jpg", quality=95)
        else:
            write_clip(out / f"{name}.mp4", clip)
        (out / f"{name}.txt").write_text(f"{PLACES[place]['caption']}; {move}")
    walker.close()
    return samples


def jobs(samples: int, most: int = 50) -> Iterator[tuple[int, int, int]]:
    """Parts of at most so many samples, of each place in turn; places have equally many."""
    of_place = [len(range(place, samples, len(PLACES))) for place in range(len(PLACES))]
    for part in range(-(-of_place[0] // most)):
        for place, number in enumerate(of_place):
            if (left := min(most, number - part * most)) > 0:
                yield place, part, left


def main(argv: list[str]) -> int:
    """Renders the samples."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--samples", type=int, default=30_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if not find_spec("vizdoom"):
        raise InputError("the package vizdoom is missing; install alload-jax[simulator]")
    if options.out.exists():
        raise InputError(f"{options.out}: already exists; name another folder with --out")
    options.out.mkdir(parents=True)
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        run = partial(render, out=options.out.resolve(), seed=options.seed)
        done = 0
        for samples in pool.map(run, jobs(options.samples)):
            done += samples
            print(f"\r{done:,} of {options.samples:,} samples", end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
