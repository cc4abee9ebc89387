"""Loops over layers: kernels in 16 bits, recomputation, and tensors in the host's memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from alload_jax.models.common.host_loop import Step, host_scan
from alload_jax.models.common.stored import (
    Float8Kernel,
    SlottedKernel,
    narrow_linears,
    quantise,
    with_cast_kernels,
    with_slots,
)
from alload_jax.models.families import abstract_model, config_from_fields, gradient_dtypes
from alload_jax.planning.architecture import from_fields
from alload_jax.planning.remat import LADDER
from alload_jax.sharding.mesh import HOST_MEMORY, MeshConfig, make_mesh
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.state import abstract_state
from alload_jax.training.step import make_accumulate, zero_accumulator
from alload_jax.training.trial_step import random_batch, training_spec

FIELDS = {"in_channels": 4, "dim": 32, "ffn_dim": 64, "num_heads": 2, "num_layers": 3}
FAMILIES = ["wan", "hunyuan_video"]


def config_of(family, dtype="bfloat16", **fields):
    return config_from_fields(FIELDS | {"family": family, "dtype": dtype} | fields)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def gradient_of(spec):
    """The traced program of a micro-batch."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    weights = abstract_state(spec, mesh, 0).weights
    batch = jax.eval_shape(lambda: random_batch(spec.model, (1, 1, 4, 4), 1))
    sums = jax.eval_shape(lambda: zero_accumulator(spec, mesh, weights, batch, single=True))
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return make_accumulate(spec, mesh, single=True).trace(weights, sums, batch, key)


@pytest.mark.parametrize(
    ("policies", "barriers"), [(["full"], 0), (["full", "attention", "full", "attention"], 4)]
)
def test_layers_of_an_iteration_are_computed_again_in_turn(policies, barriers):
    spec = training_spec(config_of("wan", num_layers=4, remat="none", remat_layers=policies))
    text = gradient_of(spec).lower().as_text()
    of_timesteps = 1
    assert text.count("stablehlo.optimization_barrier") == of_timesteps + barriers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_backward_pass_keeps_no_weights_that_are_in_the_hosts_memory(family):
    parameters = ParametersConfig(frozen_memory="host").with_lora()
    text = {"dim": 16, "length": 12}  # which HunyuanVideo refines by layers of another stack
    config = config_of(family, lora={"rank": 2}, text=text)
    spec = training_spec(config, parameters=parameters)
    found = equations(gradient_of(spec).jaxpr.jaxpr)
    loops = [each for each in found if each.primitive.name in ("scan", "while")]
    of_all_layers = [(3, 32, 32), (3, 32, 64), (3, 64, 32)]
    assert loops
    assert not [v for each in loops for v in each.outvars if v.aval.shape in of_all_layers]


@pytest.mark.parametrize("remat", LADDER[:-1])  # kernels keep less than what is differentiated
@pytest.mark.parametrize("family", [*FAMILIES, "hunyuan_video_13b"])
def test_layers_keep_the_values_that_their_costs_count(family, remat):
    single = {"single_layers": 5} if family == "hunyuan_video_13b" else {}
    config = config_of(family, remat=remat, text={"dim": 24, "length": 9}, **single)
    graph, shapes = abstract_model(config)[:2]

    def residuals(params):
        _, height, width = config.patch_size
        batch = random_batch(config, (1, 1, height, 37 * width), 9)
        given = batch.latents, jnp.zeros(1), batch.condition
        return jax.vjp(lambda params: nnx.merge(graph, params)(*given), params)[1]

    kept = dict.fromkeys((37, 37 + 9, 9), 0)
    for leaf in jax.tree.leaves(jax.eval_shape(residuals, shapes)):
        for tokens in kept.keys() & set(leaf.shape if leaf.shape[:1] in ((3,), (5,)) else ()):
            kept[tokens] += leaf.size // tokens
    counts = from_fields(config.architecture())
    assert kept[37] + kept[46] == counts.kept_activations(remat)
    rising = [counts.kept_activations(each) for each in LADDER]
    assert rising == sorted(rising)
    if family == "wan":  # whose texts have no other layers
        assert 9 * kept[9] == counts.kept_condition(remat)


