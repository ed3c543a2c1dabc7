"""Your own functions, without any framework, with tensor parallelism and ZeRO.

python examples/bring_your_own_function.py --stage 3 --model-axis 2
"""

import argparse
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshtrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3")
parser.add_argument("--model-axis", type=int, default=2, help="devices that share each layer")
args = parser.parse_args()
meshtrain.use_virtual_devices(8)  # eight CPU devices; without this line, the machine's own

VOCAB, LENGTH, WIDTH, HEADS, LAYERS, STEPS = 32, 16, 32, 4, 2, 60


def init(key: jax.Array) -> dict[str, Any]:
    """The parameters, a tree of arrays. Plain JAX: it knows no mesh, no axis and no collective."""
    shapes = {
        "tokens": (VOCAB, WIDTH),  # one table serves as embedding and for the logits (tied weights)
        "positions": (LENGTH, WIDTH),
        "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / WIDTH**0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss(params: dict[str, Any], batch: dict[str, jax.Array], key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Two sums, of token losses and of token weights: means of unequal parts of a batch would not add up."""

    def dropout(x: jax.Array, key: jax.Array | None) -> jax.Array:
        return x if key is None else jnp.where(jax.random.bernoulli(key, 0.98, x.shape), x / 0.98, 0.0)

    def norm(x: jax.Array) -> jax.Array:
        return jax.nn.standardize(x, epsilon=1e-6)

    def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, None]:
        w, keys = scanned
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", norm(x), w["qkv"]), 2, 0)
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dropout(jnp.einsum("bthk,hkd->btd", heads, w["out"]), keys and keys[0])
        return x + dropout(jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], keys and keys[1]), None

    stack = {name: params[name] for name in ("qkv", "out", "up", "down")}
    keys = None if key is None else tuple(jax.random.split(key, (2, LAYERS)))  # None in evaluation: no dropout
    x = params["tokens"][batch["tokens"]] + params["positions"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, (stack, keys))
    return meshtrain.cross_entropy(norm(x) @ params["tokens"].T, batch["targets"], batch["weights"])


# How `model` cuts each weight: (the end of its path, a spec of its last dims). The first match wins.
RULES = [
    (r"qkv", P(None, None, "model", None)),  # column parallel: each device has some of the heads
    (r"out", P("model", None, None)),  # row parallel: its output is summed over `model`
    (r"up", P(None, "model")),  # column parallel
    (r"down", P("model", None)),  # row parallel
    (r"tokens", P("model", None)),  # vocabulary parallel, for the lookup and the logits
    (r"positions", P()),  # whole on each device of `model`; what ZeRO cuts over `data` is not for rules to say
]


def make_batch(step: int) -> dict[str, np.ndarray]:
    """The task is to copy: each row is a random half twice, and only the targets in its second half count."""
    half = np.random.default_rng(step).integers(VOCAB, size=(32, LENGTH // 2), dtype=np.int32)
    row = np.concatenate([half, half, half[:, :1]], axis=1)
    counts = np.arange(LENGTH) >= LENGTH // 2 - 1
    return {"tokens": row[:, :-1], "targets": row[:, 1:], "weights": np.tile(counts.astype(np.float32), (32, 1))}


engine = meshtrain.initialize(  # the counterpart of deepspeed.initialize
    meshtrain.from_function(init, loss),
    make_batch(0),
    mesh=meshtrain.make_mesh(model=args.model_axis),
    rules=RULES,
    optimizer=optax.adam(1e-2),
    stage=args.stage,
)
print(engine.layout)

state = engine.init()
for step in range(STEPS):
    state, metrics = engine.step(state, make_batch(step))
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:3}  loss {metrics['loss']:.4f}")

with tempfile.TemporaryDirectory() as directory, meshtrain.Checkpointer(directory, keep=1) as checkpointer:
    checkpointer.save(STEPS, state)
    restored = checkpointer.restore(STEPS, engine.abstract_state())  # an engine of any mesh and stage can read it
for name, each in [("before", state), ("after", restored)]:
    loss_sum, tokens = engine.evaluate(each, make_batch(STEPS))  # without dropout
    print(f"{name:6} saving and restoring  loss {loss_sum / tokens:.6f}")
