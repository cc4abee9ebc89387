"""Each optimizer and schedule against a reference: by hand in float64, optax, or AdamW."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layouts import mesh_of

from alload_jax.config import read_config
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.training.optimizer import (
    OptimizerConfig,
    OptimizerGroup,
    learning_rate_schedule,
    make_optimizer,
    skip_spikes,
    skipped_updates,
    update_ema,
)
from alload_jax.training.state import TrainingSpec, init_state, state_shardings
from alload_jax.training.update_rules import (
    BLOCK,
    Quantised,
    dequantise,
    dynamic_codes,
    quantise,
    scale_by_adam8bit,
)

NAMES = ("adamw", "adamw8bit", "adafactor", "lion", "muon")
LAYERS, INPUTS, OUTPUTS = 3, 130, 160
RATE, DECAY = 0.01, 0.1


def stacked(seed):
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(LAYERS, INPUTS, OUTPUTS)) * 10.0 ** rng.normal(size=(LAYERS, 1, 1))
    return {
        "blocks": {
            "kernel": jnp.asarray(kernel, jnp.float32),
            "bias": jnp.asarray(rng.normal(size=(LAYERS, OUTPUTS)), jnp.float32),
        },
        "head": {"kernel": jnp.asarray(rng.normal(size=(INPUTS, 4)), jnp.float32)},
    }


def constant(name, **changes):
    settings = {"learning_rate": RATE, "warmup_steps": 0, "clip_norm": 1e9, "weight_decay": DECAY}
    return OptimizerConfig(name=name, schedule="constant", **settings | changes)


def follow(optimizer, params, grads):
    """The parameters after an update by each of the gradients."""
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params


def trained(name, **changes):
    """The parameters of `stacked` after three updates."""
    grads = [stacked(n) for n in range(1, 4)]
    return follow(make_optimizer(constant(name, **changes), 10), stacked(0), grads)


def kernels(layer):
    """One layer's kernel in the stack, and its gradients."""
    first, *grads = (stacked(n)["blocks"]["kernel"][layer] for n in range(4))
    return first, grads


@pytest.mark.parametrize("name", ["adamw8bit", "adafactor", "muon"])
def test_a_stack_of_matrices_is_trained_as_its_matrices(name):
    """Other arrays of a stack may share statistics; matrices must not."""
    together, optimizer = trained(name)["blocks"]["kernel"], make_optimizer(constant(name), 10)
    for number in (0, LAYERS - 1):
        first, *grads = (
            {"blocks": {"kernel": stacked(n)["blocks"]["kernel"][number : number + 1]}}
            for n in range(4)
        )
        alone = follow(optimizer, first, grads)["blocks"]["kernel"][0]
        np.testing.assert_allclose(together[number], alone, rtol=1e-4, atol=1e-5)


def test_muon_is_optax_muon_on_each_matrix_and_adamw_elsewhere():
    found, adamw = trained("muon"), trained("adamw")
    np.testing.assert_array_equal(found["head"]["kernel"], adamw["head"]["kernel"])
    np.testing.assert_array_equal(found["blocks"]["bias"], adamw["blocks"]["bias"])
    reference = optax.contrib.muon(RATE, weight_decay=DECAY, consistent_rms=0.2)
    for number in range(LAYERS):
        first, grads = kernels(number)
        expected = follow(reference, {"kernel": first}, [{"kernel": grad} for grad in grads])
        ours = found["blocks"]["kernel"][number]
        np.testing.assert_allclose(ours, expected["kernel"], rtol=1e-4, atol=1e-5)


def test_the_updates_of_muon_are_nearly_orthogonal_with_the_size_of_adamw():
    zero = jax.tree.map(jnp.zeros_like, stacked(0))
    moved = follow(make_optimizer(constant("muon", weight_decay=0.0), 10), zero, [stacked(1)])
    for matrix in np.asarray(moved["blocks"]["kernel"], np.float64):
        singular = np.linalg.svd(matrix / RATE / 0.2 / np.sqrt(OUTPUTS), compute_uv=False)
        assert singular.min() > 0.4
        assert singular.max() < 1.3
        assert 0.1 < np.sqrt((matrix**2).mean()) / RATE < 0.3


