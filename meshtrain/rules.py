"""PartitionSpec rules: an ordered list of `(path regex, spec of the trailing dims)`.

    RULES = [
        (r"up/kernel", P(None, "model")),     # column parallel: Megatron-LM, Shoeybi et al. 2019, section 3
        (r"down/kernel", P("model", None)),   # row parallel
        (r"wte/embedding", P("model", None)), # vocabulary parallel
        (r".*", P()),                         # an explicit default: the rest is replicated
    ]

A pattern must match whole path components, counted from the end: `up/kernel` places `blocks/mlp/up/kernel` and not
`blocks/mlp/up_gate/kernel`. A spec speaks of the last dims, so that the same rule serves one layer `(d, f)` and a stack
of them `(layers, d, f)`. The first rule that matches wins. A parameter that none matches is an error, so nothing is
replicated in silence.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from meshtrain.errors import RuleError
from meshtrain.mesh import MODEL

Rule = tuple[str, P]
DEFAULT = ".*"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lies in the step, and which rule said so."""

    path: str
    shape: tuple[int, ...]
    rule: str
    spec: P  # as long as the shape


@dataclasses.dataclass(frozen=True)
class Placements:
    """What the rules did: a placement per parameter, and what deserves a look."""

    by_path: dict[str, Placement]
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Every fault of a list of rules, for those who want more than the first.

    Attributes:
        errors: what `place` would refuse, in the order in which it would.
        warnings: as in `Placements`.
        good_rules: rules without a fault of their own.
        good_paths: parameters that are placed, and by a good rule.
    """

    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    good_rules: tuple[Rule, ...]
    good_paths: tuple[str, ...]


def path_matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches whole components at the end of `path`, such as `up/kernel` in `blocks/up/kernel`.

    Raises:
        RuleError: the pattern is not a regular expression.
    """
    try:
        re.compile(pattern)  # alone: `a)|(b` would be one in the middle of another
        return re.fullmatch(f"(?:.*/)?(?:{pattern})", path) is not None
    except re.error as error:
        raise RuleError(f"rule '{pattern}' is not a regular expression: {error}") from None


def as_rules(rules: Iterable[tuple[str, Any]]) -> tuple[Rule, ...]:
    """Rules with their specs as `PartitionSpec`; `[axes]` lists, as a config holds them, are taken too.

    Raises:
        RuleError: something is not a pair of a pattern and a spec.
    """
    return tuple(map(_as_rule, rules))


def place(
    rules: Sequence[tuple[str, Any]], params: Mapping[str, jax.ShapeDtypeStruct], axis_sizes: Mapping[str, int]
) -> Placements:
    """Applies the rules to every parameter.

    Args:
        rules: ordered `(pattern, spec)`; with none at all, everything is replicated over `model`.
        params: shape and dtype by path.
        axis_sizes: size by mesh axis name.

    Raises:
        RuleError: a parameter that no rule matches, a spec that does not fit its parameter, an axis that the mesh does
            not have or that is used twice, a dim that its axes do not divide.
    """
    checked = as_rules(rules) or ((DEFAULT, P()),)
    for pattern, spec in checked:
        _check_axes(pattern, spec, axis_sizes)
    matched = {path: [rule for rule in checked if path_matches(rule[0], path)] for path in params}
    if missing := [path for path, hits in matched.items() if not hits]:
        raise RuleError(_missing(missing))
    placements = {
        path: Placement(path, param.shape, matched[path][0][0], _fit(path, param.shape, *matched[path][0], axis_sizes))
        for path, param in params.items()
    }
    return Placements(placements, tuple(_warnings(checked, matched, list(params))))


def inspect(
    rules: Sequence[tuple[str, Any]], params: Mapping[str, jax.ShapeDtypeStruct], axis_sizes: Mapping[str, int]
) -> Inspection:
    """Everything that is wrong with the rules, where `place` stops at the first. The arguments are those of `place`."""
    errors: list[str] = []

    def holds(check: Callable[..., Any], *args: Any) -> bool:
        try:
            check(*args)
        except RuleError as error:
            errors.append(str(error))
            return False
        return True

    pairs = [_as_rule(rule) for rule in rules if holds(_as_rule, rule)] if rules else [(DEFAULT, P())]
    known = [rule for rule in pairs if holds(path_matches, rule[0], "")]
    good = [rule for rule in known if holds(_check_axes, *rule, axis_sizes)]
    matched = {path: [rule for rule in known if path_matches(rule[0], path)] for path in params}
    if missing := [path for path, hits in matched.items() if not hits]:
        errors.append(_missing(missing))
    placed = [path for path, hits in matched.items() if hits and hits[0] in good]
    fits = [path for path in placed if holds(_fit, path, params[path].shape, *matched[path][0], axis_sizes)]
    return Inspection(tuple(errors), tuple(_warnings(known, matched, list(params))), tuple(good), tuple(fits))


