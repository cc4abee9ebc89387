"""`--text hunyuan_video`: embeddings of HunyuanVideo 1.5's text encoders."""

from dataclasses import dataclass

from alload_jax.data.prepare.text_embeddings import TextEmbeddings
from alload_jax.encoders.hunyuan_video_text import HunyuanVideoText


@dataclass(frozen=True)
class HunyuanVideoEmbeddings(TextEmbeddings):
    """Stores the tokens of the language model, and those of byT5 for quoted words.

    See `TextEmbeddings`. Captions without quotes have no tokens of byT5.
    """

    name = "hunyuan_video"
    default_length = 1000
    text_class = HunyuanVideoText
