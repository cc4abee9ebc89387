"""Checkpoints: what comes back, which are kept, and what is told of damaged and other ones."""

import argparse
import dataclasses
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from threading import Timer
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.commands.flags import add_run_flags
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError, LostConnectionError
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.lora_files import Adapter, Target, write_lora
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.training import CheckpointConfig, RunConfig
from alload_jax.training import checkpoint as checkpoint_module
from alload_jax.training.checkpoint import (
    BEST_NAME,
    BestCheckpoints,
    Checkpoints,
    Measured,
    best_step,
)
from alload_jax.training.checkpoint_files import (
    CHECKSUMS_NAME,
    as_input_error,
    check_identity,
    checksum,
    damage,
    with_samples_of,
)
from alload_jax.training.parameters import ALL_TRAINED, ParametersConfig, merge_parameters
from alload_jax.training.restore import (
    described_model,
    find_step,
    given_parameters,
    new_state,
    one_device_mesh,
    read_identity,
    restore_weights,
)
from alload_jax.training.run_files import CHECKPOINTS
from alload_jax.training.state import Weights, abstract_state, init_state, training_spec

MODEL = WanConfig(dim=16, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8)
ONES = np.ones((2, 16), np.float32)
ARCHITECTURE = MODEL.architecture()
IDENTITY = {
    "model": ARCHITECTURE,
    "plan": {"m_mem": 40, "seed": 0, "ranks": 4},
    "data": {"samples": 11, "records": "a"},
}


def opened(folder, identity=IDENTITY, **settings):
    return Checkpoints(folder, CheckpointConfig(**settings), identity, MODEL.later_fields)


