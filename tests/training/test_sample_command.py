"""`alload sample` and `alload export`, as a user types them."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from PIL import Image
from safetensors.numpy import load_file, save_file
from training_runs import UNTRAINED, WEIGHTS, save_untrained

from alload_jax.commands import sample_draw
from alload_jax.commands.model_source import find_run
from alload_jax.data.manifest import read_manifest
from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.errors import InputError
from alload_jax.models.common.config import TextConfig
from alload_jax.models.weights import load_weights
from alload_jax.objectives import FlowMatching
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sampling import flow
from alload_jax.sampling.config import SamplingConfig
from alload_jax.sampling.encoders import read_tensors
from alload_jax.training.restore import described_model, one_device_mesh

T2V, I2V = WEIGHTS, WEIGHTS.parents[1] / "i2v" / "transformer"
STILL = ["--frames", 1, "--height", 8, "--width", 8, "--steps", 2]
CLIP = ["--frames", 5, "--height", 8, "--width", 8, "--steps", 2]
LATENTS = ["--frames", 5, "--height", 16, "--width", 16, "--steps", 3]


@pytest.fixture(scope="module")
def class_run(unbroken):
    """A run that train.py trained."""
    return unbroken[0].folder / "run"


SHIFTED = TimestepConfig(shift=2.0, shift_seq_len=1, shift_power=0.5)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A run of a text model, saved at step 7 without training; and its state."""
    folder = tmp_path_factory.mktemp("text") / "run"
    sections = {"planning": PlanningConfig(policy="dual_constraint", m_mem=10)}
    sections |= {"objective": FlowMatching(timesteps=SHIFTED)}
    sections |= {"sampling": SamplingConfig(guidance=1.5, sampler="unipc")}
    return folder, save_untrained(folder, **sections)


@pytest.fixture
def printed(alload):
    """Runs a command that succeeds; returns what it prints."""

    def run(*argv):
        status, out, err = alload(*argv)
        assert status == 0, err
        return out

    return run


def embeddings(path, tokens, width, seed=0, name="text"):
    values = np.random.default_rng(seed).normal(size=(tokens, width)).astype(np.float32)
    save_file({name: values}, path)
    return values


def notes(path):
    with safetensors.safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()["sampling"])


# ------------------------------------------------------------------------------ runs of classes


def test_a_seed_gives_the_same_files_again(printed, class_run):
    names = ["x.png", "x.gif", "x.mp4", "x.safetensors"]

    def files(folder, *seeds):
        Path(folder).mkdir()
        out = [(seed, name) for seed in seeds for name in names]
        lines = [
            {"frames": 1 if name == "x.png" else 5, "out": f"{seed}{name}", "seed": seed}
            for seed, name in out
        ]
        text = "".join(json.dumps(line | {"class": 3}) + "\n" for line in lines)
        Path(folder, "list").write_text(text)
        printed("sample", "--checkpoint", class_run, *STILL, "--list", f"{folder}/list")
        return [Path(folder, f"{seed}{name}").read_bytes() for seed, name in out]

    first, others = files("first", 0), files("second", 0, 1)
    assert others[:4] == first
    assert all(a != b for a, b in zip(others[4:], first, strict=True))


