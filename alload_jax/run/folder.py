"""What a run writes to its folder before it trains."""

from collections.abc import Sequence
from pathlib import Path

from alload_jax.config import Config, write_config
from alload_jax.data.manifest import Manifest
from alload_jax.training.run_files import append_environment, write_json


def write_folder(
    config: Config, folder: Path, manifest: Manifest, argv: Sequence[str], start: int
) -> None:
    """Writes the config, facts about the data and the environment.

    Args:
      config: the config in force.
      folder: folder of the run.
      manifest: the samples.
      argv: the command line.
      start: steps done already.
    """
    write_config(config, folder / "config.yaml")
    known = {
        "vae_stride": list(manifest.vae_stride),
        "text_length": manifest.longest_text(),
        "origin": manifest.origin,
    }
    write_json(folder / "data.json", known)  # for `alload sample`, wherever the data goes
    append_environment(folder / "environment.json", list(argv), start)