def blocks_of(config):
    graph, shapes = abstract_model(config)[:2]
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)
    return nnx.merge(graph, values).blocks


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (config_of("wan"), 10),
        (config_of("hunyuan_video"), 12),
        (config_of("wan", "float32"), 0),
        (config_of("wan", lora={"rank": 2}), 10),
    ],
    ids=["wan", "hunyuan_video", "float32", "adapters"],
)
def test_a_copy_has_the_kernels_in_16_bits_and_all_else_as_it_was(config, count):
    blocks = blocks_of(config)
    before = nnx.to_pure_dict(nnx.state(blocks))
    copy = nnx.to_pure_dict(nnx.state(with_cast_kernels(blocks)))
    narrow = {"/".join(map(str, path)) for path, *_ in narrow_linears(blocks)}
    assert len(narrow) == count

    def compare(path, value, original):
        name = "/".join(str(key.key) for key in path)
        cast = name.removesuffix("/kernel") in narrow and name.endswith("/kernel")
        assert value.dtype == ("bfloat16" if cast else "float32")
        np.testing.assert_array_equal(value, original.astype(value.dtype))

    jax.tree_util.tree_map_with_path(compare, copy, before)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(blocks)), before)


def test_float8_stays_as_it_is_and_parameters_without_a_slot_are_those_that_are_differentiated():
    blocks = blocks_of(config_of("wan"))
    linear = blocks.self_attention.query
    linear.kernel = nnx.Param(Float8Kernel(**quantise(linear.kernel[...])))
    kept = with_cast_kernels(blocks).self_attention.query.kernel.get_value()
    assert isinstance(kept, Float8Kernel)
    assert kept.values.dtype == jnp.float8_e4m3fn
    values = {"a": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones(2)}}
    slots = {"a": {"kernel": jnp.zeros((2, 3, 4), jnp.bfloat16), "bias": jnp.full(2, 5.0)}}
    found = with_slots(values, slots, {"a/kernel": jnp.bfloat16, "absent/kernel": jnp.bfloat16})
    assert found["a"]["kernel"].shape == (2, 3, 4)
    np.testing.assert_array_equal(found["a"]["kernel"][1], values["a"]["kernel"][1])
    np.testing.assert_array_equal(found["a"]["bias"], slots["a"]["bias"])


def test_layers_compiled_one_by_one_split_no_kernels_in_float32():
    def split(scan):
        config = config_of("wan", scan_layers=scan)
        graph, shapes = abstract_model(config)[:2]
        batch = jax.eval_shape(lambda: random_batch(config, (1, 1, 4, 4), 8))

        def loss(params, batch):
            time = jnp.zeros(len(batch.latents))
            return jnp.sum(nnx.merge(graph, params)(batch.latents, time, batch.condition))

        found = equations(jax.make_jaxpr(jax.grad(loss))(shapes, batch).jaxpr)
        splits = [each for each in found if each.primitive.name == "split"]
        kernels = [each.invars[0].aval for each in splits if each.params["axis"] == 0]
        return {str(aval.dtype) for aval in kernels if aval.ndim == 3 and min(aval.shape[1:]) > 6}

    assert (split(False), split(True)) == ({"bfloat16"}, set())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_slots_gradient_is_the_one_before_the_cast(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    kernel = jax.random.normal(keys[0], (6, 4))
    x, weights = (
        jax.random.normal(key, (5, n), dtype) for key, n in zip(keys[1:], (6, 4), strict=True)
    )

    def loss(kernel):
        return jnp.sum((x @ kernel[...].astype(dtype)) * weights)

    def of_slot(slot):
        return loss(SlottedKernel(kernel, slot))

    plain = jax.jit(jax.grad(loss))(kernel)
    found = jax.jit(jax.grad(of_slot))(jnp.zeros(kernel.shape, dtype))
    assert (plain.dtype, found.dtype) == (jnp.float32, dtype)
    np.testing.assert_array_equal(plain, found.astype(jnp.float32))
    np.testing.assert_array_equal(loss(kernel), of_slot(jnp.full(kernel.shape, jnp.nan, dtype)))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_kernels_of_layers_that_compute_in_16_bits_have_narrow_gradients(family):
    narrow = gradient_dtypes(config_of(family))
    assert set(narrow.values()) == {jnp.dtype("bfloat16")}
    assert all(name.endswith("/kernel") for name in narrow)
    assert any(name.endswith("feed_forward/hidden/kernel") for name in narrow)
    assert not [name for name in narrow if "modulation" in name or "time" in name]
    assert gradient_dtypes(config_of(family, "float32")) == {}


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


def arguments_of(length):
    """x, floats of the layers, what all share, and stored numbers of the layers."""
    rng = np.random.default_rng(length)
    shapes = ((ROWS, WIDTH), (length, WIDTH, WIDTH), (length, WIDTH), (WIDTH,))
    x, kernel, bias, scale = (jnp.asarray(rng.normal(0, 0.5, each), jnp.float32) for each in shapes)
    counts = jnp.arange(length, dtype=jnp.int32) % 3
    return (x, {"kernel": kernel, "bias": bias}, scale), counts


def loop_and_scan(wraps, counts, to_host=True):
    """Losses of the loop and of a scan, as functions of (x, floats of layers, scale)."""
    places = jnp.array([2, 0, 1])

    def loop(x, layers, scale):
        def step(x, group, n):
            return block((scale, places), x, jax.tree.map(lambda leaf: leaf[n], group))

        steps = [
            Step(partial(step, n=n), WRAPS[wrap], to_host=to_host) for n, wrap in enumerate(wraps)
        ]
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, len(wraps), *leaf.shape[1:]), layers)
        x, auxiliary = host_scan(steps, x, groups, "last")
        stacked = jnp.stack([each["loss"] for each in auxiliary], axis=1)
        return x, stacked.reshape(-1, ROWS)

    def scan(x, layers, scale):
        x, auxiliary = jax.lax.scan(partial(block, (scale, places)), x, layers)
        return x, auxiliary["loss"]

    def loss(run, x, floats, scale):
        x, losses = run(x, floats | {"count": counts}, scale)
        return jnp.sum(x * jnp.arange(WIDTH)) + 0.1 * jnp.sum(losses), losses

    return partial(loss, loop), partial(loss, scan)


