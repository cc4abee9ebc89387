"""One training step of one of diffusers' transformers in PyTorch, in a process of its own.

    python benchmarks/torch_step.py '{"kind": "wan", "model": {…}, "batch": 1, "latents": […], …}'

The JSON's keys are the fields of `Settings`. The last line of stdout is one JSON object: the
settings and what was measured, or `error`. Neither JAX nor anything that imports it is loaded
here: two frameworks in a process would share the device's memory.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from alload_jax.files import Json

# A cached program has the attention of the variant that compiled it.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
import torch._dynamo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from typing_extensions import override

from alload_jax.bench.harness import provenance

# ---------------------------------------------------------------- models


class Wan:
    """WanTransformer3DModel, text-to-video, with random inputs.

    Attributes:
      masks_elsewhere: backends for attention outside the blocks, which keeps its masks.
      tokens_beside: condition tokens of a sample that attend beside those of its latents.
      casts_timestep: whether the timestep has the dtype of the other inputs; else it is float32.
    """

    masks_elsewhere: tuple[SDPBackend, ...] = ()
    tokens_beside = 0
    casts_timestep = False
    TEXT_LENGTH: ClassVar[int] = 512

    def build(self, arguments: Json, masked: bool) -> Any:
        """The model; its blocks attend with masks only if `masked`, of which this has none."""
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(**arguments)

    def latent_channels(self, config: Any) -> int:
        """Channels of clips."""
        return int(config.in_channels)

    def volume(self, config: Any) -> int:
        """Latents of a token."""
        return math.prod(config.patch_size)

    def given(self, config: Any, clips: torch.Tensor) -> list[torch.Tensor]:
        """What the model takes behind the channels of noised clips, [B, C, F, H, W] each."""
        return []

    def conditions(self, config: Any, rows: int, **of: Any) -> dict[str, torch.Tensor]:
        """Random conditions without padding: keyword arguments of the model's forward.

        Args:
          config: of the model.
          rows: number of samples.
          of: dtype and device.
        """
        return {"encoder_hidden_states": torch.randn(rows, self.TEXT_LENGTH, config.text_dim, **of)}


class HunyuanVideo15(Wan):
    """HunyuanVideo15Transformer3DModel, image-to-video."""

    # Its text refiner has masks of its own, which neither flash attention nor cuDNN takes.
    masks_elsewhere = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    LENGTHS: ClassVar[tuple[int, int, int]] = (1000, 256, 729)
    """Tokens of the text, of the glyphs and of the image."""
    tokens_beside = sum(LENGTHS)
    casts_timestep = True

    @override
    def build(self, arguments: Json, masked: bool) -> Any:
        from diffusers import HunyuanVideo15Transformer3DModel

        if not masked:
            _drop_masks(importlib.import_module(HunyuanVideo15Transformer3DModel.__module__))
        return HunyuanVideo15Transformer3DModel(**arguments)

    @override
    def latent_channels(self, config: Any) -> int:
        return int(config.out_channels)

    @override
    def volume(self, config: Any) -> int:
        return int(config.patch_size_t * config.patch_size**2)

    @override
    def given(self, config: Any, clips: torch.Tensor) -> list[torch.Tensor]:
        # Latents of the given frames and their mask.
        return [torch.ones_like(clips), torch.ones_like(clips[:, :1])]

    @override
    def conditions(self, config: Any, rows: int, **of: Any) -> dict[str, torch.Tensor]:
        widths = (config.text_embed_dim, config.text_embed_2_dim, config.image_embed_dim)
        text, glyphs, image = (
            torch.randn(rows, length, width, **of)
            for length, width in zip(self.LENGTHS, widths, strict=True)
        )
        return {
            "encoder_hidden_states": text,
            "encoder_hidden_states_2": glyphs,
            "image_embeds": image,
            "encoder_attention_mask": torch.ones(text.shape[:2], **of),
            "encoder_attention_mask_2": torch.ones(glyphs.shape[:2], **of),
        }


def _drop_masks(module: Any) -> None:
    """Lets the blocks of a module of diffusers attend without a mask."""
    dispatch = module.dispatch_attention_fn

    def without_mask(*tensors: torch.Tensor, attn_mask: Any = None, **options: Any) -> Any:
        return dispatch(*tensors, **options)

    module.dispatch_attention_fn = without_mask


MODELS = {"wan": Wan(), "hunyuan_video": HunyuanVideo15()}
"""By the name of our family."""

# ---------------------------------------------------------------- a training step like our own

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
      kind: name of one of `MODELS`.
      model: arguments of diffusers' class.
      batch: samples a step.
      latents: frames, height, width of a latent clip.
      remat: full: every block is recomputed in the backward pass (gradient checkpointing);
        attention: all of it but the outputs of attention.
      compile: by torch.compile: the whole model, which takes far longer than each block, or none.
      attention: the backend that attention must take; default: PyTorch's choice.
      masked: whether attention gets masks, as diffusers' model makes them where texts have padding.
        Here no text has any, so that attention without a mask computes the same.
      precision: autocast: float32 weights, each operation casts what it takes. bf16_copy: bfloat16
        weights for forward and backward, float32 ones for the optimizer, as mixed-precision
        trainers do. sharded: float32 weights, which FSDP2 gathers in bfloat16.
      warmup: steps before those that are timed.
      steps: timed steps.
      learning_rate: AdamW's, constant.
    """

    kind: str
    model: Json
    batch: int
    latents: tuple[int, int, int]
    remat: Literal["full", "attention", "none"] = "full"
    compile: Literal["whole", "blocks", "no"] = "blocks"
    attention: Literal["cudnn", "flash", "efficient", "default"] = "default"
    masked: bool = False
    precision: Literal["autocast", "bf16_copy", "sharded"] = "autocast"
    warmup: int = 3
    steps: int = 8
    learning_rate: float = 1e-4


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
        kept_float32 = {*(model._keep_in_fp32_modules or ())}  # by diffusers' own loader
        for name, weight in model.named_parameters():
            master = weight
            if settings.precision == "bf16_copy" and not kept_float32 & {*name.split(".")}:
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
        self.average = [local(master).clone() for master in self.masters]

    def update(self) -> None:
        """Clips the gradient, updates the weights and their average, drops the gradient."""
        for copy, master in self.copies:
            master.grad, copy.grad = copy.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, [*map(local, self.masters)], 1 - EMA_DECAY)
            if self.copies:
                copies, masters = zip(*self.copies, strict=True)
                torch._foreach_copy_(list(copies), list(masters))


