"""What `alload prepare media` finds in folders, tables and tar shards."""

import io
import json
import os
import tarfile
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from media_helpers import SMALL, contents, moving_frames, prepare, rows, skipped, write_video
from PIL import Image

from alload_jax.data.manifest import caption_counts, read_manifest, read_paths
from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.encoders import ByteText, uniform_vectors
from alload_jax.data.prepare.inputs import count_ignored, find_items
from alload_jax.data.prepare.pipeline import prepare_media
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.record import texts_of
from alload_jax.data.store import StoreReader, is_finished
from alload_jax.errors import InputError


@pytest.fixture
def media(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    return folder


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32), (9, 9, 9)).save(path)
    return path


def captions(items):
    return {item.name: item.caption for item in items}


def reasons(items):
    return {item.name: item.reason for item in items if item.reason}


def all_captions(place, **options):
    items = find_items(place, every_caption=True, **options)
    return {item.name: [item.caption, *item.alternatives] for item in items}


# ---------------------------------------------------------------- folders


def test_captions_lie_beside_their_files(media):
    for name in ("b.png", "a b.png", "ä.png", "a/z.png", "B.png", "c.png", "d.png", "sub/a.png"):
        picture(media / name)
    (media / "a b.txt").write_text("a cat\n")
    (media / "b.json").write_text('{"size": 3, "Caption": "a dog", "mine": 7.0}')
    (media / "c.png.txt").write_text("a cow")
    (media / "d.json").write_text('"a hen"')
    (media / "sub/a.json").write_text('{"caption": ["first", "second"]}')
    (media / ".hidden.png").write_text("")
    items = find_items(media)
    assert captions(items) == {
        "a b.png": "a cat\n",
        "b.png": "a dog",
        "c.png": "a cow",
        "d.png": "a hen",
        "sub/a.png": "first",
        "B.png": None,
        "ä.png": None,
        "a/z.png": None,
    }
    names = [item.name for item in items]
    assert names == sorted(names, key=str.encode)
    assert captions(find_items(media, caption_column="mine"))["b.png"] == "7"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", "café".encode("latin-1"), "its caption is not UTF-8; save it as UTF-8"),
        ("a.json", b"{", "not valid JSON"),
    ],
)
def test_a_caption_that_cannot_be_read_is_a_reason(media, name, content, reason):
    picture(media / "a.png")
    (media / name).write_bytes(content)
    os.mkfifo(media / "b.mp4")
    found = reasons(find_items(media))
    assert reason in found["a.png"]
    assert found["b.mp4"] == "not a regular file"


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        ("ein Hund läuft", "utf-8-sig", "ein Hund läuft"),
        ("ein Hund läuft", "utf-16", "ein Hund läuft"),
        ("€" * 2**20, "utf-8", "€" * (2**20 // 3)),  # cut between characters
    ],
    ids=["utf-8-sig", "utf-16", "long"],
)
def test_captions_are_unicode_as_windows_and_others_write_it(media, text, encoding, expected):
    picture(media / "a.png")
    (media / "a.txt").write_text(text, encoding=encoding)
    assert captions(find_items(media)) == {"a.png": expected}


def test_media_that_a_table_or_tar_files_leave_out_are_counted(media):
    for name in ("a.png", "b.png", "sub/c.png"):
        picture(media / name)
    assert count_ignored(media, find_items(media)) == 0
    (media / "metadata.csv").write_text("file_name,caption\nb.png,one\n")
    assert count_ignored(media, find_items(media)) == 2
    assert count_ignored(media / "metadata.csv", find_items(media / "metadata.csv")) == 0
    (media / "metadata.csv").unlink()
    with tarfile.open(media / "x.tar", "w") as archive:
        archive.add(media / "a.png", "z.png")
    assert count_ignored(media, find_items(media)) == 3


def test_a_comma_that_is_not_quoted_cuts_no_caption(media):
    picture(media / "a.png")
    table = media / "metadata.csv"
    table.write_text("file_name,caption\na.png,a red flower, close up\n")
    with pytest.raises(InputError, match=r"line 2 has more fields than the header; put"):
        find_items(media)
    table.write_text('file_name,caption\na.png,"a red flower, close up"\n')
    assert captions(find_items(media)) == {"a.png": "a red flower, close up"}


def test_links_out_of_the_folder_are_refused(media, tmp_path):
    picture(tmp_path / "secret.png")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "more").mkdir()
    picture(media / "in.png")
    picture(media / "caption.png")
    (media / "link.png").symlink_to("in.png")
    (media / "out.png").symlink_to(tmp_path / "secret.png")
    (media / "relative.png").symlink_to("../secret.png")
    (media / "caption.txt").symlink_to("../secret.txt")
    (media / "circle.png").symlink_to("circle.png")
    (media / "folder").symlink_to(tmp_path / "more")
    found = reasons(find_items(media))
    assert found.keys() == {"out.png", "relative.png", "caption.png", "circle.png", "folder"}
    assert found["out.png"] == found["relative.png"] == "link out of the folder"
    assert "caption.txt: link out of the folder" in found["caption.png"]
    assert "not followed" in found["folder"]


