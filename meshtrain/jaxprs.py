"""What a jaxpr shows of a model: where its parameters are read, and how many of its matrix products are recomputed."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching

from meshtrain.errors import ModelError

_SLICES = ("slice", "dynamic_slice", "squeeze")  # one layer of a stack, as `stack[i]` gives it

# The identity, there to be seen in a jaxpr. A `vmap` moves its axis to the front, so another one shows as a transpose.
_read = Primitive("read_parameter")
_read.def_abstract_eval(lambda x: x)
ad.deflinear2(_read, lambda cotangent, _: (cotangent,))
batching.primitive_batchers[_read] = lambda args, dims: (_read.bind(jnp.moveaxis(args[0], dims[0], 0)), 0)


def mark_read(x: jax.Array) -> jax.Array:
    """The same array, marked as a parameter that the model has read. For abstract traces only."""
    marked: jax.Array = _read.bind(x)
    return marked


def follow_params(jaxpr: Any, inputs: Sequence[str | None]) -> None:
    """Follows the parameters of a loss to where each is read (`mark_read`).

    Under ZeRO what has not been read is a shard, so a loss that computes with one is wrong without any error.

    Args:
        inputs: for each input of the jaxpr, the path of the parameter that it is, or None.

    Raises:
        ModelError: something computes with a parameter that has not been read.
    """
    for path in filter(None, _follow(jaxpr, inputs)):
        raise _unread(path, "its result")


def _follow(jaxpr: Any, inputs: Sequence[str | None]) -> list[str | None]:
    """For each output of a jaxpr, the path of the unread parameter that it is, or None."""
    unread = {var: path for var, path in zip(jaxpr.invars, inputs, strict=True) if path}
    for equation in jaxpr.eqns:
        given = _paths(equation.invars, unread)
        if not any(given) or equation.primitive is _read:
            continue
        results = given[:1] if equation.primitive.name in _SLICES else _follow_into(equation, given)
        unread |= {var: path for var, path in zip(equation.outvars, results, strict=True) if path}
    return _paths(jaxpr.outvars, unread)


def _paths(variables: Sequence[Any], unread: dict[Any, str]) -> list[str | None]:
    return [None if isinstance(var, Literal) else unread.get(var) for var in variables]


def _follow_into(equation: Any, given: list[str | None]) -> list[str | None]:
    """`_follow` through an equation that calls jaxprs: a scan, a branch, a `jit`, a `checkpoint` and the like."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        _follow(params["cond_jaxpr"].jaxpr, given[:num_cond] + given[num_cond + num_body :])
        return _follow(params["body_jaxpr"].jaxpr, given[num_cond:])
    inputs = given[1:] if name == "cond" else given
    inner = list(inner_jaxprs(equation))
    if not inner or any(len(jaxpr.invars) != len(inputs) for jaxpr in inner):
        raise _unread(next(filter(None, given)), f"'{name}'")
    return [next(filter(None, paths), None) for paths in zip(*(_follow(jaxpr, inputs) for jaxpr in inner), strict=True)]


def _unread(path: str, where: str) -> ModelError:
    if where == "'transpose'":
        return ModelError(
            f"the model scans or maps over a dim of '{path}' that is not the first: stack layers along axis 0"
        )
    return ModelError(
        f"the loss passes parameter '{path}' to {where} without reading it, as jax.tree functions over a model or its "
        "state do: read it as `param[...]` (for all of them: jax.tree.leaves(nnx.state(model, nnx.Param), "
        "is_leaf=lambda x: isinstance(x, nnx.Param))), and leave casts to `Precision`"
    )


def count_dots(jaxpr: Any, inside: bool = False) -> tuple[int, int]:
    """How many matrix products a jaxpr has, and how many of them are inside a `jax.checkpoint`."""
    total = inner_total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total, inner_total = total + 1, inner_total + inside
        within = inside or equation.primitive.name in ("checkpoint", "remat", "remat2")
        for inner in inner_jaxprs(equation):
            dots, remat_dots = count_dots(inner, within)
            total, inner_total = total + dots, inner_total + remat_dots
    return total, inner_total


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation calls: a loop's body, branches, what a `jit` or a `checkpoint` is of."""
    for x in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(x):
            yield getattr(x, "jaxpr", x)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
