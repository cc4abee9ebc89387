"""Each optimizer and schedule against a reference: by hand in float64, optax, or AdamW."""

import math
import re
from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alload_jax.config import read_config
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import (
    OptimizerConfig,
    OptimizerGroup,
    learning_rate_schedule,
    make_optimizer,
    skip_spikes,
    skipped_updates,
    update_ema,
)
from alload_jax.training.state import abstract_state, training_spec, with_shardings
from alload_jax.training.step import GradientAccumulator, accumulator_shardings, make_update
from alload_jax.training.update_rules import (
    BLOCK,
    OptimizerName,
    decays,
    dequantise,
    dynamic_codes,
    quantise,
    scale_by_adam8bit,
    zeros_like,
)

NAMES = get_args(OptimizerName)
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


NEEDS = {"prodigy": {"learning_rate": 1.0}, "schedule_free_adamw": {"schedule": "constant"}}
"""Settings that an optimizer must have."""


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


@cache
def trained(name, **changes):
    """The parameters of `stacked` after three updates."""
    grads = [stacked(n) for n in range(1, 4)]
    return follow(make_optimizer(constant(name, **changes), 10), stacked(0), grads)


OF_MATRICES = {
    "muon": optax.contrib.muon(RATE, weight_decay=DECAY, consistent_rms=0.2),
    "adafactor": optax.adafactor(
        RATE, multiply_by_parameter_scale=False, weight_decay_rate=RATE * DECAY
    ),
}


@pytest.mark.parametrize(
    ("name", "layers", "size"),
    [
        *(("muon", 3, (130, 160)), ("adafactor", 3, (130, 160))),
        *(("adafactor", 200, (130, 128)), ("adafactor", 200, (128, 4))),
    ],
)
def test_each_layer_of_a_stack_is_updated_as_optax_updates_a_matrix(name, layers, size):
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.normal(size=(layers, 1, 1))
    stacks = [np.float32(rng.normal(size=(layers, *size)) * scale) for _ in range(4)]
    found, expected = (
        [follow(optimizer, first, grads)["kernel"] for first, *grads in given]
        for optimizer, given in (
            (make_optimizer(constant(name), 10), [[{"kernel": stack} for stack in stacks]]),
            (OF_MATRICES[name], [[{"kernel": s[n]} for s in stacks] for n in (0, layers - 1)]),
        )
    )
    np.testing.assert_allclose(found[0][jnp.array([0, -1])], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_first_gradient_of_zeros_does_no_harm(name):
    """Such as that of adapters on a new model, whose head is zero."""
    grads = [jax.tree.map(jnp.zeros_like, stacked(0)), stacked(1), stacked(2)]
    config = OptimizerConfig(name=name, warmup_steps=0, **NEEDS.get(name, {}))
    found = follow(make_optimizer(config, 10), stacked(0), grads)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_muon_is_adamw_where_there_is_no_matrix_of_a_layer():
    found, adamw = trained("muon"), trained("adamw")
    np.testing.assert_array_equal(found["head"]["kernel"], adamw["head"]["kernel"])
    np.testing.assert_array_equal(found["blocks"]["bias"], adamw["blocks"]["bias"])


def test_muon_multiplies_whole_matrices_on_each_replica():
    """Split matrices would be summed or gathered in each of its products."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=1), jax.devices()[:2])
    spec = training_spec(MODEL, constant("muon"), steps=10)
    state, number = abstract_state(spec, mesh, 0), jax.ShapeDtypeStruct((), jnp.float32)
    sums = GradientAccumulator(state.params, number, number, {})
    sums = with_shardings(sums, accumulator_shardings(sums, spec, mesh))
    program = make_update(spec, mesh).lower(state, sums).compile().as_text()
    summed = re.findall(r"f32\[2,(\d+,\d+)\]\S* all-reduce\(", program)
    gathered = re.findall(r"f32\[2,(\d+,\d+)\]\S* all-gather\(", program)
    kernels = [leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim == 3]
    assert not summed
    assert len(gathered) <= len(kernels)  # the updated ones


def test_adafactor_has_a_small_state():
    state = make_optimizer(constant("adafactor"), 10).init(stacked(0))
    assert max(leaf.size for leaf in jax.tree.leaves(state)) == max(LAYERS * OUTPUTS, INPUTS * 4)
    bias = {"bias": jnp.zeros((200, 130))}  # of 200 layers, whose moments stay whole
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


OF_OPTAX = {
    "prodigy": partial(optax.contrib.prodigy, betas=(0.9, 0.99)),
    "schedule_free_adamw": partial(optax.contrib.schedule_free_adamw, b2=0.99),
    "ademamix": partial(optax.contrib.ademamix, b2=0.99),
    "adopt": partial(optax.contrib.adopt, b2=0.99, eps=1e-8),
    "radam": partial(optax.radam, b2=0.99),
    "sgd": partial(optax.sgd, momentum=0.9),
    "lion": partial(optax.lion, b1=0.9, b2=0.99),
}


@pytest.mark.parametrize("name", OF_OPTAX)
def test_the_others_are_those_of_optax_but_for_the_decay_of_what_is_no_matrix(name):
    """Prodigy's estimate grows from the second update; its factor and its decay are seen then."""
    rate = 1.0 if name == "prodigy" else RATE
    grads = [stacked(1 + n) for n in range(8)]
    if name == "prodigy":
        grads = [jax.tree.map(partial(jnp.multiply, 1 + n), stacked(0)) for n in range(8)]
    decayed = name in ("prodigy", "schedule_free_adamw", "lion")  # others have no such argument
    for decay in (0.0, DECAY) if decayed else (0.0,):
        ours = make_optimizer(constant(name, weight_decay=decay, learning_rate=rate), 10)
        theirs = OF_OPTAX[name](rate, **({"weight_decay": decay} if decayed else {}))
        both = (follow(each, stacked(0), grads) for each in (ours, theirs))
        trees = map(jax.tree.leaves, (decays(stacked(0)), *both))
        for is_matrix, found, expected in zip(*trees, strict=True):
            if is_matrix or not decay:
                np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-6)
    plain, found = (trained(name, learning_rate=rate, weight_decay=d) for d in (0.0, DECAY))
    np.testing.assert_array_equal(plain["blocks"]["bias"], found["blocks"]["bias"])
    assert (plain["head"]["kernel"] != found["head"]["kernel"]).any()


