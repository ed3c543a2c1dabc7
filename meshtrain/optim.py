"""The optimizer: a config becomes a learning-rate schedule and an optax chain over the flat dict of parameters.

    clip by global norm -> direction (adamw, lion, ...) -> + weight decay -> [lamb: trust ratio] -> * -schedule(k)

One update, whatever the number of microbatches, is one call. Update k counts from 0 and uses `schedule(k)`.

The chain runs on global arrays outside `shard_map`, so its norms and factored moments see each whole parameter under
any layout. All of it computes in float32, for `eps` does not exist in float16 (1e-8 rounds to 0, and 0 / 0 follows).

A scanned model stacks its layers in one leaf `(layers, ...)`. Where the mathematics depends on the whole matrix (LAMB's
trust ratio, Adafactor's factors, clipping and scale, Muon's orthogonalisation), each layer is treated by itself:
a stack of L layers takes the same updates as L separate leaves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from meshtrain.config import OptimConfig
from meshtrain.errors import ConfigError, RuleError
from meshtrain.rules import path_matches

Arrays = dict[str, jax.Array]  # by parameter path; names as in `blocks/mlp/up/kernel`

_NORM = r"(?i:[^/]*norm[^/]*|ln(?:_?(?:\d+|f|[a-z]+))?)"
DECAY_RULES: tuple[tuple[str, bool], ...] = (
    (rf"{_NORM}/[^/]+", False),
    (r"[^/]*(?:bias|scale)|b|beta|gamma|alpha", False),
    (r"[^/]*(?:kernel|embedding|embed|weight|weights)|w[0-9]?", True),
)
"""Which parameters decay: not those of norms, no bias and no scale, but every matrix and embedding."""

MUON_RULES: tuple[tuple[str, str], ...] = (
    (r"(?:(?:lm_|output_)?head|unembed|router|[^/]*embed[^/]*)/[^/]+", ""),
    (r"experts/(?:[^/]+/)*[^/]+", "bio"),
    (r"(?:[^/]*qkv|kv|kv_proj|gate_up)/kernel", "iboo"),
    (r"(?:[^/]*qkv|kv|kv_proj|gate_up)/kernel", "ibo"),
    (r"(?:q|k|v|q_proj|k_proj|v_proj|query|key|value)/kernel", "ioo"),
    (r"(?:o|out|o_proj|out_proj|proj)/kernel", "iio"),
    (r"(?:[^/]*(?:kernel|weight)|w[0-9]?)", "io"),
)
"""How Muon reads the dims of one layer's weight as a matrix: `i` input, `o` output, `b` a batch of separate matrices.

