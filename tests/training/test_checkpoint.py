import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError, LostConnectionError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.training import CheckpointConfig
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.checkpoint_files import CHECKSUMS_NAME, as_input_error, damage
from alload_jax.training.parameters import ALL_TRAINED
from alload_jax.training.restore import one_device_mesh, restore_weights
from alload_jax.training.state import abstract_state

MODEL = WanConfig(dim=16, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8)
IDENTITY = {"model": {"dim": 16}, "plan": {"m_mem": 40, "seed": 0}}


@pytest.fixture(scope="module")
def made(tiny_state):
    state, spec = tiny_state
    return state, abstract_state(spec, one_device_mesh(), 0)


def opened(folder, identity=IDENTITY, **settings):
    return Checkpoints(folder, CheckpointConfig(**settings), identity, MODEL.later_fields)


def test_a_state_comes_back_bit_for_bit(tmp_path, made):
    state, like = made
    with opened(tmp_path) as checkpoints:
        checkpoints.save(3, state)
    with opened(tmp_path) as again:
        restored = again.restore(again.latest(), like)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_the_newest_and_every_so_many_are_kept(tmp_path, made):
    with opened(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, made[0])
    kept = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert kept == [4, 6, 7]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"dim": 32}}, "another model: dim was 16 and is now 32"),
        ({"plan": {"m_mem": 80, "seed": 0}}, "another plan: m_mem was 40 and is now 80"),
        (
            {"model": {"dim": 16, "cross_norm": False}},
            "another model: cross_norm was True and is now False",
        ),
        # The plan of other data differs too, and says less.
        (
            {"data": {"samples": 9, "records": "b"}, "plan": {"order": "c7ed"}},
            "trained on 11 samples, and data.folder now has 9; give data.folder as it was, or",
        ),
        (
            {"data": {"samples": 11, "records": "b"}, "plan": {"order": "c7ed"}},
            "trained on 11 samples, and data.folder now has as many of other content; give",
        ),
    ],
)
def test_another_models_plans_or_datas_checkpoint_is_refused(tmp_path, made, change, words):
    state, like = made
    whole = IDENTITY | {"data": {"samples": 11, "records": "a"}}
    with opened(tmp_path, whole) as checkpoints:
        checkpoints.save(1, state)
    with opened(tmp_path, whole | change) as other:
        for refused in (lambda: other.restore(1, like), lambda: other.check(1)):
            with pytest.raises(InputError, match=words):
                refused()
    assert (tmp_path / "1").exists()


def test_checkpoints_that_name_no_data_are_of_any(tmp_path, made):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(3, made[0])
    with opened(tmp_path, IDENTITY | {"data": {"samples": 2, "records": "b"}}) as again:
        again.check(3)


def test_a_plan_for_other_ranks_says_how_to_go_on(tmp_path, made):
    state, like = made
    plans = ({"ranks": 4}, {"ranks": 2}, {"ranks": 4, "context": 2})
    four, two, split = ({"model": {"dim": 16}, "plan": plan} for plan in plans)
    with opened(tmp_path, four) as checkpoints:
        checkpoints.save(1, state)
    words = "ranks was 4 and is now 2; on another number of devices give --planning.ranks 4"
    # Split samples need the ranks that they were planned for.
    other_words = "restore the config, with mesh and number of devices"
    for identity, said in ((two, words), (split, other_words)):
        with opened(tmp_path, identity) as other, pytest.raises(InputError, match=said):
            other.restore(1, like)


def remove_arrays(folder):
    for found in list(folder.rglob("d")):
        shutil.rmtree(found)


def garble_arrays(folder):
    for found in folder.rglob("d/*"):
        found.write_bytes(bytes(reversed(found.read_bytes())))


def garble_manifest(folder):
    (folder / "state" / "manifest.ocdbt").write_bytes(b"x")


def garble_identity(folder):
    (folder / "identity" / "metadata").write_text("[1]")


def as_an_old_version_wrote_it(folder):
    (folder / CHECKSUMS_NAME).unlink()
    identity = folder / "identity" / "metadata"
    fields = json.loads(identity.read_text())
    del fields["checksums"]
    identity.write_text(json.dumps(fields))


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("saved")
    with opened(folder) as checkpoints:
        checkpoints.save(3, made[0])
    return folder / "3"