# ---------------------------------------------------------------- tables


TABLE = [
    ("a.png", "a cat"),
    ("sub/b.png", "a, dog" + "x" * 200_000),
    *((name, "x") for name in ("none.png", "../secret.png", "/etc/passwd.png", "C:\\a.png")),
    *((name, "x") for name in ("out.png", "a.doc", "")),
]


def write_table(path, names):
    columns = {names[0]: [row[0] for row in TABLE], names[1]: [row[1] for row in TABLE]}
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(columns | {"bytes": [b"x"] * len(TABLE)}), path)
    elif path.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in TABLE]
        path.write_text("\n".join(lines) + "\n")
    else:
        lines = [",".join(f'"{value}"' for value in row) for row in (names, *TABLE)]
        path.write_text("\ufeff" + "\n".join(lines))


@pytest.mark.parametrize(
    ("table", "names", "flags"),
    [
        ("metadata.csv", ("file_name", "text"), ()),
        ("metadata.jsonl", ("video", "caption"), ()),
        ("captions.parquet", ("path", "prompt"), ()),
        ("other.csv", ("Where", "What"), ("where", "what")),
        ("other.parquet", ("Where", "What"), ("Where", "What")),
    ],
)
def test_tables_list_media(media, tmp_path, table, names, flags):
    picture(tmp_path / "secret.png")
    picture(media / "a.png")
    picture(media / "sub/b.png")
    (media / "out.png").symlink_to("../secret.png")
    write_table(media / table, names)
    place = media / table if flags else media
    items = find_items(place, *flags)
    assert [item.name for item in items] == [row[0] for row in TABLE]
    assert [item.caption for item in items[:2]] == [row[1] for row in TABLE[:2]]
    found = [item.reason for item in items]
    assert found[:2] == ["", ""]
    expected = ["no such file", "'..'", "absolute", "absolute", "link out", "suffix .doc", "row"]
    for reason, part in zip(found[2:], expected, strict=True):
        assert part in reason


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("metadata.csv", b"x,y\n1,2\n", ["x, y", "--path-column"]),
        ("metadata.csv", b"\xff\xfe\n", ["CSV"]),
        ("metadata.csv", b"path,text\na,b\n", ["no column mine", "--caption-column"]),
        ("metadata.jsonl", b'{"path": "a"}\n{\n', ["line 2"]),
        ("metadata.jsonl", b"[1]\n", ["line 1", "object"]),
        ("metadata.parquet", b"PAR1", ["PARQUET"]),
        ("a.txt", b"", ["has no images or videos"]),
    ],
)
def test_tables_and_folders_that_cannot_be_read_are_refused(media, name, content, named):
    (media / name).write_bytes(content)
    column = "mine" if b"path,text" in content else None
    with pytest.raises(InputError) as error:
        find_items(media, caption_column=column)
    for part in (name if "no images" not in named[0] else media, *named):
        assert str(part) in str(error.value)


@pytest.mark.parametrize("name", ["none", "a.zip"])
def test_other_inputs_are_refused(media, name):
    if name != "none":
        (media / name).touch()
    with pytest.raises(InputError, match=name):
        find_items(media / name)


# ---------------------------------------------------------------- tar shards


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def test_tar_members_with_one_stem_belong_together(media, tmp_path):
    image = picture(tmp_path / "a.png").read_bytes()
    video = write_video(tmp_path / "a.mkv", moving_frames(9)).read_bytes()
    members = {"0.png": image, "0.txt": b"a cat", "1.mkv": video, "1.json": b'{"text": "a dog"}'}
    write_tar(media / "x-1.tar", {"0.png": image})
    write_tar(media / "x-0.tar", members)
    prepare(media, tmp_path / "out")
    found = rows(tmp_path / "out" / "manifest.parquet")
    assert [(row["frames"], row["caption"]) for row in found] == [
        (1, "a cat"),
        (9, "a dog"),
        (1, ""),
    ]


def test_members_that_lead_out_of_a_tar_are_refused(media, tmp_path):
    image = picture(tmp_path / "a.png").read_bytes()
    members = {
        "good.png": image,
        "../up.png": image,
        "/root.png": image,
        "link.png": "/etc/passwd",
        "empty.png": b"",
        "caption.png": image,
        "caption.txt": "/etc/passwd",
    }
    write_tar(media / "x.tar", members)
    before = set(tmp_path.rglob("*"))
    found = reasons(find_items(media / "x.tar"))
    assert set(tmp_path.rglob("*")) == before
    assert found == {
        "x.tar/../up.png": "tar member with an absolute path or '..'",
        "x.tar//root.png": "tar member with an absolute path or '..'",
        "x.tar/link.png": "tar member that is a link",
        "x.tar/empty.png": "empty file (0 bytes)",
        "x.tar/caption.png": "tar member that is a link",
    }


