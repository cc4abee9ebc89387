"""Functions whose arrays are all arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun


class Traced(NamedTuple):
    """A function as a jaxpr, beside the arrays over which it closes.

    Attributes:
      jaxpr: of the flat arguments; its `consts` are those arrays.
      tree: structure of what it returns.
    """

    jaxpr: ClosedJaxpr
    tree: Any

    @classmethod
    def of(cls, function: Callable, *example: Any) -> "Traced":
        """Traces a function for arguments like the given ones."""
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*example)
        return cls(jaxpr, jax.tree.structure(shapes))

    def call(self, *arguments: Any) -> Any:
        """Runs it, with other arrays in place of its own as the last argument."""
        *given, arrays = arguments
        run = jaxpr_as_fun(ClosedJaxpr(self.jaxpr.jaxpr, arrays))
        return jax.tree.unflatten(self.tree, run(*jax.tree.leaves(given)))

    def named(self, name: str) -> list[bool]:
        """Which of the flat results were given the name by `checkpoint_name`."""
        jaxpr = self.jaxpr.jaxpr
        origin = {variable: each for each in jaxpr.eqns for variable in each.outvars}
        found = []
        for variable in jaxpr.outvars:
            each = None if isinstance(variable, Literal) else origin.get(variable)
            while each is not None and each.primitive.name == "reduce_precision":
                each = origin.get(each.invars[0])  # `jax.checkpoint` adds it to what it keeps
            found.append(each is not None and each.params.get("name") == name)
        return found
