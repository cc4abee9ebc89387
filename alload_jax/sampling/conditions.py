"""Builds the condition arrays of requests."""

from collections.abc import Sequence

import numpy as np

from alload_jax.models.common.config import ModelConfig
from alload_jax.sampling.embeddings import read_embeddings
from alload_jax.sampling.flow import Condition
from alload_jax.sampling.requests import Request


def conditions(requests: Sequence[Request], model: ModelConfig) -> tuple[Condition, Condition]:
    """Returns the condition of a batch and its null condition, float32 or int32 in host memory.

    Args:
      requests: requests with equal `Request.shape()`.
      model: config of the model.
    """
    image = None
    if model.image:
        image = np.stack([read_embeddings(r.image, "image") for r in requests if r.image])
    if model.text is None:
        tokens = np.array([request.classes for request in requests], np.int32)
        return Condition(tokens, image), Condition(np.full_like(tokens, model.num_classes), image)
    shape = (len(requests), model.text.length, model.text.dim)
    text, negative = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, request in enumerate(requests):
        for array, file in ((text, request.prompt), (negative, request.negative)):
            if file is not None:
                found = read_embeddings(file, "text")
                array[row, : len(found)] = found
    return Condition(text, image), Condition(negative, image)