@pytest.mark.parametrize("keep", [3, 2200])
def test_a_damaged_tar_is_listed(media, tmp_path, keep):
    image = picture(tmp_path / "a.png").read_bytes() + bytes(800)
    write_tar(media / "x.tar", {"0.png": image, "1.png": image})
    write_tar(media / "y.tar", {"0.png": image})
    (media / "x.tar").write_bytes((media / "x.tar").read_bytes()[:keep])
    items = find_items(media)
    assert any("x.tar" in name for name in reasons(items))
    assert captions(items)["y.tar/0.png"] is None


@pytest.mark.parametrize("size", [2**33 - 1, 2**62])
@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE])
def test_sizes_that_a_tar_only_claims_take_no_memory(media, kind, size):
    member = tarfile.TarInfo("a.png")
    member.type, member.size = kind, size
    (media / "x.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    tracemalloc.start()
    try:
        found = reasons(find_items(media))
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    assert found
    assert all("tar" in reason for reason in found.values())


# ---------------------------------------------------------------- captions


def test_captions_are_cleaned():
    assert clean("a\x00 cat\x07\r\n on\ta\u2028 mat\x1b[0m") == "a cat on a mat[0m"
    assert clean("  é 猫 🐈‍⬛ ") == "é 猫 🐈‍⬛"
    assert clean("\ud800x") == "x"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "猫".encode() * 40_000),
        ("a.txt", b"\x00\x07ok"),
        ("a.json", json.dumps({"text": "猫\x00\n" * 30_000}).encode()),
    ],
)
def test_long_and_strange_captions_are_cut_and_cleaned(media, tmp_path, name, content):
    picture(media / "a.png")
    (media / name).write_bytes(content)
    prepare(media, tmp_path / "out", text_length=100)
    manifest = read_manifest(tmp_path / "out")
    embedded = StoreReader(manifest).read(0)["text"]
    assert embedded.shape[1] == 64
    assert 0 < len(embedded) <= 100
    assert (manifest.text_length == len(embedded)).all()


def test_byte_embeddings_never_change():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # SplitMix64's first from seed 0
    expected = [(2 * value / 2**64 - 1) * 3**0.5 for value in published]
    assert uniform_vectors(0, 1, 2)[0] == pytest.approx(expected, abs=1e-12)
    found = ByteText().encode("ab")
    assert found.dtype == np.float16
    assert found.astype(float).tobytes() == ByteText().encode("abc")[:2].astype(float).tobytes()
    assert abs(ByteText(length=4000).encode("x" * 4000).astype(float).std() - 1) < 0.05
    assert not np.array_equal(ByteText().encode("aa")[0], ByteText().encode("aa")[1])
    assert len(ByteText(length=4).encode("猫猫")) == 3  # no half characters
    assert ByteText().encode(None).shape == (0, 64)


@pytest.mark.parametrize(
    ("texts", "expected", "classes"),
    [
        (["dog", "cat", "dog"], [1, 0, 1], ["cat", "dog"]),
        (["3", "0", "3"], [3, 0, 3], ["0", "1", "2", "3"]),
    ],
)
def test_captions_can_be_classes(media, tmp_path, texts, expected, classes):
    for number, text in enumerate(texts):
        picture(media / f"{number}.png")
        (media / f"{number}.txt").write_text(text + "\n")
    picture(media / "none.png")
    prepare(media, tmp_path / "out", text="class")
    manifest = read_manifest(tmp_path / "out")
    reader = StoreReader(manifest)
    assert [reader.read(n)["labels"].tolist() for n in range(3)] == [[n] for n in expected]
    assert manifest.origin["text"]["classes"] == classes
    assert "no caption" in skipped(tmp_path / "out")["none.png"]


# ---------------------------------------------------------------- several captions


def test_each_line_and_each_entry_of_a_list_is_a_caption(media):
    for name in "abcdef":
        picture(media / f"{name}.png")
    (media / "a.txt").write_text("a cat\n\n  a small   cat \na cat\r\na pet")
    (media / "b.json").write_text('{"captions": ["a dog", null, "a hound"], "width": 3}')
    (media / "c.json").write_text('["one", "two"]')
    (media / "d.txt").write_text(" \n")
    (media / "e.json").write_text('{"caption_2": "second", "caption_10": "tenth", "caption": "x"}')
    assert all_captions(media) == {
        "a.png": ["a cat", "  a small   cat ", "a pet"],
        "b.png": ["a dog", "a hound"],
        "c.png": ["one", "two"],
        "d.png": [" "],
        "e.png": ["x", "second", "tenth"],
        "f.png": [None],
    }
    (one,) = {len(item.alternatives) for item in find_items(media)}
    assert one == 0