A rule serves only weights with as many dims as it has letters. An empty one sends its weights to Adam, and so does
having no rule. Thus `qkv/kernel` of shape `(d, 3, heads, head_dim)` is three matrices `(d, heads * head_dim)`, and
`out/kernel` of shape `(heads, head_dim, d)` is one matrix `(heads * head_dim, d)`.
"""

# Muon's update then has the RMS of an AdamW update, so one learning rate and one weight decay serve both of its halves:
# Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2.
_MUON_RMS = 0.2


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """The learning rate of update k, as a function of k = 0 .. steps - 1.

    With W = `warmup_steps`, T = `steps`, peak P = `lr` and final rate F = `lr * min_lr_ratio`:

    - k < W: P * k / W. The first update of a warm-up has rate 0, update W has rate P.
    - k >= W, constant: P.
    - k >= W, linear and cosine: from P at W down to F at T, over r = (k - W) / (T - W).
    - k >= W, wsd (warmup-stable-decay, Hu et al. 2024): P until T - D, then linear to F at T. D is `decay_steps`, or
      by default a tenth of T (rounded up) and at most T - W.

    F is the value at k = T, one past the last update, and stays from there on. All values are finite and >= 0.

    Args:
        config: the `optim` section.
        steps: T, updates in the whole run.

    Raises:
        ConfigError: the warm-up, or the warm-up plus the decay of wsd, is longer than the run.
    """
    peak, final = config.lr, config.lr * config.min_lr_ratio
    warmup = config.warmup_steps
    if warmup > steps:
        raise ConfigError(f"optim.warmup_steps={warmup} is more than the run's {steps} steps: lower it")
    decay = steps - warmup
    if config.schedule == "wsd":
        decay = _wsd_decay_steps(config, steps)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        k = jnp.asarray(count, jnp.int32)
        rising = peak * k.astype(jnp.float32) / max(warmup, 1)
        if config.schedule == "constant":
            after = jnp.float32(peak)
        else:
            progress = jnp.clip((k - (steps - decay)).astype(jnp.float32) / max(decay, 1), 0.0, 1.0)
            progress = jnp.where(k >= steps, 1.0, progress)
            share = 0.5 * (1.0 + jnp.cos(jnp.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
            after = final + (peak - final) * share
        return jnp.where(k < warmup, rising, after).astype(jnp.float32)

    return schedule


def _wsd_decay_steps(config: OptimConfig, steps: int) -> int:
    room = steps - config.warmup_steps
    if config.decay_steps is None:
        return min(math.ceil(steps / 10), room)
    if config.decay_steps > room:
        raise ConfigError(
            f"optim.decay_steps={config.decay_steps} does not fit: {room} of {steps} steps are left after the warm-up"
        )
    return config.decay_steps


def decay_mask(params: Mapping[str, Any], rules: Sequence[tuple[str, bool]] | None = None) -> dict[str, bool]:
    """Whether each parameter gets weight decay, by its path alone.

    The number of dims says nothing: a norm's scale in a stack of layers is 2-D, an attention bias 4-D.

    Args:
        params: anything by parameter path.
        rules: `(pattern, decays)` pairs, as `optim.decay_rules`, that go before `DECAY_RULES`; the first match wins. A
            pattern matches whole components at the end of a path.

    Raises:
        ConfigError: no rule matches a parameter, or one of `rules` matches none.
    """
    own = tuple(rules or ())
    try:
        idle = [pattern for pattern, _ in own if not any(path_matches(pattern, path) for path in params)]
    except RuleError as error:
        raise ConfigError(f"optim.decay_rules: {error}") from None
    if idle:
        raise ConfigError(f"optim.decay_rules: no parameter matches {', '.join(map(repr, idle))}; correct or remove it")
    mask = {path: _first_match(path, own + DECAY_RULES) for path in params}
    unknown = [path for path, decays in mask.items() if decays is None]
    if unknown:
        raise ConfigError(
            f"no rule says whether weight decay applies to {', '.join(unknown)}: add optim.decay_rules such as "
            f'[["{unknown[0]}", false]], or set optim.weight_decay=0'
        )
    return cast(dict[str, bool], mask)


def _first_match(path: str, rules: Sequence[tuple[str, bool]]) -> bool | None:
    return next((decays for pattern, decays in rules if path_matches(pattern, path)), None)


def muon_layout(path: str, shape: Sequence[int]) -> str | None:
    """How Muon reads one layer's weight: a letter per dim (see `MUON_RULES`), or None where Adam updates it.

    Args:
        path: the parameter's path.
        shape: its shape without the dims of stacked layers.
    """
    for pattern, layout in MUON_RULES:
        if len(layout) in (0, len(shape)) and path_matches(pattern, path):
            return layout or None
    return None


def global_norm(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The L2 norm over all leaves, a float32 scalar, with squares summed in float32 whatever the leaves' dtype.

    This is the norm that `clip_norm` limits. A shared (tied) weight is one leaf and counts once.
    """
    return jnp.asarray(optax.tree.norm({path: x.astype(jnp.float32) for path, x in arrays.items()}))


