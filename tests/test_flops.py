"""Peak rates and MFU by hand; matrix products of traced programs, counted and by formula."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain.flops import count_flops, flops_per_token, mfu, model_flops_per_token, peak_flops
from meshtrain.mesh import make_mesh
from tests.tiny_gpt import BATCH, SIZES, make_engine

ONE = {"data": 1, "model": 1}
N = 8


@pytest.mark.parametrize(
    ("kind", "dtype", "rate"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "float32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H100 80GB HBM3", "float32", 494.5e12),
        ("NVIDIA H200", "float16", 989.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA H100 PCIe", "bfloat16", None),  # slower, and not in the table
        ("NVIDIA H200 NVL", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("NVIDIA GB200", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "int8", None),
        ("cpu", "float32", None),
    ],
)
def test_peak_flops(kind: str, dtype: str, rate: float | None) -> None:
    assert peak_flops(kind, dtype) == rate


def test_flops_per_token_and_mfu() -> None:
    assert flops_per_token(1000, num_layers=2, dim=8, seq_len=16) == 6 * 1000 + 12 * 2 * 8 * 16
    assert flops_per_token(1000, 2, 8, 16, causal=True) == 6 * 1000 + 6 * 2 * 8 * 16
    # PaLM 540B, table 3 and appendix B: 238.3k tokens/s on 6144 TPU v4 (275 TFLOP/s) is 46.2% (45.7% without attention)
    palm = flops_per_token(540_350_000_000, num_layers=118, dim=48 * 256, seq_len=2048)
    assert mfu(238_300, palm, 6144, 275e12) == pytest.approx(0.462, abs=1e-3)
    assert mfu(1e5, 1e9, 8, None) is None


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def count(fn: Any, *shapes: tuple[int, ...], mesh: dict[str, int] | None = None) -> float:
    return count_flops(jax.make_jaxpr(fn)(*(array(*shape) for shape in shapes)), mesh or ONE)


def square(x: jax.Array) -> jax.Array:
    return x @ x


def cube_in_scan(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (c @ x, None), x, length=3)[0]


def by_convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID")


CUBE = 2 * N**3  # a product of two N x N matrices


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda x, y: x @ y, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (lambda x, y: jnp.einsum("bthk,bshk->bhts", x, y), [(2, 3, 4, 5), (2, 7, 4, 5)], 2 * (2 * 4 * 3 * 7) * 5),
        (lambda x: x + x.sum(), [(N, N)], 0),
        (cube_in_scan, [(N, N)], 3 * CUBE),
        (lambda x: jax.lax.fori_loop(0, 5, lambda _, c: c @ x, x), [(N, N)], 5 * CUBE),  # jax makes a scan of it
        (lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, square, x), [(N, N)], CUBE),
        (lambda x: jax.lax.cond(x[0, 0] > 0, square, cube_in_scan, x), [(N, N)], 3 * CUBE),
        (lambda x: jax.jit(square)(jax.checkpoint(square)(x)), [(N, N)], 2 * CUBE),
        (jax.grad(lambda x: jnp.sin(x @ x).sum()), [(N, N)], 3 * CUBE),  # one forward, two backward
        (by_convolution, [(2, 3, 9, 9), (5, 3, 2, 2)], 2 * (2 * 5 * 8 * 8) * (3 * 2 * 2)),
    ],
)  # fmt: skip
def test_products_by_hand(fn: Any, shapes: list[tuple[int, ...]], expected: int) -> None:
    assert count(fn, *shapes) == expected


def test_recomputation_counts() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sin(jax.checkpoint(lambda x: jnp.sin(x @ x))(x) @ x).sum()

    plain = jax.grad(lambda x: jnp.sin(jnp.sin(x @ x) @ x).sum())
    assert count(jax.grad(loss), (N, N)) - count(plain, (N, N)) == CUBE


def test_manual_axes_show_shards_and_the_others_divide() -> None:
    """On data=4 x model=2: outside nothing is manual, then `data`, then both."""
    mesh = make_mesh(4, 2)
    inner = jax.shard_map(
        square, in_specs=P(None, None), out_specs=P(None, None), axis_names={"model"}, check_vma=False
    )

    def manual_over_data(x: jax.Array) -> jax.Array:
        return square(x) + inner(x)

    over_data = jax.shard_map(
        manual_over_data, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    with jax.set_mesh(mesh):
        found = count(lambda x: over_data(x) + x @ jnp.ones((N, N)), (4 * N, N), mesh=dict(mesh.shape))
    assert found == CUBE * (1 / 2 + 1 + 4 / 8)


@dataclasses.dataclass
class _Equation:
    """A fused attention as cuDNN's, which cannot be traced without it."""

    name: str
    heads: int = 4

    @property
    def primitive(self) -> Any:
        return self

    params: Any = dataclasses.field(default_factory=dict)

    @property
    def invars(self) -> list[Any]:
        q, kv = jax.core.ShapedArray((2, 16, self.heads, 8), jnp.bfloat16), jax.core.ShapedArray((2, 32, 1, 8), "f4")
        return [_Variable(q), _Variable(kv), _Variable(kv)]

    @property
    def eqns(self) -> list[Any]:
        return [self]


@dataclasses.dataclass
class _Variable:
    aval: Any


@pytest.mark.parametrize(("name", "products"), [("fwd", 2), ("bwd", 5)])
def test_fused_attention(name: str, products: int) -> None:
    assert count_flops(_Equation(f"dot_product_attention_{name}_wrapper"), ONE) == products * 2 * 2 * 4 * 16 * 32 * 8


TOKENS = BATCH * SIZES.seq_len
BLOCK = 24 * TOKENS * SIZES.dim**2 + 4 * TOKENS * SIZES.seq_len * SIZES.dim  # its products, forward
LOGITS = 2 * TOKENS * SIZES.dim * 64  # of the padded vocabulary
DOWN = 8 * TOKENS * SIZES.dim**2  # the MLP's last product


def step_flops(data: int, model: int, stage: int, **rest: Any) -> float:
    engine = make_engine(data, model, stage, **rest)
    return count_flops(engine.trace().jaxpr, dict(engine.mesh.shape))


@pytest.mark.parametrize(("data", "model"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_step_counts_as_by_hand_on_every_mesh(data: int, model: int) -> None:
    """Each product once forward and twice backward, divided over the devices."""
    whole = 3 * (SIZES.num_layers * BLOCK + LOGITS)
    assert step_flops(data, model, 1) * data * model == whole


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_full_recomputation_is_one_more_forward_pass(num_microbatches: int) -> None:
    """Of the blocks, without the last product of each, whose result nothing backward needs."""
    sizes = dataclasses.replace(SIZES, remat="full")
    found = step_flops(1, 1, 1, sizes=sizes, num_microbatches=num_microbatches)
    assert found == 3 * (SIZES.num_layers * BLOCK + LOGITS) + SIZES.num_layers * (BLOCK - DOWN)


def test_the_models_formula_is_the_count_without_the_small_parameters() -> None:
    """PaLM's counts each parameter in a product, biases and norms too: 1 % of this tiny model."""
    layout = make_engine(1, 1, 1).layout
    per_token = model_flops_per_token(layout, SIZES, SIZES.seq_len)
    in_products = 12 * SIZES.num_layers * SIZES.dim**2 + 64 * SIZES.dim
    others = sum(math.prod(leaf.shape) for leaf in layout.leaves.values()) - in_products - 16 * 32
    assert per_token * TOKENS == 3 * (SIZES.num_layers * BLOCK + LOGITS) + 6 * others * TOKENS
