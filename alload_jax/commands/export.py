"""`alload export`: a run's weights as a folder that diffusers loads."""

import argparse
from pathlib import Path

HELP = "Write a run's weights as a transformer folder of diffusers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--checkpoint", required=True, help="a run folder; its model's condition must be text")
    add("--out", required=True, help="the folder; must be empty or not exist")
    add("--weights", choices=["ema", "raw"], help="which of the run's; default ema")
    add("--step", type=int, help="which of the run's checkpoints; default the newest")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")


def run(options: argparse.Namespace) -> int:
    """Writes the folder and says how to load it."""
    # Only now: they need JAX, which takes a second to import.
    from alload_jax.commands.model_source import find_run
    from alload_jax.models.common.weights import parameter_count, require_free, save_weights
    from alload_jax.models.wan.conversion import diffusers_fields
    from alload_jax.sampling.flow import one_device_mesh

    source = find_run(options.checkpoint, options.weights, options.step)
    diffusers_fields(source.config)  # refuses what diffusers has no model for
    require_free(Path(options.out))
    save_weights(options.out, source.params(one_device_mesh()), source.config, options.dtype)
    assert source.config.text is not None
    print(
        f"{options.out}: {parameter_count(source.config):,} parameters of step {source.step}, "
        f"{options.dtype}; load it with WanTransformer3DModel.from_pretrained({options.out!r}) "
        f"and fill texts to {source.config.text.length} tokens (max_sequence_length)"
    )
    return 0
