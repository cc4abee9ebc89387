"""Conditions of samples: classes or text embeddings, and what image-to-video models are given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import IMAGE, LABELS, TEXT, Arrays, SampleForm
from alload_jax.errors import InputError
from alload_jax.models.common.config import ConditionPart, ModelConfig
from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.segments import PADDING, Segments
from alload_jax.planning.samples import Samples

_IMAGE_TOKENS = 257
"""Embeddings of one image by CLIP ViT-H at 224×224: 16² patches and the class token."""


Parts = dict[str, ConditionTokens]
"""Condition tokens of all rows by the names of the kinds."""
Tokens = np.ndarray | dict[str, np.ndarray]
"""A sample's condition: [L], [L, width], or [L, width] by the names of the kinds."""


@dataclass(frozen=True)
class Conditions:
    """Shape and dtype of the conditions of a micro-batch.

    Attributes:
      length: number of condition tokens per sample.
      dtype: int32 for classes, or the dtype of the embeddings.
      text_dim: width of the embeddings; None for classes.
      null_label: the null class, which stands for no condition.
      given_channels: input channels behind the noisy latents; 0 if the model takes none.
      image_shape: (tokens, width) of the image embeddings; None if the model takes none.
      parts: the kinds of condition tokens whose number differs by sample, each with the most tokens
        of a sample of the data, in place of all that is said above but given channels; empty if
        samples have equal numbers of condition tokens.
    """

    length: int
    dtype: np.dtype
    text_dim: int | None
    null_label: int
    given_channels: int = 0
    image_shape: tuple[int, int] | None = None
    parts: tuple[ConditionPart, ...] = ()

    def empty(
        self,
        rows: int,
        tokens: int | None = None,
        room: Sequence[int] = (),
        slots: int = 1,
        reserved: Sequence[np.ndarray] = (),
    ) -> np.ndarray | Parts:
        """Returns null conditions, or of `parts` room without any tokens yet.

        Args:
          rows: number of rows.
          tokens: of a row; None for `length`.
          room: tokens of each of `parts` in a row; nothing for rows of one sample each.
          slots: M, samples of a row.
          reserved: for each row [samples, K], most tokens of each sample of each of `parts`.

        Returns:
          the null class [rows, tokens], or zeros [rows, tokens, text_dim]; or tokens by the names
          of `parts`.
        """
        if not self.parts:
            shape = (rows, self.length if tokens is None else tokens)
            if self.text_dim is None:
                return np.full(shape, self.null_label, self.dtype)
            return np.zeros((*shape, self.text_dim), self.dtype)
        offsets = np.zeros((len(self.parts), rows, slots), np.int32)
        for row, sizes in enumerate(reserved):
            offsets[:, row, : len(sizes)] = (np.cumsum(sizes, axis=0) - sizes).T
        found = {}
        lengths = room or [part.length for part in self.parts]
        for part, length, offset in zip(self.parts, lengths, offsets, strict=True):
            values = np.zeros((rows, length, part.width), self.dtype)
            ids = np.full((rows, length), PADDING, np.int32)
            segments = Segments(offset, np.zeros_like(offset), ids)
            found[part.name] = ConditionTokens(values, segments)
        return found

    def given(self, *shape: int) -> np.ndarray | None:
        """No given frames, zeros [*shape, given_channels] float32; None if the model takes none."""
        return np.zeros((*shape, self.given_channels), np.float32) if self.given_channels else None

    def image(self, *shape: int) -> np.ndarray | None:
        """No image embeddings, zeros [*shape, N, width]; None if the model takes none."""
        if self.image_shape is None:
            return None
        dtype = np.float32 if self.text_dim is None else self.dtype
        return np.zeros((*shape, *self.image_shape), dtype)

    def part_tokens(self, manifest: Manifest) -> np.ndarray:
        """Returns how many tokens of each of `parts` each sample has at most, [N, K] int64."""
        columns = [_held(manifest, part.name)[1] for part in self.parts]
        return np.stack(columns, axis=1).astype(np.int64)

    def of(self, arrays: Arrays) -> Tokens:
        """Returns the condition of a record without padding: [L], [L, text_dim], or parts by name.

        Raises:
          ValueError: a class is out of range.
        """
        if self.parts:
            return {part.name: arrays[part.name] for part in self.parts if part.name in arrays}
        if self.text_dim is not None:
            return arrays[TEXT]
        labels = arrays[LABELS]
        if labels.size and not 0 <= labels.min() <= labels.max() < self.null_label:
            raise ValueError(
                f"has labels {labels.tolist()}; they must be from 0 to below model.num_classes, "
                f"which is {self.null_label}"
            )
        return labels


