"""Values of strangers are passed over: they lack the proof that the run's secret gives."""

import stat
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from patience import PATIENCE, wait_until

from alload_jax.distributed import coordination
from alload_jax.distributed.coordination import (
    LONGEST_TEXT,
    SECRET_NAME,
    KeyValueStore,
    Seal,
    agree_on_seal,
    create_secret,
    digest_of,
    read_secret,
)
from alload_jax.errors import InputError


class Client:
    """The part of JAX's client that the store uses; anybody can write to it."""

    def __init__(self):
        self.values, self._changed = {}, threading.Condition()
        self.answers = 0

    def key_value_set(self, key, text, allow_overwrite=False):
        with self._changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = text
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, PATIENCE)
            self.answers += 1
            return self.values[key]

    def key_value_dir_get(self, prefix):
        return [(key, text) for key, text in self.values.items() if key.startswith(prefix)]


@settings(max_examples=25)
@given(st.text(), st.text(), st.binary(min_size=1), st.integers(0), st.text(max_size=3))
def test_only_what_was_sealed_is_opened(key, text, secret, place, other):
    seal = Seal(secret)
    sealed = seal.close(key, text)
    assert seal.open(key, sealed) == text
    assert seal.open(key + "x", sealed) is None
    assert Seal(secret + b"x").open(key, sealed) is None
    place %= len(sealed)
    changed = sealed[:place] + other + sealed[place + 1 :]
    assert seal.open(key, changed) is None or changed == sealed
    assert seal.open(key, text) is None


def test_long_texts_are_neither_sent_nor_read(monkeypatch):
    seal = Seal(b"secret")
    longest = "x" * LONGEST_TEXT
    sealed = seal.close("key", longest)
    assert seal.open("key", sealed) == longest
    with pytest.raises(ValueError, match="at most"):
        seal.close("key", longest + "x")
    monkeypatch.setattr(coordination, "LONGEST_TEXT", LONGEST_TEXT - 1)
    assert seal.open("key", sealed) is None


def test_values_of_strangers_end_nothing():
    client, seal = Client(), Seal(b"secret")
    store, other = KeyValueStore(seal, client), KeyValueStore(seal, client)
    for text in ("", "{", "0" * 64 + "[1]", Seal(b"guess").close("alload/heartbeat/7", "[1]")):
        client.values |= {"alload/heartbeat/7": text, "alload/heartbeat/x/y": text}
        store.put("heartbeat/1", "[2]")
        assert other.get_prefix("heartbeat") == {"1": "[2]"}
    # The value of another key, which a stranger has read and repeats.
    client.values["alload/heartbeat/2"] = client.values["alload/heartbeat/1"]
    assert other.get_prefix("heartbeat") == {"1": "[2]"}


def test_a_wait_goes_on_until_a_process_of_the_run_writes(monkeypatch):
    monkeypatch.setattr(coordination, "_FORGED_SECONDS", 0.01)
    client, seal = Client(), Seal(b"secret")
    client.values["alload/broadcast/1"] = "forged"
    found, store = [], KeyValueStore(seal, client)
    waiting = threading.Thread(target=lambda: found.append(store.wait_for("broadcast/1")))
    waiting.start()
    wait_until(lambda: found or client.answers > 2)
    assert not found
    KeyValueStore(seal, client).put("broadcast/1", "true")
    waiting.join(PATIENCE)
    assert found == ["true"]


def test_a_secret_is_for_its_owner_and_one_start(tmp_path):
    first = create_secret(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run" / SECRET_NAME).stat().st_mode) == 0o600
    assert read_secret(tmp_path / "run", digest_of(first), 0.0) == first
    assert first != create_secret(tmp_path / "run")
    for folder, words in (("run", "it is of another start"), ("elsewhere", "No such file")):
        with pytest.raises(InputError, match=words):
            read_secret(tmp_path / folder, digest_of(first), 0.0)


def agree(folders):
    """What each process gets or raises; each sees one of the folders."""
    client, found = Client(), {}

    def one(process):
        try:
            found[process] = agree_on_seal(process, len(folders), folders[process], client)
        except InputError as error:
            found[process] = str(error)

    threads = [threading.Thread(target=one, args=[process]) for process in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return [found[process] for process in range(len(folders))], client


def test_processes_agree_on_a_secret_that_is_not_told(tmp_path):
    create_secret(tmp_path)  # of an earlier start
    seals, client = agree([tmp_path] * 3)
    sealed = seals[0].close("key", "text")
    assert [seal.open("key", sealed) for seal in seals] == ["text"] * 3
    assert (tmp_path / SECRET_NAME).read_bytes().hex() not in repr(client.values)


def test_a_folder_that_is_not_shared_ends_all_with_one_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(coordination, "_READ_SECONDS", 0.0)
    read = coordination.read_secret
    monkeypatch.setattr(coordination, "read_secret", lambda *given: read(*given, 0.1))
    (tmp_path / "file").write_text("")
    a, b, file = (tmp_path / name for name in ("a", "b", "file"))
    for folders, begin in (
        ([a, a, b], f"process 2 of 3: run.folder is {b}: "),
        ([file] * 2, "process 0 of 2: "),
    ):
        (said,) = set(agree(folders)[0])
        assert said.startswith(begin)
