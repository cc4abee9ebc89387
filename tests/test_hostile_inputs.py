"""Files and values from anybody: a command does what it says, or refuses in one line."""

import io
import json
import os
import random
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from safetensors.numpy import save_file
from training_runs import save_untrained

from alload_jax import cli, files
from alload_jax.config import read_config
from alload_jax.data.store import StoreWriter
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError, first_line, one_line, reason_of, run_command
from alload_jax.files import open_regular, replacing
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sampling.config import SamplingConfig
from alload_jax.training.run_files import locked

DIGITS = Path(__file__).parents[1] / "configs" / "digits.yaml"
RELEASED = Path(__file__).parent / "golden" / "wan" / "t2v" / "transformer"
LONGEST_LINE = 1300

# ---------------------------------------------------------------- what files hold


def header(text, size=None):
    """A safetensors file of this header."""
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(data) if size is None else size) + data


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def parquet(columns, notes=None):
    file = io.BytesIO()
    table = pa.table(columns)
    if notes:
        table = table.replace_schema_metadata(notes)
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def tar(*members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), kind
            info.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


TEXTS = [
    *(b"", b"[" * 100_000, b'{"a":' * 5000, b"\xff\xfe\x00", b"\0" * 100, b"1" * 5000),
    *b'null [] {} 3 "text" [[1,2],{}]'.split(),
    b'{"step": NaN, "format": Infinity, "_class_name": -Infinity}',
    b'{"step": 9223372036854775808, "_class_name": {}, "weight_map": 1}',
    b'{"step": "x", "_class_name": ["a"], "weight_map": {"a": {}}}\n',
    b'{"step": -1, "best": [{"step": "9"}], "files": {"x": [1]}, "text_length": "\\ud800"}\n',
    b'{"_class_name": "a\\u001b[31m\\n\\u202e' + b"x" * 10_000 + b'"}',
    b"a: &a [*a]",
    b"a0: &a0 [x]\n"
    + b"\n".join(b"a%d: &a%d [%s]" % (n, n, b"*a%d," % (n - 1) * 9) for n in range(1, 40)),
    *(b'a: !!int ""', b"a: !!timestamp x", b"a: !!binary aGk=", b"? [1]\n: 2"),
    b"a: !!python/object/apply:os.system [true]",
    b"run: {folder: 2020-13-45, steps: .nan, seed: 9223372036854775808}\n1: 2\nnull: 3\n",
]
TENSORS = [
    header(b"[" * 50_000),
    *(header(b"{}", 2**63), header(b"{}", 2**20)),
    header({"a": tensor(offsets=(0, 2**62))}) + b"1234",
    header({"a": tensor(shape=(2**62, 2**62))}) + b"1234",
    header({"a": tensor(shape=(-1,))}) + b"1234",
    header({"a": tensor("F99")}) + b"1234",
    header({"a\x1b[31m\n" + "x" * 10_000: tensor()}) + b"1234",
    header({"lora_A": tensor(), "__metadata__": {"lora_adapter_metadata": "[" * 50_000}}) + b"1234",
    header({"text": tensor("I64", (1, 1), (0, 8))}) + b"12345678",
    header({"text": tensor("F32", (1, 6), (0, 24)), "__metadata__": 3}) + bytes(24),
    header({"x.lora_A.weight": tensor("F32", (1, 4), (0, 16))}) + bytes(16),
]
TABLES = [
    parquet({"seq_len": [2**63 - 1, 1]}),
    parquet({"seq_len": [float("nan"), 1.0]}),
    parquet({"seq_len": [-1, 0]}),
    parquet({"seq_len": pa.array([], pa.int64())}),
    parquet({"seq_len": [None, 3]}),
    parquet({"seq_len": [["a"], ["b"]]}),
    parquet({"frames": [2**62], "height": [2**62], "width": [2**62]}),
    parquet({"frames": [1], "height": ["x"], "width": [64]}),
    parquet({"file_name": ["a\x1b[31m\n.png", "../../x.png"], "caption": ["\0", None]}),
    parquet({"a": [1]}, {b"alload": b"[" * 50_000}),
    b"PAR1" + b"\xff" * 100 + b"PAR1",
    *(b"seq_len\nx\n", b"seq_len\n99999999999999999999\n", b"seq_len\nnan\ninf\n1e308\n"),
    b"frames,height,width\n1,64\n1,64,64,64\n",
    b'file_name,caption\n"a\nb.png",x\n',
    b"seq_len\n" + b"1" * 200_000,
]
MEDIA = [
    tar(("a\x1b[31m\n.png", b"x", tarfile.REGTYPE), ("../../x.png", b"x", tarfile.REGTYPE)),
    tar(("a.png", b"", tarfile.SYMTYPE), ("b.png", b"", tarfile.LNKTYPE)),
    tar(("a.png", b"", tarfile.FIFOTYPE), ("b.mp4", b"", tarfile.CHRTYPE)),
    tar(("a.json", b"[" * 50_000, tarfile.REGTYPE), ("a.png", b"x", tarfile.REGTYPE))[:700],
    b"\x89PNG\r\n\x1a\n" + b"\xff" * 50,
    b"\x00\x00\x00\x20ftypisom" + b"\xff" * 100,
    b"GIF89a" + b"\xff" * 40,
    bytes(range(256)) * 8,
]


