"""What `alload prepare media` finds in folders, tables and tar shards."""

import gzip
import io
import json
import os
import tarfile
import tracemalloc

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from media_helpers import moving_frames, prepare, rows, write_video
from PIL import Image

from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.inputs import count_ignored, find_items, write_captions
from alload_jax.data.prepare.sources import UnusableError, content_of
from alload_jax.errors import InputError


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32), (9, 9, 9)).save(path)
    return path


def captions(items):
    return {item.name: next(iter(item.captions), None) for item in items}


def reasons(items):
    return {item.name: item.reason for item in items if item.reason}


def all_captions(place, **options):
    items = find_items(place, every_caption=True, **options)
    return {item.name: list(item.captions) or [None] for item in items}


def test_captions_lie_beside_their_files(media):
    for name in ("b.png", "a b.png", "ä.png", "a/z.png", "B.png", "c.png", "d.png", "sub/a.png"):
        picture(media / name)
    (media / "a b.txt").write_text("a cat\n")
    (media / "b.json").write_text('{"size": 3, "Caption": "a dog", "mine": 7.0}')
    (media / "c.png.txt").write_text("a cow")
    for name, text in (("E.JPG", "E.jpg.txt"), ("f.jpg", "f.JPG.txt")):
        picture(media / name)
        (media / text).write_text("an ox")
    (media / "d.json").write_text('"a hen"')
    (media / "sub/a.json").write_text('{"caption": ["first", "second"]}')
    (media / ".hidden.png").write_text("")
    items = find_items(media)
    found = {name: text for name, text in captions(items).items() if text is not None}
    beside = {"a b.png": "a cat\n", "b.png": "a dog", "c.png": "a cow", "d.png": "a hen"}
    assert found == beside | {"sub/a.png": "first", "E.JPG": "an ox", "f.jpg": "an ox"}
    names = [item.name for item in items]
    assert len(names) == 10
    assert names == sorted(names, key=str.encode)
    assert captions(find_items(media, caption_column="mine"))["b.png"] == "7"
    with pytest.raises(InputError, match="nor media whose caption has that name"):
        find_items(media, caption_column="mien")


def test_each_line_and_each_entry_of_a_list_is_a_caption(media):
    for name, suffix, content in (
        ("a", "txt", "a cat\n\n  a small   cat \na cat\r\na\u2028pet\f"),
        ("b", "json", '{"captions": ["a dog", null, "a hound"], "width": 3}'),
        ("c", "json", '["one", "two"]'),
        ("d", "txt", " \n"),
        ("e", "json", '{"caption_2": "second", "caption_10": "tenth", "caption": "x"}'),
        ("f", "caption", ""),
        ("h", "json", '{"caption": {"en": "x"}, "text": "a word"}'),
        ("i", "json", '{"caption": {"en": "x"}}'),
        ("g", "other", ""),
    ):
        picture(media / f"{name}.png")
        (media / f"{name}.{suffix}").write_text(content)
    (media / "g.other").unlink()
    expected = {"a": ["a cat", "  a small   cat ", "a\u2028pet\f"], "b": ["a dog", "a hound"]}
    expected |= {"c": ["one", "two"], "d": [" "], "e": ["x", "second", "tenth"], "f": [""]}
    expected |= {"g": [None], "h": ["a word"], "i": [None]}
    assert all_captions(media) == {f"{name}.png": each for name, each in expected.items()}
    (wrong,) = (item.reason for item in find_items(media) if item.source is None)
    assert "caption is no text but an object" in wrong
    assert not any(item.captions[1:] for item in find_items(media))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("ein Hund läuft".encode("utf-8-sig"), "ein Hund läuft"),
        ("ein Hund läuft".encode("utf-16"), "ein Hund läuft"),
        ("€".encode() * 2**20, "€" * (2**20 // 3)),  # cut between characters
        ("café".encode("latin-1"), "its caption is not UTF-8; save it as UTF-8"),
        (b"{", "not valid JSON"),
    ],
    ids=["mark", "utf-16", "long", "latin-1", "json"],
)
def test_captions_are_unicode_as_windows_and_others_write_it(media, content, expected):
    picture(media / "a.png")
    (media / ("a.json" if content == b"{" else "a.txt")).write_bytes(content)
    os.mkfifo(media / "b.mp4")
    (item, pipe) = find_items(media)
    assert item.captions == (expected,) or expected in item.reason
    assert pipe.reason == "not a regular file"
    assert clean("a\x00 cat\x07\r\n on\ta\u2028 mat\x1b[0m") == "a cat on a mat[0m"
    assert clean("  é 猫 🐈‍⬛ ") == "é 猫 🐈‍⬛"
    assert clean("\ud800x") == "x"


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