def test_a_sample_goes_where_out_says_and_the_run_stays_as_it_was(
    printed, refused, class_run, tmp_path
):
    run = shutil.copytree(class_run, tmp_path / "copy")
    (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()  # as if it were being written
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    command = ["sample", "--checkpoint", run, "--class", 3, *CLIP, "--zoom", 4, "--out"]
    assert printed(*command, "new/x.gif") == "new/x.gif\n"
    with Image.open("new/x.gif") as picture:
        assert (picture.size, picture.n_frames) == ((32, 32), 5)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    Path("x.gif").write_text("mine")
    refused("x.gif: exists already; give --force", *command, "x.gif")
    printed(*command, "x.gif", "--force")
    assert Path("x.gif").read_bytes().startswith(b"GIF")
    Path("y.gif").mkdir()
    refused("y.gif: is a folder", *command, "y.gif", "--force")


def test_weights_classes_and_steps_change_what_is_drawn(alload, class_run):
    variants = {
        "ema": [],
        "raw": ["--weights", "raw"],
        "older": ["--step", 10],
        "plain": ["--guidance", 1],
        "euler": ["--sampler", "euler"],
        "shifted": ["--shift", 3],
        "dense": ["--dense-attention", "--embedded-guidance", 3],
    }
    for name, flags in variants.items():
        command = ["sample", "--checkpoint", class_run, "--class", 3, *STILL, *flags]
        status, _, note = alload(*command, "--out", f"{name}.safetensors")
        assert status == 0, note
    *drawn, dense = (load_file(f"{name}.safetensors")["latents"] for name in variants)
    assert note.splitlines() == [
        "note: --embedded-guidance has no effect: the model takes no scale of guidance",
        "note: --dense-attention has no effect: the model is dense",
    ]
    np.testing.assert_array_equal(dense, drawn[0])
    assert drawn[0].shape == (1, 8, 8, 1)
    assert drawn[0].dtype == np.float32
    for n, one in enumerate(drawn):
        for other in drawn[:n]:
            assert np.abs(one - other).max() > 1e-6
    expected = {"seed": 0, "steps": 2, "sampler": "unipc", "guidance": 2.0, "shift": 1.0}
    assert notes("ema.safetensors") == expected


@pytest.mark.slow
def test_a_sample_depends_on_its_own_line_alone(printed, class_run):
    """Whatever else is in the list, in whichever order, at the same --batch."""
    items = [
        {"class": n, "seed": 10 + n, "out": f"{n}.safetensors"} | ({"width": 16} if n == 1 else {})
        for n in range(4)
    ]
    files = {"all": items, "turned": items[::-1], "last": items[3:]}
    command = ["sample", "--checkpoint", class_run, *STILL, "--batch", 2, "--list"]
    for name, lines in files.items():
        Path(name).mkdir()
        Path(name, "x.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
        text = printed(*command, f"{name}/x.jsonl")
        assert sorted(text.split()) == sorted(f"{name}/{line['out']}" for line in lines)
    for n in range(4):
        content = Path(f"all/{n}.safetensors").read_bytes()
        assert Path(f"turned/{n}.safetensors").read_bytes() == content
    assert Path("last/3.safetensors").read_bytes() == content
    assert load_file("all/1.safetensors")["latents"].shape == (1, 8, 16, 1)
    # Another batch size rounds otherwise, no more; and it needs no list.
    alone = ["--class", 3, "--seed", 13, *STILL, "--out", "b1.safetensors"]
    printed("sample", "--checkpoint", class_run, *alone)
    pair = (load_file(place)["latents"] for place in ("b1.safetensors", "last/3.safetensors"))
    np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5)


def test_without_its_data_a_run_still_draws(alload, class_run, digits_folder, tmp_path):
    run = shutil.copytree(class_run, tmp_path / "copy")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("/digits\n", "/gone\n"))

    def drawn(*argv):
        command = ["sample", "--checkpoint", run, *STILL, "--force", "--out", "x.png", *argv]
        status, _, err = alload(*command)
        return status, err

    noted = json.loads((run / "data.json").read_text())
    assert noted.pop("origin") == read_manifest(digits_folder).origin
    assert noted == {"vae_stride": [1, 1, 1], "text_length": 2}
    assert drawn("--class", 3) == (0, "")
    (run / "data.json").write_text('{"vae_stride": [1, 1]}')
    assert "data.json: needs vae_stride" in drawn("--class", 3)[1]
    noted |= {"vae_stride": [1, 2, 2]}
    (run / "data.json").write_text(json.dumps(noted))
    assert "need a decoder" in drawn("--class", 3)[1]
    assert "lists 3 classes" in drawn("--class", 3, 4, 5, "--vae-stride", 1, 1, 1)[1]
    (run / "data.json").unlink()
    status, note = drawn("--class", 3, 4)
    assert (status, note.count("\n")) == (0, 1)
    assert note.startswith("note: the run's data.json is gone: a VAE stride of 1 1 1 is guessed")
    assert "--vae-stride" in note