def link_to(target):
    return lambda path: path.symlink_to(target)


PLACES = [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)]
PLACES += [link_to(target) for target in ("/dev/zero", "/dev/null", "/nowhere/at/all")]
"""What may stand where a file should be."""

# ---------------------------------------------------------------- commands and what they read


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder of files that every command can read."""
    folder = tmp_path_factory.mktemp("good")
    write_run(folder / "run")
    shutil.copytree(RELEASED, folder / "model")
    save_file({"text": np.zeros((2, 6), np.float32)}, folder / "text.safetensors")
    (folder / "adapter").mkdir()
    width = json.loads((RELEASED / "config.json").read_text())
    width = width["num_attention_heads"] * width["attention_head_dim"]
    sides = {"A": np.zeros((1, width), np.float32), "B": np.zeros((width, 1), np.float32)}
    adapter = {f"transformer.blocks.0.attn1.to_q.lora_{k}.weight": v for k, v in sides.items()}
    for name in ("lora.safetensors", "adapter/adapter_model.safetensors"):
        save_file(adapter, folder / name)
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    with StoreWriter(folder / "store", vae_stride=(1, 1, 1)) as writer:
        for _ in range(3):
            writer.add(np.zeros((1, 8, 8, 1), np.float32), np.zeros(1, np.int64), (1, 8, 8))
    shutil.copytree(folder / "store", folder / "other")
    (folder / "lengths.csv").write_text("seq_len\n10\n20\n")
    (folder / "lengths.parquet").write_bytes(parquet({"seq_len": [10, 20]}))
    (folder / "cost.json").write_text("{}")
    (folder / "list.jsonl").write_text("{}")
    (folder / "config.yaml").write_text(DIGITS.read_text())
    (folder / "media").mkdir()
    Image.new("RGB", (256, 256)).save(folder / "media" / "a.png")
    (folder / "media" / "a.json").write_text("{}")
    for name in ("table.csv", "table.jsonl", "table.parquet", "shard.tar", "picture.png"):
        (folder / name).write_bytes(b"")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    return folder


def write_run(folder):
    """A run that was saved without training."""
    planning = PlanningConfig("fixed", rows=1)
    save_untrained(folder, planning=planning, sampling=SamplingConfig())
    for name in ("environment.json", "summary.json"):
        (folder / name).write_text("{}")
    known = {"vae_stride": [1, 8, 8], "text_length": 4, "origin": {}}
    (folder / "data.json").write_text(json.dumps(known))
    (folder / "best.json").write_text('{"best": [{"step": 7, "loss": 1.0}]}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (folder / "layers.jsonl").write_text('{"step": 1}\n')


PLAN = ("plan", "--policy", "equal_tokens", "--m-mem", "100", "--ranks", "2")
SAMPLE = ("sample", "--out", "new.safetensors", "--frames", "1", "--height", "16", "--width", "16")
OF_RUN = (*SAMPLE, "--prompt-embeds", "text.safetensors", "--checkpoint", "run")
OF_MODEL = (*SAMPLE, "--prompt-embeds", "text.safetensors", "--checkpoint", "model")
MEDIA_FLAGS = ("--out", "new", "--area", "192p", "--workers", "1")
VAE_FLAGS = ("--vae", "wan", "--vae-folder", "vae")

PREPARE = ("prepare", "media")
CONVERT = ("lora", "convert")
TO_FILE = ("--model", "model", "--out", "new.safetensors")
EXPORT = ("export", "--checkpoint", "run", "--out", "new")
OF_TIMES = ("calibrate", "--from-run", "run", "--out", "new.json")

READERS = [
    (("train", "--config", "config.yaml", "--run.steps", "0"), "config.yaml"),
    (("parameters", "--config", "config.yaml", "--config", "config.yaml"), "config.yaml"),
    ((*PLAN, "--manifest", "lengths.csv"), "lengths.csv"),
    ((*PLAN, "--manifest", "lengths.parquet"), "lengths.parquet"),
    ((*PLAN, "--manifest", "store"), "store/manifest.parquet"),
    ((*PLAN, "--manifest", "lengths.csv", "--cost-model", "cost.json"), "cost.json"),
    ((*PLAN, "--manifest", "lengths.csv", "--config", "config.yaml"), "config.yaml"),
    (("data", "store"), "store/manifest.parquet"),
    (("data", "store", "--config", "config.yaml"), "config.yaml"),
    (("data", "merge", "other", "store", "--out", "new"), "store/manifest.parquet"),
    ((*PREPARE, "media", *MEDIA_FLAGS), "media/a.json"),
    ((*PREPARE, "table.csv", *MEDIA_FLAGS), "table.csv"),
    ((*PREPARE, "table.jsonl", *MEDIA_FLAGS), "table.jsonl"),
    ((*PREPARE, "table.parquet", *MEDIA_FLAGS), "table.parquet"),
    ((*PREPARE, "shard.tar", *MEDIA_FLAGS), "shard.tar"),
    ((*PREPARE, "media", *MEDIA_FLAGS[:2], *VAE_FLAGS), "vae/config.json"),
    (OF_MODEL, "model/config.json"),
    (OF_MODEL, "text.safetensors"),
    ((*OF_MODEL, "--lora", "lora.safetensors"), "lora.safetensors"),
    ((*OF_MODEL, "--lora", "adapter"), "adapter/adapter_config.json"),
    ((*OF_MODEL, "--image", "picture.png"), "picture.png"),
    ((*OF_MODEL, "--image-embeds", "text.safetensors"), "text.safetensors"),
    ((*OF_MODEL, "--vae", "vae"), "vae/config.json"),
    (("sample", "--checkpoint", "model", "--list", "list.jsonl"), "list.jsonl"),
    (OF_RUN, "run/config.yaml"),
    (OF_RUN, "run/data.json"),
    ((*OF_RUN, "--step", "best"), "run/best.json"),
    (OF_RUN, "run/checkpoints/7/checksums.json"),
    (EXPORT, "run/checkpoints/7/identity/metadata"),
    (("lora", "export", "--checkpoint", "run", *TO_FILE[2:]), "run/config.yaml"),
    ((*CONVERT, "lora.safetensors", *TO_FILE), "lora.safetensors"),
    ((*CONVERT, "adapter", *TO_FILE), "adapter/adapter_config.json"),
    ((*CONVERT, "lora.safetensors", *TO_FILE), "model/config.json"),
    (
        ("lora", "merge", "--lora", "lora.safetensors", *TO_FILE[:-1], "new"),
        "model/diffusion_pytorch_model.safetensors.index.json",
    ),
    (("report", "sparsity", "run"), "run/layers.jsonl"),
    (("report", "validation", "run"), "run/metrics.jsonl"),
    (OF_TIMES, "run/config.yaml"),
    (OF_TIMES, "run/metrics.jsonl"),
    (OF_TIMES, "run/environment.json"),
    (("calibrate", "--config", "config.yaml", "--out", "new.json"), "config.yaml"),
]
"""Command lines, and the file among those that they read that is replaced."""


@pytest.fixture
def place(good, tmp_path, monkeypatch):
    shutil.copytree(good, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def files_of(folder):
    """The files of a folder and their sizes and times of change."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {
        path: (s.st_size, s.st_mtime_ns, s.st_ino) for path, s in found.items() if not path.is_dir()
    }