@pytest.fixture(scope="module")
def made(tiny_state):
    state, spec = tiny_state
    return state, abstract_state(spec, one_device_mesh(), 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, made):
    """A checkpoint of step 3, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("saved")
    with opened(folder) as checkpoints:
        checkpoints.save(3, made[0])
    return folder / "3"


def test_sums_of_arrays_are_those_of_earlier_versions():
    """Which are stored beside the arrays."""
    rng, expected = np.random.default_rng(0), 0
    tree = [rng.normal(size=(3, 5)).astype("f4"), rng.normal(size=(2, 3, 4)).astype("f2")]
    for number, array in enumerate(tree):
        bits = array.view(f"u{array.itemsize}").ravel().tolist()
        mixed = [(b + 0x9E3779B9) * (2 * n + 1) % 2**32 for n, b in enumerate(bits)]
        expected += sum(each ^ (each >> 15) for each in mixed) % 2**32 * (2 * number + 1)
    assert checksum(tree) == expected % 2**32


@pytest.fixture
def copies(saved, tmp_path):
    """Makes copies of the checkpoint that stand for steps; returns their folder."""

    def make(*steps):
        for step in steps:
            shutil.copytree(saved, tmp_path / str(step))
        return tmp_path

    return make


def on_disk(folder):
    return {int(place.name) for place in folder.iterdir() if place.name.isdigit()}


# ---------------------------------------------------------------- kept and brought back


def test_a_state_comes_back_bit_for_bit(saved, made):
    state, like = made
    with opened(saved.parent) as again:
        restored = again.restore(again.newest_undamaged(), like)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_the_newest_and_the_best_and_every_so_many_are_kept(tmp_path, made):
    losses = {2: 0.5, 3: 0.9, 5: 0.5, 6: 0.7, 7: 0.6}
    folder = tmp_path / "checkpoints"
    with opened(folder, keep=1, keep_every=4, keep_best=2) as checkpoints:
        best = BestCheckpoints(tmp_path, 2, checkpoints, Cluster())
        best.begin([])
        for step in range(1, 10):
            checkpoints.save(step, made[0])
            if step in losses:  # which is known after the checkpoint is saved
                best.add(Measured(losses[step], step))
        checkpoints.wait()
        assert on_disk(folder) == {2, 4, 5, 8, 9}
        content = json.loads((tmp_path / BEST_NAME).read_text())
        assert content == {"best": [{"step": 2, "loss": 0.5}, {"step": 5, "loss": 0.5}]}
        assert best.add(Measured(0.4, 9))
        best.finish()
    assert on_disk(folder) == {2, 4, 8, 9}
    assert find_step(folder, "best") == find_step(folder) == 9


def test_a_held_checkpoint_stays_and_later_ones_can_be_set_aside(copies, made):
    folder = copies(2, 3, 5)
    with opened(folder, keep=1) as checkpoints:
        assert checkpoints.hold(2) is None
        assert checkpoints.hold(5) == 3
        for step in (7, 9):
            checkpoints.save(step, made[0])
            checkpoints.wait()
        assert on_disk(folder) == {3, 9}
        assert checkpoints.set_aside(9) == ["diverged-9"]
    assert on_disk(folder) == {3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": ARCHITECTURE | {"dim": 32}}, "another model: dim was 16 and is now 32"),
        ({"model": {"dim": 16}}, "another model: "),
        ({"plan": {"m_mem": 80, "seed": 0, "ranks": 4}}, "m_mem was 40 and is now 80; restore"),
        (
            {"plan": {"m_mem": 40, "seed": 0, "ranks": 2, "ladder": [1], "m_comp": 9.0}},
            "plan: ranks was 4 and is now 2; on a .* that divides 4 give --planning.ranks 4",
        ),
        (  # split samples need the ranks that they were planned for
            {"plan": {"m_mem": 40, "seed": 0, "ranks": 2, "context": 2}},
            "restore the config, with mesh and number of devices",
        ),
        # The plan of other data differs too, and says less.
        (
            {"data": {"samples": 9, "records": "b"}, "plan": {"order": "c7ed"}},
            "11 samples, .* now has 9",
        ),
        ({"data": {"samples": 11, "records": "b"}, "plan": {"order": "c7ed"}}, "as many of other"),
    ],
)
def test_another_models_plans_or_datas_checkpoint_is_refused(saved, made, change, words):
    with opened(saved.parent, IDENTITY | change) as other:
        for refused in (lambda: other.restore(3, made[1]), lambda: other.check(3)):
            with pytest.raises(InputError, match=words):
                refused()
    assert saved.exists()


def test_a_run_whose_samples_have_changed_has_the_other_settings_that_its_checkpoint_has():
    found, now = {"plan": {"m_mem": 40, "order": "a"}}, {"plan": {"m_mem": 80, "order": "b"}}
    expected = {"data": 9, "plan": {"m_mem": 40, "order": "b"}}
    assert with_samples_of(found, now | {"data": 9}) == expected


def test_rows_that_another_version_chose_can_be_given():
    plans = [{"policy": "balanced", "m_mem": 40, "ranks": 2, "row_tokens": n} for n in (33, 36)]
    found, identity = ({"plan": plan} for plan in plans)
    words = "row_tokens was 33 and is now 36; another version chose .* --planning.row_tokens 33"
    with pytest.raises(InputError, match=words):
        check_identity(Path("run"), found, identity, {})


@pytest.mark.parametrize("field", [{"max_delay": 8}, {"max_delay": 8, "row_tokens": 33}])
def test_a_plan_with_fields_of_another_version_ends_with_it(field):
    plan = {"policy": "balanced", "m_mem": 40, "max_segments": 4, "order": "c7ed"}
    with pytest.raises(InputError, match="another version planned this run: go on with that one"):
        check_identity(Path("run"), {"plan": plan | field}, {"plan": plan}, {})


def change_identity(folder, change):
    path = folder / "identity" / "metadata"
    identity = json.loads(path.read_text())
    change(identity)
    path.write_text(json.dumps(identity))


def as_an_old_version_wrote_it(folder):
    (folder / CHECKSUMS_NAME).unlink()

    def change(identity):
        del identity["checksums"], identity["data"]
        identity["model"].pop("cross_norm", None)

    change_identity(folder, change)


def test_a_checkpoint_of_an_old_version_is_used_with_a_warning(copies, made, capsys):
    """It names no data and has no checksums; fields that came later have their defaults."""
    folder = copies(3)
    as_an_old_version_wrote_it(folder / "3")
    with opened(folder) as checkpoints:
        assert checkpoints.continue_from(Cluster()) == 3
        restored = checkpoints.restore(3, made[1])
        jax.tree.map(np.testing.assert_array_equal, restored, made[0])
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {folder}/3: has no checksums")
    other = {"model": ARCHITECTURE | {"cross_norm": False}}
    with (
        opened(folder, IDENTITY | other) as checkpoints,
        pytest.raises(InputError, match="cross_norm was True and is now False"),
    ):
        checkpoints.check(3)


# ---------------------------------------------------------------- damage


def remove_arrays(folder):
    for found in list(folder.rglob("d")):
        shutil.rmtree(found)


def garble_arrays(folder):
    for found in folder.rglob("d/*"):
        found.write_bytes(bytes(reversed(found.read_bytes())))


HARMS = [remove_arrays, garble_arrays]
HARMS.append(lambda folder: (folder / "state" / "manifest.ocdbt").write_bytes(b"x"))
HARMS.append(lambda folder: (folder / "identity" / "metadata").write_text("[1]"))


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_every_flipped_bit_is_found(saved, place, bit, file):
    files = sorted(path for path in saved.rglob("*") if path.is_file() and path.stat().st_size)
    said_later = ("_CHECKPOINT_METADATA", "commit_success.txt")  # which hold no data
    files = [path for path in files if path.name not in said_later]
    path = files[file % len(files)]
    good = path.read_bytes()
    at = int(place * len(good))
    path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
    found = damage(saved)
    path.write_bytes(good)
    assert found in (f"{path.relative_to(saved)} is damaged", f"{CHECKSUMS_NAME} is damaged") or (
        path.name == CHECKSUMS_NAME and found.endswith(("is missing", "is damaged"))
    )
    assert damage(saved) == ""


def test_a_run_goes_on_from_the_newest_whole_checkpoint(copies, made, capsys):
    folder = copies(3, 6, 9, 12)
    garble_arrays(folder / "12")
    remove_arrays(folder / "9")
    (folder / "6" / CHECKSUMS_NAME).unlink()
    with pytest.raises(InputError, match=r"\(checksums.json is missing\); choose another with"):
        restore_weights(folder, 6, MODEL, ALL_TRAINED, one_device_mesh())
    with opened(folder, keep=3) as checkpoints:
        assert checkpoints.continue_from(Cluster()) == 3
        warnings = capsys.readouterr().err.splitlines()
        for step, end, warning in zip(
            (12, 9, 6), ("is damaged", "is missing", "is missing"), warnings, strict=True
        ):
            assert warning.startswith(f"warning: {folder}/{step}: ")
            assert warning.endswith(f"{end}; it is moved to damaged-{step}")
            assert (folder / f"damaged-{step}").is_dir()
        checkpoints.save(12, made[0])  # as a run that goes on does
    for step in (3, 12):
        garble_arrays(folder / str(step))
    with (
        opened(folder) as checkpoints,
        pytest.raises(InputError, match=r"12: .* is damaged, and no other checkpoint is left"),
    ):
        checkpoints.continue_from(Cluster())
    assert (folder / "damaged-12-2").is_dir()


def test_a_process_waits_until_its_host_shows_the_checkpoints_of_process_0(copies, monkeypatch):
    """Such as one that process 0 has moved away, which the others must save again with it."""
    folder, told = copies(3, 6), Mock(broadcast=lambda _: [3, [3]])
    with opened(folder) as checkpoints:
        moved = Timer(0.3, shutil.rmtree, [folder / "6"])
        moved.start()
        assert checkpoints.continue_from(told) == 3
        assert checkpoints.steps() == {3}
        told.broadcast = lambda _: [9, [3, 9]]
        monkeypatch.setattr(checkpoint_module, "VISIBLE_SECONDS", 0.2)
        with pytest.raises(InputError, match=r"shows checkpoints \[3\], but .* 0 \[3, 9\]; mount"):
            checkpoints.continue_from(told)


@pytest.mark.parametrize("harm", HARMS, ids=["gone", "garbled", "manifest", "identity"])
def test_a_damaged_checkpoint_is_one_line(copies, made, harm):
    folder = copies(3)
    as_an_old_version_wrote_it(folder / "3")
    harm(folder / "3")
    with opened(folder) as checkpoints:
        with pytest.raises(InputError, match="3: this checkpoint cannot be read") as refused:
            checkpoints.restore(3, made[1])
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="choose another with --step") as refused:
        restore_weights(folder, 3, MODEL, ALL_TRAINED, one_device_mesh())
    assert "\n" not in str(refused.value)


def test_what_belongs_to_no_model_and_what_is_no_file_is_named(copies):
    place = copies(3) / "3"
    change_identity(place, lambda identity: identity.pop("model"))
    with pytest.raises(InputError, match=r"cannot be read \(its identity names no model\)"):
        read_identity(place)
    os.mkfifo(place / "pipe")
    with pytest.raises(InputError, match=r"cannot be read \(pipe is not a regular file\)"):
        read_identity(place)


def test_a_run_gives_another_its_model_and_its_weights_in_parts(tmp_path):
    sparse = SparseAttentionConfig(selector="pooled")
    model = dataclasses.replace(MODEL, sparse_attention=sparse)
    parameters, mesh = ParametersConfig(trained=("head",)), one_device_mesh()
    spec = training_spec(model, parameters=parameters)
    state, run = init_state(spec, mesh, 0), tmp_path / "run"
    state = state._replace(ema=jax.tree.map(lambda leaf: leaf + 1, state.params))
    identity = {"model": model.architecture(), "parameters": dataclasses.asdict(parameters)}
    with opened(run / CHECKPOINTS, identity) as checkpoints:
        checkpoints.save(3, state)
    whole = Weights(state.params, state.frozen, state.variables)
    assert all(jax.tree.leaves(part) for part in whole)
    for alone, expected in ((False, whole), (True, Weights(state.params, {}, {}))):
        found = restore_weights(
            run / CHECKPOINTS, 3, model, parameters, mesh, "raw", trained_only=alone
        )
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert described_model(run).architecture() == model.architecture()
    given = given_parameters(run, model, ALL_TRAINED, mesh)
    jax.tree.map(np.testing.assert_array_equal, given, merge_parameters(state.ema, state.frozen))
    # What does not fit begins anew, if it is trained; so do adapters that a file lacks.
    other = dataclasses.replace(model, num_classes=7, lora=LoraConfig(rank=2))
    query = {Target("blocks/self_attention/query/kernel", 0): Adapter(ONES.T, ONES, 1.0)}
    write_lora(tmp_path / "x.safetensors", query, other, "diffusers")
    begun = RunConfig("", initial_weights=str(run), initial_lora=f"{tmp_path}/x.safetensors")
    for trained in (("lora",), ("lora", "condition_embedding")):
        parameters = ParametersConfig(trained=trained, frozen_dtype="float32")
        spec = training_spec(other, parameters=parameters)
        with nullcontext() if trained[1:] else pytest.raises(InputError, match="no condition_"):
            state, _, lacking = new_state(spec, mesh, begun, Mock())
    assert re.fullmatch(r"condition_embedding/.* anew; .* lacks 9 of 10 adapters, .*", lacking)
    np.testing.assert_array_equal(
        state.params["blocks"]["self_attention"]["query"]["lora_up"], ONES[None]
    )
    jax.tree.map(np.testing.assert_array_equal, state.frozen["head"], given["head"])


@pytest.mark.parametrize(
    ("words", "kind", "told", "reads"),
    [
        ("Gloo AllGather failed: Connection closed by peer", LostConnectionError, "read it", True),
        ("NCCL operation failed", LostConnectionError, "lost each other while they read it", True),
        ("DEADLINE_EXCEEDED: Barrier timed out", LostConnectionError, "start all proc", True),
        ("bad magic\nand more", InputError, r"cannot be read \(bad magic\); move it away", True),
        ("Gloo AllGather failed: Connection reset", LostConnectionError, "they wrote it", False),
        ("x\ny: No space left on device z", InputError, r"\(No space .*, none is whole", False),
    ],
)
def test_lost_processes_are_told_apart_from_damage_and_a_full_disk(
    tmp_path, monkeypatch, words, kind, told, reads
):
    def fail(*_, **__):
        raise RuntimeError(words)

    with opened(tmp_path / "run") as checkpoints, monkeypatch.context() as patched:
        patched.setattr(checkpoints._manager, "check_for_errors", fail)
        reading = as_input_error(tmp_path, "move it away") if reads else nullcontext()
        with pytest.raises(kind, match=told), reading:
            (fail if reads else checkpoints.check_writing)()


# ---------------------------------------------------------------- the best


class Saved:
    """Checkpoints in memory."""

    def __init__(self, newest):
        self.newest, self.there, self.chosen = newest, [], frozenset()

    def steps(self):
        return frozenset(self.there)

    def keep(self, steps):
        self.chosen = frozenset(steps)

    def save(self, step):
        after = [*self.there, step]
        self.there = [each for each in after if each in {*after[-self.newest :], *self.chosen}]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sets(st.integers(1, 20)),
    st.integers(0, 20),
)
def test_the_best_of_all_are_there_whenever_a_run_is_continued(
    tmp_path_factory, losses, count, intervals, stop
):
    """Steps are saved where they are among the best, and some at an interval."""
    folder, saved = tmp_path_factory.mktemp("run"), Saved(newest=1)
    best = BestCheckpoints(folder, count, saved, Cluster())
    best.begin([])
    for step, loss in enumerate(losses, 1):
        if step == stop + 1:  # another start knows only what is in the log and on disk
            best = BestCheckpoints(folder, count, saved, Cluster())
            best.begin([Measured(old, at) for at, old in enumerate(losses[:stop], 1)])
        if best.add(Measured(loss, step)) or step in intervals:
            saved.save(step)
        lowest = sorted(range(1, step + 1), key=lambda at: (losses[at - 1], at))[:count]
        assert {each.step for each in best.best} == set(lowest) <= set(saved.there)
        assert best_step(folder, saved.there) == lowest[0]


def test_a_best_checkpoint_that_is_gone_is_no_longer_the_best(tmp_path):
    checkpoints = Saved(3)
    checkpoints.there = [2, 4]  # and that of step 6 was damaged
    best = BestCheckpoints(tmp_path, 1, checkpoints, Cluster())
    best.begin([Measured(0.9, 2), Measured(0.7, 4), Measured(0.3, 6)])
    assert best.best == [Measured(0.7, 4)]


def test_without_keep_best_nothing_is_written(tmp_path):
    best = BestCheckpoints(tmp_path, None, Saved(1), Cluster())
    best.begin([Measured(0.1, 1)])
    assert not best.add(Measured(0.0, 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file; the run keeps no best checkpoint"),
        ("[]", "is not a list of steps and losses; name a step"),
        ('{"best": [{"loss": 1}]}', "is not a list of steps and losses"),
        ("{", "is not valid JSON"),
        ('{"best": []}', "names no checkpoint that is complete; name a step"),
        ('{"best": [{"step": 9, "loss": 1}]}', "names no checkpoint that is complete"),
    ],
)
def test_a_missing_best_checkpoint_is_one_line(tmp_path, content, words):
    if content is not None:
        (tmp_path / BEST_NAME).write_text(content)
    with pytest.raises(InputError, match=words):
        best_step(tmp_path, [3])


def test_a_step_is_a_number_or_best(capsys):
    parser = argparse.ArgumentParser()
    add_run_flags(parser.add_argument)
    given = [parser.parse_args(["--step", right]).step for right in ("12", "best")]
    assert given == [12, "best"]
    for wrong in ("-1", "1.5", "newest", "", "٣", "9" * 5000):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--step={wrong}"])
        assert "is not a step such as 500, nor best" in capsys.readouterr().err