def test_samples_that_are_not_finite_do_not_stop_others(alload, class_run, tmp_path, monkeypatch):
    def draw(params, noise, condition, null):
        bad = condition.tokens[:, :1, None, None, None] % 2 == 1
        return jnp.where(bad, jnp.nan, noise)

    monkeypatch.setattr(flow, "make_flow", lambda *_: draw)
    lines = [json.dumps({"class": n, "out": f"{n}.safetensors"}) for n in range(4)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    status, out, err = alload("sample", "--checkpoint", class_run, *STILL, "--list", "x.jsonl")
    assert (status, out) == (2, "0.safetensors\n2.safetensors\n")
    assert err.startswith("error: 1.safetensors, 3.safetensors: the model's output is not")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == out.split()


def test_out_of_memory_is_reported_in_one_line(refused, class_run, monkeypatch):
    def spent(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(flow, "make_flow", lambda *_: spent)
    command = ["sample", "--checkpoint", class_run, *STILL, "--class", 1, "--out", "x.png"]
    refused("x.png: drawing latents of (1, 8, 8) does not fit", *command)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--class 1 --base nowhere", ["lacks no parameters; leave --base nowhere out"]),
        ("--class 10", ["--class is 10", "from 0 to 9"]),
        ("--class -1", ["--class"]),
        ("--class 1 2 3", ["3 classes", "at most"]),
        ("--class 1 --height 9", ["--height is 9", "nearest: 8 and 12"]),
        ("--class 1 --width 1", ["--width is 1", "nearest: 4"]),
        ("--class 1 --frames 0", ["--frames is 0", "nearest: 1"]),
        ("--class 1 --vae-stride 1 3", ["--vae-stride", "4 8 8"]),
        ("--class 1 --vae-stride 4 8 8", ["nearest: 32"]),
        ("--class 1 --vae-stride 1 2 2", ["need a decoder", ".safetensors"]),
        ("--class 1 --steps 0", ["--steps: '0'"]),
        ("--class 1 --batch 0", ["--batch: '0'"]),
        ("--class 1 --zoom 0", ["--zoom: '0'"]),
        ("--class 1 --shift 0", ["--shift: '0'"]),
        ("--class 1 --guidance nan", ["--guidance: 'nan'"]),
        ("--class 1 --steps 1001", ["--steps: '1001'", "to 1,000"]),
        ("--class 1 --batch 1001", ["--batch:", "to 1,000"]),
        ("--class 1 --zoom 1001", ["--zoom:", "to 1,000"]),
        (f"--class 1 --frames {10**23}", ["--frames is 1", "at most 2147483648"]),
        ("--class 1 --vae-stride 1001 8 8", ["--vae-stride", "from 1 to 1000"]),
        (f"--class 1 --vae-stride {'9' * 5000} 8 8", ["--vae-stride", "from 1 to 1000"]),
        ("--class 1 --zoom 1000 --width 72 --out x.gif", ["72000", "GIF"]),
        ("--class 1 --low-noise-guidance 3", ["low-noise-guidance goes with --low-noise-ch"]),
        ("--class 1 --seed -1", ["--seed is -1"]),
        (f"--class 1 --seed {2**32}", ["--seed is 4294967296"]),
        ("--class 1 --step 4", ["checkpoints", "step 4", "10, 14"]),
        ("--class 1 --out x.jpg", ["x.jpg", "suffix"]),
        ("--class 1 --frames 5", ["x.png", "one frame"]),
        ("--class 1 --prompt-embeds x", ["--prompt-embeds", "--class"]),
        ("--prompt-embeds x", ["--class is not given", "classes"]),
        ("--class 1 --negative-embeds x", ["--negative-embeds", "classes"]),
        ("--class 1 --image-embeds x", ["--image-embeds", "no image"]),
        ("--class 1 --out /dev/null/x.png", ["--out: /dev/null/x.png", "not a folder"]),
        ("--list none.jsonl", ["--list: none.jsonl", "No such file"]),
        ("--list .", ["--list: .", "directory"]),
        ("", ["--class", "--prompt-embeds", "--list"]),
    ],
)
def test_invalid_requests_to_a_class_model_are_refused(refused, class_run, flags, named):
    command = ["sample", "--checkpoint", class_run, *STILL, "--out", "x.png"]
    refused(named, *command, *flags.split())