def test_the_average_of_a_schedule_free_optimizer_is_optax_evaluated_parameters():
    """Beside a group of another optimizer, whose average is the moving one."""
    groups = (OptimizerGroup(("head",), name="adamw"),)
    alone = optax.contrib.schedule_free_adamw(RATE, b2=0.99, weight_decay=0.0)
    mixed = make_optimizer(constant("schedule_free_adamw", groups=groups, weight_decay=0.0), 10)
    params = ema = moving = stacked(0)
    first, state = params["blocks"], mixed.init(params)
    inner = alone.init(first)
    for step in range(4):
        grad = stacked(step + 1)
        updates, state = mixed.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        ema = update_ema(ema, params, jnp.int32(step), 0.9, state)
        moving = update_ema(moving, params, jnp.int32(step), 0.9)
        updates, inner = alone.update(grad["blocks"], inner, first)
        first = optax.apply_updates(first, updates)
    expected = optax.contrib.schedule_free_eval_params(inner, first)
    same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(same, ema["blocks"], expected)
    jax.tree.map(same, ema["head"], moving["head"])


def test_groups_can_have_another_optimizer():
    found = trained("adamw", groups=(OptimizerGroup(("blocks",), name="lion"),))
    same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # fused differently
    for part, name in (("blocks", "lion"), ("head", "adamw")):
        jax.tree.map(same, found[part], trained(name)[part])


@pytest.mark.parametrize(
    ("settings", "identity"),
    [
        ({}, {}),
        *((NEEDS.get(name, {}) | {"name": name}, {"name": name}) for name in NAMES[1:]),
        ({"mu_dtype": "bfloat16"}, {"mu_dtype": "bfloat16"}),
        ({"groups": (OptimizerGroup(("a",)),)}, {"groups": [["a"]]}),
        (
            {"groups": (OptimizerGroup(("a",), name="muon"),)},
            {"groups": [["a"]], "group_names": ["muon"]},
        ),
        ({"skip_above": 5.0}, {"skip_above": "set"}),
        ({"ema_decay": None}, {"without_ema": True}),
    ],
)
def test_checkpoints_say_which_optimizer_wrote_them(settings, identity):
    assert OptimizerConfig(**settings).identity() == identity


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mu_dtype": "bfloat16", "name": "adafactor"}, "mu_dtype is bfloat16, but adafactor has"),
        ({"mu_dtype": "bfloat16", "name": "adamw8bit"}, "mu_dtype is bfloat16, but adamw8bit has"),
        ({"name": "prodigy"}, r"learning_rate is 0.0001, but prodigy .*; set 1\.0"),
        ({"name": "schedule_free_adamw"}, "schedule is cosine, but schedule_free_adamw needs con"),
        (
            {"name": "schedule_free_adamw", "schedule": "constant", "ema_decay": None},
            "ema_decay is None",
        ),
    ],
)
def test_invalid_settings_are_refused(change, words):
    with pytest.raises(InputError, match=rf"optimizer\.{words}"):
        OptimizerConfig(**change)