def test_links_out_of_the_folder_are_refused(media, tmp_path):
    picture(tmp_path / "secret.png")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "more").mkdir()
    picture(media / "in.png")
    picture(media / "caption.png")
    for name, target in (
        *(("link.png", "in.png"), ("out.png", tmp_path / "secret.png")),
        *(("relative.png", "../secret.png"), ("caption.txt", "../secret.txt")),
        *(("circle.png", "circle.png"), ("folder", tmp_path / "more")),
    ):
        (media / name).symlink_to(target)
    found = reasons(find_items(media))
    assert found.keys() == {"out.png", "relative.png", "caption.png", "circle.png", "folder"}
    assert found["out.png"] == found["relative.png"] == "link out of the folder"
    assert "caption.txt: link out of the folder" in found["caption.png"]
    assert "not followed" in found["folder"]


TABLE = [
    ("a.png", "a cat"),
    ("sub/b.png", "a, dog" + "x" * 200_000),
    *((name, "x") for name in ("none.png", "../secret.png", "/etc/passwd.png", "C:\\a.png")),
    *(("out.png", "x"), ("a.doc", "x"), ("", "x"), ("x" * 300 + ".png", "x")),
]


def write_table(path, names):
    columns = {names[0]: [row[0] for row in TABLE], names[1]: [row[1] for row in TABLE]}
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(columns | {"bytes": [b"x"] * len(TABLE)}), path)
    elif path.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in TABLE]
        path.write_text("\n\n".join(lines) + "\n")
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
    items = find_items(media / table if flags else media, *flags)
    assert [item.name for item in items] == [row[0] for row in TABLE]
    assert [item.captions for item in items[:2]] == [(row[1],) for row in TABLE[:2]]
    found = [item.reason for item in items]
    assert found[:2] == ["", ""]
    expected = ["no such file", "'..'", "absolute", "absolute", "link out", "suffix .doc", "row"]
    expected += ["no such file"]
    for reason, part in zip(found[2:], expected, strict=True):
        assert part in reason


def test_a_table_of_a_folder_below_is_named_as_not_read(media):
    picture(media / "train/a.png")
    (media / "train/metadata.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}')
    assert captions(find_items(media))["train/a.png"] is None
    assert "table of a folder below" in reasons(find_items(media))["train/metadata.jsonl"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.csv", 'file_name;text\r\n"sub\\a.png";"ein Hund; ""groß"", nah"\r\n'),
        ("metadata.csv", 'sep=;\n\npath;caption\nsub/a.png;"ein Hund; ""groß"", nah"\n'),
        ("metadata.csv", 'path\tcaption\nsub/a.png\tein Hund; "groß", nah\n'),
        ("metadata.jsonl", '{"file": "sub/a.png", "cap": "ein Hund; \\"groß\\", nah"}\r\n'),
        ("captions.json", '{"sub/a.png": {"caption": "ein Hund; \\"groß\\", nah", "tags": "x"}}'),
    ],
)
def test_tables_are_read_as_spreadsheets_shells_and_trainers_write_them(
    media, name, content, encoding
):
    picture(media / "sub/a.png")
    (media / name).write_bytes(content.encode(encoding))
    (item,) = find_items(media)
    assert (item.name, item.captions, item.reason) == ("sub/a.png", ('ein Hund; "groß", nah',), "")


