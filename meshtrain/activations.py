"""Names for points in a model that an activation rule may place.

    x = name(x + attention(x), "residual")

Without a rule `name` is the identity, so a model that uses it is still plain single-device code. The step sets the
rules while it traces the model:

    with placed(SEQUENCE_PARALLEL):
        loss(model, batch)

A rule is one or more specs that the value takes on one after the other; the gradient takes them on in reverse.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import jax
from jax.sharding import PartitionSpec as P

from meshtrain.errors import ModelError

Placed = Mapping[str, tuple[P, ...]]

_WHOLE = P(None, None, None)  # [batch, seq, d]
_CUT = P(None, "model", None)

# Megatron's sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Between the tensor-parallel branches the
# residual stream is cut along its sequence dim. `branch_in` is the paper's g: gathered forward, reduce-scattered
# backward; `branch_out` is its conjugate. Both ends are said: given one, the compiler may gather a weight instead.
SEQUENCE_PARALLEL: Placed = {
    "residual": (_CUT,),
    "branch_in": (_CUT, _WHOLE),
    "branch_out": (_WHOLE, _CUT),
}

_seen: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("seen", default=None)
_placed: contextvars.ContextVar[Placed] = contextvars.ContextVar("placed", default=MappingProxyType({}))


@contextlib.contextmanager
def placed(rules: Placed) -> Iterator[None]:
    """Sets the activation rules (specs of the trailing dims by name) while a model is traced."""
    token = _placed.set(rules)
    try:
        yield
    finally:
        _placed.reset(token)


@contextlib.contextmanager
def points_seen() -> Iterator[set[str]]:
    """Collects the names of the points that a model passes while it is traced inside."""
    seen: set[str] = set()
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def name(x: jax.Array, point: str) -> jax.Array:
    """Marks `x` as the named point: placed by the rule of that name, unchanged where there is none.

    The names that `train.sequence_parallel` places, each of shape [batch, seq, d]:

    * "residual": the residual stream;
    * "branch_in": what enters a tensor-parallel branch (after the norm, before the column-parallel layer);
    * "branch_out": what leaves one (the result of a row-parallel layer or a vocabulary-parallel lookup, before it is
      added).

    Raises:
        ModelError: the rule cuts a dim that its axis does not divide (the compiler would pad it, at a cost unseen).
    """
    seen = _seen.get()
    if seen is not None:
        seen.add(point)
    for spec in _placed.get().get(point, ()):
        full = P(*(None,) * (x.ndim - len(spec)), *spec)
        _check_divides(x.shape, full, point)
        x = jax.lax.with_sharding_constraint(x, full)
    return x


def _check_divides(shape: tuple[int, ...], spec: P, point: str) -> None:
    sizes = jax.sharding.get_abstract_mesh().shape
    for dim, axis in enumerate(spec):
        if axis is not None and shape[dim] % sizes[axis]:
            raise ModelError(
                f"'{point}' of shape {shape}: axis '{axis}' of size {sizes[axis]} does not divide dim {dim} of size "
                f"{shape[dim]}: choose another sequence length or model axis, or leave sequence parallelism off"
            )