def test_sizes_and_a_file_must_be_given(refused, class_run):
    flags = [*STILL, "--out", "x.png"]
    for missing in ("--frames", "--height", "--width", "--out"):
        at = flags.index(missing)
        given = ["--class", 1, *flags[:at], *flags[at + 2 :]]
        refused(f"{missing} is not given", "sample", "--checkpoint", class_run, *given)
    words = "--frames is not given, nor --height, --width, --out; give it"
    refused(words, "sample", "--checkpoint", class_run, "--class", 1)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: is not valid JSON"),
        ("[1]", "line 2: holds list"),
        ('{"clas": 1}', "line 2: clas is unknown; did you mean class?"),
        ('{"class": "one"}', "line 2: class is 'one'"),
        ('{"class": []}', "line 2: class is []"),
        ('{"class": true}', "line 2: class is True"),
        ('{"class": 1, "width": 2.5}', "line 2: width is 2.5"),
        ('{"class": 1, "width": 9}', "line 2: width is 9"),
        ('{"class": 1, "out": 3}', "line 2: out is 3"),
        ('{"class": 1, "out": "x.jpg"}', "line 2: out"),
        ('{"class": 1}', "line 2: out is not given"),
        ('{"prompt_embeds": "p.safetensors", "out": "b.png"}', "line 2: class is not given"),
        ('{"class": 1, "out": "a.png"}', "a.png: is the output of two samples"),
        ('{"class": 1, "out": "x.jsonl/b.png"}', "line 2: out: x.jsonl/b.png: "),
        *((content, "x.jsonl") for content in (b"", b"\n\n", b"\xff\xfe")),  # no line at all
    ],
)
def test_a_list_that_cannot_be_drawn_is_refused(refused, class_run, tmp_path, line, named):
    content = line if isinstance(line, bytes) else b'{"class": 1, "out": "a.png"}\n' + line.encode()
    (tmp_path / "x.jsonl").write_bytes(content)
    named = [named, "x.jsonl: line 2" if isinstance(line, str) else "x.jsonl"]
    refused(named, "sample", "--checkpoint", class_run, *STILL, "--list", "x.jsonl")


# -------------------------------------------------------------------------------- Wan's weights


