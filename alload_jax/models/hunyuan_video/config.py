"""Config of HunyuanVideo's transformer: shape and arithmetic."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.models.common.config import ConditionPart, TextConfig, TransformerConfig

TEXT, GLYPHS, IMAGE = "text", "glyphs", "image"
"""Names of the kinds of condition tokens."""
_IMAGE_TOKENS = 729
"""Embeddings of one image by SigLIP at 384×384: 27² patches of 14."""


@dataclass(frozen=True)
class HunyuanVideoConfig(TransformerConfig):
    """Shape and arithmetic of the transformer; `TransformerConfig` has the other fields.

    Attributes:
      family: `hunyuan_video`.
      refiner_layers: number of blocks of the text refiner.
      glyphs: second text, of the characters to be drawn, from byT5; null for none.
      glyph_hidden: width of the layers that embed it.
      rotary_dims: channels of a head that encode (t, h, w), even; null for 1/8, 7/16 and 7/16 of
        them.
      rotary_theta: base of the frequencies of the rotary embedding.
    """

    family: Literal["hunyuan_video"] = "hunyuan_video"
    refiner_layers: int = 2
    glyphs: TextConfig | None = None
    glyph_hidden: int = 2048
    rotary_dims: tuple[int, int, int] | None = None
    rotary_theta: float = 256.0

    joint_attention: ClassVar[bool] = True
    given_optional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("refiner_layers", "glyph_hidden")
        if any(size < 0 or size % 2 for size in self.rotary_sizes) or (
            sum(self.rotary_sizes) != self.head_dim
        ):
            raise InputError(
                f"model.rotary_dims is {self.rotary_dims}; they must be even, and their sum "
                f"model.dim / model.num_heads, which is {self.head_dim}"
            )
        if self.image and self.image.positions is not None:
            raise InputError(
                f"model.image.positions is {self.image.positions}, and model.family hunyuan_video "
                "learns none; set it to null"
            )
        for name in (GLYPHS, IMAGE):
            if getattr(self, name) and not self.text:
                raise InputError(f"model.{name} is set without model.text; set both, or neither")

    @override
    def architecture(self) -> dict[str, Any]:
        """The division of a head's channels is always named."""
        return super().architecture() | {"rotary_dims": list(self.rotary_sizes)}

    @override
    def condition_parts(self) -> tuple[ConditionPart, ...]:
        """The null condition keeps its image."""
        parts = []
        if self.text:
            parts.append(ConditionPart(TEXT, self.text.dim, self.text.length))
        if self.glyphs:
            parts.append(ConditionPart(GLYPHS, self.glyphs.dim, self.glyphs.length))
        if self.image:
            parts.append(ConditionPart(IMAGE, self.image.dim, _IMAGE_TOKENS, dropped=False))
        return tuple(parts)

    @property
    def rotary_sizes(self) -> tuple[int, int, int]:
        """Channels of a head that encode (t, h, w)."""
        if self.rotary_dims is not None:
            return self.rotary_dims
        spatial = 2 * (7 * self.head_dim // 32)
        return (self.head_dim - 2 * spatial, spatial, spatial)
