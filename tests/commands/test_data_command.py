"""`alload data`: shows, checks and merges data folders, and files of other trainers."""

import re

import numpy as np
import pytest
import yaml
from looks import assert_looks
from PIL import Image
from source_files import make_samples, write_fastvideo, write_musubi, write_tensor_files

from alload_jax.data.manifest import read_manifest, read_paths
from alload_jax.data.store import StoreWriter

SIZES = [(1, 16, 16), (5, 16, 32), (5, 16, 32), (9, 16, 16)]


def write(folder, channels=3, stride=(1, 1, 1), origin=None, sizes=SIZES):
    rng = np.random.default_rng(0)
    with StoreWriter(folder, vae_stride=stride, origin=origin, samples_per_shard=2) as writer:
        for number, (frames, height, width) in enumerate(sizes):
            grid = ((frames - 1) // stride[0] + 1, height // stride[1], width // stride[2])
            latents = rng.uniform(-1, 1, (*grid, channels)).astype(np.float16)
            text = np.zeros((number + 1, 8), np.float16)
            caption = f"a [red] dot, {number}\x00\n" + "long " * number * 100
            writer.add(latents, text, (frames, height, width), caption=caption)
    return folder


@pytest.fixture
def data(alload):
    """Runs `alload data`."""
    return lambda *argv: alload("data", *argv)


def cells(out):
    """The cells of each line of printed tables."""
    return [tuple(part.strip() for part in line.replace("│", "  ").split("  ") if part.strip())
            for line in out.splitlines()]  # fmt: skip


def test_a_store_is_shown(data, tmp_path):
    origin = {"fps": "8", "vae": "none", "made": ["[red]", {"by": 1}]}
    write(tmp_path / "merge", origin=origin)  # a name that is a command too
    status, out, err = data("./merge")
    assert (status, err) == (0, "")
    size = sum(read_manifest(tmp_path / "merge").shard_bytes.values())
    for row in [
        ("samples", "4"),
        ("images", "1"),
        ("videos", "3"),
        ("video", "0.001 hours: 19 frames at 8 fps"),
        ("tokens", "30 with patch size 1,16,16"),
        ("condition", "text of width 8"),
        ("condition tokens of a sample", "1 to 4, median 2"),
        ("channels", "3"),
        ("VAE stride", "1,1,1"),
        ("shards", "2"),
        ("bytes", f"{size:,}"),
        ("origin: made", '["[red]", {"by": 1}]'),
        ("5×16×32", "2", "10", "20", "66.7%"),
        ("9×16×16", "1", "9", "9", "30.0%"),
        ("1×16×16", "1", "1", "1", "3.3%"),
    ]:
        assert row in cells(out)
    write(tmp_path / "store")
    rows = cells(data("store", "--patch-size", "1,4,4")[1])
    assert ("tokens", "480 with patch size 1,4,4") in rows
    assert ("video", "19 frames; the origin names no fps") in rows
    # Sizes of pixels have whole patches of pixels; many sizes are gathered.
    write(tmp_path / "pixels", channels=4, stride=(4, 1, 1), sizes=[(5, 16, 16)])
    rows = cells(data("pixels")[1])
    assert ("tokens", "2 with patch size 1,16,16") in rows
    assert ("VAE stride", "4,1,1") in rows
    write(tmp_path / "many", sizes=[(1, 2, 2 * n) for n in range(1, 41)])
    assert ("10 other sizes", "10", "55", "6.7%") in cells(data("many")[1])


def test_damaged_records_are_named_and_leave_their_place_on_the_sheet(data, tmp_path):
    store = write(tmp_path / "store")
    status, out, err = data("store", "--check")
    assert (status, err) == (0, "")
    assert out.endswith("4 records read, 0 damaged\n")
    shard = store / "shard-00001.arrayrecord"
    content = bytearray(shard.read_bytes())
    written = np.flatnonzero(np.frombuffer(content, np.uint8))
    content[written[len(written) // 2]] ^= 1
    shard.write_bytes(content)
    status, out, _ = data("store", "--check")
    assert status == 1
    assert out.endswith("4 records read, 1 damaged\n")
    named = r"^store/shard-00001.arrayrecord: record [01] \(sample [23]\) "
    assert re.search(named, out, re.MULTILINE)
    shard.write_bytes(bytes(len(content)))
    assert data("store", "--sheet", "sheet.png")[0] == 0
    assert_looks(Image.open(tmp_path / "sheet.png"), (1200, 486, -2.71))


@pytest.mark.parametrize(
    ("channels", "stride", "looks"),
    [
        (3, (1, 1, 1), (1200, 610, 18.58)),
        (1, (1, 1, 1), (1200, 610, 5.21)),
        (16, (4, 8, 8), (1200, 636, 3.04)),
        (12, (4, 1, 1), (1200, 610, -25.62)),
    ],
)
def test_the_sheet_is_a_picture_which_force_alone_replaces(data, tmp_path, channels, stride, looks):
    write(tmp_path / "store", channels=channels, stride=stride)
    status, out, _ = data("store", "--sheet", "sheet.png", "--samples", 3)
    assert (status, out.endswith("written: sheet.png\n")) == (0, True)
    assert_looks(Image.open(tmp_path / "sheet.png"), looks)
    first = (tmp_path / "sheet.png").read_bytes()
    status, _, err = data("store", "--sheet", "sheet.png", "--samples", 4)
    assert (status, "exists already; give --force" in err) == (2, True)
    assert (tmp_path / "sheet.png").read_bytes() == first
    data("store", "--sheet", "sheet.png", "--samples", 3, "--force")
    assert (tmp_path / "sheet.png").read_bytes() == first


def test_stores_are_merged_with_their_names_on_demand(data, tmp_path):
    for name in "ab":
        write(tmp_path / name)
    assert data("merge", "a", "b", "--out", "all") == (0, "all/manifest.parquet\n", "")
    assert len(read_manifest(tmp_path / "all")) == 8
    assert data("merge", "a", "b", "--out", "named", "--add-names")[0] == 0
    assert set(read_paths(read_manifest(tmp_path / "named"))) == {"a", "b"}


def test_several_captions_are_counted(data, tmp_path):
    text = np.zeros((1, 8), np.float16)
    with StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1)) as writer:
        for count in (1, 3, 2):
            latents, others = np.zeros((1, 16, 16, 3), np.float16), [(text, "other")] * (count - 1)
            writer.add(latents, text, (1, 16, 16), "first", alternatives=others)
    _, out, _ = data("store", "--sheet", "sheet.png", "--check")
    assert ("captions of a sample", "1 to 3, median 2; 2 samples have several") in cells(out)
    assert "3 records read, 0 damaged" in out


def test_what_differs_between_merged_stores_is_named(data, tmp_path):
    """Such as two preparations with different flags, or one by hand."""
    media = {"area": ["480p"], "frames": 81}
    write(tmp_path / "a", origin={"fps": "16", "media": media})
    write(tmp_path / "b", origin={"fps": 16.0, "media": media | {"area": ["720p"]}, "by": "x" * 99})
    status, out, err = data("merge", "a", "b", "--out", "all")
    assert (status, out) == (0, "all/manifest.parquet\n")
    assert err.startswith("note: the origins differ: fps (16 in a, 16.0 in b), media.area ([")
    assert 'media.area (["480p"] in a, ["720p"] in b), by (none in a, xxx' in err
    assert err.count("\n") == 1
    assert len(err) < 300
    assert read_manifest(tmp_path / "all").fps == 16
    write(tmp_path / "many", origin={f"name {n}": n for n in range(9)})
    assert "and 8 more" in data("merge", "a", "many", "--out", "more")[2]


def test_videos_of_different_rates_are_not_merged(data, refused, tmp_path):
    write(tmp_path / "a", origin={"fps": "16"})
    write(tmp_path / "b", origin={"fps": "30000/1001"})
    said = ["b: fps of its videos is 29.97", "16.0 in a"]
    refused(said, "data", "merge", "a", "b", "--out", "all")
    write(tmp_path / "images", origin={"fps": "8"}, sizes=[(1, 16, 16)])
    assert data("merge", "images", "a", "--out", "all")[0] == 0
    assert read_manifest(tmp_path / "all").fps == 16
    write(tmp_path / "unknown")
    assert "fps (16 in a, none in unknown)" in data("merge", "a", "unknown", "--out", "both")[2]
    assert read_manifest(tmp_path / "both").fps is None


def test_what_cannot_be_done_is_refused(refused, tmp_path):
    for name in "ab":
        write(tmp_path / name)
    for argv, named in (
        ("", ["STORE"]),
        ("none", ["none/manifest.parquet", "no such manifest"]),
        ("a/manifest.parquet", ["a/manifest.parquet: is a file; set data.folder to its folder"]),
        ("a b", ["2 folders", "alload data merge"]),
        ("a --out c", ["--out", "alload data merge"]),
        ("a --add-names", ["--add-names belongs to `alload data merge`; leave"]),
        ("a --media m", ["--media belongs to `alload data captions`; leave"]),
        ("a --force", ["--force needs --sheet FILE"]),
        ("merge a b --out c --media m", ["--media does not apply to merge"]),
        ("merge a b", ["--out is missing"]),
        ("merge a --out c", ["at least two"]),
        ("merge a a --out c", ["given twice"]),
        ("merge a b --out a", ["a: exists already"]),
        ("merge a b --out c --check", ["--check", "leave it out"]),
        ("a --sheet sheet.jpg", ["sheet.jpg", ".png"]),
        ("a --sheet none/sheet.png", ["none/sheet.png", "existing folder"]),
        ("a --samples 3", ["--sheet"]),
        ("a --sheet sheet.png --samples 0", ["--samples: '0'", "1 to 1,000"]),
        ("a --sheet sheet.png --samples 1001", ["--samples: '1001'", "1 to 1,000"]),
        ("a --patch-size 0,2,2", ["patch_size", "at least 1"]),
    ):
        refused(named, "data", *argv.split())


SAMPLES = make_samples(6)
WRITERS = {"musubi": write_musubi, "fastvideo": write_fastvideo, "tensors": write_tensor_files}


@pytest.fixture
def sources(tmp_path):
    for name, write in WRITERS.items():
        write(tmp_path / name, SAMPLES)
    with StoreWriter(tmp_path / "store", vae_stride=(4, 8, 8)) as writer:
        for sample in SAMPLES:
            writer.add(sample.latents, sample.text, sample.size)


def write_config(path, **source):
    model = "{in_channels: 16, text: {dim: 6, length: 8}}"
    text = f"run: {{folder: run}}\nplanning: {{m_mem: 24}}\nmodel: {model}\n"
    path.write_text(text + yaml.safe_dump({"data": {"folder": "unused", "source": source}}))


@pytest.mark.parametrize("name", WRITERS)
def test_data_shows_and_checks_them(sources, alload, tmp_path, name):
    status, out, err = alload("data", name, "--check", "--sheet", "sheet.png")
    assert (status, err) == (0, "")
    for words in ("text of width 6", "files", "4,8,8", "6 records read, 0 damaged"):
        assert words in out
    assert Image.open(tmp_path / "sheet.png").width == 1200
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["fastvideo", "musubi", "sheet.png", "store", "tensors"]
    )