def conditions_for(model: ModelConfig, manifest: Manifest) -> Conditions:
    """Returns the conditions that a model takes from the data of a manifest.

    Raises:
      InputError: the kind of condition or the width differs from the model's, or a text is too
        long; or the data lack what an image-to-video model takes.
    """
    if model.latent_channels > model.in_channels:
        raise InputError(
            f"model.out_channels is {model.out_channels}; to train, it must be at most "
            f"model.in_channels, which is {model.in_channels}"
        )
    held, given = manifest.form.given_channels, model.given_channels
    if given and held != given and (held or not model.given_optional):
        raise InputError(
            f"{manifest.path}: holds given frames of {held} channels, but "
            f"model.in_channels − model.out_channels is {given}; prepare the data "
            "with --image-to-video, or train a text-to-video model"
        )
    text = model.text
    if text is not None and manifest.form.text_dim != text.dim:
        raise InputError(
            f"{manifest.path}: holds {manifest.form.described()['condition']}, but model.text.dim "
            f"is {text.dim}; set model.text as in the data, or prepare other data"
        )
    if text is not None and manifest.longest_text() > text.length:
        raise InputError(
            f"{manifest.path}: sample {int(manifest.text_length.argmax())} has a text of "
            f"{manifest.longest_text()} tokens, but model.text.length is {text.length}; "
            "shorten it, or set model.text.length to the longest"
        )
    if model.condition_parts():
        return _conditions_in_parts(model, manifest)
    image_shape = manifest.form.image_shape if model.image else None
    if model.image and (image_shape is None or image_shape[1] != model.image.dim):
        raise InputError(
            f"{manifest.path}: holds image embeddings: {manifest.form.described()['image']}, but "
            f"model.image.dim is {model.image.dim}; prepare the data with --image-folder, or set "
            "model.image as in the data"
        )
    if model.image and image_shape and model.image.positions not in (None, image_shape[0]):
        raise InputError(
            f"{manifest.path}: holds {image_shape[0]} image embeddings a sample, but "
            f"model.image.positions is {model.image.positions}; set it to that"
        )
    if text is not None:
        length, width, dtype = text.length, text.dim, _embedding_dtype(model)
    elif manifest.form.text_dim is None:
        length, width, dtype = manifest.longest_text(), None, np.dtype(np.int32)
    else:
        raise InputError(
            f"{manifest.path}: holds text embeddings of width {manifest.form.text_dim}, but "
            f"model.text is null; set model.text.dim to {manifest.form.text_dim}"
        )
    return Conditions(length, dtype, width, model.num_classes, given, image_shape)


def unread(model: ModelConfig, manifest: Manifest) -> list[str]:
    """What the data hold and the model does not take, a line each."""
    held, found = manifest.form, []
    if held.given_channels and not model.given_channels:
        found.append(
            f"each sample has given frames of {held.given_channels} channels, which are not read, "
            f"because model.in_channels is {model.in_channels}, those of the latents alone; train "
            "an image-to-video model to use them"
        )
    if held.image_shape and model.image is None:
        found.append(
            f"each sample has {held.described()['image']} of its image, which are not read, "
            "because model.image is null; set model.image for a model that takes them"
        )
    return found


def _embedding_dtype(model: ModelConfig) -> np.dtype:
    low = model.compute_dtype == np.dtype(ml_dtypes.bfloat16)
    return np.dtype(ml_dtypes.bfloat16 if low else np.float32)


def _conditions_in_parts(model: ModelConfig, manifest: Manifest) -> Conditions:
    """The conditions of a model that declares parts; what the data lack has no tokens."""
    parts, found = model.condition_parts(), []
    if model.image and manifest.form.given_channels and manifest.form.image_shape is None:
        raise InputError(
            f"{manifest.path}: holds given frames without embeddings of their images, which the "
            "model takes too; prepare the data with --image-folder, or set model.image to null"
        )
    for name, _ in manifest.form.parts:
        if name not in [part.name for part in parts]:
            raise InputError(
                f"{manifest.path}: holds tokens of {name}, which the model does not take; set "
                f"model.{name}, or write the data without"
            )
    for part in parts:
        width, lengths = _held(manifest, part.name)
        longest = int(lengths.max())
        if part.required and not lengths.all():
            raise InputError(
                f"{manifest.path}: sample {int(lengths.argmin())} has no tokens of {part.name}, "
                f"which the model takes; write [{part.length}, {part.width}] of each"
            )
        if width not in (None, part.width) or longest > part.length:
            raise InputError(
                f"{manifest.path}: holds up to {longest} tokens of {part.name} of width {width}, "
                f"but the model takes {part.length} of width {part.width}; set "
                f"model.{part.name} as in the data, or prepare other data"
            )
        # Every model with parts embeds texts, for which attention needs a token of padding.
        least = 1 if part.name == TEXT else 0
        found.append(part._replace(length=max(least, longest)))
    length, dtype = sum(part.length for part in found), _embedding_dtype(model)
    given, parts = model.given_channels, tuple(found)
    return Conditions(length, dtype, None, model.num_classes, given, parts=parts)


