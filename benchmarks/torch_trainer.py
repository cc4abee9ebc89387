"""A training step like our own, in PyTorch, of one of diffusers' transformers.

Neither JAX nor anything that imports it is loaded here: two frameworks in a process would share
the device's memory.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_models import MODELS

Compiled = Literal["whole", "blocks", "no"]

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.99), 1e-8, 0.01
"""AdamW as in `alload_jax.training.optimizer`."""
CLIP_NORM = 1.0
EMA_DECAY = 0.999
TIMESTEP_SCALE = 1000.0


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
      kind: name of one of `torch_models.MODELS`.
      model: arguments of diffusers' class.
      batch: samples a step.
      latents: frames, height, width of a latent clip.
      remat: full: every block is recomputed in the backward pass (gradient checkpointing).
      compile: by torch.compile: true: the whole model, each block where that fails, nothing where
        that fails too. blocks: not the whole, whose compilation takes far longer.
      compile_mode: torch.compile's mode.
      attention: the backend that attention must take; default: PyTorch's choice.
      masked: whether attention gets masks, as diffusers' model makes them where texts have padding.
        Here no text has any, so that attention without a mask computes the same.
      precision: autocast: float32 weights, each operation casts what it takes. bf16_copy: bfloat16
        weights for forward and backward, float32 ones for the optimizer, as mixed-precision
        trainers do.
      warmup: steps before those that are timed.
      steps: timed steps.
      learning_rate: AdamW's, constant.
    """

    kind: str
    model: dict[str, Any]
    batch: int
    latents: tuple[int, int, int]
    remat: Literal["full", "none"] = "full"
    compile: bool | Literal["blocks"] = True
    compile_mode: str = "default"
    attention: Literal["cudnn", "flash", "efficient", "default"] = "default"
    masked: bool = False
    precision: Literal["autocast", "bf16_copy"] = "autocast"
    warmup: int = 3
    steps: int = 8
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        known = {
            "kind": tuple(MODELS),
            "remat": ("full", "none"),
            "compile": (True, False, "blocks"),
            "attention": (*BACKENDS, "default"),
            "precision": ("autocast", "bf16_copy"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}; there are {values}")
        if self.steps < 1 or self.warmup < 0:
            raise ValueError(f"steps is {self.steps}, warmup {self.warmup}; take 1, 0 or more")


class Weights:
    """Float32 weights that the optimizer updates, and their average.

    Attributes:
      masters: all weights in float32; the model's own where those are float32.
      copies: the model's bfloat16 weights, with the master of each; empty under autocast.
    """

    def __init__(self, model: Any, settings: Settings):
        self.masters: list[Any] = []
        self.copies: list[tuple[Any, Any]] = []
        decayed: list[Any] = []
        kept: list[Any] = []
        for name, weight in model.named_parameters():
            master = weight
            if settings.precision == "bf16_copy" and not _stays_float32(model, name):
                master = torch.nn.Parameter(weight.data)
                weight.data = weight.data.bfloat16()
                self.copies.append((weight, master))
            self.masters.append(master)
            # Matrices decay; biases, norms and modulation keep their size.
            (decayed if name.endswith("weight") and weight.ndim > 1 else kept).append(master)
        groups = [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": kept, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=BETAS, eps=EPS, fused=True
        )
        self.average = [master.detach().clone() for master in self.masters]

    def update(self) -> None:
        """Clips the gradient, updates the weights and their average, drops the gradient."""
        for copy, master in self.copies:
            master.grad, copy.grad = copy.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.masters, 1 - EMA_DECAY)
            if self.copies:
                copies, masters = zip(*self.copies, strict=True)
                torch._foreach_copy_(list(copies), list(masters))


class Trainer:
    """A model on random clips and conditions; `step` trains it once."""

    def __init__(self, settings: Settings, compiled: Compiled, device: str):
        self.settings, self.device = settings, device
        self.model = build(settings, device)
        self.weights = Weights(self.model, settings)
        self.forward = _compile(self.model, settings, compiled)
        kind, dtype = MODELS[settings.kind], torch.float32
        if settings.precision == "bf16_copy":
            dtype = torch.bfloat16
        channels = kind.latent_channels(self.model.config)
        self.clips = torch.randn(settings.batch, channels, *settings.latents, device=device)
        self.given = kind.given(self.model.config, self.clips)
        self.conditions = kind.conditions(self.model.config, settings.batch, dtype, device)

    def step(self) -> Any:
        """Gradient and update; returns the loss, a scalar on the device."""
        loss = self.loss_and_gradient()
        self.weights.update()
        return loss

    def loss_and_gradient(self) -> Any:
        """Flow matching: the model predicts noise − clip from (1 − σ)·clip + σ·noise."""
        noise = torch.randn_like(self.clips)
        sigma = torch.sigmoid(torch.randn(self.settings.batch, device=self.device))
        noised = torch.lerp(self.clips, noise, sigma.view(-1, 1, 1, 1, 1))
        noised = torch.cat([noised, *self.given], dim=1)
        if self.settings.precision == "bf16_copy":
            noised = noised.bfloat16()
        timestep = sigma * TIMESTEP_SCALE
        if MODELS[self.settings.kind].casts_timestep:
            timestep = timestep.to(noised.dtype)
        with self._attention():  # around the backward pass too: it recomputes
            with self._autocast():
                (predicted,) = self.forward(noised, timestep, **self.conditions, return_dict=False)
            loss = torch.nn.functional.mse_loss(predicted.float(), noise - self.clips)
            loss.backward()
        return loss.detach()

    def _autocast(self) -> Any:
        enabled = self.settings.precision == "autocast"
        return torch.autocast(self.device, torch.bfloat16, enabled=enabled)

    def _attention(self) -> Any:
        backend = BACKENDS.get(self.settings.attention)
        if backend is None:
            return contextlib.nullcontext()
        also = MODELS[self.settings.kind].masks_elsewhere
        return sdpa_kernel([backend, *also], set_priority=True)


def build(settings: Settings, device: str) -> Any:
    """The model with random float32 weights, made on the device."""
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.model.items()}
    with torch.device(device):
        model = MODELS[settings.kind].build(arguments, settings.masked)
    if settings.remat == "full":
        model.enable_gradient_checkpointing()
    return model.train()


def _compile(model: Any, settings: Settings, compiled: Compiled) -> Any:
    """The model's forward; fullgraph, so that `whole` and `blocks` mean what they say."""
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "mode": settings.compile_mode}
    if compiled == "whole":
        return torch.compile(model, **options)
    if compiled == "blocks":
        model.compile_repeated_blocks(**options)
    return model


def _stays_float32(model: Any, name: str) -> bool:
    """Whether diffusers' own loader would keep this weight in float32 in a bfloat16 model."""
    kept = model._keep_in_fp32_modules or ()
    return any(part in kept for part in name.split("."))