def assert_one_line(argv, capsys):
    """Runs a command that must refuse, or do its work without a word on stderr but notes."""
    status = run_command(cli.main, list(argv))
    err = capsys.readouterr().err
    lines = err.splitlines()
    if status == 2:
        assert lines[-1].startswith("error: "), err
        assert sum(line.startswith("error: ") for line in lines) == 1, err
    assert status in (0, 2), err
    assert all(line.isprintable() and len(line) < LONGEST_LINE for line in lines), err
    return status


def put(path, content):
    """Puts something in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)


def assert_read_or_refused(reader, contents, place, capsys):
    argv, name = reader
    for content in contents:
        put(place / name, content)
        before = files_of(place)
        if assert_one_line(argv, capsys) == 2:
            assert files_of(place) == before
        for new in place.glob("new*"):
            shutil.rmtree(new) if new.is_dir() else new.unlink()


def contents_for(name):
    """What may stand in the place of a file of this name."""
    tables, tensors = (".csv", ".parquet"), (".safetensors",)
    kinds = ((tables, TABLES), (tensors, TENSORS), ((".tar", ".png"), MEDIA))
    own = next((kind for endings, kind in kinds if name.endswith(endings)), TEXTS)
    return [*own, *PLACES]


def each_of(readers):
    names = [f"{' '.join(argv[:2])} {name}" for argv, name in readers]
    return pytest.mark.parametrize("reader", readers, ids=names)


@each_of(list({name: (argv, name) for argv, name in reversed(READERS)}.values()))
def test_some_files_from_anybody_are_read_or_refused_in_one_line(reader, place, capsys):
    drawn = random.Random(str(reader)).sample(contents_for(reader[1]), 2)
    assert_read_or_refused(reader, [*drawn, b"[" * 50_000, os.mkfifo], place, capsys)


@pytest.mark.slow
@each_of(READERS)
def test_files_from_anybody_are_read_or_refused_in_one_line(reader, place, capsys):
    own = contents_for(reader[1])
    others = [each for each in [*TEXTS, *TENSORS, *TABLES, *MEDIA] if each not in own]
    shift = READERS.index(reader) % 5
    assert_read_or_refused(reader, [*own, *others[shift::5]], place, capsys)


# ---------------------------------------------------------------- bounds


def test_what_is_read_is_bounded(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    nested, wide = "[" * 63 + "3" + "]" * 63, "[" + "3," * 999_998 + "3]"
    for text in (nested, wide, "[9223372036854775807, -9223372036854775808]", '"\\u00e9"'):
        file.write_text(text)
        assert files.read_json(file) == json.loads(text)
    for text, words in (
        (f"[{nested}]", "nested deeper than 64 levels"),
        (f"[{wide}]", "holds more than 1,000,000 values"),
        ("9223372036854775808", "beyond 64 bits"),
        ("-9223372036854775809", "beyond 64 bits"),
        ('{"a": NaN}', "a number is nan"),
        ('["\\ud800"]', "half a character"),
        ("{", "is not valid JSON"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            files.read_json(file)
    assert files.parse_json("Infinity", "", "", finite=False) == float("inf")
    assert files.parse_yaml("a: 2020-01-02\nb: .inf", "", "") == {"a": "2020-01-02", "b": np.inf}
    with pytest.raises(InputError, match=r"it: line 2: .*the key a stands twice"):
        files.parse_yaml("b:\n - {a: 1, a: 2}", "it", "")
    base = "x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}"
    assert files.parse_yaml(base, "", "")["y"] == {"a": 3, "b": 2}
    assert files.read_json(tmp_path / "none.json") is None
    with pytest.raises(InputError, match="a number is inf"):
        files.parse_json("Infinity", "", "")
    monkeypatch.setattr(files, "_LARGEST", 4)
    file.write_text("1234")
    assert files.read_json(file) == 1234
    file.write_text("12345")
    with pytest.raises(InputError, match="is larger than 4 bytes"):
        files.read_json(file)


def test_no_library_opens_what_is_no_file(tmp_path):
    regular, fifo, link = (tmp_path / name for name in ("a", "b", "c"))
    regular.touch()
    os.mkfifo(fifo)
    link.symlink_to("nothing")
    for path in (regular, tmp_path, tmp_path / "none"):
        files.require_regular(path)
    for path, words in ((fifo, "not a regular file"), (link, "a link to nothing")):
        with pytest.raises(InputError, match=words):
            files.require_regular(path)
    with pytest.raises(InputError, match="is not a regular file"):
        files.require_regular(tmp_path, or_folder=False)


# ---------------------------------------------------------------- messages


def test_a_message_is_one_line_of_bounded_length_with_its_begin_and_end():
    assert one_line("a\n\x1b[31m\u202e\ud800") == r"a\n\x1b[31m\u202e\ud800"
    half = "x" * 49
    quoted = f"file: it's '{half * 99}'; give \"a number\" {half}"
    assert one_line(quoted) == f"file: it's '{half}...{half}'; give \"a number\" {half}"
    for kept in (f"{half} '{'x' * 101}'", f"y {'x' * 303}", "ab " * 401):
        assert one_line(kept) == kept
    assert one_line(f"{half} '{'x' * 102}'") == f"{half} '{half}...{half}'"
    assert one_line(f"y {'x' * 304}") == f"y {'x' * 150}...{'x' * 150}"
    assert one_line("ab " * 500) == "ab " * 200 + "..." + "ab " * 200
    assert str(InputError("a\nb")) == "a\\nb"
    assert first_line(ValueError(" a \nb")) == "a "
    assert first_line(ValueError()) == "ValueError"


def test_secrets_in_addresses_reach_no_message_and_no_config():
    flags = ["--run.folder", "r", "--data.folder", "d", "--planning.m_mem", "9", "--trackers"]
    tracker = "[{{name: mlflow, tracking_uri: '{}'}}]"
    for address, shown in (
        ("https://me:hidden@host/x", "https://***host/x"),
        ("https://hidden@host/x", "https://***host/x"),
        ("postgresql://me:hidden@host:5432/base", "://***host:5432/base"),
        ("http://host/x?token=hidden", "?token=***"),
        ("http://host/x?a=1&api_key=hidden&b=2", "&api_key=***&b=2"),
    ):
        told = one_line(f"cannot reach '{address}'") + reason_of(RuntimeError(f"no {address}"))
        assert "hidden" not in told
        assert told.count(shown) == 2
    for wrong in ([*flags[:-1], "--run.folder", address], [*flags, tracker.format(address)]):
        with pytest.raises(InputError, match="holds a password or token") as error:
            read_config(wrong)
        assert "hidden" not in str(error.value)
    for address in ("http://host:5000", "sqlite:///a@b.db", "postgresql://me@host/b"):
        assert address in one_line(f"cannot reach {address}")
    assert read_config([*flags, tracker.format(address)]).trackers[0].tracking_uri == address


# ---------------------------------------------------------------- what commands write


@pytest.mark.parametrize("out", ["../../x.png", "a/../../x.png", "link/x.png"])
def test_a_list_writes_into_its_folder_alone(out, place, capsys):
    (place / "link").symlink_to("/tmp")
    (place / "list.jsonl").write_text(json.dumps({"out": out}))
    command = ["sample", "--checkpoint", "model", "--list", "list.jsonl"]
    assert run_command(cli.main, command) == 2
    assert "leaves the list's folder" in capsys.readouterr().err


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_folder_of_somebody_else_is_refused_where_it_leads_out(tmp_path):
    (tmp_path / "mine").mkdir()
    target = tmp_path / "mine" / "kept"
    target.write_text("mine")
    for name in ("lock.json", "config.yaml", "samples/a.png", "checkpoints", "tensorboard/x"):
        run = tmp_path / "run"
        link = run / name
        link.parent.mkdir(parents=True)
        link.symlink_to(target if "." in name else target.parent)
        refused = pytest.raises(InputError, match="is a link out of the run folder")
        with refused, locked(run, Cluster()):
            pass
        shutil.rmtree(run)
    assert target.read_text() == "mine"
    assert names_in(target.parent) == ["kept"]
    run.symlink_to("nothing")  # in a container that does not see it
    with pytest.raises(InputError, match="run: is a link to nothing; make the folder"):
        locked(run, Cluster()).__enter__()


def test_links_are_replaced_or_refused_and_never_followed(tmp_path):
    target = tmp_path / "kept"
    target.write_text("mine")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    for mode in ("a", "a+", "w"):
        with pytest.raises(InputError, match="is a link or a pipe"):
            open_regular(link, mode)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="is a link or a pipe"):
        open_regular(tmp_path / "fifo", "a")
    with replacing(link) as unfinished:
        assert unfinished.parent == tmp_path
        unfinished.write_text("new")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("mine", "new", False)
    with pytest.raises(KeyError), replacing(link) as unfinished:
        raise KeyError
    assert link.read_text() == "new"
    with pytest.raises(OSError, match=r"link\.json"), replacing(link):
        os.write(os.open("/dev/full", os.O_RDWR), b"x")  # the error of a full disk names no file
    assert names_in(tmp_path) == ["fifo", "kept", "link.json"]


def test_what_a_killed_run_did_not_finish_is_removed(tmp_path):
    with locked(tmp_path, Cluster()):
        kept = replacing(tmp_path / "config.yaml")
        left = kept.__enter__()
    assert left.exists()
    with locked(tmp_path, Cluster()):
        assert names_in(tmp_path) == ["lock.json"]
    with pytest.raises(FileNotFoundError):
        kept.__exit__(None, None, None)


def test_more_workers_than_a_machine_can_have_are_refused(place, capsys):
    command = ["prepare", "media", "media", *MEDIA_FLAGS[:-1], "2147483648"]
    assert assert_one_line(command, capsys) == 2
    assert "new" not in names_in(place)
