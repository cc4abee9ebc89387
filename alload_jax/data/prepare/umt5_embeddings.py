"""`--text umt5`: embeddings of Wan's text encoder."""

from dataclasses import dataclass

from alload_jax.data.prepare.text_embeddings import TextEmbeddings
from alload_jax.encoders.umt5 import Umt5Text


@dataclass(frozen=True)
class Umt5Embeddings(TextEmbeddings):
    """Stores embeddings of umT5; see `TextEmbeddings`."""

    name = "umt5"
    default_length = 512
    text_class = Umt5Text
