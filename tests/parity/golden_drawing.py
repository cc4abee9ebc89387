"""Draws golden files from a model of diffusers: what the draw_*.py of all families share."""

import argparse
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file

SMALL = 1 / 32
"""Variance 1e-3, of which an epsilon of 1e-5 or 1e-6 is a visible part."""


class Case(Protocol):
    """A model and its calls; names that match `small` are drawn smaller, so that epsilons show."""

    name: str
    calls: tuple[Any, ...]
    small: str


def main(golden: Path, cases: Sequence[Case], draw: Callable[[Any, Path], None], doc: str) -> None:
    """Draws all cases into the folder of the command line, by default `golden`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=golden)
    out = parser.parse_args().out
    for case in cases:
        draw(case, out / case.name)


def draw_case(
    case: Case,
    folder: Path,
    model: torch.nn.Module,
    inputs_of: Callable[[Any, Any, int], dict[str, torch.Tensor]],
    call: Callable[[dict[str, torch.Tensor]], torch.Tensor],
) -> None:
    """Writes one case's files into `folder`; `inputs_of` gets the case, a call and its number."""
    folder.mkdir(parents=True, exist_ok=True)
    _randomise(case, model)
    drawn = [inputs_of(case, each, number) for number, each in enumerate(case.calls)]
    model.save_pretrained(folder / "transformer")
    inputs = {f"{n}.{name}": value for n, each in enumerate(drawn) for name, value in each.items()}
    save_file(inputs, folder / "inputs.safetensors")
    expected = {}
    for number, arrays in enumerate(drawn):
        output = call(arrays)
        (output * arrays["cotangent"]).sum().backward()
        expected[f"{number}.output"] = output.detach().contiguous()
    for key, value in model.named_parameters():
        expected[f"grad.{key}"] = torch.zeros_like(value) if value.grad is None else value.grad
    save_file(expected, folder / "expected.safetensors")


def normal(case: Case, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal values that depend on the names alone, not on the order of drawing."""
    values = generator(case, name).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values) * (SMALL if re.search(case.small, name) else 1.0)


def generator(case: Case, name: str) -> np.random.Generator:
    """NumPy's, because torch's normal values differ between CPUs in their last bits."""
    return np.random.default_rng([zlib.crc32(case.name.encode()), zlib.crc32(name.encode())])


@torch.no_grad()
def _randomise(case: Case, model: torch.nn.Module) -> None:
    """Draws all parameters such that activations stay of order one; none is left at 0 or 1."""
    for key, parameter in model.named_parameters():
        values = normal(case, key, parameter.shape)
        if not key.endswith((".weight", ".bias")):  # scale_shift_table, pos_embed
            values = values / 2
        elif parameter.ndim == 1:
            values = values / 4 + (1.0 if key.endswith(".weight") else 0.0)
        else:
            values = values / math.sqrt(math.prod(parameter.shape[1:]))
        parameter.copy_(values)