def local(weight: Any) -> Any:
    """What this process holds of a weight, without gradient."""
    return getattr(weight, "to_local", weight.detach)().detach()


class Trainer:
    """A model on random clips and conditions; `step` trains it once.

    Attributes:
      clips: [B, C, F, H, W] float32.
      rows: samples among the clips; the loss counts no further ones. None for all.
    """

    rows: int | None = None

    def __init__(self, settings: Settings, device: str):
        self.settings, self.device = settings, device
        self.model = build(settings, device)
        self.weights = Weights(self.model, settings)
        self.forward = compiled(self.model, settings)
        kind = MODELS[settings.kind]
        dtype = torch.float32 if settings.precision == "autocast" else torch.bfloat16
        channels = kind.latent_channels(self.model.config)
        self.clips = torch.randn(settings.batch, channels, *settings.latents, device=device)
        self.given = kind.given(self.model.config, self.clips)
        self.conditions = kind.conditions(
            self.model.config, settings.batch, dtype=dtype, device=device
        )

    def step(self) -> Any:
        """Gradient and update; returns the loss, a scalar on the device."""
        loss = self.loss_and_gradient()
        self.weights.update()
        return loss

    def loss_and_gradient(self) -> Any:
        """Flow matching: the model predicts noise − clip from (1 − σ)·clip + σ·noise."""
        noise = torch.randn_like(self.clips)
        sigma = torch.sigmoid(torch.randn(len(self.clips), device=self.device))
        noised = torch.lerp(self.clips, noise, sigma.view(-1, 1, 1, 1, 1))
        noised = torch.cat([noised, *self.given], dim=1)
        if self.settings.precision != "autocast":
            noised = noised.bfloat16()
        timestep = sigma * TIMESTEP_SCALE
        if MODELS[self.settings.kind].casts_timestep:
            timestep = timestep.to(noised.dtype)
        with self._attention():  # around the backward pass too: it recomputes
            autocast = self.settings.precision == "autocast"
            with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
                (predicted,) = self.forward(noised, timestep, **self.conditions, return_dict=False)
            wrong = (predicted.float() - (noise - self.clips))[: self.rows]
            loss = wrong.square().sum() / predicted.numel()
            loss.backward()
        return loss.detach()

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
    if settings.remat == "attention":
        kept = functools.partial(create_selective_checkpoint_contexts, _keeps_attention)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block, context_fn=kept)
    return model.train()