def make_optimizer(
    config: OptimConfig,
    steps: int,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    num_stacked: Mapping[str, int],
) -> optax.GradientTransformation:
    """The run's optimizer, for gradients and parameters that are flat dicts by path.

    Whatever mirrors a parameter in the state lies in a dict under the parameter's path. The state is float32, except
    the first moment where `moment_dtype` says otherwise; updates come in the parameters' dtype.

    - `adamw`: Loshchilov & Hutter 2019.
    - `sgd`: heavy-ball momentum `beta1` (0: none), decoupled weight decay.
    - `lion`: Chen et al. 2023; `beta1` blends momentum and gradient, `beta2` is the momentum's decay.
    - `adafactor`: Shazeer & Stern 2018, steps relative to the RMS of each weight. The second moment decays by
      1 - t^-0.8, so `beta2` and `eps` have no part in it; `beta1` > 0 keeps a momentum (and its memory), 0 keeps none.
    - `muon`: Jordan 2024, momentum `beta1`; what `muon_layout` does not know as a matrix goes to Adam.
    - `lamb`: You et al. 2020, Adam under a trust ratio per weight.

    Args:
        config: the `optim` section.
        steps: updates in the whole run.
        shapes: shape and dtype by parameter path.
        num_stacked: by path, how many of the leading dims are stacked layers; a path that is missing has none.

    Raises:
        ConfigError: the schedule does not fit the run, or no rule says whether a parameter decays.
    """
    layers = {path: num_stacked.get(path, 0) for path in shapes}
    parts = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    parts.append(_direction(config, shapes, layers))
    if config.weight_decay:
        mask = decay_mask(shapes, config.decay_rules)
        parts.append(optax.add_decayed_weights(config.weight_decay, mask))
    if config.name == "lamb":
        parts.append(_per_layer(optax.scale_by_trust_ratio(), layers))
    parts.append(optax.scale_by_learning_rate(make_schedule(config, steps)))
    return _in_float32(optax.chain(*parts))


def _direction(
    config: OptimConfig, shapes: Mapping[str, jax.ShapeDtypeStruct], layers: Mapping[str, int]
) -> optax.GradientTransformation:
    """The named optimizer without weight decay, trust ratio and learning rate."""
    dtype = jnp.dtype(config.moment_dtype)
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=dtype)
    match config.name:
        case "adamw" | "lamb":
            return adam
        case "sgd":
            return optax.trace(config.beta1, accumulator_dtype=dtype) if config.beta1 else optax.identity()
        case "lion":
            return optax.scale_by_lion(config.beta1, config.beta2, mu_dtype=dtype)
        case "adafactor":
            return _adafactor(config.beta1, dtype, layers)
        case "muon":
            return _muon_or_adam(_muon_dims(shapes, layers), config, adam)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `inner` on float32 copies of gradients and parameters; updates return in the parameters' dtype."""

    def init(params: Any) -> Any:
        return inner.init(optax.tree.cast(params, jnp.float32))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        params32 = None if params is None else optax.tree.cast(params, jnp.float32)
        updates, state = inner.update(optax.tree.cast(grads, jnp.float32), state, params32)
        return optax.tree.cast_like(updates, grads if params is None else params), state

    return optax.GradientTransformation(init, update)


def _vmap_layers(function: Callable[..., Any], num_stacked: int, in_axes: Any = 0, out_axes: Any = 0) -> Any:
    """`function` of one layer, over that many leading dims of stacked layers."""
    for _ in range(num_stacked):
        function = jax.vmap(function, in_axes, out_axes)
    return function


def _per_layer(inner: optax.GradientTransformation, layers: Mapping[str, int]) -> optax.GradientTransformation:
    """A stateless transformation applied to each layer of each leaf by itself."""

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        return cast(jax.Array, inner.update(update, optax.EmptyState(), param)[0])

    def update(updates: Arrays, state: Any, params: Arrays | None = None) -> tuple[Arrays, Any]:
        assert params is not None, "this optimizer needs the parameters"
        return {path: _vmap_layers(one, layers[path])(u, params[path]) for path, u in updates.items()}, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _factored_rms(layers: Mapping[str, int]) -> optax.GradientTransformation:
    """Adafactor's factored second moment, whose two factors are those of each layer's own matrix."""
    inner = optax.scale_by_factored_rms()
    axes = optax.FactoredState(count=None, v_row=0, v_col=0, v=0)  # the count is one for all layers

    def init(params: Arrays) -> optax.FactoredState:
        states = {path: _vmap_layers(inner.init, layers[path], out_axes=axes)(p) for path, p in params.items()}
        return _join(states)

    def update(updates: Arrays, state: optax.FactoredState, params: Arrays | None = None) -> tuple[Arrays, Any]:
        assert params is not None, "adafactor needs the parameters"
        results = {}
        for path, grad in updates.items():
            own = optax.FactoredState(state.count, state.v_row[path], state.v_col[path], state.v[path])
            step = _vmap_layers(inner.update, layers[path], (0, axes, 0), (0, axes))
            results[path] = step(grad, own, params[path])
        return {path: r[0] for path, r in results.items()}, _join({path: r[1] for path, r in results.items()})

    return optax.GradientTransformation(init, update)


