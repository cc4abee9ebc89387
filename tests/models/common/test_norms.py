"""Norms in float32 against float64, also where the mean of a row is far above its deviation."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alload_jax.models.families import config_from_fields, family_of
from pallas_kernels import layernorm_modulate

ROOT = Path(__file__).parents[3]
SIZES = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 1, "in_channels": 4}
INPUTS = {"text": {"dim": 16, "length": 8}, "image": {"dim": 16}, "dtype": "float32"}
FAMILIES = {"wan": {}, "hunyuan_video": {"glyphs": {"dim": 16, "length": 8}}}
NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.BatchNorm, nnx.InstanceNorm)
MEANS = [0.0, 1.0, 10.0, 100.0, 1000.0]


def rows(mean, size=256):
    """Rows of deviation 1, float32."""
    return (mean + np.random.default_rng(0).normal(size=(16, size))).astype(np.float32)


def normed(x, eps):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)


def bound(mean):
    """A row's mean is known to a unit of float32, four of its size."""
    return 2.0**-22 * (4 + mean)


def norms_of(family):
    config = config_from_fields({"family": family} | SIZES | INPUTS | FAMILIES[family])
    model = family_of(config).build(config, rngs=nnx.Rngs(0))
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_graph(model)
        if isinstance(module, NORMS)
    }


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_models_keep_their_digits_at_any_mean(family, mean):
    found = norms_of(family)
    assert found
    for name, module in found.items():
        graph, state = nnx.split(module)
        size = jax.tree.leaves(state)[0].shape[-1]
        layer = jax.tree.map(lambda leaf, size=size: leaf.reshape(-1, size)[0], state)
        x = rows(mean, size).astype(np.float64)
        eps = module.epsilon
        expected = (
            x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
            if isinstance(module, nnx.RMSNorm)
            else normed(x, eps)
        )
        result = nnx.merge(graph, layer)(jnp.asarray(x, jnp.float32))
        np.testing.assert_allclose(result, expected, rtol=0, atol=bound(mean), err_msg=name)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("chosen", [{"implementation": "xla"}, {"interpret": True}])
def test_the_modulated_norm_keeps_its_digits_at_any_mean(chosen, mean):
    x = rows(mean)
    none = jnp.zeros((1, x.shape[-1]), jnp.float32)
    result = layernorm_modulate(jnp.asarray(x, jnp.float32)[None], none, none, **chosen)
    expected = normed(x.astype(np.float64), 1e-6)
    np.testing.assert_allclose(result[0], expected, rtol=0, atol=bound(mean))


def fast_variances(path):
    """Lines of a file that build a norm which computes E[x²] − E[x]², as Flax does by default."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            exact = any(
                keyword.arg == "use_fast_variance"
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value is False
                for keyword in node.keywords
            )
            if name.endswith("Norm") and name != "RMSNorm" and not exact and name[0].isupper():
                yield f"{path}:{node.lineno}: {name} without use_fast_variance=False"


def test_no_norm_takes_its_variance_from_a_difference(tmp_path):
    found = [line for path in ROOT.glob("alload_jax/**/*.py") for line in fast_variances(path)]
    assert not found, found
    (tmp_path / "a.py").write_text("nnx.LayerNorm(4)\nnnx.GroupNorm(4, use_fast_variance=True)")
    assert len(list(fast_variances(tmp_path / "a.py"))) == 2
