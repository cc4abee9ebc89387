"""Sets of several folders in one YAML file: clips and captions of each, weights, dropout."""

import json
import shutil

import numpy as np
import pytest
import yaml
from media_helpers import SMALL, grey_frames, moving_frames, write_video
from PIL import Image
from pyarrow.parquet import read_table

from alload_jax.cli import main
from alload_jax.data.manifest import read_manifest, read_rows
from alload_jax.data.prepare.inputs import MediaFolder, find_items, set_items
from alload_jax.data.prepare.pipeline import prepare_media
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.prepare.sources import Item
from alload_jax.data.record import with_text_of_epoch
from alload_jax.data.selection import SourceWeight, source_shares, with_weights
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError


@pytest.fixture
def folders(tmp_path):
    """Two folders of media, and a function that prepares a set of them."""
    for number, name in enumerate(("portraits", "clips")):
        (tmp_path / name).mkdir()
        write_video(tmp_path / name / "a.mkv", grey_frames(range(10, 210, 10)))
        Image.new("RGB", (90, 90), (number, 0, 0)).save(tmp_path / name / "b ü.png")
        (tmp_path / name / "b ü.txt").write_text(f"tag {number}, red, blue, green\n")

    def prepare_set(*given, out="out", **options):
        place = tmp_path / "set.yaml"
        place.write_text(yaml.safe_dump({"folders": list(given)}))
        settings = MediaSettings(**SMALL)
        prepare_media(set_items(place, settings), tmp_path / out, settings, **options)
        return tmp_path / out

    return prepare_set


def arrays_of(folder, begin=""):
    reader = StoreReader(read_manifest(folder))
    rows = read_rows(folder).to_pylist()
    return [
        (row["path"].removeprefix(begin), {k: v.tobytes() for k, v in reader.read(at).items()})
        for at, row in enumerate(rows)
        if row["path"].startswith(begin)
    ]


def test_each_folder_is_prepared_by_its_own_settings(folders, tmp_path):
    own = {"portraits": {"area": "48x48", "frames": 5}, "clips": {"fps": 8, "max_clips": 1}}
    out = folders(*({"path": name} | settings for name, settings in own.items()))
    for name, settings in own.items():
        changes = {key: (value,) if key == "area" else value for key, value in settings.items()}
        alone = MediaSettings(**SMALL | changes | ({"fps": "8"} if "fps" in settings else {}))
        prepare_media(find_items(tmp_path / name), tmp_path / name[0], alone)
        assert arrays_of(out, f"{name}/") == arrays_of(tmp_path / name[0])
    # Other settings of one folder encode its files anew; those of the other stay.
    before = read_rows(out).to_pylist()
    folders({"path": "portraits", "frames": 9}, {"path": "clips"} | own["clips"], update=True)
    after = {row["path"]: row for row in read_rows(out).to_pylist()}
    for row in before:
        stays = row["path"].startswith("clips")
        assert (after[row["path"]]["checksum"] == row["checksum"]) == stays
    assert set(read_rows(out)["frames"].to_pylist()) == {1, 9}


def test_captions_get_words_and_orders_of_tags(folders):
    tags = {"path": "clips", "shuffle_tags": 6, "keep_tags": 1, "trigger": "sks"}
    words = {"path": "portraits", "prefix": "a film of ", "suffix": ", grainy", "trigger": "film"}
    rows = read_rows(folders(tags, words)).to_pylist()
    captions = {row["path"]: row["captions"] or [row["caption"]] for row in rows}
    orders = captions["clips/b ü.png"]
    assert orders[0] == "sks, tag 1, red, blue, green"
    assert len(set(orders)) == len(orders) == 6
    for order in orders:
        first, kept, *rest = order.split(", ")
        assert (first, kept, sorted(rest)) == ("sks", "tag 1", ["blue", "green", "red"])
    assert captions["portraits/b ü.png"] == ["a film of tag 0, red, blue, green, grainy"]
    assert captions["clips/a.mkv"] == ["sks"]
    assert captions["portraits/a.mkv"] == ["film"]
    for caption, expected in (("she asks", "sks, she asks"), ("a (sks) cat", "a (sks) cat")):
        item = Item("a.png", None, (caption,))
        assert MediaFolder("clips", trigger="sks").captions_of(item) == (expected,)