def _join(states: Mapping[str, optax.FactoredState]) -> optax.FactoredState:
    """States by path become one state of dicts by path."""
    count = next((s.count for s in states.values()), jnp.zeros([], jnp.int32))
    return optax.FactoredState(
        count=count,
        v_row={path: s.v_row for path, s in states.items()},
        v_col={path: s.v_col for path, s in states.items()},
        v={path: s.v for path, s in states.items()},
    )


def _adafactor(beta1: float, dtype: Any, layers: Mapping[str, int]) -> optax.GradientTransformation:
    parts = [
        _factored_rms(layers),
        _per_layer(optax.clip_by_block_rms(1.0), layers),
        _per_layer(optax.scale_by_param_block_rms(), layers),
    ]
    if beta1:
        parts.append(optax.ema(beta1, debias=False, accumulator_dtype=dtype))
    return optax.chain(*parts)


def _muon_dims(
    shapes: Mapping[str, jax.ShapeDtypeStruct], layers: Mapping[str, int]
) -> dict[str, contrib.MuonDimensionNumbers]:
    """Input and output dims of every weight that Muon updates; all other dims are batches of matrices."""
    dims = {}
    for path, leaf in shapes.items():
        stacked = layers[path]
        layout = muon_layout(path, leaf.shape[stacked:])
        if layout is not None:
            inputs = tuple(stacked + i for i, letter in enumerate(layout) if letter == "i")
            outputs = tuple(stacked + i for i, letter in enumerate(layout) if letter == "o")
            dims[path] = contrib.MuonDimensionNumbers(inputs, outputs)
    return dims


class MuonOrAdamState(NamedTuple):
    """Each half holds the paths that are its own."""

    muon: Any
    adam: Any


def _muon_or_adam(
    dims: Mapping[str, contrib.MuonDimensionNumbers], config: OptimConfig, adam: optax.GradientTransformation
) -> optax.GradientTransformation:
    muon = contrib.scale_by_muon(
        beta=config.beta1, eps=config.eps, mu_dtype=jnp.dtype(config.moment_dtype), weight_dimension_numbers=dict(dims)
    )

    def split(tree: Arrays) -> tuple[Arrays, Arrays]:
        return {p: x for p, x in tree.items() if p in dims}, {p: x for p, x in tree.items() if p not in dims}

    def init(params: Arrays) -> MuonOrAdamState:
        matrices, rest = split(params)
        return MuonOrAdamState(muon.init(matrices), adam.init(rest))

    def update(updates: Arrays, state: MuonOrAdamState, params: Arrays | None = None) -> tuple[Arrays, Any]:
        del params
        matrices, rest = split(updates)
        matrices, muon_state = muon.update(matrices, state.muon)
        rest, adam_state = adam.update(rest, state.adam)
        scaled = {path: u * _muon_scale(u.shape, dims[path]) for path, u in matrices.items()}
        return {path: scaled[path] if path in scaled else rest[path] for path in updates}, MuonOrAdamState(
            muon_state, adam_state
        )

    return optax.GradientTransformation(init, update)


def _muon_scale(shape: Sequence[int], dims: contrib.MuonDimensionNumbers) -> float:
    """An orthogonal (fan_in, fan_out) matrix has RMS 1 / sqrt(max(fan_in, fan_out)): the factor that makes it 0.2."""
    fan_in = math.prod(shape[i] for i in cast(tuple[int, ...], dims.reduction_axis))
    fan_out = math.prod(shape[i] for i in cast(tuple[int, ...], dims.output_axis))
    return _MUON_RMS * math.sqrt(max(fan_in, fan_out))