def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path, made, capsys):
    with opened(tmp_path, keep=3) as checkpoints:
        for step in (3, 6, 9):
            checkpoints.save(step, made[0])
    garble_arrays(tmp_path / "9")
    remove_arrays(tmp_path / "6")
    with opened(tmp_path, keep=3) as checkpoints:
        assert checkpoints.continue_from(Cluster()) == 3
        warnings = capsys.readouterr().err.splitlines()
        assert [line.split(": ")[1] for line in warnings] == [f"{tmp_path}/9", f"{tmp_path}/6"]
        assert warnings[0].endswith("is damaged; it is moved to damaged-9")
        assert warnings[1].endswith("is missing; it is moved to damaged-6")
        checkpoints.save(9, made[0])  # as a run that goes on does
    assert (tmp_path / "damaged-9").is_dir()
    with opened(tmp_path) as checkpoints:
        assert checkpoints.continue_from(Cluster()) == 9
    for step in (3, 9):
        garble_arrays(tmp_path / str(step))
    with (
        opened(tmp_path) as checkpoints,
        pytest.raises(InputError, match=r"9: .* is damaged, and no other checkpoint is left"),
    ):
        checkpoints.continue_from(Cluster())
    assert (tmp_path / "damaged-9-2").is_dir()


def test_lost_checksums_are_damage(tmp_path, made, capsys):
    identity = {"model": MODEL.architecture()}
    with opened(tmp_path, identity, keep=3) as checkpoints:
        for step in (3, 6):
            checkpoints.save(step, made[0])
    (tmp_path / "6" / CHECKSUMS_NAME).unlink()
    with pytest.raises(InputError, match=r"\(checksums.json is missing\); choose another with"):
        restore_weights(tmp_path, 6, MODEL, ALL_TRAINED, one_device_mesh())
    with opened(tmp_path, identity, keep=3) as checkpoints:
        assert checkpoints.continue_from(Cluster()) == 3
    warning = f"warning: {tmp_path}/6: checksums.json is missing; it is moved to damaged-6\n"
    assert capsys.readouterr().err == warning


def test_a_checkpoint_that_never_had_checksums_is_used_with_a_warning(tmp_path, made, capsys):
    state, like = made
    with opened(tmp_path) as checkpoints:
        checkpoints.save(3, state)
    as_an_old_version_wrote_it(tmp_path / "3")
    with opened(tmp_path) as checkpoints:
        assert checkpoints.continue_from(Cluster()) == 3
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(3, like), state)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {tmp_path}/3: has no checksums")


@pytest.mark.parametrize("harm", [remove_arrays, garble_arrays, garble_manifest, garble_identity])
def test_a_damaged_checkpoint_is_one_line(tmp_path, made, harm):
    state, like = made
    identity = {"model": MODEL.architecture()}
    with opened(tmp_path, identity) as checkpoints:
        checkpoints.save(1, state)
    as_an_old_version_wrote_it(tmp_path / "1")
    harm(tmp_path / "1")
    with opened(tmp_path, identity) as checkpoints:
        with pytest.raises(InputError, match="1: this checkpoint cannot be read") as refused:
            checkpoints.restore(1, like)
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="choose another with --step") as refused:
        restore_weights(tmp_path, 1, MODEL, ALL_TRAINED, one_device_mesh())
    assert "\n" not in str(refused.value)


def test_what_orbax_raises_is_an_input_error(tmp_path, made, monkeypatch):
    def fail(*_, **__):
        raise Exception("bare\nand long")

    with opened(tmp_path, {"model": MODEL.architecture()}) as checkpoints:
        checkpoints.save(1, made[0])
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with pytest.raises(InputError, match=r"cannot be read \(bare\); choose"):
        restore_weights(tmp_path, 1, MODEL, ALL_TRAINED, one_device_mesh())


@pytest.mark.parametrize(
    "words",
    [
        "FAILED_PRECONDITION: Gloo AllGather failed: Connection closed by peer",
        "NCCL operation failed",
        "DEADLINE_EXCEEDED: Barrier timed out",
    ],
)
def test_lost_processes_are_not_told_as_damage(tmp_path, words):
    lost = pytest.raises(LostConnectionError, match="lost each other while they read it")
    with lost as error, as_input_error(tmp_path, "move it away"):
        raise RuntimeError(words)
    assert words in str(error.value)
    assert "move it away" not in str(error.value)


def test_lost_processes_are_not_told_as_a_full_disk(tmp_path, made, monkeypatch):
    def lose(*arguments, **options):
        raise RuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")

    with opened(tmp_path / "run") as checkpoints, monkeypatch.context() as patched:
        patched.setattr(checkpoints._manager, "check_for_errors", lose)
        with pytest.raises(LostConnectionError, match="lost each other while they wrote it"):
            checkpoints.check_writing()


def test_other_errors_are_told_as_damage(tmp_path):
    damaged = pytest.raises(InputError, match=r"cannot be read \(bad magic\); move it away")
    with damaged, as_input_error(tmp_path, "move it away"):
        raise RuntimeError("bad magic")
