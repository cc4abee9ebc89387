"""Stores in object storage: shards are copied when they are first read, and copies are renewed."""

import functools
import http.server
import io
import pickle
import shutil
import threading
from pathlib import Path

import pytest
from data_helpers import assert_holds, random_samples, says, write_store

from alload_jax.data.loader import PatientReader
from alload_jax.data.manifest import read_captions
from alload_jax.data.sources.opening import open_source
from alload_jax.data.store import BadRecordError, ShardWriter, finish_store, merge_stores
from alload_jax.models.lora_files import require_writable
from alload_jax.models.weights import require_free
from alload_jax.sampling.pictures import check_format

SAMPLES = random_samples(10)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_store(tmp_path / "far" / "mine", SAMPLES, samples_per_shard=4)


@pytest.fixture
def copies(tmp_path):
    """The names of the copies."""

    def names():
        (found,) = (tmp_path / "cache" / "alload_jax").iterdir()
        assert found.name.startswith("mine-")
        return sorted(path.name for path in found.iterdir())

    return names


def opened(folder):
    return open_source(f"file://{folder}")


def test_shards_are_copied_when_they_are_read(folder, copies):
    source = opened(folder)
    source.require_shards()
    assert copies() == ["manifest.parquet"]
    assert_holds(source.read(5), SAMPLES[5])
    assert copies() == ["manifest.parquet", "shard-00001.arrayrecord"]
    assert read_captions(source.manifest.folder) == source.captions(range(10)) == [None] * 10
    other = pickle.loads(pickle.dumps(source))
    shutil.rmtree(folder)
    assert_holds(other.read(6), SAMPLES[6])
    with says("shard-00002.arrayrecord: record 1", "cannot be read", kind=BadRecordError):
        other.read(9)


def test_a_copy_that_is_damaged_or_old_is_made_again(folder, copies):
    first = opened(folder)
    first.read(0)
    first.close()
    copy = first.manifest.folder / "shard-00000.arrayrecord"
    for content in (b"", bytes(copy.stat().st_size)):
        copy.write_bytes(content)
        source = PatientReader(opened(folder), waits=(0.0,))
        assert_holds(source.read(0), SAMPLES[0])
    assert not [name for name in copies() if "unfinished" in name]


def test_appended_shards_are_seen_at_the_next_start(folder):
    assert len(opened(folder).manifest) == 10
    write_store(folder, SAMPLES[:3], mode="append")
    source = opened(folder)
    for sample, wanted in enumerate([*SAMPLES, *SAMPLES[:3]]):
        assert_holds(source.read(sample), wanted)


def test_what_cannot_be_reached_is_refused(folder):
    for address, words in (
        (f"file://{folder}-else", ["manifest.parquet cannot be read", "check data.folder"]),
        ("s4://bucket/mine", ["s4://bucket/mine", "Unrecognized filesystem"]),
    ):
        with says(*words):
            open_source(address)
    shard = folder / "shard-00002.arrayrecord"
    shard.write_bytes(b"short")
    with says("shard-00002.arrayrecord: this shard has 5 bytes where the manifest says"):
        opened(folder)
    shard.unlink()
    with says("shard-00002.arrayrecord: this shard is missing"):
        opened(folder)


def test_copies_without_a_home_need_a_folder(folder, no_home):
    with says("mine: its copies have no folder", "set the environment variable XDG_CACHE_HOME"):
        opened(folder)


def test_nothing_is_written_into_object_storage(folder, tmp_path, monkeypatch):
    """Neither there nor into a folder of this machine that is called s3:."""
    monkeypatch.chdir(tmp_path)
    other = write_store(tmp_path / "other", SAMPLES)
    before = sorted(tmp_path.rglob("*"))
    for write in (
        lambda: write_store("s3://far/new", SAMPLES),
        lambda: write_store("s3://far/new", SAMPLES, mode="append"),
        lambda: merge_stores([folder, other], "s3://far/new"),
        lambda: ShardWriter("s3://far/new", 0, vae_stride=(1, 1, 1)),
        lambda: finish_store("s3://far/new", shards=1),
        lambda: require_free(Path("s3://far/new")),
        lambda: require_writable(Path("s3://far/new.safetensors"), force=False),
        lambda: check_format("--out", Path("s3://far/new.png"), (1, 8, 8), 1),
    ):
        with says("is no folder of this machine; name one"):
            write()
    assert sorted(tmp_path.rglob("*")) == before


class Objects(http.server.SimpleHTTPRequestHandler):
    """The files of a folder, as a server of S3 gives them."""

    def send_head(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return None
        content, status = path.read_bytes(), 200
        self.whole = len(content)
        if wanted := self.headers.get("Range"):
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            content, status = content[first : last + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 12:00:00 GMT")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{self.whole}")
        self.end_headers()
        return io.BytesIO(content)

    def log_message(self, *_):
        pass


def test_a_store_in_s3_is_read(folder, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    handler = functools.partial(Objects, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = f"scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{server.server_port}"
        source = open_source(f"s3://far/mine?{options}")
        for sample, wanted in enumerate(SAMPLES):
            assert_holds(source.read(sample), wanted)
        server.shutdown()