def adafactor_by_hand(matrix, grads):
    """Factored second moments in float64 (arXiv 1804.04235, algorithm 4), decay as in AdamW."""
    rows, columns = np.zeros(matrix.shape[0]), np.zeros(matrix.shape[1])
    for count, grad in enumerate(grads, 1):
        keep = 1 - count**-0.8
        square = grad**2 + 1e-30
        rows = keep * rows + (1 - keep) * square.mean(1)
        columns = keep * columns + (1 - keep) * square.mean(0)
        update = grad / np.sqrt(np.outer(rows, columns) / rows.mean())
        update /= max(1.0, np.sqrt((update**2).mean()))
        matrix = matrix - RATE * (update + DECAY * matrix)
    return matrix


def test_adafactor_by_hand_and_its_small_state():
    found = trained("adafactor")["blocks"]["kernel"]
    for number in range(LAYERS):
        first, grads = kernels(number)
        exact = [np.asarray(grad, np.float64) for grad in grads]
        expected = adafactor_by_hand(np.asarray(first, np.float64), exact)
        np.testing.assert_allclose(found[number], expected, rtol=1e-3, atol=1e-5)
    state = make_optimizer(constant("adafactor"), 10).init(stacked(0))
    assert max(leaf.size for leaf in jax.tree.leaves(state)) == max(LAYERS * OUTPUTS, INPUTS * 4)


@pytest.mark.parametrize(
    ("layers", "size"), [(2, (128, 130)), (200, (130, 128)), (200, (128, 4))], ids=str
)
def test_adafactor_treats_each_layer_of_a_stack_by_itself(layers, size):
    rng = np.random.default_rng(0)
    stacks = [jnp.asarray(rng.normal(size=(layers, *size)), jnp.float32) for _ in range(3)]
    optimizer = make_optimizer(constant("adafactor"), 10)

    def after(arrays):
        first, *grads = ({"kernel": array} for array in arrays)
        return follow(optimizer, first, grads)["kernel"]

    together = after(stacks)
    for number in (0, layers - 1):
        alone = after([stack[number] for stack in stacks])
        np.testing.assert_allclose(together[number], alone, rtol=1e-5, atol=1e-6)


def test_adafactor_keeps_the_second_moments_of_biases_whole():
    bias = {"bias": jnp.zeros((200, 130))}  # of 200 layers
    moments = optax.tree.get(make_optimizer(constant("adafactor"), 10).init(bias), "v")
    assert moments["bias"].shape == bias["bias"].shape


@pytest.mark.parametrize("decay", [0.3, 0.9999])
def test_the_average_is_that_of_its_decay(decay):
    """In float64; its first updates weigh the steps so far more alike."""
    values = np.random.default_rng(0).normal(size=(60, 5))
    average, expected = {"a": jnp.asarray(values[0], jnp.float32)}, values[0]
    for step, value in enumerate(values):
        rate = min(decay, (1 + step) / (10 + step))
        expected = rate * expected + (1 - rate) * value
        params = {"a": jnp.asarray(value, jnp.float32)}
        average = update_ema(average, params, jnp.int32(step), decay)
    np.testing.assert_allclose(average["a"], expected, rtol=0, atol=1e-5)
    assert update_ema({}, params, jnp.int32(0), None) == {}


def test_lion_by_hand():
    value, *grads = (np.asarray(stacked(n)["head"]["kernel"], np.float64) for n in range(4))
    mu = np.zeros_like(value)
    for grad in grads:
        value = value - RATE * (np.sign(0.9 * mu + 0.1 * grad) + DECAY * value)
        mu = 0.99 * mu + 0.01 * grad
    np.testing.assert_allclose(trained("lion")["head"]["kernel"], value, rtol=1e-4, atol=1e-6)