def test_wan_weights_use_the_settings_of_wan(printed):
    low = embeddings("p.safetensors", 5, 10).astype(ml_dtypes.bfloat16)
    save_file({"text": low}, "p.safetensors")
    command = ["sample", "--checkpoint", T2V, "--prompt-embeds", "p.safetensors", *LATENTS]
    printed(*command, "--out", "a.safetensors")
    expected = {"seed": 0, "steps": 3, "sampler": "unipc", "guidance": 5.0, "shift": 5.0}
    assert notes("a.safetensors") == expected
    assert load_file("a.safetensors")["latents"].shape == (2, 2, 2, 4)
    printed(*command, "--dtype", "bfloat16", "--out", "low.safetensors")
    exact, low = (load_file(f"{n}.safetensors")["latents"] for n in ("a", "low"))
    assert 0 < np.abs(exact - low).max() < 0.5


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--prompt-embeds p --negative-prompt x", ["--negative-prompt needs an encoder"]),
        ("--prompt-embeds p --vae none", ["none"]),
        ("--prompt-embeds p --text-encoder none", ["none"]),
        ("--prompt-embeds p --image-encoder none", ["the model takes no image"]),
        ("--prompt-embeds p --last-image x.png", ["--image is not given"]),
        ("--prompt-embeds p --image x.png", ["--image needs --vae"]),
        ("--prompt-embeds p --fps 0", ["--fps: '0'"]),
        ("--prompt-embeds p --boundary 0.9", ["--low-noise-checkpoint go together"]),
        ("--prompt-embeds p --round-timesteps --sampler euler", ["and the sampler is euler"]),
        ("--prompt-embeds p --negative-embeds inf", ["inf: holds values", "finite"]),
        ("--prompt-embeds p --negative-embeds wide", ["--negative-embeds", "[5, 11]"]),
        ("--prompt-embeds p --weights raw", ["--weights raw does not apply"]),
        ("--prompt-embeds p --step 3", ["--step 3 does not apply"]),
        ("--prompt-embeds p --frames 4", ["--frames is 4", "1 and 5"]),
        ("--prompt-embeds p --height 24", ["--height is 24", "16 and 32"]),
        ("--prompt-embeds p --out x.gif", ["x.gif", "decoder", ".safetensors"]),
        ("--prompt-embeds p --shift 1e9", ["shift is 1000000000.0", "coincide"]),
        ("--class 1", ["--class is given", "text"]),
        ("--prompt cat", ["--prompt needs an encoder; give --text-encoder"]),
        ("--prompt-embeds none", ["none: cannot be read (No such file or directory)"]),
        ("--prompt-embeds bad", ["bad: is not a valid safetensors file"]),
        ("--prompt-embeds two", ["two: holds a, b", "text"]),
        ("--prompt-embeds nan", ["nan: holds values that are not finite"]),
        ("--prompt-embeds long", ["--prompt-embeds", "513 tokens", "512"]),
        ("--prompt-embeds wide", ["--prompt-embeds", "[5, 11]", "[tokens, 10]"]),
        # Of an image-to-video model:
        ("--prompt-embeds p --checkpoint i2v", ["--image is not given; this image-to-video model"]),
        ("--prompt-embeds p --checkpoint i2v --last-image x.png", ["but last_image is"]),
        ("--prompt-embeds p --checkpoint i2v --image x.png", ["--image needs --vae"]),
    ],
)
def test_invalid_requests_to_a_text_model_are_refused(refused, tmp_path, flags, named):
    for name, tokens, width in (("p", 5, 10), ("long", 513, 10), ("wide", 5, 11)):
        embeddings(tmp_path / name, tokens, width)
    save_file({"a": np.zeros(2), "b": np.zeros(2)}, tmp_path / "two")
    for name in ("nan", "inf"):
        save_file({"text": np.full((2, 10), float(name), np.float32)}, tmp_path / name)
    (tmp_path / "bad").write_bytes(b"bad")
    given = [str(I2V) if flag == "i2v" else flag for flag in flags.split()]
    command = ["sample", "--checkpoint", T2V, *LATENTS, "--out", "x.safetensors"]
    refused(named, *command, *given)


def test_embeddings_that_may_not_be_read_say_so(tmp_path, monkeypatch):
    embeddings(tmp_path / "p", 5, 10)

    def locked(path, *_):  # a mode would not stop root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", locked)
    with pytest.raises(InputError, match=r"p: cannot be read \(Permission denied\)"):
        read_tensors(tmp_path / "p", ("text",))


# ------------------------------------------------------------------- runs of text, and checkpoints


def test_a_run_of_text_draws_with_its_own_settings(alload, text_run):
    embeddings("p.safetensors", 2, 6)
    command = ["sample", "--checkpoint", text_run[0], "--prompt-embeds", "p.safetensors", *LATENTS]
    status, _, note = alload(*command, "--out", "x.safetensors")
    assert (status, note.count("\n")) == (0, 1)
    assert "a VAE stride of 4 8 8 is guessed; --vae-stride sets it" in note
    # Two tokens; 2·(2/1)^0.5
    expected = {"guidance": 1.5, "sampler": "unipc", "shift": 2 * 2**0.5}
    assert notes("x.safetensors").items() >= expected.items()
    source = find_run(text_run[0])
    run = dataclasses.replace(source.run, sampling=SamplingConfig(shift=3.0))
    assert dataclasses.replace(source, run=run).shift(2) == 3.0


@pytest.mark.parametrize(("weights", "dtype"), [("raw", "float32"), ("ema", "bfloat16")])
def test_an_exported_run_has_the_chosen_weights(printed, text_run, weights, dtype):
    folder, state = text_run
    flags = ["--weights", weights, "--dtype", dtype]
    text = printed("export", "--checkpoint", folder, "--out", "wan", *flags)
    count = sum(p.size for p in jax.tree.leaves(state.params))
    assert text.count("\n") == 1
    assert f"wan: {count:,} parameters of step 7" in text
    assert "WanTransformer3DModel.from_pretrained('wan')" in text
    found = load_weights("wan", UNTRAINED, one_device_mesh())
    expected = state.ema if weights == "ema" else state.params
    rounded = jax.tree.map(lambda p: p.astype(dtype).astype(jnp.float32), expected)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)


