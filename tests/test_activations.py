"""Named points: the identity without a rule, constraints with one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.activations import SEQUENCE_PARALLEL, Placed, name, placed
from meshtrain.errors import ModelError
from meshtrain.mesh import make_mesh

X = np.arange(2 * 8 * 4, dtype=np.float32).reshape(2, 8, 4)


def constraints(point: str, rules: Placed) -> list[P]:
    """The specs that a named point is constrained to, in order."""
    with jax.set_mesh(make_mesh(4, 2)), placed(rules):
        jaxpr = jax.make_jaxpr(lambda x: name(x, point))(X)
    return [equation.params["sharding"].spec for equation in jaxpr.eqns]


def test_without_a_rule_it_is_the_identity() -> None:
    x = jnp.asarray(X)
    assert name(x, "residual") is x
    with placed({"other": (P("model"),)}):
        assert name(x, "residual") is x


def test_a_rule_constrains_the_point_of_its_name() -> None:
    mesh = make_mesh(4, 2)
    with jax.set_mesh(mesh), placed(SEQUENCE_PARALLEL):
        out = jax.jit(lambda x: name(x, "residual"))(X)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model", None)), 3)
    np.testing.assert_array_equal(out, X)
    assert constraints("logits", SEQUENCE_PARALLEL) == []


def test_several_specs_are_taken_on_in_order() -> None:
    cut, whole = P(None, "model", None), P(None, None, None)
    assert constraints("residual", SEQUENCE_PARALLEL) == [cut]
    assert constraints("branch_in", SEQUENCE_PARALLEL) == [cut, whole]
    assert constraints("branch_out", SEQUENCE_PARALLEL) == [whole, cut]


def test_a_spec_speaks_of_the_last_dims() -> None:
    assert constraints("point", {"point": (P("model"),)}) == [P(None, None, "model")]
    assert constraints("point", {"point": (P(),)}) == [P(None, None, None)]


def test_rules_end_with_their_block() -> None:
    x = jnp.asarray(X)

    def is_placed() -> bool:
        return bool(jax.make_jaxpr(lambda x: name(x, "residual"))(x).eqns)

    with jax.set_mesh(make_mesh(4, 2)):
        with placed(SEQUENCE_PARALLEL):
            with placed({}):
                assert not is_placed()
            assert is_placed()
        assert not is_placed()
        with pytest.raises(RuntimeError, match="stop"), placed(SEQUENCE_PARALLEL):
            raise RuntimeError("stop")
        assert not is_placed()


def test_values_and_gradients_pass() -> None:
    for point in SEQUENCE_PARALLEL:
        with jax.set_mesh(make_mesh(4, 2)), placed(SEQUENCE_PARALLEL):
            loss, grad = jax.jit(jax.value_and_grad(lambda x, point=point: jnp.sum(name(x * 3, point) ** 2)))(X)
        np.testing.assert_array_equal(grad, 18 * X)
        np.testing.assert_allclose(loss, 9 * (X**2).sum(), rtol=1e-6)


def test_a_dim_that_the_axis_does_not_divide_is_refused() -> None:
    message = r"'residual' of shape \(2, 9, 4\): axis 'model' of size 2 does not divide dim 1"
    with jax.set_mesh(make_mesh(4, 2)), placed(SEQUENCE_PARALLEL), pytest.raises(ModelError, match=message):
        jax.eval_shape(lambda x: name(x, "residual"), jnp.zeros((2, 9, 4)))
