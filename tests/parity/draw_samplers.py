"""Draws the golden files that the samplers are compared with, from diffusers' own schedulers.

    python tests/parity/draw_samplers.py [--out tests/golden/samplers]

The flow is tanh(latents·matrix)·(1 + σ)·gain + text, followed in float32. The folder holds

- `flow.safetensors`: `noise` [B, F, C], `matrix` [C, C], `gain` [B], `text` [B, F, C];
- `<sampler>.safetensors`: for every case `<case>.sigmas` [steps + 1] and `<case>.latents`
  [steps + 1, B, F, C], the noise and what each step made of it.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "samplers"
SAMPLERS = ("euler", "unipc")
CASES = {
    f"{steps}_steps_shift_{shift}": (steps, shift)
    for steps in (1, 2, 3, 5, 20)
    for shift in (1, 3, 5)
}


def flow_arrays() -> dict[str, torch.Tensor]:
    """The noise to start from, and what the flow is made of."""
    draw = np.random.default_rng(0).normal
    arrays = {
        "noise": draw(size=(2, 3, 5)),
        "matrix": draw(size=(5, 5)),
        "gain": draw(size=2),
        "text": draw(size=(2, 3, 5)),
    }
    return {name: torch.tensor(array, dtype=torch.float32) for name, array in arrays.items()}


def scheduler_of(
    sampler: str, steps: int, shift: float
) -> FlowMatchEulerDiscreteScheduler | UniPCMultistepScheduler:
    """Diffusers' scheduler, ready for its first step."""
    if sampler == "euler":
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        # Unshifted levels: it shifts them itself.
        scheduler.set_timesteps(sigmas=np.linspace(1, 0, steps + 1)[:-1])
    else:
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=shift,
            num_train_timesteps=1000,
        )
        scheduler.set_timesteps(steps)
    # Else it looks for its first timestep among all, and takes a later one that rounds alike.
    scheduler.set_begin_index(0)
    return scheduler


def follow(sampler: str, steps: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels [steps + 1] and latents [steps + 1, B, F, C] of a case."""
    arrays = flow_arrays()
    scheduler = scheduler_of(sampler, steps, shift)
    path = [arrays["noise"]]
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        gain = arrays["gain"][:, None, None]
        slope = torch.tanh(path[-1] @ arrays["matrix"]) * (1 + sigma) * gain + arrays["text"]
        path.append(scheduler.step(slope, timestep, path[-1]).prev_sample)
    return scheduler.sigmas, torch.stack(path)


def draw(out: Path) -> None:
    """Writes the golden files into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(flow_arrays(), out / "flow.safetensors")
    for sampler in SAMPLERS:
        tensors = {}
        for case, (steps, shift) in CASES.items():
            tensors[f"{case}.sigmas"], tensors[f"{case}.latents"] = follow(sampler, steps, shift)
        save_file(tensors, out / f"{sampler}.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=GOLDEN)
    draw(parser.parse_args().out)
