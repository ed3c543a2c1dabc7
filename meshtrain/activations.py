"""Names for points in a model that an activation rule may place.

    x = name(x + attention(x), "residual")

Without a rule `name` is the identity, so a model that uses it is still plain single-device code. The step sets the rules
while it traces the model:

    with placed({"residual": P(None, "model", None)}):  # Megatron's sequence parallelism
        loss(model, batch)
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import PartitionSpec as P

Placed = Mapping[str, P]

# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2: between the
# tensor-parallel regions the residual stream [batch, seq, d] is cut along its sequence dim.
SEQUENCE_PARALLEL: Placed = {"residual": P(None, "model", None)}

_placed: contextvars.ContextVar[Placed] = contextvars.ContextVar("placed", default={})


@contextlib.contextmanager
def placed(rules: Placed) -> Iterator[None]:
    """Sets the activation rules (spec of the trailing dims by name) while a model is traced."""
    token = _placed.set(rules)
    try:
        yield
    finally:
        _placed.reset(token)


def name(x: jax.Array, point: str) -> jax.Array:
    """Marks `x` as the named point: placed by the rule of that name, unchanged where there is none."""
    spec = _placed.get().get(point)
    if spec is None:
        return x
    return jax.lax.with_sharding_constraint(x, P(*(None,) * (x.ndim - len(spec)), *spec))
