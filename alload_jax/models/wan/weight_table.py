"""Names and layouts of Wan's parameters: ours, diffusers' and those of Wan's repository.

The table follows diffusers' WanTransformer3DModel (0.42.1) and the Wan 2.1 repository's WanModel,
which compute the same function with different names and layouts.
"""

import math
import re
from collections.abc import Iterator

from alload_jax.models.common.named_tensors import Naming, Tensor, linear_tensors, norm_tensors
from alload_jax.models.wan.config import WanConfig


def tensors(config: WanConfig, naming: Naming) -> list[Tensor]:
    """Lists the tensors of a checkpoint of that model, in the order of the blocks."""
    found = list(_outside_blocks(config))
    for layer in range(config.num_layers):
        found += _block(config, layer)
    if naming == "diffusers":
        return found
    return [Tensor(_original(t.key), t.shape, t.path, t.layer, t.kind) for t in found]


def naming_of(keys: set[str]) -> Naming:
    """Returns the naming scheme of a checkpoint's keys."""
    original = any(re.match(r"(blocks\.\d+\.self_attn|head\.|time_projection)", k) for k in keys)
    return "original" if original else "diffusers"


def _outside_blocks(config: WanConfig) -> Iterator[Tensor]:
    dim, patch = config.dim, config.patch_size
    yield Tensor(
        "patch_embedding.weight",
        (dim, config.in_channels, *patch),
        "patch_embedding/kernel",
        None,
        "patch",
    )
    yield Tensor("patch_embedding.bias", (dim,), "patch_embedding/bias", None, "same")
    time = "condition_embedder.time_embedder"
    yield from linear_tensors(f"{time}.linear_1", "time_embedding/hidden", dim, config.freq_dim)
    yield from linear_tensors(f"{time}.linear_2", "time_embedding/out", dim, dim)
    yield from linear_tensors(
        "condition_embedder.time_proj", "time_embedding/modulation", 6 * dim, dim
    )
    if config.text:
        text = "condition_embedder.text_embedder"
        yield from linear_tensors(
            f"{text}.linear_1", "condition_embedding/hidden", dim, config.text.dim
        )
        yield from linear_tensors(f"{text}.linear_2", "condition_embedding/out", dim, dim)
    if config.image:
        yield from _image(config.image.dim, config.image.positions, dim)
    outputs = math.prod(patch) * config.latent_channels
    yield from linear_tensors("proj_out", "head/out", outputs, dim)
    yield Tensor("scale_shift_table", (1, 2, dim), "head/modulation", None, "leading")


def _image(size: int, positions: int | None, dim: int) -> Iterator[Tensor]:
    key = "condition_embedder.image_embedder"
    yield from norm_tensors(f"{key}.norm1", "image_embedding/norm_in", size)
    yield from linear_tensors(f"{key}.ff.net.0.proj", "image_embedding/hidden", size, size)
    yield from linear_tensors(f"{key}.ff.net.2", "image_embedding/out", dim, size)
    yield from norm_tensors(f"{key}.norm2", "image_embedding/norm_out", dim)
    if positions:
        shape = (1, positions, size)
        yield Tensor(f"{key}.pos_embed", shape, "image_embedding/position", None, "leading")


def _block(config: WanConfig, layer: int) -> Iterator[Tensor]:
    dim, key = config.dim, f"blocks.{layer}"
    shape = (1, 6, dim)
    yield Tensor(f"{key}.scale_shift_table", shape, "blocks/modulation", layer, "leading")
    yield from _attention(config, f"{key}.attn1", "blocks/self_attention", layer)
    yield from _attention(config, f"{key}.attn2", "blocks/cross_attention", layer)
    if config.image:
        path = "blocks/cross_attention"
        yield from linear_tensors(f"{key}.attn2.add_k_proj", f"{path}/image_key", dim, dim, layer)
        yield from linear_tensors(f"{key}.attn2.add_v_proj", f"{path}/image_value", dim, dim, layer)
        if config.qk_norm:
            name, place = f"{key}.attn2.norm_added_k.weight", f"{path}/image_key_norm/scale"
            yield Tensor(name, (dim,), place, layer, "same")
    if config.cross_norm:
        yield from norm_tensors(f"{key}.norm2", "blocks/cross_norm", dim, layer)
    hidden, out = "blocks/feed_forward/hidden", "blocks/feed_forward/out"
    yield from linear_tensors(f"{key}.ffn.net.0.proj", hidden, config.ffn_dim, dim, layer)
    yield from linear_tensors(f"{key}.ffn.net.2", out, dim, config.ffn_dim, layer)


def _attention(config: WanConfig, key: str, path: str, layer: int) -> Iterator[Tensor]:
    dim = config.dim
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("out.0", "out")):
        yield from linear_tensors(f"{key}.to_{theirs}", f"{path}/{ours}", dim, dim, layer)
    if config.qk_norm:
        for theirs, ours in (("norm_q", "query_norm"), ("norm_k", "key_norm")):
            yield Tensor(f"{key}.{theirs}.weight", (dim,), f"{path}/{ours}/scale", layer, "same")


_RENAMED = (
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.norm2\.", ".norm3."),  # the original numbers its norms in another order
    (r"\.ffn\.net\.0\.proj", ".ffn.0"),
    (r"\.ffn\.net\.2", ".ffn.2"),
    (r"\.attn2\.add_k_proj", ".cross_attn.k_img"),
    (r"\.attn2\.add_v_proj", ".cross_attn.v_img"),
    (r"\.attn2\.norm_added_k", ".cross_attn.norm_k_img"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
)
"""Patterns that turn diffusers' names into those of Wan's repository, applied in order."""


def _original(key: str) -> str:
    for pattern, name in _RENAMED:
        key = re.sub(pattern, name, key)
    return key