@pytest.mark.parametrize(
    ("groups", "wraps", "frozen"),
    [
        (1, ["named"], ()),
        (2, ["nothing"], ("kernel",)),
        (3, ["all", "named", "nothing"], ("bias",)),
        (4, ["named", "all"], ("kernel", "bias")),
        (4, ["nothing", "named"], ()),
    ],
)
def test_values_and_gradients_are_those_of_a_scan(groups, wraps, frozen):
    (x, floats, scale), counts = arguments_of(groups * len(wraps))
    held = {name: floats.pop(name) for name in frozen}
    on_host = jax.device_put(held, SingleDeviceSharding(jax.devices()[0], memory_kind=HOST_MEMORY))
    loop, scan = loop_and_scan(wraps, counts)
    graded, plain = [], []
    for loss, others in ((scan, held), (loop, held), (loop, on_host))[: 3 if held else 2]:

        def of_trained(x, trained, scale, others, loss=loss):
            return loss(x, trained | others, scale)

        gradient = jax.value_and_grad(of_trained, argnums=(0, 1, 2), has_aux=True)
        graded.append(jax.jit(gradient)(x, floats, scale, others))
        if groups < 3:  # without a gradient
            plain.append(jax.jit(of_trained)(x, floats, scale, others))
    for each in graded[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), each, graded[0])
    for each in plain[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), each, plain[0])


@pytest.mark.parametrize(
    ("wraps", "to_host", "moved", "carry"),
    [(["nothing"], True, 1, 1), (["named"], True, 3, 2), (["named"], False, 0, 1)],
)
def test_what_steps_keep_moves_and_the_last_output_a_turn_later(wraps, to_host, moved, carry):
    arguments, counts = arguments_of(4)
    loss, _ = loop_and_scan(wraps, counts, to_host)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *given: loss(*given)[0], argnums=1))(*arguments)
    [scan] = [each for each in jaxpr.eqns if each.primitive.name == "scan"]
    moves = [each for each in scan.params["jaxpr"].eqns if each.primitive.name == "device_put"]
    shapes = [variable.aval.shape for each in moves for variable in each.outvars]
    of_step = [each.shape for each in scan.params["jaxpr"].out_avals]
    carried = sum(v.aval.shape == of for v, of in zip(scan.outvars, of_step, strict=True))
    assert (shapes, carried) == ([(ROWS, WIDTH)] * moved, carry)
    # Parameters are not kept a second time.
    _, backward, _ = jax.vjp(loss, *arguments, has_aux=True)
    kernels = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape[-3:] == (1, WIDTH, WIDTH)]
    assert len(kernels) == 1
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda scale: loss(*arguments[:2], scale)[0], arguments[2:], arguments[2:])


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_rows_may_be_split_over_devices():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    (x, layers, scale), _ = arguments_of(4)
    x = jnp.concatenate([x, x])[:4]

    def looped(x, layers, scale):
        def step(x, layer):
            return x + jnp.tanh(x @ layer["kernel"] + scale), {}

        steps = [Step(step, WRAPS["nothing"], to_host=True)]
        return jnp.sum(host_scan(steps, x, layers, "last")[0] ** 2)

    def plain(x, layers, scale):
        for kernel in layers["kernel"]:
            x = x + jnp.tanh(x @ kernel + scale)
        return jnp.sum(x**2)

    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    found = jax.jit(jax.grad(looped, argnums=(0, 1, 2)))(split, layers, scale)
    expected = jax.grad(plain, argnums=(0, 1, 2))(x, layers, scale)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected)