def test_unsupported_exports_are_refused(refused, class_run, text_run, tmp_path):
    refused("model.text is null", "export", "--checkpoint", class_run, "--out", "wan")
    refused("not a run folder", "export", "--checkpoint", T2V, "--out", "wan")
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "mine").write_text("mine")
    refused("wan: exists already", "export", "--checkpoint", text_run[0], "--out", "wan")


def test_invalid_checkpoints_are_refused(refused, text_run, tmp_path):
    flags = ["--prompt-embeds", "p.safetensors", *LATENTS, "--out", "x.safetensors"]
    embeddings("p.safetensors", 2, 6)

    def refuse(words, place):
        refused(words, "sample", "--checkpoint", place, *flags, "--vae-stride", 4, 8, 8)

    (tmp_path / "empty").mkdir()
    shutil.copytree(T2V, tmp_path / "pipeline" / "transformer")
    refuse("empty: is neither a run folder", "empty")
    refuse("none: is neither a run folder", "none")
    refuse("did you mean pipeline/transformer?", "pipeline")
    run = shutil.copytree(text_run[0], tmp_path / "run")
    (run / "environment.json").touch()
    for part in (run / "checkpoints", next((run / "checkpoints").iterdir())):
        refuse(f"did you mean {run}?", part)
        with pytest.raises(InputError, match=f"did you mean {run}, its newest step"):
            described_model(part)
    exported = shutil.copytree(T2V, run / "checkpoints" / "exported" / "transformer")
    assert described_model(exported) == described_model(T2V)
    shutil.rmtree(exported.parent)
    for path in (run / "checkpoints" / "7" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 2000:
            path.write_bytes(path.read_bytes()[:1000])
    refuse("checkpoints/7: this checkpoint cannot be read", "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("cross_norm: true", "cross_norm: false"))
    difference = "its model is not config.yaml's: cross_norm was True and is now False;"
    refuse(f"checkpoints/7: {difference}", "run")
    shutil.rmtree(run / "checkpoints")
    refuse("holds no complete checkpoint", "run")


def test_notes_say_where_a_model_is_used_as_it_was_not_trained(capsys):
    def expert(lowest, highest):
        return SimpleNamespace(
            noise_levels=lambda: (lowest, highest),
            trained_null=lambda: False,
            config=SimpleNamespace(text=TextConfig(6, 4)),
        )

    def notes_of(boundary, high, low):
        options = SimpleNamespace(checkpoint="a", low_noise_checkpoint="b", boundary=boundary)
        sample_draw._note_noise_levels(options, high, low)
        return capsys.readouterr().err.splitlines()

    high, low = expert(0.875, 1), expert(0, 0.875)
    assert notes_of(0.875, high, low) == []
    assert notes_of(None, expert(0, 1), None) == []
    (alone,) = notes_of(None, high, None)
    assert "--checkpoint a was trained on noise levels 0.875 to 1, and draws from 1 to 0" in alone
    assert len(notes_of(0.875, low, high)) == 2
    (moved,) = notes_of(0.9, high, low)
    assert "--low-noise-checkpoint b was trained on noise levels 0 to 0.875" in moved

    request, raw = SimpleNamespace(negative=None), SimpleNamespace(values={})
    sample_draw._note_guidance([request], [raw], 5.0, low)
    assert "guidance leads away from zeros" in capsys.readouterr().err
    sample_draw._note_guidance([request], [raw], 1.0, low)
    sample_draw._note_guidance([SimpleNamespace(negative="")], [raw], 5.0, low)
    assert capsys.readouterr().err == ""
    given = SimpleNamespace(values={"negative_embeds": "p"})
    sample_draw._note_guidance([request], [given], 1.0, low)
    assert "--guidance 1" in capsys.readouterr().err