def test_values_are_clipped_before_the_norm():
    params, grad = {"kernel": jnp.zeros(3)}, {"kernel": jnp.asarray([3.0, -0.1, 0.2])}
    config = OptimizerConfig(clip_value=0.4, clip_norm=0.1)
    optimizer = make_optimizer(config, 10)
    state = optimizer.init(params)
    _, after = optimizer.update(grad, state, params)
    by_value = np.clip([3.0, -0.1, 0.2], -0.4, 0.4)
    clipped = 0.1 * by_value / np.linalg.norm(by_value)
    moments = optax.tree.get(after, "mu")["kernel"]
    np.testing.assert_allclose(moments, 0.1 * clipped, rtol=1e-5)
    plain = make_optimizer(OptimizerConfig(), 10).init(params)
    assert jax.tree.structure(plain) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_the_first_moment_can_be_bfloat16(name):
    state = make_optimizer(constant(name, mu_dtype="bfloat16"), 10).init(stacked(0))
    moments = [leaf for _, tree in optax.tree.get_all_with_path(state, "mu")
               for leaf in jax.tree.leaves(tree)]  # fmt: skip
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("bfloat16")}
    found, full = trained(name, mu_dtype="bfloat16"), trained(name)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(full), strict=True):
        assert np.abs(np.asarray(ours) - np.asarray(theirs)).mean() < 0.1 * RATE


def test_groups_can_have_another_optimizer():
    found = trained("adamw", groups=(OptimizerGroup(("blocks",), name="lion"),))
    same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # fused differently
    for part, name in (("blocks", "lion"), ("head", "adamw")):
        jax.tree.map(same, found[part], trained(name)[part])


def test_checkpoints_say_which_optimizer_wrote_them():
    assert OptimizerConfig().identity() == {}
    found = [OptimizerConfig(name=name).identity().get("name") for name in NAMES]
    assert found == [None, "adamw8bit", "adafactor", "lion", "muon"]
    assert OptimizerConfig(mu_dtype="bfloat16").identity() == {"mu_dtype": "bfloat16"}
    group = OptimizerGroup(("a",))
    assert OptimizerConfig(groups=(group,)).identity() == {"groups": [["a"]]}
    named = OptimizerConfig(groups=(OptimizerGroup(("a",), name="muon"),)).identity()
    assert named == {"groups": [["a"]], "group_names": ["muon"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clip_value": 0.0}, "clip_value is 0"),
        ({"mu_dtype": "bfloat16", "name": "adafactor"}, "mu_dtype is bfloat16, but adafactor has"),
        ({"mu_dtype": "bfloat16", "name": "adamw8bit"}, "mu_dtype is bfloat16, but adamw8bit has"),
        ({"schedule_steps": 0}, "schedule_steps is 0"),
        ({"decay_steps": 0}, "decay_steps is 0"),
        ({"decay_fraction": 0.0}, "decay_fraction is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        *(({"skip_above": value}, "skip_above") for value in (0.0, 1.0, float("nan"))),
    ],
)
def test_invalid_settings_are_refused(change, words):
    with pytest.raises(InputError, match=rf"optimizer\.{words}"):
        OptimizerConfig(**change)


MODEL = WanConfig(dim=64, ffn_dim=64, num_heads=4, num_layers=2, freq_dim=16, dtype="float32")


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 CPU devices")
@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_sharded_and_computes_the_same(name):
    config = OptimizerConfig(name=name, warmup_steps=0)
    spec = TrainingSpec(MODEL, FlowMatching(), make_optimizer(config, 10), 0.99)

    def updated(devices, **axes):
        mesh = mesh_of(devices, **axes)
        state = init_state(spec, mesh, seed=0)
        grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), state.params)

        @jax.jit
        def update(state):
            updates, opt_state = spec.optimizer.update(grads, state.opt_state, state.params)
            after = state._replace(
                params=optax.apply_updates(state.params, updates), opt_state=opt_state
            )
            return jax.lax.with_sharding_constraint(after, state_shardings(after, mesh, spec.rules))

        return update(update(state))

    one, eight = updated(1), updated(8, fsdp=4, tensor=2)
    same = partial(np.testing.assert_allclose, rtol=2e-3, atol=3e-5)
    jax.tree.map(same, one.params, eight.params)
    big = [leaf for leaf in jax.tree.leaves(eight.opt_state) if leaf.size >= 2 * 64 * 64]
    assert big or name == "adafactor"
    for leaf in big:
        assert leaf.addressable_shards[0].data.size <= leaf.size // 4


