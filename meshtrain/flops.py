"""Floating-point operations: of a model by formula, of a traced program by counting, of a card by its data sheet."""

import math
import re
from collections.abc import Mapping
from typing import Any

from meshtrain.jaxprs import inner_jaxprs
from meshtrain.layout import Layout

# Dense rates (without 2:4 sparsity) of one GPU in TFLOP/s: float32 as TF32, which XLA runs a float32 matmul in by
# default, then bfloat16 and float16. From the vendor's datasheets: "NVIDIA A100 Tensor Core GPU", "NVIDIA H100 Tensor
# Core GPU" (SXM), "NVIDIA H200 Tensor Core GPU" (SXM), "NVIDIA HGX B200". From Hopper on they print the rate with
# sparsity, twice the dense one. PCIe and NVL cards of the Hopper line are slower and not listed.
_PEAK_TFLOPS = {"A100": (156.0, 312.0), "H100": (494.5, 989.5), "H200": (494.5, 989.5), "B200": (1125.0, 2250.0)}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """The dense matrix rate of one device in FLOP/s by its datasheet, or None where that is unknown.

    Args:
        device_kind: as in `jax.Device.device_kind`, for instance "NVIDIA H100 80GB HBM3".
        dtype: "float32", "bfloat16" or "float16", the type that matmuls read.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_kind.upper()))
    name = next((name for name in _PEAK_TFLOPS if name in words), None)
    if name is None or "MIG" in words or (name != "A100" and words & {"PCIE", "NVL"}):
        return None
    tf32, half = _PEAK_TFLOPS[name]
    return {"float32": tf32 * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}.get(dtype)


def flops_per_token(num_params_matmul: int, num_layers: int, dim: int, seq_len: int, causal: bool = False) -> float:
    """Floating-point operations that training on one token takes: forward and backward, no rematerialisation.

    6 N + 12 L d T: PaLM (Chowdhery et al. 2022), appendix B. Twice N multiply-adds forward, twice that backward; the
    second term is the attention scores and their product with the values.

    Args:
        num_params_matmul: N, parameters that a matmul reads: the output head, but no embedding lookup.
        num_layers: L.
        dim: d = heads * head_dim of attention.
        seq_len: T, tokens per record.
        causal: counts the half of the attention matrix that a causal mask keeps, 6 L d T. PaLM and Megatron-LM count
            it in full, as this does by default so that figures compare; a kernel that skips the rest is then flattered.
    """
    return 6.0 * num_params_matmul + (6.0 if causal else 12.0) * num_layers * dim * seq_len


def mfu(tokens_per_s: float, flops_per_token: float, num_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOP/s utilisation, 0 to 1 (PaLM, appendix B): what the model needs over what the devices could do.

    Args:
        tokens_per_s: of the whole run, all devices together.
        flops_per_token: see the function of that name.
        num_devices: in the mesh.
        peak_flops: FLOP/s of one device; None, unknown, gives None.
    """
    return None if peak_flops is None else tokens_per_s * flops_per_token / (num_devices * peak_flops)


def model_flops_per_token(layout: Layout, sizes: Any, seq_len: int) -> float:
    """`flops_per_token` of a laid-out model: a lookup costs none, and a tied table is used once as a matrix.

    Args:
        sizes: of the model, for `num_layers` and `dim`; without them attention's own products are left out.
    """
    lookups = [leaf for path, leaf in layout.leaves.items() if path.endswith("wpe/embedding")]
    num_params = layout.num_params - sum(math.prod(leaf.shape) for leaf in lookups)
    layers, dim = getattr(sizes, "num_layers", 0), getattr(sizes, "dim", 0)
    return flops_per_token(num_params, layers, dim, seq_len)


def count_flops(jaxpr: Any, mesh_shape: Mapping[str, int]) -> float:
    """Floating-point operations of one device for one call of a traced program: matrix products, recomputed ones too.

    A multiply-add is two. Loops count as often as they run where the trace tells (`scan`), else once; of branches the
    most expensive counts. What is not manual over an axis is taken to be divided evenly over it.

    Args:
        jaxpr: such as `jax.jit(f).trace(...).jaxpr`.
        mesh_shape: axis name -> size.
    """
    return _count(getattr(jaxpr, "jaxpr", jaxpr), dict(mesh_shape))


def _count(jaxpr: Any, automatic: dict[str, int]) -> float:
    """Inside a `shard_map` shapes are those of a shard over its manual axes; the others still divide the work."""
    return sum(_count_equation(equation, automatic) for equation in jaxpr.eqns)


def _count_equation(equation: Any, automatic: dict[str, int]) -> float:
    name, params = equation.primitive.name, equation.params
    if (product := _product(equation)) is not None:
        return product / math.prod(automatic.values())
    if name == "shard_map":
        automatic = {axis: size for axis, size in automatic.items() if axis not in params["newly_manual_axes"]}
    counts = [_count(inner, automatic) for inner in inner_jaxprs(equation)]
    if name == "cond":
        return max(counts, default=0.0)
    return float(params["length"] if name == "scan" else 1) * sum(counts)


def _product(equation: Any) -> float | None:
    """Operations of a matrix product, a convolution or a fused attention; None for anything else."""
    name, params = equation.primitive.name, equation.params
    shapes = [variable.aval.shape for variable in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shapes[0][dim] for dim in contracted)
    if name == "conv_general_dilated":
        features = shapes[1][params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shapes[1]) / features
    if match := re.match(r"dot_product_attention_(fwd|bwd)", name):  # cuDNN's: q [B, T, N, H], k and v [B, S, K, H]
        batch, q_len, heads, head_dim = shapes[0]
        products = 2 if match[1] == "fwd" else 5  # backward: the scores once more, and four gradients
        return 2.0 * products * batch * heads * q_len * shapes[1][1] * head_dim
    return None
