"""Rules: what they match, what they place, what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain.errors import RuleError, UserError
from meshtrain.rules import Placements, as_rules, axes_of, num_shards, path_matches, place

SIZES = {"data": 4, "model": 2}


def shapes(**params: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters by path; `__` stands for `/`."""
    return {path.replace("__", "/"): jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in params.items()}


def specs(placements: Placements) -> dict[str, P]:
    """Spec by path."""
    return {path: placement.spec for path, placement in placements.by_path.items()}


def refusal(rules: Any, params: Any, sizes: dict[str, int] | None = None) -> str:
    """The one line with which `place` refuses."""
    with pytest.raises(RuleError) as caught:
        place(rules, params, sizes or SIZES)
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- matching


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("up/kernel", "blocks/mlp/up/kernel", True),
        ("up/kernel", "up/kernel", True),
        ("up/kernel", "blocks/mlp/up_gate/kernel", False),
        ("up/kernel", "blocks/group/kernel", False),  # ends in the same letters
        ("up/kernel", "blocks/up/kernel/scale", False),
        ("kernel", "blocks/up/kernel", True),
        ("ernel", "blocks/up/kernel", False),
        ("kern", "blocks/up/kernel", False),
        ("blocks", "blocks/up/kernel", False),
        ("blocks/.*", "blocks/up/kernel", True),
        ("^up/kernel", "up/kernel", True),
        ("^up/kernel", "blocks/up/kernel", False),
        ("(up|gate)/kernel", "blocks/gate/kernel", True),
        ("up/kernel|down/kernel", "blocks/down/kernel", True),  # the alternative is anchored as a whole
        ("up/kernel|down", "blocks/updown", False),
        ("up|down/kernel", "blocks/up/kernel", False),
        (r"ln_[12]/(scale|bias)", "blocks/ln_2/bias", True),
        (r"ln_[12]/(scale|bias)", "blocks/ln_f/bias", False),
        (r"layers/\d+/up/kernel", "layers/11/up/kernel", True),
        (".*", "anything/at/all", True),
        ("", "a/b", False),
        ("up.kernel", "up/kernel", True),
    ],
)
def test_a_pattern_matches_whole_components_at_the_end(pattern: str, path: str, matches: bool) -> None:
    assert path_matches(pattern, path) is matches


@pytest.mark.parametrize("pattern", ["(", "[a", "*up", "(?P<x>a)(?P<x>b)", "a)|(b", "up/(?i)kernel"])
def test_what_is_no_regular_expression_is_refused(pattern: str) -> None:
    message = refusal([(pattern, P()), (".*", P())], shapes(a=(2,)))
    assert message.startswith(f"rule '{pattern}' is not a regular expression: ")


def test_the_first_rule_that_matches_wins() -> None:
    params = shapes(a__up__kernel=(4, 4), b__up__kernel=(4, 4))
    rules = [("a/up/kernel", P("model", None)), ("up/kernel", P(None, "model"))]
    assert specs(place(rules, params, SIZES)) == {"a/up/kernel": P("model", None), "b/up/kernel": P(None, "model")}
    assert specs(place(rules[::-1], params, SIZES)) == dict.fromkeys(("a/up/kernel", "b/up/kernel"), P(None, "model"))
    placement = place(rules, params, SIZES).by_path["b/up/kernel"]
    assert (placement.path, placement.shape, placement.rule) == ("b/up/kernel", (4, 4), "up/kernel")


# ---------------------------------------------------------------- placing


def test_a_spec_speaks_of_the_last_dims() -> None:
    params = shapes(one__kernel=(6, 4), stack__kernel=(3, 6, 4), deep__kernel=(5, 3, 6, 4))
    placed = specs(place([("kernel", P(None, "model"))], params, SIZES))
    assert placed == {
        "one/kernel": P(None, "model"),
        "stack/kernel": P(None, None, "model"),
        "deep/kernel": P(None, None, None, "model"),
    }
    for path, spec in placed.items():
        assert len(spec) == len(params[path].shape)


def test_an_empty_spec_and_a_scalar() -> None:
    placed = specs(place([(".*", P())], shapes(scale=(), kernel=(3, 5)), SIZES))
    assert placed == {"scale": P(), "kernel": P(None, None)}


def test_no_rules_at_all_replicate_everything() -> None:
    placements = place([], shapes(a=(3, 5), b__c=(7,)), SIZES)
    assert specs(placements) == {"a": P(None, None), "b/c": P(None)}
    assert placements.warnings == ()


def test_rules_may_come_from_a_config() -> None:
    assert as_rules([("a", [None, "model"]), ("b", [["x", "y"]]), ("c", []), ("d", P("model"))]) == (
        ("a", P(None, "model")),
        ("b", P(("x", "y"))),
        ("c", P()),
        ("d", P("model")),
    )


def test_a_dim_over_a_tuple_of_one_axis() -> None:
    placed = specs(place([("kernel", P(None, ("model",)))], shapes(kernel=(3, 4)), SIZES))
    assert num_shards(placed["kernel"][1], SIZES) == 2
    assert "kernel' dim 1 has size 5" in refusal([("kernel", P(None, ("model",)))], shapes(kernel=(3, 5)))


def test_entries_of_a_spec() -> None:
    assert [axes_of(entry) for entry in (None, "model", ("data", "model"))] == [(), ("model",), ("data", "model")]
    assert [num_shards(entry, SIZES) for entry in (None, "model", ("data", "model"))] == [1, 2, 8]


# ---------------------------------------------------------------- refusing