def test_a_folder_takes_one_or_all_captions_whatever_the_command_says(folders, tmp_path):
    (tmp_path / "clips" / "b ü.txt").write_text("one\ntwo\n")
    place = tmp_path / "set.yaml"
    every, joined = ("one", "two"), ("one two",)
    cases = (("", "all", every), ("", "one", joined), ("all", "one", every), ("one", "all", joined))
    for own, of_command, expected in cases:
        place.write_text(yaml.safe_dump({"folders": [{"path": "clips", "captions": own}]}))
        settings = MediaSettings(**SMALL, captions=of_command)
        (item,) = (each for each in set_items(place, settings) if any(each.captions))
        assert item.captions == expected


def test_weights_and_dropout_reach_plans_and_texts_and_follow_the_set(folders):
    out = folders({"path": "portraits", "weight": 3, "caption_dropout": 0.25}, {"path": "clips"})
    manifest = read_manifest(out)
    assert manifest.weight.tolist() == [3.0] * 3 + [1.0] * 3
    assert manifest.dropout.tolist() == [0.25] * 3 + [0.0] * 3
    samples = manifest.samples((1, 8, 8))
    assert with_weights(samples, (), None).weight.tolist() == manifest.weight.tolist()
    paths = np.array(read_rows(out)["path"].to_pylist())
    twice = with_weights(samples, [SourceWeight("*.png", 2)], paths).weight
    factors = [2 if path.endswith("png") else 1 for path in paths]
    assert twice.tolist() == (manifest.weight * factors).tolist()
    (share, others) = source_shares(samples, [SourceWeight("*.png", 2)], paths)
    assert (share.epoch_samples, others.epoch_samples) == (8.0, 8.0)
    with pytest.raises(InputError, match="times the weights in the data folder"):
        with_weights(samples, [SourceWeight("*", 1000)], paths)
    arrays = StoreReader(manifest).read(2)
    drawn = [with_text_of_epoch(arrays, 0, epoch, 2, 0.25)["text"] for epoch in range(2000)]
    lengths = {len(text) for text in drawn}
    assert lengths == {0, len(arrays["text"])}
    assert 0.22 < np.mean([len(text) == 0 for text in drawn]) < 0.28
    folders({"path": "portraits", "weight": 2}, {"path": "clips"}, update=True)
    assert read_manifest(out).weight.tolist() == [2.0] * 3 + [1.0] * 3
    assert read_manifest(out).dropout is None


def test_captions_without_what_a_set_adds_go_to_a_table_and_back(folders, tmp_path, capsys):
    tags = {"path": "clips", "shuffle_tags": 3, "trigger": "sks"}
    out = folders(tags, {"path": "portraits", "prefix": "a film of "})
    table, texts = tmp_path / "edit.csv", [*tmp_path.glob("*/*.txt")]
    before, own = read_rows(out).to_pylist(), [text.read_text() for text in texts]
    assert main(["data", "captions", str(out), "--out", str(table)]) == 0
    lines = table.read_text("utf-8-sig").splitlines()
    assert lines[1:3] == ["clips/a.mkv,", 'clips/b ü.png,"tag 1, red, blue, green"']
    assert main(["data", "captions", str(table), "--media", str(tmp_path)]) == 0
    assert "0 caption files changed" in capsys.readouterr().out
    assert [text.read_text() for text in texts] == own
    table.write_text(table.read_text("utf-8-sig").replace("tag 0", "tag 7"))
    assert main(["data", "captions", str(table), "--media", str(tmp_path)]) == 0
    folders(tags, {"path": "portraits", "prefix": "a film of "}, update=True)
    for was, row in zip(before, read_rows(out).to_pylist(), strict=True):
        assert row["caption"] == was["caption"].replace("tag 0", "tag 7")
    folders({"path": "clips"}, {"path": "portraits"}, update=True)
    assert "found_captions" not in read_rows(out).column_names


def test_sets_into_one_of_their_folders_or_of_two_called_alike_are_refused(folders, tmp_path):
    folders({"path": "portraits"}, {"path": "clips"})
    argv = ["prepare", "media", str(tmp_path / "set.yaml"), "--out", str(tmp_path / "clips/out")]
    with pytest.raises(InputError, match="lies in the input folder"):
        main(argv)
    with pytest.raises(InputError, match="--media-root does not apply to a set"):
        main([*argv[:4], str(tmp_path / "new"), "--media-root", str(tmp_path)])
    shutil.copytree(tmp_path / "clips", tmp_path / "portraits" / "clips")
    one, two = (str(tmp_path / name) for name in ("clips", "portraits/clips"))
    with pytest.raises(InputError, match=f"{one} and {two} would both be called clips"):
        folders({"path": one}, {"path": two})