@pytest.mark.parametrize(
    ("main", "group", "words"),
    [
        ({"name": "prodigy", "learning_rate": 1.0}, {"name": "adamw"}, "main .* one for adamw"),
        ({}, {"name": "prodigy"}, r"is that of the main optimizer, .* give 1\.0$"),
        ({"name": "prodigy", "learning_rate": 1.0}, {"learning_rate": 1e-3}, "0.001, .* such as a"),
    ],
)
def test_a_learning_rate_and_a_factor_of_prodigys_are_not_taken_for_each_other(main, group, words):
    groups = (OptimizerGroup(("head",), **group),)
    with pytest.raises(InputError, match=rf"optimizer\.groups: the learning_rate of head.*{words}"):
        OptimizerConfig(**main, groups=groups)
    for good in ({"name": "adamw", "learning_rate": 1e-3}, {"name": "prodigy", "learning_rate": 1}):
        OptimizerConfig(**main, groups=(OptimizerGroup(("head",), **good),))


MODEL = WanConfig(dim=64, ffn_dim=64, num_heads=4, num_layers=2, freq_dim=16, dtype="float32")


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


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([(7, 3), (256, 2), (2, 520, 3)]), st.booleans())
def test_a_value_becomes_the_nearest_code_of_its_block(seed, shape, signed):
    to_codes, to_values = (jax.jit(each, static_argnums=1) for each in (quantise, dequantise))
    values = spread(seed, shape, signed)
    stored = to_codes(values, signed)
    found = np.asarray(to_values(stored, signed), np.float64)
    codes = dynamic_codes(signed).astype(np.float64)
    assert (stored.codes.dtype, stored.codes.shape) == (jnp.uint8, shape)
    assert stored.scale.shape == (*shape[:-2], len(blocks_along_inputs(values)), shape[-1])
    for rows in blocks_along_inputs(values):
        block = values[..., rows, :].astype(np.float64)
        scale = np.abs(block).max(-2, keepdims=True)
        allowed = np.abs(block[..., None] - scale[..., None] * codes).min(-1) + 1e-6 * scale
        if not signed:  # what is not zero stays above zero
            least = scale * codes[1]
            allowed = np.where((block > 0) & (block < least), least * (1 + 1e-6), allowed)
        assert (np.abs(found[..., rows, :] - block) <= allowed).all()
    assert signed or ((found > 0) == (values > 0)).all()
    # Codes stay what they are when nothing changes.
    once = to_codes(np.abs(values), signed)
    twice = to_codes(to_values(once, signed), signed)
    jax.tree.map(np.testing.assert_array_equal, once, twice)


@pytest.mark.parametrize("shape", [(7, 3), (2, 520, 3)])
@pytest.mark.parametrize("signed", [True, False])
def test_new_moments_are_zeros_that_nothing_quantises(shape, signed):
    values = jnp.ones(shape)
    expected = quantise(0 * values, signed)
    jax.tree.map(np.testing.assert_array_equal, zeros_like(values, signed), expected)
    # XLA would compute it when it compiles: for 14 billion parameters it takes minutes.
    text = jax.jit(scale_by_adam8bit(0.9, 0.99, 1e-8).init).lower({"kernel": values}).as_text()
    assert "reduce" not in text
    assert "gather" not in text


