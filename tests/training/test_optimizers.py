"""Each optimizer against a reference: by hand in float64, optax on single matrices, or AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import (
    OptimizerConfig,
    OptimizerGroup,
    make_optimizer,
    update_ema,
)
from alload_jax.training.state import TrainingSpec, init_state, state_shardings

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


def layer(tree, number):
    """One layer of the stack alone, as a model without stacked layers has it."""
    return jax.tree.map(lambda leaf: leaf[number], tree["blocks"])


@pytest.mark.parametrize("name", ["adamw8bit", "adafactor", "muon"])
def test_a_stack_of_matrices_is_trained_as_its_matrices(name):
    """Other arrays of a stack may share statistics; matrices must not."""
    params, grads = stacked(0), [stacked(n) for n in range(1, 4)]
    together = follow(make_optimizer(constant(name), 10), params, grads)
    for number in range(LAYERS):
        single = {"blocks": {"kernel": params["blocks"]["kernel"][number : number + 1]}}
        single_grads = [
            {"blocks": {"kernel": grad["blocks"]["kernel"][number : number + 1]}} for grad in grads
        ]
        alone = follow(make_optimizer(constant(name), 10), single, single_grads)
        np.testing.assert_allclose(
            together["blocks"]["kernel"][number],
            alone["blocks"]["kernel"][0],
            rtol=1e-4,
            atol=1e-5,
        )


def test_muon_is_optax_muon_on_each_matrix_and_adamw_elsewhere():
    params, grads = stacked(0), [stacked(n) for n in range(1, 4)]
    found = follow(make_optimizer(constant("muon"), 10), params, grads)
    adamw = follow(make_optimizer(constant("adamw"), 10), params, grads)
    np.testing.assert_array_equal(found["head"]["kernel"], adamw["head"]["kernel"])
    np.testing.assert_array_equal(found["blocks"]["bias"], adamw["blocks"]["bias"])
    reference = optax.contrib.muon(RATE, weight_decay=DECAY, consistent_rms=0.2)
    for number in range(LAYERS):
        expected = follow(
            reference,
            {"kernel": layer(params, number)["kernel"]},
            [{"kernel": layer(grad, number)["kernel"]} for grad in grads],
        )
        np.testing.assert_allclose(
            found["blocks"]["kernel"][number], expected["kernel"], rtol=1e-4, atol=1e-5
        )


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
    params, grads = stacked(0), [stacked(n) for n in range(1, 4)]
    optimizer = make_optimizer(constant("adafactor"), 10)
    found = follow(optimizer, params, grads)
    for number in range(LAYERS):
        single = [np.asarray(layer(grad, number)["kernel"], np.float64) for grad in grads]
        before = np.asarray(layer(params, number)["kernel"], np.float64)
        expected = adafactor_by_hand(before, single)
        np.testing.assert_allclose(
            found["blocks"]["kernel"][number], expected, rtol=1e-3, atol=1e-5
        )
    largest = max(leaf.size for leaf in jax.tree.leaves(optimizer.init(params)))
    assert largest == max(LAYERS * OUTPUTS, INPUTS * 4)


@pytest.mark.parametrize("layers", [2, 200])
@pytest.mark.parametrize("size", [(128, 130), (130, 128), (128, 4)], ids=str)
def test_adafactor_treats_each_layer_of_a_stack_by_itself(layers, size):
    rng = np.random.default_rng(0)
    stacks = [jnp.asarray(rng.normal(size=(layers, *size)), jnp.float32) for _ in range(3)]
    optimizer = make_optimizer(constant("adafactor"), 10)

    def trained(arrays):
        first, *grads = ({"kernel": array} for array in arrays)
        return follow(optimizer, first, grads)["kernel"]

    together = trained(stacks)
    for number in (0, layers - 1):
        alone = trained([stack[number] for stack in stacks])
        np.testing.assert_allclose(together[number], alone, rtol=1e-5, atol=1e-6)


def test_adafactor_keeps_the_second_moments_of_biases_whole():
    bias = {"bias": jnp.zeros((200, 130))}  # of 200 layers
    moments = optax.tree.get(make_optimizer(constant("adafactor"), 10).init(bias), "v")
    assert moments["bias"].shape == bias["bias"].shape


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.9999])
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
    params, grads = stacked(0), [stacked(n) for n in range(1, 4)]
    found = follow(make_optimizer(constant("lion"), 10), params, grads)
    value = np.asarray(params["head"]["kernel"], np.float64)
    mu = np.zeros_like(value)
    for grad in (np.asarray(grad["head"]["kernel"], np.float64) for grad in grads):
        value = value - RATE * (np.sign(0.9 * mu + 0.1 * grad) + DECAY * value)
        mu = 0.99 * mu + 0.01 * grad
    np.testing.assert_allclose(found["head"]["kernel"], value, rtol=1e-4, atol=1e-6)


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
    params, grads = stacked(0), [stacked(n) for n in range(1, 4)]
    config = constant(name, mu_dtype="bfloat16")
    optimizer = make_optimizer(config, 10)
    moments = optax.tree.get_all_with_path(optimizer.init(params), "mu")
    assert {leaf.dtype for _, tree in moments for leaf in jax.tree.leaves(tree)} == {
        jnp.dtype("bfloat16")
    }
    found = follow(optimizer, params, grads)
    full = follow(make_optimizer(constant(name), 10), params, grads)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(full), strict=True):
        away = np.abs(np.asarray(ours) - np.asarray(theirs))
        assert away.mean() < 0.1 * RATE


def test_groups_can_have_another_optimizer():
    params, grads = stacked(0), [stacked(n) for n in range(1, 4)]
    group = OptimizerGroup(("blocks",), name="lion")
    found = follow(make_optimizer(constant("adamw", groups=(group,)), 10), params, grads)
    lion = follow(make_optimizer(constant("lion"), 10), params, grads)
    adamw = follow(make_optimizer(constant("adamw"), 10), params, grads)
    for part, alone in (("blocks", lion), ("head", adamw)):  # fused differently: not the same bits
        for ours, theirs in zip(
            jax.tree.leaves(found[part]), jax.tree.leaves(alone[part]), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


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
        ({"clip_value": 0.0}, r"optimizer\.clip_value is 0"),
        ({"mu_dtype": "bfloat16", "name": "adafactor"}, "mu_dtype is bfloat16, but adafactor has"),
        ({"mu_dtype": "bfloat16", "name": "adamw8bit"}, "mu_dtype is bfloat16, but adamw8bit has"),
        ({"schedule_steps": 0}, r"optimizer\.schedule_steps is 0"),
        ({"decay_steps": 0}, r"optimizer\.decay_steps is 0"),
        ({"decay_fraction": 0.0}, r"optimizer\.decay_fraction is 0"),
    ],
)
def test_invalid_settings_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        OptimizerConfig(**change)


MODEL = WanConfig(dim=64, ffn_dim=64, num_heads=4, num_layers=2, freq_dim=16, dtype="float32")


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 CPU devices")
@pytest.mark.parametrize(
    "name",
    [n if n == "adafactor" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
def test_the_state_is_sharded_and_computes_the_same(name):
    config = OptimizerConfig(name=name, warmup_steps=0)
    spec = TrainingSpec(MODEL, FlowMatching(), make_optimizer(config, 10), 0.99)

    def updated(devices, **axes):
        mesh = make_mesh(MeshConfig(**axes), jax.devices()[:devices])
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
    for ours, theirs in zip(
        jax.tree.leaves(one.params), jax.tree.leaves(eight.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=3e-5)
    big = [leaf for leaf in jax.tree.leaves(eight.opt_state) if leaf.size >= 2 * 64 * 64]
    assert big or name == "adafactor"
    for leaf in big:
        assert leaf.addressable_shards[0].data.size <= leaf.size // 4
