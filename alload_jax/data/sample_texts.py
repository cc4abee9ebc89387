"""The texts of a sample that has several: how a record holds them, and which one an epoch takes."""

from collections.abc import Mapping, Sequence

import numpy as np

from alload_jax.data.record import LABELS, TEXT, Arrays
from alload_jax.data.sample_form import part_names

_STREAM = 2
"""Tells these draws from others of the same seed."""


def with_alternatives(
    arrays: dict[str, np.ndarray],
    alternatives: Sequence[np.ndarray],
    parts: Sequence[Mapping[str, np.ndarray]] = (),
) -> dict[str, np.ndarray]:
    """A record's arrays with further conditions of the sample, `text.1`, `text.2` and so on.

    Args:
      arrays: of the record, with its first condition.
      alternatives: [L, width] or [L] each, as the first.
      parts: for each alternative its tokens of further kinds by name, stored as `glyphs.1` and so
        on; kinds that are left out are those of the first condition.
    """
    name, found = _name(arrays), dict(arrays)
    found |= {f"{name}.{number}": other for number, other in enumerate(alternatives, 1)}
    for kind in dict.fromkeys(kind for kinds in parts for kind in kinds):
        for number, kinds in enumerate(parts, 1):  # without gaps, so that `texts_of` finds all
            found[f"{kind}.{number}"] = kinds.get(kind, arrays[kind])
    return found


def texts_of(arrays: Arrays, name: str | None = None) -> list[np.ndarray]:
    """All conditions of a sample, of [L, width] or [L] each; usually one.

    Args:
      arrays: of the sample.
      name: `TEXT` or `LABELS`, None for what there is of them; or a further kind of tokens.
    """
    name = name or _name(arrays)
    found = [arrays[name]]
    while (other := arrays.get(f"{name}.{len(found)}")) is not None:
        found.append(other)
    return found


def with_text_of_epoch(
    arrays: dict[str, np.ndarray], seed: int, epoch: int, sample: int
) -> dict[str, np.ndarray]:
    """The arrays with one of the sample's texts as its text, drawn from seed, epoch and sample.

    Tokens of further kinds are those of that text.

    Args:
      arrays: of the sample; returned as they are if it has one text.
      seed: of the run.
      epoch: as `noise_epoch` numbers it, so that repetitions draw anew.
      sample: the manifest's row number.
    """
    texts = texts_of(arrays)
    if len(texts) == 1:
        return arrays
    drawn = np.random.SeedSequence(seed, spawn_key=(_STREAM, epoch, sample)).generate_state(1)[0]
    number = int(drawn) % len(texts)
    kinds = {kind: arrays.get(f"{kind}.{number}") for kind in part_names(arrays)}
    taken = {kind: tokens for kind, tokens in kinds.items() if tokens is not None}
    return arrays | taken | {_name(arrays): texts[number]}


def _name(arrays: Arrays) -> str:
    return TEXT if TEXT in arrays else LABELS
