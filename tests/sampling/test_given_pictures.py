"""Pictures that are given to image-to-video models."""

import numpy as np
import pytest
from PIL import Image

from alload_jax.data.prepare.images import decode_image
from alload_jax.data.prepare.sources import Source
from alload_jax.errors import InputError
from alload_jax.sampling.encoders import read_picture

TURNED = 6
"""EXIF: the picture is shown a quarter turn clockwise, as phones write it."""


def write(path, turned):
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (48, 80, 3), np.uint8)).resize((800, 480))
    exif = Image.Exif()
    if turned:
        exif[0x0112] = TURNED
    picture.save(path, exif=exif, quality=95)
    return picture


@pytest.mark.parametrize("turned", [False, True])
def test_a_picture_is_turned_as_its_file_says(tmp_path, turned):
    path = tmp_path / "photo.jpg"
    expected = write(path, turned).convert("RGB")
    if turned:
        expected = expected.transpose(Image.Transpose.ROTATE_270)
    width, height = expected.size
    found = read_picture(path, height, width)
    assert found.shape == (height, width, 3)
    assert np.abs(found.astype(int) - np.asarray(expected).astype(int)).mean() < 6


def test_a_picture_is_read_as_preparation_reads_it(tmp_path):
    path = tmp_path / "photo.jpg"
    write(path, turned=True)

    def fit(height, width):
        assert (height, width) == (800, 480)
        raise StopIteration

    with pytest.raises(StopIteration):
        decode_image(Source(path, 0, path.stat().st_size), fit)


def test_what_is_no_picture_is_one_line(tmp_path):
    bomb, text = tmp_path / "bomb.png", tmp_path / "text.png"
    Image.new("1", (20_000, 20_000)).save(bomb)
    text.write_text("no picture")
    for path in (bomb, text, tmp_path / "missing.png", tmp_path):
        with pytest.raises(InputError) as error:
            read_picture(path, 16, 16)
        assert str(error.value).startswith(f"{path}: cannot be read as an image (")
        assert "\n" not in str(error.value)
