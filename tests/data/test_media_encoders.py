"""Encoders with weights: their folders, and the processes that encode for all workers."""

import os

import pytest
from media_helpers import contents, moving_frames, prepare, skipped, write_video
from PIL import Image
from weighed_encoders import WeighedBytes

from alload_jax import cli
from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare import unit
from alload_jax.errors import InputError, run_command


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for number in range(3):
        write_video(folder / f"clip{number}.mkv", moving_frames(9 + number))
        (folder / f"clip{number}.txt").write_text(f"clip number {number}")
    Image.new("RGB", (40, 40), (90, 0, 0)).save(folder / "image.png")
    return folder


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "weights").write_text("half")
    return folder


def weighed(media, out, weights, **changes):
    flags = {"vae": "weighed", "vae_folder": str(weights)}
    flags |= {"text": "weighed", "text_folder": str(weights)}
    return prepare(media, out, **flags | {"files_per_shard": 1} | changes)


def processes(weights):
    """Processes that encoded, with the GPUs that they saw."""
    return {int(p.name.split("-")[1]): p.read_text() for p in weights.glob("process-*")}


# ---------------------------------------------------------------- processes


def test_one_process_encodes_for_all_workers_on_each_gpu(media, weights, tmp_path, monkeypatch):
    weighed(media, tmp_path / "one", weights)
    assert processes(weights).keys() == {os.getpid()}
    lengths = read_manifest(tmp_path / "one").text_length.tolist()
    assert lengths == [len("clip number 0")] * 3 + [0]
    weighed(media, tmp_path / "two", weights, workers=2)
    assert len(processes(weights)) == 2
    monkeypatch.setattr(unit, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    weighed(media, tmp_path / "gpus", weights, workers=2)
    assert sorted(processes(weights).values())[-2:] == ["3", "5"]
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "gpus")


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [(0, None, [None]), (1, "3", [None]), (2, None, ["0", "1"]), (2, "5,3", ["5", "3"])],
)
def test_processes_see_one_gpu_each(monkeypatch, count, visible, expected):
    monkeypatch.setattr(unit, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert unit._devices() == expected


def test_what_the_encoder_raises_reaches_the_report_and_the_user(media, weights, tmp_path):
    (weights / "weights").write_text("picky")
    weighed(media, tmp_path / "picky", weights, workers=2)
    assert skipped(tmp_path / "picky") == {"image.png": "one frame"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [("refuses", "the weights are damaged"), ("ends", "the process that encodes ended")],
)
def test_an_encoding_process_that_fails_or_ends_gives_one_line(
    media, weights, tmp_path, fault, said
):
    (weights / "weights").write_text(fault)
    with pytest.raises(InputError, match=said) as error:
        weighed(media, tmp_path / "out", weights, workers=2)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- folders


def interrupted(media, out, weights, monkeypatch):
    def stop(*_, **__):
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("alload_jax.data.prepare.pipeline.finish_store", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            weighed(media, out, weights)


def test_a_run_goes_on_with_equal_weights_alone(media, weights, tmp_path, monkeypatch):
    weighed(media, tmp_path / "whole", weights)
    interrupted(media, tmp_path / "out", weights, monkeypatch)
    (weights / "weights").write_text("other")
    with pytest.raises(InputError, match="was begun with vae"):
        weighed(media, tmp_path / "out", weights)
    (weights / "weights").write_text("half")
    weighed(media, tmp_path / "out", weights.rename(tmp_path / "moved"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--vae", "wan"], ["--vae wan", "--vae-folder"]),
        (["--text", "umt5"], ["--text umt5", "--text-folder"]),
        (["--vae-folder", "x"], ["--vae none", "--vae-folder x"]),
        (["--text-folder", "x"], ["--text bytes", "--text-folder x"]),
        (["--vae", "wan", "--vae-folder", "missing"], ["missing: no such folder"]),
        (["--text", "umt5", "--text-folder", "missing"], ["missing: no such folder"]),
    ],
)
def test_folders_that_do_not_fit_are_refused(media, tmp_path, capsys, flags, named):
    argv = ["prepare", "media", media, "--out", tmp_path / "out", "--area", "32x32", *flags]
    assert run_command(cli.main, [str(part) for part in argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for part in named:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_the_default_length_is_the_encoders_own(media, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(WeighedBytes, "default_length", 3)
    weighed(media, tmp_path / "out", weights)
    assert read_manifest(tmp_path / "out").text_length.max() == 3