TWICE = ["has the columns", "rename or remove one"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("metadata.csv", b"x,y\n1,2\n", ["x, y", "--path-column"]),
        ("metadata.csv", b"\xff\xfe\n", ["save it as UTF-8"]),
        ("metadata.csv", b"path,caption\na,caf\xe9\n", ["save it as UTF-8"]),
        ("metadata.csv", b'path,caption\na,b\nc,"d\ne,f\n', ["line 3", "double"]),
        ("metadata.csv", b'sep=,\n\npath,caption\na,"b" c\n', ["line 4", "double"]),
        ("metadata.csv", b"path,text\na,b\n", ["no column mine", "--caption-column"]),
        ("metadata.csv", b"path,caption\na,a red, close\n", ["line 2 has more fields"]),
        ("metadata.csv", b"path,caption,caption\na.png,one,two\n", TWICE),
        ("metadata.csv", b"path,Caption,caption \na.png,one,two\n", TWICE),
        ("metadata.jsonl", b'{"path": "a", "text": "1"}\n{"path": "a", "Text": "2"}', TWICE),
        ("metadata.jsonl", b'{"path": "a.png", "Path": "b.png", "text": "two"}\n', TWICE),
        ("metadata.jsonl", b'{"path": "a"}\n{\n', ["line 2"]),
        ("metadata.jsonl", b"[1]\n", ["line 1", "object"]),
        ("metadata.parquet", b"PAR1", ["PARQUET"]),
        ("a.txt", b"", ["has no images or videos"]),
        ("a.zip", b"", ["is no input"]),
        ("none", None, ["no such file or folder"]),
    ],
)
def test_tables_and_places_that_cannot_be_read_are_refused(media, name, content, named):
    if content is not None:
        (media / name).write_bytes(content)
    place = media if name[0] in "ma" and name != "a.zip" else media / name
    with pytest.raises(InputError) as error:
        find_items(place, caption_column="mine" if b"path,text" in (content or b"") else None)
    for part in (name if name != "a.txt" else media, *named):
        assert str(part) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.parquet"])
def test_a_column_of_weights_that_is_not_read_is_named(media, capsys, table):
    columns = {"path": ["b.png"], "caption": ["one"], "Weight": [2.0]}
    write = pyarrow.csv.write_csv if table.endswith("csv") else pyarrow.parquet.write_table
    write(pa.table(columns), media / table)
    find_items(media)
    assert f"{table}: the column weight is not read; name paths in data" in capsys.readouterr().err


