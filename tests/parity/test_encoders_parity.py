"""Encoders against diffusers and transformers run by hand, on small random folders."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: install alload-jax[parity]")
pytest.importorskip("diffusers", reason="needs diffusers: install alload-jax[parity]")
pytest.importorskip("transformers", reason="needs transformers: install alload-jax[parity]")

from diffusers import (  # noqa: E402
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from encoder_folders import random_vae, write_pipeline  # noqa: E402
from PIL import Image  # noqa: E402

from alload_jax.encoders.image import ClipImage  # noqa: E402
from alload_jax.encoders.text import Umt5Text, clean_prompt  # noqa: E402
from alload_jax.encoders.vae import WanVae  # noqa: E402
from alload_jax.errors import InputError  # noqa: E402

pytestmark = pytest.mark.parity

SIDES = {"2.1": (16, 24), "2.2": (32, 48)}
STRIDES = {"2.1": (4, 8, 8), "2.2": (4, 16, 16)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wan")


@pytest.fixture(scope="module")
def parts(folder):
    return write_pipeline(folder)


@pytest.fixture(scope="module")
def pipeline(parts):
    return WanImageToVideoPipeline(
        **{name: parts[name] for name in ("tokenizer", "text_encoder", "image_encoder")},
        image_processor=parts["image_processor"],
        vae=parts["vae"],
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


@pytest.fixture(scope="module")
def text_pipeline(pipeline):
    parts = {name: getattr(pipeline, name) for name in ("tokenizer", "text_encoder", "vae")}
    return WanPipeline(**parts, scheduler=pipeline.scheduler)


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def vae(request, folder, parts, tmp_path_factory):
    """Kind, our VAE and diffusers'."""
    if request.param == "2.1":
        return "2.1", WanVae(folder), parts["vae"]
    theirs = random_vae("2.2")
    place = tmp_path_factory.mktemp("wan22")
    theirs.save_pretrained(place)
    return "2.2", WanVae(place), theirs


