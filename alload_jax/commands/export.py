"""`alload export`: writes a run's weights as a folder that diffusers loads."""

import argparse
import dataclasses

from alload_jax.commands.flags import KEYS, KEYS_HELP, add_run_flags, run_each_expert
from alload_jax.errors import print_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--checkpoint", required=True, help="run folder of a model conditioned on text")
    add("--out", required=True, help="folder to write; must be empty or not exist")
    add_run_flags(add)
    add("--keys", choices=KEYS, default="diffusers", help=KEYS_HELP)
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")


def run(options: argparse.Namespace) -> int:
    """Writes the folder, or that of each expert, and prints how to load it."""
    return run_each_expert(_run, options, "checkpoint")


def _run(options: argparse.Namespace) -> int:
    # Imported here because JAX takes a second to import.
    from alload_jax.commands.model_source import find_run, save_transformer
    from alload_jax.models.families import parameter_count

    source = dataclasses.replace(
        find_run(options.checkpoint, options.weights, options.step), base=options.base
    )
    load = save_transformer(source, options.out, options.dtype, options.keys)
    text = source.config.text
    length = f" and pad texts to {text.length} tokens (max_sequence_length)" if text else ""
    written = dataclasses.replace(source.config, sparse_attention=None, lora=None)
    print(
        f"{options.out}: {parameter_count(written):,} parameters of step {source.step}, "
        f"{options.dtype}; load it with {load}{length}"
    )
    if source.config.lora is not None:
        assert source.run is not None
        stored = source.run.parameters.stored_dtype
        print_stderr(
            "note: the adapters are merged into the weights as trained, which were rounded to "
            f"{stored}; `alload lora export` writes them alone, and `alload lora merge` adds "
            "them to released weights"
        )
    if source.config.sparse_attention is not None:
        print_stderr(
            "note: others compute all self-attention densely; see the difference with "
            "`alload sample --dense-attention`"
        )
    return 0