def test_a_path_that_stands_twice_keeps_both_samples_and_weights_in_an_update(folders, tmp_path):
    given = [{"path": "clips", "trigger": "sks"}, {"path": "clips", "weight": 2}]
    small = {"path": "clips", "area": "256p", "max_enlarge": 1}
    out = folders(*given, small)
    before, skipped = read_rows(out).to_pylist(), read_table(out / "skipped.parquet").to_pylist()
    for _ in range(2):
        folders(*given, small, update=True)
        assert read_rows(out).to_pylist() == before
        # Both lists agree on what the third cannot use, though the others use the file.
        assert sorted(read_table(out / "skipped.parquet").to_pylist(), key=str) == sorted(
            skipped, key=str
        )
    folders(given[1], update=True)
    assert read_manifest(out).weight.tolist() == [2.0] * 3


def test_a_wrong_folder_is_refused_by_its_place(folders):
    for given, words in (
        ({"path": "clips", "frame": 5}, "frame is no key of a folder; there are path, weight"),
        ({"path": "clips", "frames": 6}, r"folder 1 \(clips\): --frames is 6; it must be 4n"),
        ({"path": "clips", "frames": 5.5}, "frames is 5.5; give a whole number"),
        ({"path": "nowhere"}, r"folder 1 \(nowhere\): .*nowhere: no such file or folder"),
        (
            {"path": "clips", "weight": 0},
            r"\(clips\): weight is 0; it must be from 0.001 to 1,000$",
        ),
        ({"path": ""}, "folder 1 lacks path"),
        ({"frames": 5}, "folder 1 lacks path"),
        ("clips", "folder 1 lacks path"),
        ({"path": "clips", "trigger": False}, "trigger is False; give text, in quotes"),
        ({"path": "clips", "weight": "3"}, "weight is '3'; give a finite number"),
        ({"path": "clips", "area": [7]}, "area is"),
        ({"path": "clips", "area": []}, "--area is empty"),
        ({"path": "clips", "area": "50x50"}, "not multiples of 16"),
        ({"path": "clips", "captions": "some"}, "captions is 'some'; it must be one or all"),
        ({"path": "clips", "fps": True}, "fps is True"),
        ({"path": "clips", "keep_tags": 1}, "keep_tags is 1, but shuffle_tags is 0; set it too"),
        ({"path": "clips", "caption_column": "x"}, "caption-column x: .*clips has no ta"),
    ):
        with pytest.raises(InputError, match=words):
            folders(given)


def test_a_set_is_planned_as_what_is_prepared_of_it(folders, tmp_path, capsys):
    codecs = {"b.mp4": ("libx264", {"bf": "2"}), "c.avi": ("mpeg4", {}), "d.ts": ("mpeg2video", {})}
    for name, (codec, options) in codecs.items():
        frames = moving_frames(41, 32, 48)
        write_video(tmp_path / "clips" / name, frames, 25, codec, "yuv420p", **options)
    whole = (tmp_path / "clips" / "d.ts").read_bytes()
    (tmp_path / "clips" / "cut.ts").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "clips" / "none.mp4").write_bytes(b"none")
    clips = {"fps": 24, "frames": 9, "stride_seconds": 0.2, "area": ["16x16", "32x32"]}
    portraits = {"path": "portraits", "area": "32x32", "frames": 9, "weight": 3}
    given = (portraits, {"path": "clips"} | clips)
    found = []
    for place in (folders(*given), tmp_path / "set.yaml"):
        stride = ["--vae-stride", "1,1,1"] if place.suffix else []
        flags = ["--manifest", str(place), *stride, "--patch-size", "1,8,8", "--m-mem", "900"]
        assert main(["plan", *flags, "--ranks", "2", "--seed", "0", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
        found[-1]["plan"] = {
            k: v for k, v in found[-1]["plan"].items() if k not in ("data", "manifest")
        }
    assert found[0]["plan"]["sample_count"] > 20
    assert found[0] == found[1]