def test_data_names_a_damaged_sample(sources, alload, tmp_path):
    file = tmp_path / "tensors" / "00002.safetensors"
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin:] = np.full((len(content) - begin) // 2, 0x7FC0, "<u2").tobytes()  # NaN
    file.write_bytes(content)
    status, out, _ = alload("data", "tensors", "--check")
    assert status == 1
    assert f"{file.relative_to(tmp_path)} (sample 2) holds" in out
    assert "6 records read, 1 damaged" in out


def test_plans_equal_those_of_a_store(sources, figures, refused):
    def metrics(place):
        flags = ["--m-mem", 24, "--ranks", 2, "--policy", "dual_constraint", "--p", 2]
        return figures("--manifest", place, *flags)["metrics"]

    for name in [*WRITERS, "store/manifest.parquet"]:
        assert metrics(name) == metrics("store")
    assert metrics("fastvideo/worker_0/data_chunk_0.parquet")["samples"] == 3
    said = "--vae-stride does not apply"
    refused(said, "plan", "--manifest", "musubi", "--vae-stride", "4,8,8")


def test_a_config_says_how_files_are_read(sources, alload, refused, tmp_path):
    write_config(tmp_path / "c.yaml", name="safetensors", vae_stride=[8, 16, 16])
    status, out, err = alload("data", "tensors", "--config", "c.yaml")
    assert (status, err) == (0, "")
    assert "8,16,16" in out
    write_config(tmp_path / "c.yaml", name="safetensors", latents="z")
    for command in (["data", "tensors"], ["plan", "--manifest", "tensors"]):
        said = "lacks the tensor z, and holds latents, prompt_attention_mask"
        refused(said, *command, "--config", "c.yaml")


def test_only_the_section_of_the_source_is_read(sources, alload, refused, tmp_path):
    path = tmp_path / "source.yaml"
    source = {"name": "parquet", "normalize": "none"}
    command = ["data", "fastvideo", "--config", "source.yaml"]
    path.write_text(yaml.safe_dump({"data": {"source": source}, "other": 1}))
    status, out, err = alload(*command)
    assert (status, err) == (0, "")
    assert "text of width 6" in out
    path.write_text(yaml.safe_dump({"data": {"source": source | {"normal": 1}}}))
    refused("source.yaml: data.source: parquet: key normal is unknown", *command)
    path.write_text("data: .nan")
    refused("alload data: source.yaml: data is nan; write its keys below it", *command)


@pytest.mark.parametrize(
    ("vae", "stride", "channels", "patch", "model"),
    [
        ({"name": "hunyuan_video"}, (4, 16, 16), 32, "1,1,1", "hunyuan-video-1.5"),
        ({"name": "hunyuan_video_13b"}, (4, 8, 8), 16, "1,2,2", "hunyuan-video-13b"),
        ({"name": "wan"}, (4, 8, 8), 16, "1,2,2", "wan2.1-1.3b"),
        ({"name": "none"}, (1, 1, 1), 3, "1,16,16", "wan2.1-1.3b"),
    ],
)
def test_tokens_and_costs_are_those_of_the_vae_s_model(
    data, alload, tmp_path, vae, stride, channels, patch, model
):
    write(tmp_path / "store", channels, stride, {"vae": vae}, [(5, 32, 32), (1, 32, 64)])
    _, out, _ = data(tmp_path / "store")
    (tokens,) = (row[1] for row in cells(out) if row[:1] == ("tokens",))
    assert tokens.endswith(f"with patch size {patch}")
    for place in ("store", "store/manifest.parquet"):
        status, out, _ = alload("plan", "--manifest", tmp_path / place, "--ranks", 1, "--m-mem", 90)
        assert status == 0
        assert f"patch size {patch} (--patch-size gives another)" in out
        assert f"not measured: {model} on" in out


def test_captions_go_to_a_table_and_back_to_the_media(data, tmp_path):
    with StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1)) as writer:
        for path, words in (("b.png", 'zwei ü, "x"'), ("a.png", "one"), ("a.png", "one")):
            others = [(np.zeros((1, 8)), "more")] if path == "b.png" else []
            arrays = np.zeros((1, 16, 16, 3)), np.zeros((1, 8)), (1, 16, 16)
            writer.add(*arrays, words, path=path, alternatives=others)
    table, media = tmp_path / "edit.csv", tmp_path / "media"
    media.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (16, 16)).save(media / name)
    assert data("captions", tmp_path / "store", "--out", table)[:2] == (0, f"{table}\n")
    status, out, _ = data("captions", table, "--media", media)
    assert status == 0
    assert out.startswith("2 caption files changed, 0 are the same; ")
    assert (media / "a.txt").read_text() == "one\n"
    assert (media / "b.txt").read_text() == 'zwei ü, "x"\nmore\n'
    (media / "metadata.csv").write_text("file_name,text\na.png,one\n")
    status, _, err = data("captions", table, "--media", media)
    assert (status, "have their captions from metadata.csv" in err) == (2, True)
    # A file that a table names again may have another caption there.
    with StoreWriter(tmp_path / "twice", vae_stride=(1, 1, 1)) as writer:
        for words in ("one", "two", "two"):
            writer.add(*arrays, words, path="a.png")
    assert data("captions", tmp_path / "twice", "--out", tmp_path / "twice.csv")[0] == 0
    lines = (tmp_path / "twice.csv").read_text("utf-8-sig").splitlines()
    assert lines == ["path,caption", "a.png,one", "a.png,two"]
    for argv, words in (
        (("captions", tmp_path / "store"), "--out is missing"),
        (("captions", tmp_path / "store", "--out", table), "exists already"),
        (("captions", table, "--out", table), "does not apply to a table"),
        (("captions",), "give one data folder, or one table"),
        ((tmp_path / "store", "--media", media), "belongs to"),
    ):
        status, _, err = data(*argv)
        assert (status, err.count("\n")) == (2, 1)
        assert words in err
