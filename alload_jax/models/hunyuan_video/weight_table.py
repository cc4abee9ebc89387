"""Names and layouts of HunyuanVideo's parameters: ours and diffusers'.

The table follows diffusers' HunyuanVideo15Transformer3DModel (0.42.1).
"""

import math
from collections.abc import Iterator

from alload_jax.models.common.named_tensors import Tensor, linear_tensors, norm_tensors
from alload_jax.models.hunyuan_video.config import HunyuanVideoConfig

_STREAMS = (
    ("video", "norm1", "to_{}", "to_out.0", "norm_{}", "ff"),
    ("condition", "norm1_context", "add_{}_proj", "to_add_out", "norm_added_{}", "ff_context"),
)
"""Ours; diffusers' names of a stream's modulation, projections, output, norms, feed-forward."""
_FREQUENCIES = 256
_REFINER_RATIO = 4


def tensors(config: HunyuanVideoConfig) -> list[Tensor]:
    """Lists the tensors of a checkpoint of that model, in the order of the blocks."""
    found = [*_outside_blocks(config), *_text(config), *_glyphs_and_image(config)]
    for layer in range(config.num_layers):
        found += _block(config, layer)
    return found


def _outside_blocks(config: HunyuanVideoConfig) -> Iterator[Tensor]:
    dim, patch = config.dim, config.patch_size
    shape = (dim, config.in_channels, *patch)
    yield Tensor("x_embedder.proj.weight", shape, "patch_embedding/kernel", None, "patch")
    yield Tensor("x_embedder.proj.bias", (dim,), "patch_embedding/bias", None, "same")
    time = "time_embed.timestep_embedder"
    yield from linear_tensors(f"{time}.linear_1", "time_embedding/hidden", dim, _FREQUENCIES)
    yield from linear_tensors(f"{time}.linear_2", "time_embedding/out", dim, dim)
    yield from linear_tensors("norm_out.linear", "head/modulation", 2 * dim, dim)
    outputs = math.prod(patch) * config.latent_channels
    yield from linear_tensors("proj_out", "head/out", outputs, dim)


def _text(config: HunyuanVideoConfig) -> Iterator[Tensor]:
    if config.text is None:
        return
    dim, width, path = config.dim, config.text.dim, "condition_embedding/text"
    yield Tensor(
        "cond_type_embed.weight", (3, dim), "condition_embedding/kind/embedding", None, "same"
    )
    key = "context_embedder.time_text_embed"
    yield from linear_tensors(f"{key}.timestep_embedder.linear_1", f"{path}/time_hidden", dim, 256)
    yield from linear_tensors(f"{key}.timestep_embedder.linear_2", f"{path}/time_out", dim, dim)
    yield from linear_tensors(f"{key}.text_embedder.linear_1", f"{path}/mean_hidden", dim, width)
    yield from linear_tensors(f"{key}.text_embedder.linear_2", f"{path}/mean_out", dim, dim)
    yield from linear_tensors("context_embedder.proj_in", f"{path}/inner", dim, width)
    for layer in range(config.refiner_layers):
        key = f"context_embedder.token_refiner.refiner_blocks.{layer}"
        yield from _refiner_block(key, f"{path}/blocks", dim, layer)


def _refiner_block(key: str, path: str, dim: int, layer: int) -> Iterator[Tensor]:
    yield from norm_tensors(f"{key}.norm1", f"{path}/attention_norm", dim, layer)
    yield from norm_tensors(f"{key}.norm2", f"{path}/feed_forward_norm", dim, layer)
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("out.0", "out")):
        yield from linear_tensors(f"{key}.attn.to_{theirs}", f"{path}/{ours}", dim, dim, layer)
    hidden = _REFINER_RATIO * dim
    yield from linear_tensors(
        f"{key}.ff.net.0.proj", f"{path}/feed_forward/hidden", hidden, dim, layer
    )
    yield from linear_tensors(f"{key}.ff.net.2", f"{path}/feed_forward/out", dim, hidden, layer)
    yield from linear_tensors(f"{key}.norm_out.linear", f"{path}/gates", 2 * dim, dim, layer)


def _glyphs_and_image(config: HunyuanVideoConfig) -> Iterator[Tensor]:
    dim = config.dim
    if config.glyphs:
        key, path = "context_embedder_2", "condition_embedding/glyphs"
        width, hidden = config.glyphs.dim, config.glyph_hidden
        yield from norm_tensors(f"{key}.norm", f"{path}/norm", width)
        yield from linear_tensors(f"{key}.linear_1", f"{path}/inner", hidden, width)
        yield from linear_tensors(f"{key}.linear_2", f"{path}/hidden", hidden, hidden)
        yield from linear_tensors(f"{key}.linear_3", f"{path}/out", dim, hidden)
    if config.image:
        key, path, width = "image_embedder", "condition_embedding/image", config.image.dim
        yield from norm_tensors(f"{key}.norm_in", f"{path}/norm_in", width)
        yield from linear_tensors(f"{key}.linear_1", f"{path}/hidden", width, width)
        yield from linear_tensors(f"{key}.linear_2", f"{path}/out", dim, width)
        yield from norm_tensors(f"{key}.norm_out", f"{path}/norm_out", dim)


def _block(config: HunyuanVideoConfig, layer: int) -> Iterator[Tensor]:
    dim, hidden, key = config.dim, config.ffn_dim, f"transformer_blocks.{layer}"
    for ours, modulation, project, out, norm, feed_forward in _STREAMS:
        path = f"blocks/{ours}"
        yield from linear_tensors(
            f"{key}.{modulation}.linear", f"{path}/modulation", 6 * dim, dim, layer
        )
        for theirs, name in (("q", "query"), ("k", "key"), ("v", "value")):
            linear = f"{key}.attn.{project.format(theirs)}"
            yield from linear_tensors(linear, f"{path}/{name}", dim, dim, layer)
        yield from linear_tensors(f"{key}.attn.{out}", f"{path}/out", dim, dim, layer)
        for theirs, name in (("q", "query_norm"), ("k", "key_norm")):
            weight, scale = f"{key}.attn.{norm.format(theirs)}.weight", f"{path}/{name}/scale"
            yield Tensor(weight, (config.head_dim,), scale, layer, "same")
        inner, outer = f"{path}/feed_forward/hidden", f"{path}/feed_forward/out"
        yield from linear_tensors(f"{key}.{feed_forward}.net.0.proj", inner, hidden, dim, layer)
        yield from linear_tensors(f"{key}.{feed_forward}.net.2", outer, dim, hidden, layer)