# ---------------------------------------------------------------- moments in eight bits


def spread(seed, shape, signed):
    """Values over many decades, with zeros and a block of zeros."""
    rng = np.random.default_rng(seed)
    values = 10.0 ** rng.uniform(-12, 2, shape)
    values *= rng.random(shape) > 0.1
    values[..., : shape[-2] // 2, 0] = 0
    return (values * np.where(rng.random(shape) < 0.5, -1, 1) if signed else values).astype(
        np.float32
    )


def blocks_along_inputs(values):
    size = min(BLOCK, values.shape[-2])
    return [slice(start, start + size) for start in range(0, values.shape[-2], size)]


SHAPES = [(1, 1), (7, 3), (256, 2), (300, 2), (2, 520, 3)]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.booleans())
def test_a_value_becomes_the_nearest_code_of_its_block(seed, shape, signed):
    values = spread(seed, shape, signed)
    stored = quantise(jnp.asarray(values), signed)
    found = np.asarray(dequantise(stored, signed), np.float64)
    codes = dynamic_codes(signed).astype(np.float64)
    assert stored.codes.dtype == jnp.uint8
    assert stored.codes.shape == shape
    assert stored.scale.shape == (*shape[:-2], len(blocks_along_inputs(values)), shape[-1])
    for rows in blocks_along_inputs(values):
        block = values[..., rows, :].astype(np.float64)
        scale = np.abs(block).max(-2, keepdims=True)
        best = np.abs(block[..., None] - scale[..., None] * codes).min(-1)
        away = np.abs(found[..., rows, :] - block)
        allowed = best + 1e-6 * scale
        if not signed:  # what is not zero stays above zero
            least = scale * codes[1]
            allowed = np.where((block > 0) & (block < least), least * (1 + 1e-6), allowed)
        assert (away <= allowed).all()
    if not signed:
        assert ((found > 0) == (values > 0)).all()
    # Codes stay what they are when nothing changes.
    once = quantise(jnp.asarray(np.abs(values)), signed)
    twice = quantise(dequantise(once, signed), signed)
    np.testing.assert_array_equal(once.codes, twice.codes)
    np.testing.assert_array_equal(once.scale, twice.scale)


@pytest.mark.parametrize(("signed", "intervals"), [(True, 64), (False, 128)])
def test_the_error_within_a_decade_of_the_largest_is_half_an_interval(signed, intervals):
    values = np.linspace(0.1, 1, 256, dtype=np.float32)[:, None]
    found = np.asarray(dequantise(quantise(jnp.asarray(values), signed), signed))
    error = np.abs(found - values).max()
    assert 0.9 * 0.45 / intervals < error < 1.001 * 0.45 / intervals


def test_the_first_update_is_that_of_adam():
    grads = {"kernel": jnp.asarray(spread(0, (2, 300, 4), True))}
    ours, theirs = scale_by_adam8bit(0.9, 0.99, 1e-8), optax.scale_by_adam(0.9, 0.99, 1e-8)
    found, _ = ours.update(grads, ours.init(grads))
    expected, _ = theirs.update(grads, theirs.init(grads))
    np.testing.assert_allclose(found["kernel"], expected["kernel"], rtol=1e-5)