def num_shards(entry: Any, axis_sizes: Mapping[str, int]) -> int:
    """Into how many parts one entry of a spec (None, an axis, a tuple of axes) cuts its dim."""
    return math.prod(axis_sizes[axis] for axis in axes_of(entry))


def axes_of(entry: Any) -> tuple[str, ...]:
    """The axes that one entry of a spec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _as_rule(rule: Any) -> Rule:
    if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
        raise RuleError(f"rule {rule!r} must be a pair (path regex, PartitionSpec)")
    pattern, spec = rule
    if not isinstance(spec, P | tuple | list):
        raise RuleError(f"rule '{pattern}': {spec!r} must be a PartitionSpec, or a list with an entry per dim")
    return pattern, spec if isinstance(spec, P) else P(*map(_entry, spec))


def _entry(entry: Any) -> Any:
    return tuple(entry) if isinstance(entry, list) else entry


def _check_axes(pattern: str, spec: P, axis_sizes: Mapping[str, int]) -> None:
    named = [axis for entry in spec for axis in axes_of(entry)]
    for axis in named:
        if axis not in axis_sizes:
            near = difflib.get_close_matches(axis, axis_sizes, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(axis_sizes)}"
            raise RuleError(f"rule '{pattern}': the mesh has no axis '{axis}'; {hint}")
        if axis != MODEL:
            raise RuleError(
                f"rule '{pattern}': axis '{axis}' is not for rules; they place over '{MODEL}', "
                "and zero.stage says what is sharded over 'data'"
            )
        if named.count(axis) > 1:
            raise RuleError(f"rule '{pattern}': axis '{axis}' is used twice in {spec}; an axis can cut one dim only")


def _missing(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    return f"no rule places {shown}: add a rule for each, or end the rules with an explicit default ('.*', P())"


def _fit(path: str, shape: tuple[int, ...], pattern: str, spec: P, axis_sizes: Mapping[str, int]) -> P:
    """The rule's spec, lengthened to the parameter's rank and checked against its sizes."""
    if len(spec) > len(shape):
        raise RuleError(
            f"rule '{pattern}': {spec} has {len(spec)} dims, but '{path}' has {len(shape)}: {shape}; "
            "shorten the spec, or put a rule for this parameter before it"
        )
    full = P(*(None,) * (len(shape) - len(spec)), *spec)
    for dim, entry in enumerate(full):
        parts = num_shards(entry, axis_sizes)
        if shape[dim] % parts:
            raise RuleError(
                f"'{path}' dim {dim} has size {shape[dim]}, which axis '{'+'.join(axes_of(entry))}' of size {parts} "
                f"does not divide (rule '{pattern}'): pad the dim to {-(-shape[dim] // parts) * parts}, make the axis "
                f"a divisor of {shape[dim]}, or put a rule before this one that leaves the dim whole"
            )
    return full


def _warnings(rules: Sequence[Rule], matched: Mapping[str, list[Rule]], paths: Sequence[str]) -> Iterable[str]:
    used = {rule for hits in matched.values() for rule in hits}
    for rule in rules:
        if rule not in used and rule[0] != DEFAULT:
            near = difflib.get_close_matches(rule[0], paths, n=1, cutoff=0.4)
            hint = f" (nearest parameter: {near[0]})" if near else ""
            yield f"rule '{rule[0]}' matches no parameter{hint}"
    for path, hits in matched.items():
        others = [rule for rule in hits[1:] if rule[0] != DEFAULT and rule[1] != hits[0][1]]
        if others:
            yield f"'{path}' is placed by rule '{hits[0][0]}', though '{others[0][0]}' matches it too: the first wins"