@pytest.mark.parametrize(("signed", "intervals"), [(True, 64), (False, 128)])
def test_the_error_within_a_decade_of_the_largest_is_half_an_interval(signed, intervals):
    values = np.linspace(0.1, 1, 256, dtype=np.float32)[:, None]
    found = np.asarray(dequantise(quantise(jnp.asarray(values), signed), signed))
    error = np.abs(found - values).max()
    assert 0.9 * 0.45 / intervals < error < 1.001 * 0.45 / intervals


def test_updates_in_eight_bits_are_those_of_adam_whose_moments_are_stored_between():
    grads = [np.asarray(stacked(n)["blocks"]["kernel"]) for n in range(3)]
    optimizer = scale_by_adam8bit(0.9, 0.99, 1e-8)
    state, mu, nu = optimizer.init({"kernel": grads[0]}), 0.0, 0.0
    for count, grad in enumerate(grads, 1):
        found, state = optimizer.update({"kernel": grad}, state)
        mu, nu = 0.9 * mu + 0.1 * grad, 0.99 * nu + 0.01 * grad**2
        expected = mu / (1 - 0.9**count) / (np.sqrt(nu / (1 - 0.99**count)) + 1e-8)
        away = np.abs(found["kernel"] / expected - 1)
        assert (away < 1e-4).mean() > 0.999  # a few moments lie between two codes
        mu, nu = (
            np.asarray(dequantise(quantise(jnp.asarray(each), signed), signed))
            for each, signed in ((mu, True), (nu, False))
        )


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


ADAM = optax.adam(0.1)
SKIPPING = skip_spikes(ADAM, 5.0)
UPDATES = {optimizer: jax.jit(optimizer.update) for optimizer in (ADAM, SKIPPING)}


def updates_of(optimizer, norms):
    """The parameters after all steps, and how many updates were skipped up to each."""
    params = {"a": jnp.ones(3), "b": jnp.full((2,), 2.0)}
    state, found = optimizer.init(params), []
    for norm in norms:
        value = norm / np.sqrt(5)
        grads = {"a": jnp.full(3, value), "b": jnp.full(2, value)}
        updates, state = UPDATES[optimizer](grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(int(skipped_updates(state) or 0))
    return params, found


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.floats(0.1, 3.0), min_size=21, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.floats(10, 1e6)), min_size=1, max_size=9),
)
def test_the_updates_are_those_of_the_steps_that_are_not_skipped(norms, spikes):
    for place, norm in spikes:
        norms[place % len(norms)] = norm
    expected = skipped_by_hand(norms, 5.0)
    kept = [norm for norm, skipped in zip(norms, expected, strict=True) if not skipped]
    params, found = updates_of(SKIPPING, norms)
    assert found == np.cumsum(expected).tolist()
    # Two programs may round differently, each update at the size of the weights, which begin at 1.
    same = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(same, params, updates_of(ADAM, kept)[0])


def test_only_an_optimizer_that_skips_counts_what_it_skips():
    skipping, plain = (
        make_optimizer(OptimizerConfig(skip_above=each), 10).init({"kernel": jnp.ones(2)})
        for each in (5.0, None)
    )
    assert int(skipped_updates(skipping)) == 0
    assert skipped_updates(plain) is None


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
    length=st.integers(1, 300),
    final=st.sampled_from([0.0, 0.1, 1.0]),
    decay=st.one_of(st.none(), st.integers(1, 30)),
    fraction=st.floats(0.01, 0.5),
    shape=st.sampled_from(["linear", "sqrt"]),
    own=st.booleans(),
)
def test_the_rate_follows_the_formula(schedule, warmup, length, final, decay, fraction, shape, own):
    length += 60 if schedule == "wsd" else 0  # it must fit
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
    steps = np.arange(400)  # of one shape, for which JAX compiles once
    expected = [formula(config, length, step) for step in steps]
    np.testing.assert_allclose(found(steps), expected, rtol=1e-4, atol=1e-6)


def test_a_decay_that_does_not_fit_is_refused_when_the_config_is_read():
    flags = ["--run.folder", "r", "--data.folder", "d", "--planning.m_mem", "9"]
    wsd = [*flags, "--run.steps", "20", "--optimizer.schedule", "wsd"]
    with pytest.raises(InputError, match=r"warmup_steps is 100 and the decay .* takes 4 steps"):
        read_config(wsd)
    fits = read_config([*wsd, "--optimizer.warmup_steps", "16"])
    assert float(learning_rate_schedule(fits.optimizer, 20)(16)) == pytest.approx(1e-4)