def test_small_arrays_and_vectors_keep_float32_moments():
    params = {
        "large": {"kernel": jnp.ones((64, 64))},
        "small": {"kernel": jnp.ones((63, 65))},
        "table": {"embedding": jnp.ones((64, 64))},
        "norm": {"scale": jnp.ones((2, 4096))},
    }
    state = make_optimizer(OptimizerConfig(name="adamw8bit"), 10).init(params)
    found = [tree for _, tree in optax.tree.get_all_with_path(state, "nu") if jax.tree.leaves(tree)]
    dtypes = [{str(leaf.dtype) for leaf in jax.tree.leaves(tree)} for tree in found]
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in found]
    assert sorted(zip(map(tuple, dtypes), sizes, strict=True)) == [
        (("float32",), 63 * 65 + 64 * 64 + 2 * 4096),
        (("uint8",), 64 * 64),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_training_converges_as_with_float32_moments(seed):
    """A two-layer regression on noisy minibatches: the final losses differ by a few percent."""
    rng = np.random.default_rng(seed)
    inputs = jnp.asarray(rng.normal(size=(512, 64)), jnp.float32)
    outputs = jnp.tanh(inputs @ rng.normal(size=(64, 64)).astype(np.float32) / 8)
    start = {
        "first": {"kernel": jnp.asarray(rng.normal(size=(64, 96)) / 8, jnp.float32)},
        "second": {"kernel": jnp.asarray(rng.normal(size=(96, 64)) / 10, jnp.float32)},
    }

    def loss(params, rows):
        hidden = jnp.tanh(inputs[rows] @ params["first"]["kernel"])
        return jnp.mean((hidden @ params["second"]["kernel"] - outputs[rows]) ** 2)

    def trained(name):
        config = OptimizerConfig(name=name, learning_rate=3e-3, warmup_steps=10)
        optimizer = make_optimizer(config, 300)

        def step(carry, key):
            params, state = carry
            rows = jax.random.randint(key, (64,), 0, 512)
            updates, state = optimizer.update(jax.grad(loss)(params, rows), state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(seed), 300)
        (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), keys)
        return float(loss(params, jnp.arange(512)))

    full, ours = trained("adamw"), trained("adamw8bit")
    assert full < 0.1 * float(loss(start, jnp.arange(512)))
    assert abs(ours / full - 1) < 0.05


def test_a_stored_array_has_a_byte_for_each_value():
    stored = quantise(jnp.ones((4, 1024, 64)), signed=True)
    size = sum(part.size * part.dtype.itemsize for part in stored)
    assert isinstance(stored, Quantised)
    assert size == 4 * 1024 * 64 * (1 + 4 / BLOCK)


# ---------------------------------------------------------------- skipped updates


def skipped_by_hand(norms, times):
    """By hand in float64: which of the steps are skipped, none of them by a hair."""
    total, weight, found = 0.0, 0.0, []
    for number, norm in enumerate(norms):
        bound = np.inf if number < 20 else times * total / weight
        assume(abs(norm / bound - 1) > 1e-4)
        found.append(norm > bound)
        total = 0.99 * total + 0.01 * min(norm, bound)
        weight = 0.99 * weight + 0.01
    return found


def updates_of(optimizer, norms):
    """The parameters after each step, and how many updates were skipped up to it."""
    params = {"a": jnp.ones(3), "b": jnp.full((2,), 2.0)}
    state, found = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for norm in norms:
        value = norm / np.sqrt(5)
        grads = {"a": jnp.full(3, value), "b": jnp.full(2, value)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append((jax.tree.map(np.asarray, params), int(skipped_updates(state) or 0)))
    return found


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(0.1, 3.0), min_size=20, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.floats(10, 1e6)), max_size=4),
)
def test_the_updates_are_those_of_the_steps_that_are_not_skipped(norms, spikes):
    for place, norm in spikes:
        norms[place % len(norms)] = norm
    expected = skipped_by_hand(norms, 5.0)
    kept = [norm for norm, skipped in zip(norms, expected, strict=True) if not skipped]
    found = updates_of(skip_spikes(optax.adam(0.1), 5.0), norms)
    assert [count for _, count in found] == np.cumsum(expected).tolist()
    alone = updates_of(optax.adam(0.1), kept)
    # Two programs may round differently, each update at the size of the weights, which begin at 1.
    same = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(same, found[-1][0], alone[-1][0])


