"""Number formats: what is computed in which type, and the dynamic loss scale that float16 needs.

Master weights and optimizer state are float32, always. `compute` is the type of weights and activations inside the
step, and of what ZeRO gathers; `reduce` is the type in which gradients cross the data axis.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.errors import ConfigError

FLOAT32 = np.dtype("float32")
MIN_LOSS_SCALE = 1.0
MAX_LOSS_SCALE = 2.0**24


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of one run. Hashable, so that it can be a static argument."""

    compute: np.dtype[Any] = FLOAT32
    reduce: np.dtype[Any] = FLOAT32
    loss_scale: float = 2.0**15  # float16 only: the first scale
    loss_scale_window: int = 1000

    @classmethod
    def make(
        cls, compute: str = "float32", reduce: str = "float32", loss_scale: float = 2.0**15, window: int = 1000
    ) -> "Precision":
        """From names as a config holds them; `reduce` may be "compute"."""
        for name in (compute, reduce):
            if name not in ("float32", "bfloat16", "float16", "compute"):
                raise ConfigError(f"precision '{name}' must be float32, bfloat16 or float16 (to reduce in: or compute)")
        compute_dtype = np.dtype(jnp.dtype(compute))
        reduce_dtype = compute_dtype if reduce == "compute" else np.dtype(jnp.dtype(reduce))
        return cls(compute_dtype, reduce_dtype, loss_scale, window)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients could underflow: float16 has 5 bits of exponent, the others 8."""
        return self.compute == np.dtype("float16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The dynamic loss scale (Micikevicius et al. 2018, section 3.2): a float32 and an int32 scalar."""

    scale: jax.Array
    good_steps: jax.Array

    @classmethod
    def start(cls, precision: Precision) -> "LossScale":
        """The first scale: `precision.loss_scale` for float16, 1 otherwise."""
        first = precision.loss_scale if precision.scales_loss else 1.0
        return cls(jnp.asarray(first, jnp.float32), jnp.zeros((), jnp.int32))

    def next(self, finite: jax.Array, precision: Precision) -> "LossScale":
        """Halves after an overflow, doubles after `window` finite updates in a row, within [1, 2**24].

        Args:
            finite: bool scalar, whether this update's gradients were.
        """
        if not precision.scales_loss:
            return self
        grown = self.good_steps + 1 >= precision.loss_scale_window
        up = jnp.where(grown, self.scale * 2, self.scale)
        scale = jnp.clip(jnp.where(finite, up, self.scale / 2), MIN_LOSS_SCALE, MAX_LOSS_SCALE)
        good_steps = jnp.where(finite & ~grown, self.good_steps + 1, 0)
        return LossScale(scale, good_steps.astype(jnp.int32))