SEVERAL = {
    "file_name": ["a.png", "b.png"],
    "caption_2": ["third", None],
    "caption_1": ["second", "other"],
    "caption": ["first", None],
    "captions_seen": ["no", "no"],
}


def test_numbered_columns_and_lists_of_tables_are_captions(media):
    for name in "ab":
        picture(media / f"{name}.png")
    expected = {"a.png": ["first", "second", "third"], "b.png": ["other"]}
    pyarrow.parquet.write_table(pa.table(SEVERAL), media / "metadata.parquet")
    assert all_captions(media) == expected
    assert captions(find_items(media)) == {"a.png": "first", "b.png": None}
    (media / "metadata.parquet").unlink()
    rows = [dict(zip(SEVERAL, row, strict=True)) for row in zip(*SEVERAL.values(), strict=True)]
    (media / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert all_captions(media) == expected
    (media / "metadata.jsonl").unlink()
    text = 'path,short\na.png,"[""red"", ""green""]"\nb.png,"[blue"\n'
    (media / "metadata.csv").write_text(text)
    found = all_captions(media, caption_column="short")
    assert found == {"a.png": ["red", "green"], "b.png": ["[blue"]}
    lists = pa.table({"path": ["b.png"], "captions": [["x", "y"]]})
    pyarrow.parquet.write_table(lists, media / "t.parquet")
    assert all_captions(media / "t.parquet") == {"b.png": ["x", "y"]}
    numbered = pa.table({"path": ["b.png"], "text1": ["x"], "text2": ["y"]})
    pyarrow.parquet.write_table(numbered, media / "t.parquet")
    assert all_captions(media / "t.parquet") == {"b.png": ["x", "y"]}
    assert all_captions(media / "t.parquet", caption_column="text") == {"b.png": ["x", "y"]}


def test_a_store_of_several_captions_has_all_texts_and_paths(media, tmp_path):
    for name in ("a.png", "sub/b.png"):
        picture(media / name)
    (media / "a.txt").write_text("a cat\na small cat")
    (media / "sub/b.txt").write_text("a dog\na hound")
    items = find_items(media, every_caption=True)
    settings = MediaSettings(**SMALL, captions="all")
    prepare_media(items, tmp_path / "out", settings)
    manifest = read_manifest(tmp_path / "out")
    assert read_paths(manifest).tolist() == ["a.png", "sub/b.png"]
    assert caption_counts(manifest).tolist() == [2, 2]
    assert manifest.origin["media"]["captions"] == "all"
    texts = texts_of(StoreReader(manifest).read(0))
    for found, words in zip(texts, ("a cat", "a small cat"), strict=True):
        np.testing.assert_array_equal(found, ByteText().encode(words))
    prepare_media(items, tmp_path / "classes", MediaSettings(**SMALL, captions="all", text="class"))
    manifest = read_manifest(tmp_path / "classes")
    numbers = [[int(each[0]) for each in texts_of(StoreReader(manifest).read(n))] for n in (0, 1)]
    assert numbers == [[0, 3], [1, 2]]
    prepare(media, tmp_path / "one")
    manifest = read_manifest(tmp_path / "one")
    assert "captions" not in manifest.origin["media"]
    assert rows(tmp_path / "one" / "manifest.parquet")[0]["caption"] == "a cat a small cat"
    assert caption_counts(manifest).tolist() == [1, 1]


def test_a_preparation_goes_on_with_its_captions_only(media, tmp_path):
    for number in range(5):
        picture(media / f"{number}.png")
        (media / f"{number}.txt").write_text("a cat\na pet" if number else "a cat")

    def stop(_, before):
        if not before and is_finished(tmp_path / "cut", 0):
            raise KeyboardInterrupt

    every = find_items(media, every_caption=True)
    settings = MediaSettings(**SMALL, captions="all")
    with pytest.raises(KeyboardInterrupt):
        prepare_media(every, tmp_path / "cut", settings, on_files=stop)
    with pytest.raises(InputError, match="--captions all, not unset"):
        prepare_media(find_items(media), tmp_path / "cut", MediaSettings(**SMALL))
    prepare_media(every, tmp_path / "cut", settings)
    prepare_media(every, tmp_path / "whole", settings, workers=2)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    prepare_media(find_items(media), tmp_path / "one", MediaSettings(**SMALL))
    shards = [contents(tmp_path / name)["shard-00000.arrayrecord"] for name in ("one", "cut")]
    assert shards[0] != shards[1]
