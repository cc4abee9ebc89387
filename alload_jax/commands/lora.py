"""`alload lora`: writes a run's adapters as a file, converts files, merges them into weights."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from alload_jax.commands import add_command, flags
from alload_jax.errors import InputError, print_stderr

if TYPE_CHECKING:  # these modules import JAX, which takes a second
    from alload_jax.models.common.config import ModelConfig
    from alload_jax.models.lora_files import Adapter, Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the commands below this one and their flags."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    files = partial(flags.run_each_expert, as_files=True)

    words = "Write the adapters of a run as a safetensors file."
    run = partial(files, _export, name="checkpoint")
    add = add_command(actions, "export", words, run).add_argument
    add("--checkpoint", required=True, help="run folder of a model with adapters (model.lora)")
    flags.add_run_flags(add, base=False)
    _add_output(add)
    words = "Write a file of adapters with other keys."
    add = add_command(actions, "convert", words, partial(files, _convert, name="file")).add_argument
    add("file", help="file of adapters of diffusers, PEFT, ComfyUI or musubi-tuner")
    add("--model", required=True, help="transformer folder of the model; config.json is enough")
    flags.add_skip_unknown(add)
    _add_output(add)
    words = "Add files of adapters to weights, for diffusers."
    run = partial(flags.run_each_expert, _merge, name="model")
    add = add_command(actions, "merge", words, run).add_argument
    add("--model", required=True, help="transformer folder of diffusers, or run folder")
    add("--lora", required=True, metavar="FILE[:SCALE]", nargs="+", help="files, with factors; "
        "default 1")  # fmt: skip
    flags.add_skip_unknown(add)
    add("--out", required=True, help="folder to write; must be empty or not exist")
    add("--base", metavar="DIR", help="weights that a run of adapters was trained on; default: "
        "where they were in training")  # fmt: skip
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default bfloat16")


def _add_output(add: flags.AddFlag) -> None:
    add("--out", required=True, metavar="FILE", help="safetensors file to write")
    add("--keys", choices=flags.KEYS, default="diffusers", help=flags.KEYS_HELP)
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")
    add("--force", action="store_true", help="replace a file that exists")


def _export(options: argparse.Namespace) -> int:
    # Imported here because JAX takes a second to import.
    from flax.traverse_util import flatten_dict

    from alload_jax.commands.model_source import find_run
    from alload_jax.models.common.lora import ADAPTER
    from alload_jax.models.lora_files import adapters_of
    from alload_jax.training.restore import one_device_mesh

    source = find_run(options.checkpoint, options.weights, options.step)
    if source.config.lora is None:
        raise InputError(
            f"{options.checkpoint}: the run has no adapters (model.lora is null); `alload export` "
            "writes its weights"
        )
    params = source.trained(one_device_mesh())
    adapters = adapters_of(params, source.config.lora)
    others = [name for name in flatten_dict(params, sep="/") if not name.endswith(ADAPTER)]
    if others:
        print_stderr(
            f"note: {others[0]} and {len(others) - 1} more are trained too, which a file of "
            "adapters cannot hold; `alload export` writes the whole model"
        )
    text = source.config.text
    length = None if text is None else text.length
    step = f"step {source.step}"
    status = _write(options, adapters, source.config, step, source.base_name(), length)
    if length is not None:
        print(f"texts were padded to {length} tokens (max_sequence_length)")
    return status


def _convert(options: argparse.Namespace) -> int:
    from alload_jax.commands.model_source import described_by, note_skipped
    from alload_jax.models.families import read_model_config
    from alload_jax.models.lora_files import read_lora
    from alload_jax.training import expert_places

    place = expert_places(options.model)[0]  # both experts are alike
    config = described_by(place) if place.is_file() else read_model_config(place / "config.json")
    lora = read_lora(options.file, config, options.skip_unknown)
    note_skipped(lora)
    if lora.differences:
        raise InputError(
            f"{lora.place}: also changes weights and biases (diff, diff_b, LoKr), which the keys "
            "of others lack; merge it into weights with `alload lora merge`"
        )
    return _write(options, lora.adapters, config, str(lora.place), text_length=lora.text_length)


def _write(
    options: argparse.Namespace,
    adapters: "dict[Target, Adapter]",
    config: "ModelConfig",
    source: str,
    base: str = "",
    text_length: int | None = None,
) -> int:
    from alload_jax.models.lora_files import write_lora

    tensors = write_lora(
        file=Path(options.out),
        adapters=adapters,
        config=config,
        keys=options.keys,
        dtype=options.dtype,
        force=options.force,
        base=base,
        text_length=text_length,
    )
    ranks = sorted({adapter.rank for adapter in adapters.values()})
    print(
        f"{options.out}: {len(adapters)} adapters of rank {', '.join(map(str, ranks))} from "
        f"{source}, {tensors} tensors, keys of {options.keys}, {options.dtype}"
        + (f"; they belong to {base}" if base else "")
    )
    return 0


def _merge(options: argparse.Namespace) -> int:
    from alload_jax.commands import model_source

    source = model_source.find_source(options.model)
    added = ("--lora", options.lora, options.skip_unknown)
    source = model_source.completed(source, options.base, *added)
    load = model_source.save_transformer(source, options.out, options.dtype)
    print(
        f"{options.out}: {options.model} with {', '.join(options.lora)}, {options.dtype}; load it "
        f"with {load}"
    )
    return 0
