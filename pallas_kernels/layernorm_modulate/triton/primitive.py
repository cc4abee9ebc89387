"""The forward as a JAX primitive that does only what is asked of it.

Reverse-mode differentiation keeps each row's statistics for the backward. Where `jax.checkpoint`
keeps the modulated value under a name of the user's and nothing else, what is missing later is
the statistics alone: this primitive then computes those, which reads x and writes nothing more,
rather than the whole forward a second time. The rule below tells JAX so; everything else about
the primitive is its implementation's.
"""

from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from pallas_kernels.layernorm_modulate.operands import Operands, Options
from pallas_kernels.layernorm_modulate.triton import calls
from pallas_kernels.layernorm_modulate.triton.division import Blocks

_forward_p = Primitive("layernorm_modulate_forward")
_forward_p.multiple_results = True


def forward(
    operands: Operands, options: Options, blocks: Blocks, *, statistics: bool
) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
    """h (None without y) and the modulated value [B, S, D], and statistics [B, S, 2] if wanted."""
    outputs = ("out", *(["h"] if operands.y is not None else []))
    outputs += ("statistics",) if statistics else ()
    leaves, tree = jax.tree.flatten(operands)
    results = _forward_p.bind(*leaves, tree=tree, options=options, blocks=blocks, outputs=outputs)
    named = dict(zip(outputs, results, strict=True))
    return named.get("h"), named["out"], named.get("statistics")


def _run(*leaves: jax.Array, tree: Any, options: Options, blocks: Blocks, outputs: Any) -> Any:
    return calls.forward(jax.tree.unflatten(tree, leaves), options, blocks, outputs)


def _abstract(*avals: Any, **params: Any) -> list[ShapedArray]:
    inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    results = jax.eval_shape(partial(_run, **params), *inputs)
    return [ShapedArray(result.shape, result.dtype) for result in results]


def _batch(arguments: Any, axes: Any, **params: Any) -> tuple[Any, list[int]]:
    results = jax.vmap(partial(_run, **params), in_axes=axes)(*arguments)
    return results, [0] * len(results)


def _keep_used(used: list[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    """The equation with the outputs that something needs; none at all if nothing does."""
    if not any(used):
        return [False] * len(eqn.invars), None
    outputs = [name for name, wanted in zip(eqn.params["outputs"], used, strict=True) if wanted]
    variables = [variable for variable, wanted in zip(eqn.outvars, used, strict=True) if wanted]
    params = eqn.params | {"outputs": tuple(outputs)}
    return [True] * len(eqn.invars), eqn.replace(outvars=variables, params=params)


def _refuse_jvp(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "layernorm_modulate: the Triton kernels differentiate once, in reverse mode; "
        "use implementation='xla' for second derivatives"
    )


_forward_p.def_impl(lambda *leaves, **params: jax.jit(partial(_run, **params))(*leaves))
_forward_p.def_abstract_eval(_abstract)
mlir.register_lowering(_forward_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[_forward_p] = _batch
pe.dce_rules[_forward_p] = _keep_used
ad.primitive_jvps[_forward_p] = _refuse_jvp
