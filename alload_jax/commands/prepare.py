"""`alload prepare`: writes a data folder."""

import argparse

from alload_jax.commands import prepare_dataset, prepare_media

HELP = "Write a data folder to train on."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a subcommand with its own flags for each kind of data."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    media = kinds.add_parser("media", help=prepare_media.HELP, description=prepare_media.HELP)
    prepare_media.add_arguments(media)
    media.set_defaults(prepare=prepare_media.run, parser=media)
    prepare_dataset.add_kinds(kinds)


def run(options: argparse.Namespace) -> int:
    """Writes the folder."""
    return options.prepare(options)