def _held(manifest: Manifest, name: str) -> tuple[int | None, np.ndarray]:
    """Width of the tokens of a kind, and how many each sample has, [N]; None and zeros for none."""
    form, lengths = manifest.form, np.zeros(len(manifest), np.int64)
    if name == TEXT and form.text_dim is not None:
        return form.text_dim, manifest.text_length
    if name == IMAGE and form.image_shape:
        return form.image_shape[1], lengths + form.image_shape[0]
    for number, (part, width) in enumerate(form.parts):
        if part == name:
            known = manifest.part_lengths
            return width, lengths if known is None else known[:, number]
    return None, lengths


def form_for(model: ModelConfig) -> SampleForm:
    """The arrays beside latents that a model takes; one image is taken where any number may be."""
    image = model.image
    parts = {part.name: part for part in model.condition_parts()}
    tokens = parts[IMAGE].length if IMAGE in parts else _IMAGE_TOKENS
    others = {name: part.width for name, part in parts.items() if name not in (TEXT, IMAGE)}
    return SampleForm(
        model.text.dim if model.text else None,
        model.given_channels,
        (image.positions or tokens, image.dim) if image else None,
        tuple(sorted(others.items())),
    )


def samples_for(
    model: ModelConfig, manifest: Manifest, conditions: Conditions, packed: bool
) -> Samples:
    """The samples as planning needs them, with the lengths that they have in a model's rows.

    With joint attention a length counts the condition's tokens too: in packed rows the sample's
    own, in bucketed rows as many as all rows have room for.
    """
    samples = manifest.samples(model.patch_size)
    if not model.joint_attention:
        return samples
    tokens: int | np.ndarray = conditions.length
    if packed and conditions.parts:
        tokens = conditions.part_tokens(manifest).sum(axis=1)
    return replace(samples, seq_len=samples.seq_len + tokens)


def put_condition(
    held: np.ndarray | Parts, row: int, slot: int, begin: int, condition: Tokens
) -> None:
    """Writes a sample's condition to a row.

    Args:
      held: of all rows, as `Conditions.empty` returns it.
      row: of the sample.
      slot: its number in the row.
      begin: its first token, where samples have equal numbers of them.
      condition: as `Conditions.of` returns it.
    """
    if isinstance(held, np.ndarray):
        held[row, begin : begin + len(condition)] = condition
        return
    assert isinstance(condition, dict)
    for name, array in condition.items():
        values, segments = held[name]
        begin = int(segments.offset[row, slot])
        here = slice(begin, begin + len(array))
        values[row, here] = array
        segments.ids[row, here] = slot
        segments.length[row, slot] = len(array)


def part_room(
    part_tokens: np.ndarray, seq_len: np.ndarray, row: int, slots: int, split: bool
) -> list[int]:
    """Most tokens of each kind in a row, of samples whose lengths include them.

    Args:
      part_tokens: [N, K] tokens of each sample of each kind.
      seq_len: [N] tokens of each sample in a row, all kinds and those of the latents.
      row: tokens of a row.
      slots: most samples of a row.
      split: whether rows hold parts of samples, each with the whole condition.

    Returns:
      multiples of 8, or of 512 where a sample may have as many, so that attention's kernel gets
      whole windows; at least 8.
    """
    longest = part_tokens.max(axis=0)
    # No row has a larger share of a kind than the sample with the largest.
    by_share = (part_tokens * row // seq_len[:, None]).max(axis=0)
    # Of the parts of a row only its first and its last can be cut.
    cut = 2 if split else 0
    most = np.minimum(slots * longest, by_share + cut * longest)
    return whole_windows(most, longest).tolist()


def whole_windows(tokens: np.ndarray | int, of_sample: np.ndarray | int) -> np.ndarray:
    """Condition tokens of rows, rounded up so that cuDNN gets a row in equal windows.

    Args:
      tokens: least number of them in a row.
      of_sample: most of a sample; a window has 512 of them if it has as many, else 8.
    """
    multiple = np.where(np.asarray(of_sample) >= 512, 512, 8)
    return np.maximum(1, -(-tokens // multiple)) * multiple