def random_clip(kind, frames=5, seed=0):
    shape = (frames, *SIDES[kind], 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def as_video(frames):
    """[1, 3, T, H, W] from −1 to 1, as diffusers' processors make it of 8-bit pictures."""
    scaled = torch.from_numpy(frames.astype(np.float32) / 255.0).permute(3, 0, 1, 2)[None]
    return 2.0 * scaled - 1.0


def channels_last(latents):
    return latents[0].permute(1, 2, 3, 0).numpy()


# ---------------------------------------------------------------- VAE


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_latents_are_the_normalised_mode(vae, frames):
    kind, ours, theirs = vae
    clip = random_clip(kind, frames)
    with torch.no_grad():
        mode = theirs.encode(as_video(clip)).latent_dist.mode()
    mean = torch.tensor(theirs.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(theirs.config.latents_std).view(1, -1, 1, 1, 1)
    found = ours.encode(clip)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, channels_last((mode - mean) * (1.0 / std)))
    stride = STRIDES[kind]
    assert ours.stride == stride
    height, width = SIDES[kind]
    grid = (1 + (frames - 1) // stride[0], height // stride[1], width // stride[2])
    assert found.shape == (*grid, ours.channels)
    np.testing.assert_array_equal(ours.encode(clip), found)


def test_decoded_frames_are_those_of_the_pipeline(vae, pipeline):
    kind, ours, theirs = vae
    latents = ours.encode(random_clip(kind))
    mean = torch.tensor(theirs.config.latents_mean).view(1, -1, 1, 1, 1)
    inverse = 1.0 / torch.tensor(theirs.config.latents_std).view(1, -1, 1, 1, 1)
    scaled = torch.from_numpy(latents).permute(3, 0, 1, 2)[None] / inverse + mean
    with torch.no_grad():
        video = theirs.decode(scaled, return_dict=False)[0]
    pictures = pipeline.video_processor.postprocess_video(video, output_type="pil")[0]
    found = ours.decode(latents)
    np.testing.assert_array_equal(found, np.stack([np.asarray(one) for one in pictures]))
    assert found.shape == (5, *SIDES[kind], 3)
    assert found.std() > 1


@pytest.mark.parametrize("with_last", [False, True])
def test_given_latents_are_the_condition_of_the_pipeline(folder, pipeline, with_last):
    first, last = random_clip("2.1", 2)
    height, width = SIDES["2.1"]
    process = pipeline.video_processor.preprocess
    images = [process(Image.fromarray(one), height=height, width=width) for one in (first, last)]
    with torch.no_grad():
        _, condition = pipeline.prepare_latents(
            images[0],
            batch_size=1,
            height=height,
            width=width,
            num_frames=9,
            dtype=torch.float32,
            device="cpu",
            last_image=images[1] if with_last else None,
        )
    found = WanVae(folder).encode_given(first, last if with_last else None, 9)
    np.testing.assert_array_equal(found, channels_last(condition))
    assert found.shape == (3, height // 8, width // 8, 4 + 16)
    assert found[-1, ..., 3].all() == with_last


def test_the_first_latent_given_is_that_of_the_picture(vae):
    kind, ours, _ = vae
    clip = random_clip(kind)
    given = ours.encode_given(clip[0], None, 5)[..., 4:]
    np.testing.assert_allclose(given[:1], ours.encode(clip[:1]), atol=1e-5)
    np.testing.assert_allclose(given[:1], ours.encode(clip)[:1], atol=1e-5)
    alone = ours.encode_given(clip[0], None, 1)
    np.testing.assert_array_equal(alone[..., 4:], ours.encode(clip[:1]))
    assert (alone[..., :4] == 1).all()


def test_what_does_not_fit_the_memory_is_tiled(folder, parts, monkeypatch, capsys):
    ours = WanVae(folder)
    kind = type(ours._model)
    whole = kind._encode

    def small(self, x):
        if not self.use_tiling and x.shape[-2] * x.shape[-1] >= 16 * 24:
            raise torch.OutOfMemoryError("too large")
        return whole(self, x)

    expected, clip = ours.encode(random_clip("2.1")), random_clip("2.1")
    monkeypatch.setattr(kind, "_encode", small)
    np.testing.assert_array_equal(ours.encode(clip), expected)  # smaller than a tile
    assert "384 pixels" in capsys.readouterr().err
    ours.encode(clip)
    ours.encode(clip[:, :8, :8])
    assert capsys.readouterr().err == ""
    assert not ours._model.use_tiling

    def never(self, x):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(kind, "_encode", never)
    with pytest.raises(InputError, match="also in tiles"):
        ours.encode(clip)


@pytest.mark.parametrize(
    ("clip", "named"),
    [
        (np.zeros((5, 16, 16, 3), np.float32), "float32"),
        (np.zeros((4, 16, 16, 3), np.uint8), "4n"),
        (np.zeros((5, 12, 16, 3), np.uint8), "multiples of 8"),
        (np.zeros((0, 16, 16, 3), np.uint8), "4n"),
        (np.zeros((5, 16, 16), np.uint8), "T, H, W, 3"),
    ],
)
def test_clips_of_other_shapes_are_refused(folder, parts, clip, named):
    with pytest.raises(ValueError, match=named):
        WanVae(folder).encode(clip)


def test_latents_of_other_shapes_are_refused(folder, parts):
    with pytest.raises(ValueError, match="16"):
        WanVae(folder).decode(np.zeros((2, 2, 2, 48), np.float32))
    with pytest.raises(ValueError, match="as many"):
        WanVae(folder).encode_given(*random_clip("2.1", 2), 1)


def test_bfloat16_is_close_to_float32(folder, parts):
    clip = random_clip("2.1")
    exact = WanVae(folder).encode(clip)
    found = WanVae(folder, dtype="bfloat16").encode(clip)
    assert found.dtype == np.float32
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, atol=0.05 * exact.std() + 0.02)


# ---------------------------------------------------------------- text

TEXTS = [
    "a red square moves",
    "",
    "a  &amp;amp; circle\non\tgrass ",
    "the right of a blue circle " * 9,
]


def test_text_embeddings_are_those_of_the_pipeline(folder, text_pipeline):
    ours, embed = Umt5Text(folder, length=16), text_pipeline._get_t5_prompt_embeds
    with torch.no_grad():
        expected = embed(TEXTS, max_sequence_length=16).numpy()
        alone = [embed(text, max_sequence_length=16)[0] for text in TEXTS]
    found = [ours.tokens(text)["text"] for text in TEXTS]
    lengths = [len(one) for one in found]
    assert lengths[1] == 1  # the end alone
    assert lengths[3] == 16
    for number, one in enumerate(found):
        assert one.shape == (lengths[number], ours.width)
        np.testing.assert_array_equal(one, alone[number][: len(one)].numpy())
        np.testing.assert_allclose(one, expected[number, : len(one)], rtol=1e-4, atol=1e-6)
        assert not expected[number, len(one) :].any()


def test_prompts_are_cleaned_as_by_the_pipeline():
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    for text in [*TEXTS, "&lt;b&gt; \u3000 x\u00a0y &amp;lt;", "naïve — “quoted” 猫"]:
        assert clean_prompt(text) == prompt_clean(text)


def test_a_tokenizer_can_be_a_sentencepiece_model_alone(folder, parts, tmp_path):
    parts["text_encoder"].save_pretrained(tmp_path / "text_encoder")
    (tmp_path / "tokenizer").mkdir()
    for name, source in (("spiece.model", "spiece"), ("tokenizer_config.json", "tokenizer")):
        data = (folder / source / name).read_bytes()
        (tmp_path / "tokenizer" / name).write_bytes(data)
    ours, theirs = Umt5Text(tmp_path, length=16), Umt5Text(folder, length=16)
    for text in TEXTS:
        np.testing.assert_array_equal(ours.tokens(text)["text"], theirs.tokens(text)["text"])
    (tmp_path / "tokenizer" / "spiece.model").write_bytes(b"nothing")
    with pytest.raises(InputError, match="tokenizer: the tokenizer cannot be read"):
        Umt5Text(tmp_path, length=16).tokens("a cat")


# ---------------------------------------------------------------- pictures


def test_image_embeddings_are_those_of_the_pipeline(folder, pipeline):
    picture = np.random.default_rng(1).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    with torch.no_grad():
        expected = pipeline.encode_image(Image.fromarray(picture), "cpu")[0].numpy()
    found = ClipImage(folder).encode(picture)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (5, 10)
    with pytest.raises(ValueError, match="H, W, 3"):
        ClipImage(folder).encode(picture[..., :1])


# ---------------------------------------------------------------- folders


def test_configs_are_read_without_pytorch(folder, parts):
    code = (
        "import sys\n"
        "from alload_jax.encoders.image import ClipImage\n"
        "from alload_jax.encoders.text import Umt5Text\n"
        "from alload_jax.encoders.vae import WanVae\n"
        "vae = WanVae(sys.argv[1])\n"
        "print(vae.stride, vae.channels, Umt5Text(sys.argv[1]).width)\n"
        "print([one.origin() for one in (vae, ClipImage(sys.argv[1]))])\n"
        "found = {'torch', 'diffusers', 'transformers', 'jax'} & sys.modules.keys()\n"
        "sys.exit(str(found) if found else 0)"
    )
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(4, 8, 8) 16 12\n")


def test_a_part_may_be_given_by_its_own_folder(folder, parts):
    for make, name in ((WanVae, "vae"), (Umt5Text, "text_encoder"), (ClipImage, "image_encoder")):
        assert make(folder / name).origin() == make(folder).origin()


def test_the_digest_follows_weights_and_config_alone(folder, parts, tmp_path):
    digest = WanVae(folder).origin()["weights"]
    parts["vae"].save_pretrained(tmp_path / "same", max_shard_size="50KB")
    assert (tmp_path / "same" / "diffusion_pytorch_model.safetensors.index.json").exists()
    config = tmp_path / "copy" / "config.json"
    parts["vae"].save_pretrained(tmp_path / "copy")
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"_diffusers_version": "1", "_name_or_path": "x"}))
    assert WanVae(tmp_path / "copy").origin()["weights"] == digest
    config.write_text(json.dumps(values | {"latents_std": [2.0] * 16}))
    assert WanVae(tmp_path / "copy").origin()["weights"] != digest
    random_vae("2.1", seed=1).save_pretrained(tmp_path / "other")
    assert WanVae(tmp_path / "other").origin()["weights"] != digest
    clip = random_clip("2.1")
    np.testing.assert_array_equal(
        WanVae(tmp_path / "same").encode(clip), WanVae(folder).encode(clip)
    )


