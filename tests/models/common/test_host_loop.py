"""The loop that keeps tensors in the host's memory against `jax.lax.scan`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.models.common.host_loop import Step, host_scan

WIDTH, ROWS = 4, 3
KEPT = jax.checkpoint_policies.save_only_these_names("middle", "last")
WRAPS = {
    "nothing": partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable),
    "named": partial(jax.checkpoint, policy=KEPT),
    "all": lambda function: function,
}


def block(shared, x, layer):
    """Uses a kernel, a bias, a stored number that has no gradient, and what all layers share."""
    scale, places = shared
    y = checkpoint_name(jnp.tanh(x[places] @ layer["kernel"] + layer["bias"]), "middle")
    z = checkpoint_name(jnp.sin(y * layer["count"] + scale) @ layer["kernel"].T, "last")
    return x + z, {"loss": jnp.sum(z**2, axis=-1)}


def layers_of(length, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(0, 0.5, (length, WIDTH, WIDTH)), jnp.float32),
        "bias": jnp.asarray(rng.normal(0, 0.5, (length, WIDTH)), jnp.float32),
        "count": jnp.arange(length, dtype=jnp.int32) % 3,
    }


def arguments_of(length, seed=0):
    rng = np.random.default_rng(seed + 1)
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    return x, layers_of(length, seed), jnp.asarray(rng.normal(size=WIDTH), jnp.float32)


def both(wraps, to_host=True):
    """The loss of the loop, and of a scan, as functions of (x, floats of layers, scale)."""
    places = jnp.array([2, 0, 1])

    def loop(x, layers, scale):
        steps = [
            Step(
                lambda x, group, n=n: block(
                    (scale, places), x, jax.tree.map(lambda leaf: leaf[n], group)
                ),
                WRAPS[wrap],
                to_host=to_host,
            )
            for n, wrap in enumerate(wraps)
        ]
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, len(wraps), *leaf.shape[1:]), layers)
        x, auxiliary = host_scan(steps, x, groups, "last")
        stacked = jnp.stack([each["loss"] for each in auxiliary], axis=1)
        return x, stacked.reshape(-1, ROWS)

    def scan(x, layers, scale):
        x, auxiliary = jax.lax.scan(partial(block, (scale, places)), x, layers)
        return x, auxiliary["loss"]

    def loss_of(run, counts):
        def loss(x, floats, scale):
            x, losses = run(x, floats | {"count": counts}, scale)
            return jnp.sum(x * jnp.arange(WIDTH)) + 0.1 * jnp.sum(losses), losses

        return loss

    return lambda counts: (loss_of(loop, counts), loss_of(scan, counts))


def compare(length, wraps, seed, frozen=()):
    x, layers, scale = arguments_of(length, seed)
    counts, floats = layers.pop("count"), layers
    held = {name: floats.pop(name) for name in frozen}
    results = []
    for loss in both(wraps)(counts):

        def of_trained(x, trained, scale, loss=loss):
            return loss(x, trained | held, scale)

        gradient = jax.value_and_grad(of_trained, argnums=(0, 1, 2), has_aux=True)
        results.append(jax.jit(gradient)(x, floats, scale))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), *results)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.sampled_from(sorted(WRAPS)), min_size=1, max_size=3),
    st.integers(0, 99),
    st.sampled_from([(), ("kernel",), ("bias",), ("kernel", "bias")]),
)
def test_values_and_gradients_are_those_of_a_scan(groups, wraps, seed, frozen):
    compare(groups * len(wraps), wraps, seed, frozen)


def test_without_gradients_it_is_a_scan():
    x, layers, scale = arguments_of(3)
    counts = layers.pop("count")
    loop, scan = (loss(x, layers, scale) for loss in both(["named"])(counts))
    jax.tree.map(np.testing.assert_array_equal, loop, scan)


def to_host(wraps, **options):
    """Shapes that move to the host in an iteration, and those of the loop's carry."""
    x, layers, scale = arguments_of(4)
    loss, _ = both(wraps, **options)(layers.pop("count"))
    jaxpr = jax.make_jaxpr(jax.grad(lambda *given: loss(*given)[0], argnums=1))(x, layers, scale)
    [scan] = [each for each in jaxpr.eqns if each.primitive.name == "scan"]
    moves = [each for each in scan.params["jaxpr"].eqns if each.primitive.name == "device_put"]
    shapes = [variable.aval.shape for each in moves for variable in each.outvars]
    return shapes, scan.params["num_carry"]


def test_what_steps_keep_moves_and_the_last_output_a_turn_later():
    shape = (ROWS, WIDTH)
    assert to_host(["nothing"]) == ([shape], 1)
    assert to_host(["named"]) == ([shape] * 3, 2)
    assert to_host(["named"], to_host=False) == ([], 1)


def test_parameters_are_not_kept_a_second_time():
    x, layers, scale = arguments_of(4)
    loss, _ = both(["named"])(layers.pop("count"))
    _, backward, _ = jax.vjp(lambda *given: loss(*given), x, layers, scale, has_aux=True)
    kernels = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape[-3:] == (1, WIDTH, WIDTH)]
    assert len(kernels) == 1


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_rows_may_be_split_over_devices():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    x, layers, scale = arguments_of(4)
    x = jnp.concatenate([x, x])[:4]
    counts = layers.pop("count")

    def loss(run, x, layers, scale):
        return jnp.sum(run(x, layers | {"count": counts}, scale) ** 2)

    def looped(x, layers, scale):
        step = Step(
            lambda x, layer: (x + jnp.tanh(x @ layer["kernel"] + scale), {}),
            WRAPS["nothing"],
            to_host=True,
        )
        return host_scan([step], x, layers, "last")[0]

    def plain(x, layers, scale):
        for kernel in layers["kernel"]:
            x = x + jnp.tanh(x @ kernel + scale)
        return x

    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    found = jax.jit(jax.grad(partial(loss, looped), argnums=(0, 1, 2)))(split, layers, scale)
    expected = jax.grad(partial(loss, plain), argnums=(0, 1, 2))(x, layers, scale)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected)


def test_forward_mode_is_refused():
    x, layers, scale = arguments_of(2)
    loss, _ = both(["named"])(layers.pop("count"))

    def value(scale):
        return loss(x, layers, scale)[0]

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(value, (scale,), (scale,))