def test_gradients_that_stay_large_are_accepted_after_some_steps():
    norms = [1.0] * 50 + [100.0] * 200
    skipped = [count for _, count in updates_of(skip_spikes(optax.sgd(0.1), 5.0), norms)]
    assert skipped[49] == 0
    assert skipped[50] == 1
    assert skipped[-1] == skipped[-50] < 150


def test_the_state_is_another_so_that_checkpoints_differ_in_words():
    assert OptimizerConfig().identity() == {}
    assert OptimizerConfig(skip_above=5.0).identity() == {"skip_above": "set"}
    optimizer = make_optimizer(OptimizerConfig(skip_above=5.0), 10)
    state = optimizer.init({"kernel": jnp.ones(2)})
    assert int(skipped_updates(state)) == 0
    assert skipped_updates(make_optimizer(OptimizerConfig(), 10).init({})) is None


# ---------------------------------------------------------------- schedules

PEAK = 0.5


def formula(config, length, step):
    """The learning rate of a step, counted from 0."""
    warmup, end = config.warmup_steps, PEAK * config.final_fraction
    if step < warmup:
        first = PEAK / warmup
        return first + (PEAK - first) * step / warmup
    if config.schedule == "constant":
        return PEAK
    if config.schedule == "wsd":
        decay = config.decay_steps or max(1, round(config.decay_fraction * length))
        progress = min(max(step - (length - decay), 0) / decay, 1)
        left = 1 - (math.sqrt(progress) if config.decay_shape == "sqrt" else progress)
    else:
        progress = min((step - warmup) / max(1, length - warmup), 1)
        left = (
            (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
        )
    return end + (PEAK - end) * left


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(["cosine", "constant", "linear", "wsd"]),
    warmup=st.integers(0, 30),
    length=st.integers(60, 300),
    final=st.sampled_from([0.0, 0.1, 1.0]),
    decay=st.one_of(st.none(), st.integers(1, 30)),
    fraction=st.floats(0.01, 0.5),
    shape=st.sampled_from(["linear", "sqrt"]),
    own=st.booleans(),
)
def test_the_rate_follows_the_formula(schedule, warmup, length, final, decay, fraction, shape, own):
    config = OptimizerConfig(
        learning_rate=PEAK,
        schedule=schedule,
        schedule_steps=length if own else None,
        warmup_steps=warmup,
        final_fraction=final,
        decay_steps=decay,
        decay_fraction=fraction,
        decay_shape=shape,
    )
    found = learning_rate_schedule(config, 4000 if own else length)
    steps = np.arange(0, length + 20, 7)
    expected = [formula(config, length, step) for step in steps]
    np.testing.assert_allclose([found(step) for step in steps], expected, rtol=1e-4, atol=1e-6)


def test_the_curve_of_a_schedule_of_its_own_length_does_not_depend_on_the_run():
    config = OptimizerConfig(schedule="linear", schedule_steps=50, warmup_steps=5)
    short, long = learning_rate_schedule(config, 20), learning_rate_schedule(config, 400)
    assert [short(step) for step in range(60)] == [long(step) for step in range(60)]


def test_a_decay_that_does_not_fit_is_refused_when_the_config_is_read():
    flags = ["--run.folder", "r", "--data.folder", "d", "--planning.m_mem", "9"]
    wsd = [*flags, "--run.steps", "20", "--optimizer.schedule", "wsd"]
    with pytest.raises(InputError, match=r"warmup_steps is 100 and the decay .* takes 4 steps"):
        read_config(wsd)
    fits = read_config([*wsd, "--optimizer.warmup_steps", "16"])
    assert float(learning_rate_schedule(fits.optimizer, 20)(16)) == pytest.approx(1e-4)