@pytest.mark.parametrize("make", [WanVae, Umt5Text, ClipImage])
def test_folders_of_something_else_are_refused(folder, parts, make, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        make(tmp_path / "missing")
    with pytest.raises(InputError, match=r"no config.json and no \w+/config.json"):
        make(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        make(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "Other", "model_type": "bert"}')
    with pytest.raises(InputError, match=r"is (Other|bert), not "):
        make(tmp_path)


def test_missing_parts_of_a_folder_are_named(folder, parts, tmp_path):
    parts["vae"].save_pretrained(tmp_path / "vae")
    weights = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = parts["vae"].state_dict()
    tensors.pop("quant_conv.weight")
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in tensors.items()}, weights)
    with pytest.raises(InputError, match=r"missing or have another shape, such as quant_conv"):
        WanVae(tmp_path).encode(random_clip("2.1"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="weights cannot be read") as error:
        WanVae(tmp_path).encode(random_clip("2.1"))
    assert "\n" not in str(error.value)
    weights.unlink()
    with pytest.raises(InputError, match=r"diffusion_pytorch_model\.safetensors: no such file"):
        WanVae(tmp_path).origin()
    parts["text_encoder"].save_pretrained(tmp_path / "text_encoder")
    with pytest.raises(InputError, match="no tokenizer"):
        Umt5Text(tmp_path)


@pytest.mark.parametrize("missing", ["torch", "diffusers", "transformers"])
def test_a_missing_package_gives_one_line(folder, parts, monkeypatch, missing):
    from alload_jax.encoders import loading

    find = loading.importlib.util.find_spec
    monkeypatch.setattr(
        loading.importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    for encode, argument in (
        (WanVae(folder).encode, random_clip("2.1")),
        (Umt5Text(folder).tokens, "a"),
        (ClipImage(folder).encode, random_clip("2.1")[0]),
    ):
        with pytest.raises(InputError, match=r"install alload-jax\[prepare\]"):
            encode(argument)
