"""Errors on held-out samples at fixed noise levels: which, in which batches, and their means."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from layouts import batches_of, disturbed, mesh_of, write_samples
from test_model_layouts import IMAGE_TO_VIDEO, model_of, write_given
from training_runs import CLASS_MODEL

from alload_jax.data.condition import conditions_for
from alload_jax.data.datasets.digits import Digits
from alload_jax.data.manifest import read_manifest
from alload_jax.data.sources import Subset
from alload_jax.data.store import StoreReader
from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.errors import InputError
from alload_jax.models.families import abstract_model
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching
from alload_jax.planning.samples import Samples
from alload_jax.sharding.mesh import batch_sharding
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, init_state
from alload_jax.training.validator import (
    ClassErrors,
    HeldOut,
    SizeClass,
    ValidationConfig,
    Validator,
    choose_samples,
    finite,
    validation_figures,
)

MODEL = WanConfig(**CLASS_MODEL | {"patch_size": (1, 4, 4), "dtype": "float32"})
# Dropout and the distribution of noise levels are those of training, and must not matter.
OBJECTIVE = FlowMatching(timesteps=TimestepConfig(shift=3.0), condition_dropout=0.9)
CONFIG = ValidationConfig(share=0.5, noise_levels=(0.2, 0.75), max_samples=None, seed=3)
MIX = ((1, 8, 8, 7), (5, 8, 8, 3))


def spec_of(objective=OBJECTIVE):
    return TrainingSpec(MODEL, objective, make_optimizer(OptimizerConfig(), 10), 0.9)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held") / "digits"
    Digits(mix=MIX, frames_per_latent=1).write(folder)
    return StoreReader(read_manifest(folder))


@pytest.fixture(scope="module")
def state():
    new = init_state(spec_of(), mesh_of(), seed=0)
    params = disturbed(new.params)
    return new._replace(params=params, ema=disturbed(params))


def validator_of(source, mesh, config=CONFIG, tokens=None, objective=OBJECTIVE):
    held_out = HeldOut(source, conditions_for(MODEL, source.manifest))
    return Validator(config, spec_of(objective), mesh, held_out, tokens)


def errors_by_mark(validator, state):
    """Error of each sample and level by checksum of the sample."""
    marks = validator._held_out.checksum
    found = {}
    for size, errors in zip(validator.classes, validator.measure(state), strict=True):
        for place, sample in enumerate(size.samples.tolist()):
            for level, row in zip(validator.levels, errors.errors, strict=True):
                if errors.measured[place]:
                    found[int(marks[sample]), level] = float(row[place])
    return found


@pytest.fixture(scope="module")
def reference(source, state):
    return errors_by_mark(validator_of(source, mesh_of()), state)


def noise_of(seed, level, mark, grid):
    """Noise of a sample, token by token, from the definition."""
    bits = np.float32(level).view(np.uint32)
    key = jax.random.fold_in(jax.random.key(seed), bits)
    key = jax.random.fold_in(jax.random.fold_in(key, 0), mark)
    key = jax.random.split(key, 3)[0]
    patch = np.array(MODEL.patch_size)
    noise = np.zeros((*grid, 1))
    for token, (t, h, w) in enumerate(np.ndindex(*(np.array(grid) // patch))):
        values = jax.random.normal(jax.random.fold_in(key, token), (patch.prod(),))
        here = noise[t, 4 * h : 4 * h + 4, 4 * w : 4 * w + 4, 0]
        here[:] = np.asarray(values).reshape(4, 4)
    return noise


def test_errors_are_those_of_each_sample_alone_by_the_definition(source, state, reference):
    graph = abstract_model(MODEL).graph
    model = nnx.merge(graph, state.averaged_weights.merged())
    forward = nnx.jit(lambda model, *arguments: model.forward(*arguments).velocity)
    assert len(reference) == 2 * sum(count for *_, count in MIX)
    for sample in (0, 3, 7, 9):
        arrays, mark = source.read(sample), int(source.manifest.checksum[sample])
        data = arrays["latents"].astype(np.float64)
        for level in CONFIG.noise_levels:
            noise = noise_of(CONFIG.seed, level, np.uint32(mark), data.shape[:3])
            noisy = (1 - level) * data + level * noise
            predicted = forward(
                model,
                jnp.asarray(noisy, jnp.float32)[None],
                jnp.float32([1000 * level]),
                jnp.asarray(arrays["labels"])[None],
            )
            expected = np.mean((np.asarray(predicted[0], np.float64) - (noise - data)) ** 2)
            assert reference[mark, level] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_devices_and_batches_change_nothing(source, state, reference):
    mesh = mesh_of(8, fsdp=2, context=2)
    new = init_state(spec_of(), mesh, seed=0)
    placed = jax.tree.map(lambda value, like: jax.device_put(value, like.sharding), state, new)
    found = errors_by_mark(validator_of(source, mesh, tokens=12), placed)
    assert found.keys() == reference.keys()
    for each, error in found.items():
        assert error == pytest.approx(reference[each], rel=2e-5)


def test_other_samples_and_levels_change_nothing(source, state, reference):
    """Of the same batch shape, to the bit."""
    fewer = Subset(source, np.array([8, 3, 0]))
    config = replace(CONFIG, noise_levels=(0.75, 0.5))
    found = errors_by_mark(validator_of(fewer, mesh_of(), config), state)
    assert len(found) == 6
    for (mark, level), error in found.items():
        assert level == 0.5 or error == reference[mark, level]
    other = errors_by_mark(validator_of(fewer, mesh_of(), replace(config, seed=4)), state)
    assert all(other[each] != error for each, error in found.items())


def test_the_average_is_measured_if_there_is_one(source, state, reference):
    raw = errors_by_mark(validator_of(source, mesh_of(), replace(CONFIG, weights="raw")), state)
    assert all(raw[each] != error for each, error in reference.items())
    bare = state._replace(ema={})
    assert errors_by_mark(validator_of(source, mesh_of()), bare) == raw


def test_a_damaged_sample_is_left_out_with_a_warning(source, state, reference, capsys, monkeypatch):
    """And whether it shares a batch changes nothing for the others."""
    monkeypatch.setattr("alload_jax.data.loader.time.sleep", lambda seconds: None)
    sums = source.manifest.checksum.copy()
    sums[3] ^= 1
    damaged = StoreReader(replace(source.manifest, checksum=sums))
    validator, mark = validator_of(damaged, mesh_of(), tokens=64), source.manifest.checksum[3]
    whole = {each: error for each, error in reference.items() if each[0] != int(mark)}
    for _ in range(2):
        assert errors_by_mark(validator, state) == pytest.approx(whole, rel=2e-5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: validation leaves out: ")
    assert "(sample 3) has checksum" in line


def test_what_is_measured_has_a_name(source):
    def name(config, source=source):
        return validator_of(source, mesh_of(), config).measured_set

    assert [each.seq_len for each in validator_of(source, mesh_of()).classes] == [4, 20]
    same = replace(CONFIG, every=7)
    assert name(CONFIG) == name(same)
    others = [
        replace(CONFIG, seed=1),
        replace(CONFIG, weights="raw"),
        replace(CONFIG, noise_levels=(0.2, 0.7)),
        replace(CONFIG, max_samples=5),
    ]
    assert len({name(each) for each in (CONFIG, *others)}) == 5
    assert name(CONFIG, Subset(source, np.arange(9))) != name(CONFIG)


@pytest.mark.slow
def test_errors_are_the_loss_of_training_at_a_level(tmp_path):
    """With given channels, images and first frames."""
    level = 0.05  # where float32 resolves a narrow range
    close = TimestepConfig("uniform", lowest=level - 5e-7, highest=level + 5e-7)
    trained = FlowMatching(timesteps=close, condition_dropout=0.0, given_first_frame=0.6)
    validated = replace(trained, timesteps=TimestepConfig(), condition_dropout=0.9)
    manifest, key, mesh = write_given(tmp_path / "data"), jax.random.key(5), mesh_of()
    model = model_of(IMAGE_TO_VIDEO)
    sharding = batch_sharding(mesh)

    @nnx.jit
    def both(model, batch):
        errors = validated.errors_at(model, batch, key, jnp.float32(level), sharding)
        return jnp.sum(batch.weight * errors), trained(model, batch, key, sharding).loss

    batches = batches_of(manifest, IMAGE_TO_VIDEO, "dual_constraint")
    video = max(batches, key=lambda batch: batch.latents.shape[1])
    ours, theirs = both(model, jax.tree.map(jnp.asarray, video))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-4)


@pytest.mark.parametrize(
    ("stride", "channels", "labels", "words"),
    [
        ((1, 1, 1), 3, 1, "has 3 channels, but the model generates 1"),
        ((1, 2, 2), 1, 1, r"a stride of \(1, 2, 2\), but those of data.folder \(1, 1, 1\)"),
        ((1, 1, 1), 1, 3, "a sample has 3 classes, but samples of data.folder have at most 1"),
    ],
)
def test_held_out_samples_of_another_kind_are_refused(
    tmp_path, source, stride, channels, labels, words
):
    sample = (1, 8, 8), np.zeros(labels, np.int32), {}
    other = StoreReader(write_samples(tmp_path / "o", 1, lambda *_: sample, channels, (), stride))
    trained = conditions_for(MODEL, source.manifest)
    with pytest.raises(InputError, match=words):
        HeldOut.of(other, MODEL, trained, source.manifest)
    assert HeldOut.of(source, MODEL, trained, source.manifest).conditions is trained


def test_an_objective_without_fixed_levels_is_refused(source):
    class Plain:
        name = "plain"

        def __call__(self, model, batch, key, sharding):
            raise NotImplementedError

    with pytest.raises(InputError, match=r"objective\.name is plain, which defines no errors at"):
        validator_of(source, mesh_of(), objective=Plain())


# ---------------------------------------------------------------- choices, batches and means


CHOSEN_SIZES = [(1, 8, 8), (1, 8, 16), (5, 8, 8), (5, 16, 16), (17, 8, 8)]
PICKS = st.lists(st.integers(0, len(CHOSEN_SIZES) - 1), min_size=1, max_size=60)
MOST = st.none() | st.integers(1, 70)


def manifest_of(picks, checksums=None):
    shape = np.array([CHOSEN_SIZES[pick] for pick in picks], np.int64)
    sums = np.arange(len(picks)) if checksums is None else checksums
    return SimpleNamespace(
        contents=np.asarray(sums, np.uint32),
        samples=lambda patch: Samples(shape, shape.prod(axis=1) // 16),
    )


@given(PICKS, MOST, MOST)
def test_the_choice_is_of_the_most_frequent_sizes_by_their_shares(picks, samples, shapes):
    chosen = choose_samples(manifest_of(picks), (1, 4, 4), samples, shapes)
    counts = {size: picks.count(n) for n, size in enumerate(CHOSEN_SIZES) if n in picks}
    taken = {each.shape: len(each.samples) for each in chosen}
    numbers = np.concatenate([each.samples for each in chosen])
    assert len(set(numbers.tolist())) == len(numbers)
    assert all(
        CHOSEN_SIZES[picks[n]] == each.shape for each in chosen for n in each.samples.tolist()
    )
    assert len(taken) == min(len(counts), shapes or 99, samples or 99)
    left_out = [count for size, count in counts.items() if size not in taken]
    assert not left_out or max(left_out) <= min(counts[size] for size in taken)
    room = sum(counts[size] for size in taken)
    assert len(numbers) == min(room, samples or room)
    assert [each.seq_len for each in chosen] == sorted(each.seq_len for each in chosen)
    total = len(numbers)
    for size, count in taken.items():  # its share, but at least one and rounded
        assert 1 <= count <= counts[size]
        assert abs(count - total * counts[size] / room) < len(taken) + 1


@given(PICKS, MOST, st.randoms())
def test_the_choice_depends_on_content_and_not_on_order(picks, samples, shuffle):
    rows = list(enumerate(picks))
    shuffle.shuffle(rows)
    sums, other = [n for n, _ in rows], [pick for _, pick in rows]
    found = choose_samples(manifest_of(picks), (1, 4, 4), samples, None)
    again = choose_samples(manifest_of(other, sums), (1, 4, 4), samples, None)
    assert [each.samples.tolist() for each in found] == [
        [sums[n] for n in each.samples.tolist()] for each in again
    ]


@given(st.integers(1, 40), st.integers(1, 9), st.none() | st.integers(1, 100))
def test_every_sample_has_one_row_and_batches_of_a_size_have_one_shape(count, ranks, tokens):
    size = SizeClass((5, 8, 8), 20, np.arange(100, 100 + count))
    steps = list(size.steps(ranks, tokens))
    parts = [part for step in steps for part in step.micro_batches]
    assert [sample for part in parts for sample in part.samples] == size.samples.tolist()
    assert {(part.rows, part.shape, part.seq_len) for part in parts} == {
        (size.rows(ranks, tokens), (5, 8, 8), 20)
    }
    assert all(len(part.samples) <= part.rows for part in parts)
    assert all([part.rank for part in step.micro_batches] == [*range(ranks)] for step in steps)
    assert all(any(part.samples for part in step.micro_batches) for step in steps)
    rows = parts[0].rows
    assert rows == 1 or (rows * 20 <= tokens and ranks * (rows - 1) < count)
    assert tokens is None or (rows + 1) * 20 > tokens or ranks * rows >= count


@given(st.data())
def test_means_are_those_of_all_samples_and_levels(data):
    levels = data.draw(st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True))
    rng, classes, rows = np.random.default_rng(0), [], []
    for name in ("1x8x8", "5x8x8"):
        count = data.draw(st.integers(1, 6))
        measured = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        errors = rng.normal(size=(len(levels), count)).astype(np.float32)
        errors[:, ~measured] = np.nan
        classes.append(ClassErrors(name, errors, measured))
        for place, level in enumerate(levels):
            rows += [(name, level, float(e)) for e in errors[place] if not np.isnan(e)]
    found = validation_figures(classes, [level / 100 for level in levels])
    expected = {"validation/samples": len(rows) // len(levels)}
    if rows:
        expected["validation/loss"] = np.mean([e for *_, e in rows])
    for name in {name for name, *_ in rows}:
        expected[f"validation/loss/{name}"] = np.mean([e for n, _, e in rows if n == name])
    for level in {level for _, level, _ in rows}:
        name = f"validation/loss/sigma_{level / 100:g}"
        expected[name] = np.mean([e for _, at, e in rows if at == level])
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_losses_that_are_not_finite_are_told_apart_from_losses_that_are_unknown():
    broken = ClassErrors("1x8x8", np.array([[np.nan, 1.0]], np.float32), np.array([True, True]))
    found = validation_figures([broken], [0.5])
    assert "validation/loss" in found
    assert finite(found) == {"validation/samples": 2}
    unread = broken._replace(measured=np.array([False, False]))
    assert validation_figures([unread], [0.5]) == {"validation/samples": 0}