def test_numbered_columns_lists_and_quoted_values_of_tables_are_captions(media):
    several = {"file_name": ["a.png", "b.png"], "captions_seen": ["no", "no"]}
    several |= {"caption_2": ["third", None], "caption_1": ["second", "other"]}
    several |= {"caption": ["first", None]}
    for name in "ab":
        picture(media / f"{name}.png")
    expected = {"a.png": ["first", "second", "third"], "b.png": ["other"]}
    pyarrow.parquet.write_table(pa.table(several), media / "metadata.parquet")
    assert all_captions(media) == expected
    assert captions(find_items(media)) == {"a.png": "first", "b.png": None}
    (media / "metadata.parquet").unlink()
    lines = [dict(zip(several, row, strict=True)) for row in zip(*several.values(), strict=True)]
    (media / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert all_captions(media) == expected
    (media / "metadata.jsonl").unlink()
    text = 'path,short\na.png,"[""red"", ""green""]"\nb.png,"[blue, red"\n'
    (media / "metadata.csv").write_text(text)
    found = all_captions(media, caption_column="short")
    assert found == {"a.png": ["red", "green"], "b.png": ["[blue, red"]}
    two = {"text1": ["x"], "text2": ["y"]}
    for columns, options in (
        *(({"captions": [["x", "y"]]}, {}), (two, {}), (two, {"caption_column": "text"})),
    ):
        table = pa.table({"path": ["b.png"], **columns})
        pyarrow.parquet.write_table(table, media / "t.parquet")
        assert all_captions(media / "t.parquet", **options) == {"b.png": ["x", "y"]}


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
    expected = [(1, "a cat"), (9, "a dog"), (1, "")]
    assert [(row["frames"], row["caption"]) for row in found] == expected


def test_compressed_shards_beside_others_are_listed(media):
    picture(media / "a.png")
    for name in ("a.TAR", "b.tar.gz", "c.TGZ", "d.tar.zst"):
        write_tar(media / name, {"0.png": (media / "a.png").read_bytes()})
        if name != "a.TAR":
            (media / name).write_bytes(gzip.compress((media / name).read_bytes()))
    items = find_items(media)
    assert [item.name for item in items if item.source] == ["a.TAR/0.png"]
    assert {*reasons(items)} == {"b.tar.gz", "c.TGZ", "d.tar.zst"}
    assert all("unpack it by gunzip" in reason for reason in reasons(items).values())
    (media / "a.TAR").unlink()  # then they are media's neighbours
    assert [item.name for item in find_items(media) if item.source] == ["a.png"]


def test_members_that_lead_out_of_a_tar_are_refused(media, tmp_path):
    image = picture(tmp_path / "a.png").read_bytes()
    members = dict.fromkeys(("good.png", "../up.png", "/root.png", "caption.png"), image)
    members |= {"link.png": "/etc/passwd", "empty.png": b"", "caption.txt": "/etc/passwd"}
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


def test_a_tar_that_is_cut_off_after_it_was_listed_is_named(media):
    path = media / "x.tar"
    write_tar(path, {"0.png": bytes(512), "1.png": picture(media / "a.png").read_bytes()})
    _, item = find_items(path)
    os.truncate(path, item.source.offset + 9)
    with pytest.raises(UnusableError, match=r"^damaged \.tar file \(unexpected end of data\)$"):
        content_of(item.source)


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


def test_captions_as_other_trainers_keep_them(media, tmp_path):
    (media / "videos").mkdir()
    for name in ("a.mkv", "b.mkv"):
        write_video(media / "videos" / name, moving_frames(9))
    expected = {"a.mkv": "first, with a comma", "b.mkv": "zwei ü"}
    for texts, files in (("prompt.txt", "videos.txt"), ("prompts.txt", "images.txt")):
        (media / texts).write_text("\n".join(expected.values()), encoding="utf-8")
        (media / files).write_text("".join(f"videos/{name}\n" for name in expected))
        found = captions(find_items(media))
        assert found == {f"videos/{name}": caption for name, caption in expected.items()}
        of_more_lines = "\n".join(f"{words}\u2028more" for words in expected.values())
        (media / texts).write_text(of_more_lines, encoding="utf-8")
        assert len(captions(find_items(media))) == 2
        (media / texts).write_text("only one\n")
        with pytest.raises(InputError, match=f"{files}: has 2 lines, and {texts} 1; give one"):
            find_items(media)
        (media / texts).unlink()
        (media / files).unlink()
    # "path" is that within videos/, as their scripts read it; "cap" is a list.
    size = {"resolution": {"width": 32, "height": 32}, "fps": 16.0, "duration": 0.5}
    entries = [{"path": name, "cap": [caption], **size} for name, caption in expected.items()]
    (media / "videos2caption.json").write_text(json.dumps(entries))
    assert captions(find_items(media)) == expected
    (media / "videos2caption.json").unlink()
    # diffusion-pipe's, with several captions each
    words = {f"videos/{name}": [caption, "more"] for name, caption in expected.items()}
    (media / "captions.json").write_text(json.dumps(words))
    assert all_captions(media) == words
    (media / "captions.json").write_text("[1]")
    with pytest.raises(InputError, match="is no list of JSON objects"):
        find_items(media)


def test_paths_of_a_table_may_be_absolute_within_a_folder_that_is_named(media, tmp_path):
    elsewhere = tmp_path / "tables" / "list.json"
    elsewhere.parent.mkdir()
    picture(media / "a.png")
    picture(tmp_path / "outside.png")
    paths = ("a.png", str(media / "a.png"), str(tmp_path / "outside.png"), "../outside.png")
    elsewhere.write_text(json.dumps([{"path": path, "caption": "a cat"} for path in paths]))
    refused = "absolute path out of the table's folder; name --media-root"
    found = [each.reason for each in find_items(elsewhere, media_root=media)]
    assert found == ["", "", refused, "path with '..', which could leave the folder"]
    assert [each.name for each in find_items(elsewhere, media_root=media)][:2] == ["a.png"] * 2
    found = [each.reason for each in find_items(elsewhere)]
    assert [found[0][:12], *found[1:3]] == ["no such file", refused, refused]
    for flag in ("media_root", "path_column"):
        with pytest.raises(InputError, match=f"--{flag.replace('_', '-')} .* needs a table"):
            find_items(media, **{flag: "x"})
    (media / "x.tar.gz").write_bytes(b"")
    with pytest.raises(InputError, match="is compressed; unpack it by gunzip"):
        find_items(media / "x.tar.gz")


def test_captions_of_a_table_are_written_beside_the_media(media, tmp_path):
    names = ("a.png", "b.c.png", "same.jpg", "same.png", "sub/ü.png", "json.png")
    (media / "sub").mkdir()
    for name in names:
        picture(media / name)
    (media / "a.txt").write_text("as before\n", encoding="utf-16")
    (media / "json.json").write_text('{"caption": "old", "seed": 1}')
    table = tmp_path / "edit.csv"

    def write(**given):
        lines = [f'{name},"{caption}"' for name, caption in given.items()]
        table.write_text("\n".join(["path,caption", *lines]), encoding="utf-8-sig")
        return write_captions(table, media)

    edited = {name: f"edited, {name}" for name in names} | {"a.png": "as before"}
    edited["sub/ü.png"] = '[""one"", ""two""]'
    assert write(**edited) == (5, 1)
    # Of a file that the table does not name.
    for name in ("two.txt", "two.TXT"):
        (media / name).write_text(name)
    picture(media / "two.png")
    assert write(**edited) == (0, 6)
    found = {name: all_captions(media).get(name) for name in names}
    assert found == {name: [edited[name]] for name in names} | {"sub/ü.png": ["one", "two"]}
    assert (media / "json.json").read_text() == '{"caption": "old", "seed": 1}'
    before = {path: path.read_bytes() for path in media.rglob("*.txt")}
    (media / "c.txt").write_text("both")
    picture(media / "c.png")
    picture(media / "c.jpg")
    for given, words in (
        ({"a.png": "new", "gone.png": "x"}, "gone.png: no such file"),
        ({"a.png": "new", "c.png": "x"}, "c.png shares c.txt with another file"),
        ({"a.png": "new", "c.png": "x", "c.jpg": "y"}, "c.png shares c.txt with another file"),
        ({"a.png": "new", "../edit.png": "x"}, "path with '..'"),
    ):
        with pytest.raises(InputError, match=f"{words}.*; nothing is written"):
            write(**given)
    assert {path: path.read_bytes() for path in before} == before
    assert write(**{"c.png": "x", "c.jpg": "x"}) == (1, 0)
    with pytest.raises(InputError, match="is no table"):
        write_captions(media / "c.txt", media)
    with pytest.raises(InputError, match=r"set\.yaml: is no folder; name the one"):
        write_captions(table, media / "set.yaml")