def test_parameters_that_no_rule_matches_are_listed() -> None:
    message = refusal([("up/kernel", P())], shapes(up__kernel=(2,), down__kernel=(2,), ln__scale=(2,)))
    assert message == (
        "no rule places down/kernel, ln/scale: add a rule for each, "
        "or end the rules with an explicit default ('.*', P())"
    )


def test_a_long_list_of_unmatched_parameters_is_cut() -> None:
    message = refusal([("x", P())], shapes(**{f"p{i}": (2,) for i in range(12)}))
    assert "p0, p1, p2, p3, p4 and 7 more" in message


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P("modle"), "rule 'a': the mesh has no axis 'modle'; did you mean 'model'?"),
        (P(("model", "dat")), "rule 'a': the mesh has no axis 'dat'; did you mean 'data'?"),
        (P("tensor_parallel"), "rule 'a': the mesh has no axis 'tensor_parallel'; it has data, model"),
    ],
)
def test_an_unknown_axis_names_the_nearest_one(spec: P, expected: str) -> None:
    assert refusal([("a", spec)], shapes(a=(8,))) == expected


def test_a_rule_that_matches_nothing_is_checked_too() -> None:
    assert "no axis 'modle'" in refusal([("zzz", P("modle")), (".*", P())], shapes(a=(8,)))


@pytest.mark.parametrize("spec", [P("data"), P(None, ("model", "data"))])
def test_the_data_axis_is_not_for_rules(spec: P) -> None:
    message = refusal([("a", spec)], shapes(a=(8, 8)))
    assert "rule 'a': axis 'data' is not for rules" in message
    assert "zero.stage" in message


def test_an_axis_cuts_one_dim_only() -> None:
    message = refusal([("a", P("model", "model"))], shapes(a=(8, 8)))
    assert "rule 'a': axis 'model' is used twice" in message


def test_a_spec_longer_than_its_parameter_names_both() -> None:
    message = refusal([("a", P(None, None, "model"))], shapes(a=(8, 8)))
    assert "rule 'a'" in message and "has 3 dims, but 'a' has 2: (8, 8)" in message
    assert "shorten the spec" in message


@pytest.mark.parametrize(
    ("pattern", "spec", "path", "shape", "sizes", "dim", "size", "parts", "padded"),
    [
        # a vocabulary of 17 over 2, 6 heads over 4, a stacked layer: the dim counts from the front of the whole shape
        ("wte/embedding", P("model", None), "wte/embedding", (17, 32), {"data": 1, "model": 2}, 0, 17, 2, 18),
        ("qkv", P(None, None, "model", None), "b/qkv", (2, 32, 3, 6, 8), {"data": 2, "model": 4}, 3, 6, 4, 8),
        ("kernel", P("model"), "kernel", (3, 257), {"data": 4, "model": 2}, 1, 257, 2, 258),
    ],
)  # fmt: skip
def test_a_dim_that_its_axis_does_not_divide(
    pattern: str, spec: P, path: str, shape: Any, sizes: Any, dim: int, size: int, parts: int, padded: int
) -> None:
    message = refusal([(pattern, spec)], {path: jax.ShapeDtypeStruct(shape, jnp.float32)}, sizes)
    assert message == (
        f"'{path}' dim {dim} has size {size}, which axis 'model' of size {parts} does not divide (rule '{pattern}'): "
        f"pad the dim to {padded}, make the axis a divisor of {size}, or put a rule before this one that leaves "
        "the dim whole"
    )


def test_an_axis_of_size_one_divides_everything() -> None:
    placed = place([("a", P("model"))], shapes(a=(17,)), {"data": 8, "model": 1})
    assert specs(placed) == {"a": P("model")}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([("a",)], "rule ('a',) must be a pair (path regex, PartitionSpec)"),
        (["ab"], "rule 'ab' must be a pair"),
        ({"kernel": P()}, "rule 'kernel' must be a pair"),
        ([(P(), "a")], "must be a pair"),
        ([("a", "model")], "rule 'a': 'model' must be a PartitionSpec, or a list"),
        ([("a", None)], "rule 'a': None must be a PartitionSpec, or a list"),
    ],
)
def test_what_is_no_rule_is_refused(rules: Any, expected: str) -> None:
    assert expected in refusal(rules, shapes(a=(8,)))


# ---------------------------------------------------------------- warnings


def test_a_rule_that_matches_nothing_gets_a_warning_with_the_nearest_path() -> None:
    rules = [("blocks/upp/kernel", P(None, "model")), ("blocks/up/kernel", P()), ("qqq", P()), (".*", P())]
    warnings = place(rules, shapes(blocks__up__kernel=(4, 4)), SIZES).warnings
    assert warnings == (
        "rule 'blocks/upp/kernel' matches no parameter (nearest parameter: blocks/up/kernel)",
        "rule 'qqq' matches no parameter",
    )


def test_a_parameter_that_two_rules_place_differently_gets_a_warning() -> None:
    rules = [("up/kernel", P(None, "model")), ("kernel", P("model", None)), (".*", P())]
    warnings = place(rules, shapes(up__kernel=(4, 4), down__kernel=(4, 4)), SIZES).warnings
    assert warnings == ("'up/kernel' is placed by rule 'up/kernel', though 'kernel' matches it too: the first wins",)


def test_rules_that_agree_and_the_default_get_no_warning() -> None:
    rules = [("up/kernel", P(None, "model")), ("kernel", P(None, "model")), (".*", P())]
    assert place(rules, shapes(up__kernel=(4, 4), down__kernel=(4, 4)), SIZES).warnings == ()
