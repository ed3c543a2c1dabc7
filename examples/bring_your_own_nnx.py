"""Your nnx model, unchanged, with tensor parallelism and ZeRO.

python examples/bring_your_own_nnx.py --stage 3 --model-axis 2
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshtrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3")
parser.add_argument("--model-axis", type=int, default=2, help="devices that share each layer")
args = parser.parse_args()
meshtrain.use_virtual_devices(8)  # eight CPU devices; without this line, the machine's own

VOCAB, LENGTH, WIDTH, HEADS, LAYERS, STEPS = 32, 16, 32, 4, 2, 60


class Block(nnx.Module):
    """One layer. Plain Flax: it knows no mesh, no axis and no collective."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.02, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]"""
        x = x + self.dropout(self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0])))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class LanguageModel(nnx.Module):
    """Tokens to logits; one table serves as embedding and for the logits (tied weights)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens, self.positions = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, V]"""
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def loss(model: LanguageModel, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two sums, of token losses and of token weights: means of unequal parts of a batch would not add up."""
    return meshtrain.cross_entropy(model(batch["tokens"]), batch["targets"], batch["weights"])


# How `model` cuts each weight: (the end of its path, a spec of its last dims). The first match wins.
RULES = [
    (r"(query|key|value)/kernel", P(None, "model", None)),  # column parallel: each device has some of the heads
    (r"(query|key|value)/bias", P("model", None)),
    (r"out/kernel", P("model", None, None)),  # row parallel: its output is summed over `model`
    (r"up/kernel", P(None, "model")),  # column parallel
    (r"up/bias", P("model")),
    (r"down/kernel", P("model", None)),  # row parallel
    (r"tokens/embedding", P("model", None)),  # vocabulary parallel, for the lookup and the logits
    (r".*", P()),  # the rest is whole on each device of `model`; what ZeRO cuts over `data` is not for rules to say
]


def make_batch(step: int) -> dict[str, np.ndarray]:
    """The task is to copy: each row is a random half twice, and only the targets in its second half count."""
    half = np.random.default_rng(step).integers(VOCAB, size=(32, LENGTH // 2), dtype=np.int32)
    row = np.concatenate([half, half, half[:, :1]], axis=1)
    counts = np.arange(LENGTH) >= LENGTH // 2 - 1
    return {"tokens": row[:, :-1], "targets": row[:, 1:], "weights": np.tile(counts.astype(np.float32), (32, 1))}


engine = meshtrain.initialize(  # the counterpart of deepspeed.initialize
    meshtrain.from_nnx(LanguageModel, loss),
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