def _keeps_attention(context: Any, operator: Any, *given: Any, **options: Any) -> CheckpointPolicy:
    kept = str(operator).startswith("aten._scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def compiled(model: Any, settings: Settings) -> Any:
    """The model's forward; fullgraph, so that `whole` and `blocks` mean what they say."""
    options: Json = {"fullgraph": True, "dynamic": False}
    if settings.compile == "whole":
        return torch.compile(model, **options)
    if settings.compile == "blocks" and settings.remat == "attention":
        for number, block in enumerate(model.blocks):  # the compiler then knows what is kept
            model.blocks[number] = torch.compile(block, **options)
    elif settings.compile == "blocks":
        model.compile_repeated_blocks(**options)
    return model


# ---------------------------------------------------------------- the measurement

PACKAGES = ("torch", "triton", "diffusers", "nvidia-cudnn-cu13")

NO_KERNEL = ("No available kernel", "No viable backend for scaled_dot_product_attention")
"""How PyTorch says that it cannot run attention with the backend asked for."""


def measure(settings: Settings, device: str) -> Json:
    """Trains for a few steps.

    Returns:
      seconds of a step, bytes that timed steps took at most (None on a CPU), seconds before the
      first timed step, graphs that were compiled, operators of attention with their calls in a
      step, loss (None where it is not finite).

    Raises:
      torch.OutOfMemoryError.
    """
    begin = time.perf_counter()
    trainer = Trainer(settings, device)
    built = time.perf_counter()
    first = [_timed(trainer, device)[0] for _ in range(settings.warmup)]
    ready = time.perf_counter()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed = [_timed(trainer, device) for _ in range(settings.steps)]
    seconds, losses = zip(*timed, strict=True)
    kind, config = MODELS[settings.kind], trainer.model.config
    return {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        **_peak(device),
        "build_seconds": built - begin,
        "warmup_seconds": ready - built,
        "first_step_seconds": first[0] if first else None,
        "parameters": sum(master.numel() for master in trainer.weights.masters),
        "tokens": settings.batch * math.prod(settings.latents) // kind.volume(config),
        "tokens_beside": kind.tokens_beside,
        "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "loss": losses[-1] if math.isfinite(losses[-1]) else None,
        "loss_finite": all(math.isfinite(loss) for loss in losses),
        "attention_operators": attention_operators(trainer),
    }


def attention_operators(trainer: Trainer) -> dict[str, int]:
    """Operators of attention that one more step calls: which kernels ran, whatever was asked."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.step()
    return {
        event.key.removeprefix("aten::"): event.count
        for event in profiled.key_averages()
        if event.key.startswith("aten::_") and "attention" in event.key
    }


def run(settings: Settings) -> Json:
    """Measures; an `error` where memory or a kernel is missing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    try:
        result = measure(settings, device)
    except torch.OutOfMemoryError as error:
        result = {"error": "out of memory", "message": str(error)} | _peak(device)
    except RuntimeError as error:
        if not str(error).startswith(NO_KERNEL):
            raise
        result = {"error": "no attention kernel", "message": str(error)}
    return result | {
        "settings": asdict(settings),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **provenance(PACKAGES),
    }


def _timed(trainer: Trainer, device: str) -> tuple[float, float]:
    """Seconds of a step, its loss."""
    _synchronize(device)
    begin = time.perf_counter()
    loss = trainer.step()
    _synchronize(device)
    return time.perf_counter() - begin, float(loss)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str) -> dict[str, int | None]:
    cuda = device == "cuda"
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
    }


def main(arguments: list[str]) -> None:
    """Prints the result of the settings given as JSON."""
    given = json.loads(arguments[0])
    settings = Settings(**given | {"latents": tuple(given["latents"])})
    print(json.dumps(run(settings)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
