"""What a training step of ours costs beside one written by hand for the same model, and how long the first one takes.

    python benchmarks/step_overhead.py --layouts 1x1,4x2 --rounds 30 --json overhead.json
    python benchmarks/step_overhead.py --quick

By hand: plain functions and `jax.jit`, the maths, parameter shapes and placement of `models.gpt.GPT`, and nothing else:
no modules, no rules, no ZeRO, no guard against gradients that are not finite. It exists in several variants, and the
fastest on each layout is the one that we are measured by.

Each layout (data x model) runs in a process of its own with that many virtual CPU devices. First the losses of all
candidates must agree over a few updates. Then they take turns, one update each, in an order that rotates; so whatever
else the machine does hits all of them. Figures are medians of one update; the ratios' spread is the middle half of the
ratios within a round. The hand-written step takes part twice: its ratio to itself is the error of the measurement.

Shapes: B batch, T sequence, D model width, H heads, K head dim, L layers, V vocabulary.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from meshtrain import from_nnx, initialize, make_mesh  # noqa: E402
from meshtrain.config import OptimConfig, load  # noqa: E402
from meshtrain.engine import Engine, param_shapes  # noqa: E402
from meshtrain.mesh import use_virtual_devices  # noqa: E402
from meshtrain.optim import make_optimizer  # noqa: E402
from meshtrain.trainer import build  # noqa: E402
from models.gpt import GPT, PRESETS, RULES, GPTConfig  # noqa: E402

LOSS_TOLERANCE = 1e-5
CHECKED_UPDATES = 4
CLIP_NORM = 1.0
OPTIM = OptimConfig(lr=1e-3, schedule="constant", clip_norm=CLIP_NORM)
Batch = dict[str, Any]
Arrays = dict[str, Any]
K = TypeVar("K")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one worker process measures.

    Attributes:
        data, model: sizes of the mesh axes.
        batch: records per update, over all devices.
        sizes: fields of the preset that are replaced.
        pilot: rounds by which the fastest hand-written variant is chosen.
        quick: of the hand-written variants, try only two.
    """

    data: int
    model: int
    preset: str
    batch: int
    rounds: int
    pilot: int
    stages: list[int]
    sizes: dict[str, int]
    quick: bool

    @property
    def config(self) -> GPTConfig:
        """The model's sizes."""
        return dataclasses.replace(PRESETS[self.preset], **self.sizes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the step by hand


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of writing it.

    Attributes:
        layers: a Python loop, a scan, or a scan whose layers are all unrolled. The last keeps what the backward pass
            needs in memory; of a loop, the compiler computes much again inside each gradient that reads it.
        barrier: after each residual add, which keeps the compiler from computing that again.
        placed: says at each residual add how the stream lies.
        mapped: `data` is manual (`jax.shard_map`), and gradients are summed over it once, not by the compiler.
    """

    layers: str = "unrolled scan"
    barrier: bool = True
    placed: bool = False
    mapped: bool = False

    def __str__(self) -> str:
        flags = {"barriers": self.barrier, "placed": self.placed, "mapped": self.mapped}
        return ", ".join([self.layers, *(name for name, value in flags.items() if value)])


def variants(plan: Plan) -> list[Variant]:
    """The variants that are worth a try on a layout."""
    if plan.quick:
        return [Variant(), Variant("loop")]
    found = [Variant(layers, barrier) for layers in ("unrolled scan", "loop", "scan") for barrier in (True, False)]
    found += [Variant(barrier=barrier, placed=True) for barrier in (True, False) if plan.model > 1]
    return found + [Variant(barrier=barrier, mapped=True) for barrier in (True, False) if plan.data > 1]


HAND_SPECS = {
    "blocks/attn/qkv/kernel": P(None, None, None, "model", None),
    "blocks/attn/qkv/bias": P(None, None, "model", None),
    "blocks/attn/out/kernel": P(None, "model", None, None),
    "blocks/mlp/up/kernel": P(None, None, "model"),
    "blocks/mlp/up/bias": P(None, "model"),
    "blocks/mlp/down/kernel": P(None, "model", None),
    "wte/embedding": P("model", None),
}  # all others rest whole


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Over the last dim."""
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.maximum(jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean), 0.0)
    return (x - mean) * (jax.lax.rsqrt(var + 1e-5) * scale) + bias


def attention(q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array) -> jax.Array:
    """Causal attention, [B, T, H, K] each."""
    seq, head_dim = q_BTHK.shape[1], q_BTHK.shape[3]
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK * head_dim**-0.5, k_BTHK)
    scores_BHTS = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores_BHTS, -2e38)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores_BHTS, -1), v_BTHK)


def hand_loss(num_layers: int, variant: Variant, mesh: Mesh) -> Callable[[Arrays, Batch], Any]:
    """`(parameters, batch) -> sum of the token losses`."""

    def residual(x_BTD: jax.Array) -> jax.Array:
        if variant.placed:
            x_BTD = jax.lax.with_sharding_constraint(x_BTD, NamedSharding(mesh, P("data", None, None)))
        return jax.lax.optimization_barrier(x_BTD) if variant.barrier else x_BTD

    def block(x_BTD: jax.Array, w: Arrays) -> jax.Array:
        h_BTD = layer_norm(x_BTD, w["ln_1/scale"], w["ln_1/bias"])
        qkv_BT3HK = jnp.einsum("btd,dchk->btchk", h_BTD, w["attn/qkv/kernel"]) + w["attn/qkv/bias"]
        out_BTHK = attention(qkv_BT3HK[:, :, 0], qkv_BT3HK[:, :, 1], qkv_BT3HK[:, :, 2])
        x_BTD = residual(x_BTD + jnp.einsum("bthk,hkd->btd", out_BTHK, w["attn/out/kernel"]) + w["attn/bias"])
        h_BTD = layer_norm(x_BTD, w["ln_2/scale"], w["ln_2/bias"])
        h_BTF = jax.nn.gelu(h_BTD @ w["mlp/up/kernel"] + w["mlp/up/bias"], approximate=True)
        return residual(x_BTD + h_BTF @ w["mlp/down/kernel"] + w["mlp/bias"])

    def loss(p: Arrays, batch: Batch) -> Any:
        table_VD = p["wte/embedding"]
        x_BTD = residual(jnp.take(table_VD, batch["tokens"], axis=0) + p["wpe/embedding"])
        stacked = {path.removeprefix("blocks/"): x for path, x in p.items() if path.startswith("blocks/")}
        if variant.layers == "loop":
            for i in range(num_layers):
                x_BTD = block(x_BTD, {path: x[i] for path, x in stacked.items()})
        else:
            unroll = num_layers if variant.layers == "unrolled scan" else 1
            x_BTD, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x_BTD, stacked, unroll=unroll)
        logits_BTV = layer_norm(x_BTD, p["ln_f/scale"], p["ln_f/bias"]) @ table_VD.T
        # A comparison, not a lookup: each device then works on its part of a vocabulary that is cut.
        hit_BTV = jnp.arange(logits_BTV.shape[-1]) == batch["targets"][..., None]
        chosen_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), -1)
        return jnp.sum((jax.nn.logsumexp(logits_BTV, -1) - chosen_BT) * batch["weights"])

    return loss


def hand_gradients(num_layers: int, variant: Variant, mesh: Mesh) -> Callable[[Arrays, Batch], Any]:
    """`(parameters, batch) -> (sum of the token losses, number of tokens, gradients of that sum)`."""
    loss = hand_loss(num_layers, variant, mesh)

    def gradients(params: Arrays, batch: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        sums = value, jnp.sum(batch["weights"]), grads
        return jax.lax.psum(sums, "data") if variant.mapped else sums

    if not variant.mapped:
        return gradients
    return jax.shard_map(
        gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=False
    )


def hand_update(gradients: Callable[[Arrays, Batch], Any], optim: OptimConfig) -> Callable[[Any, Batch], Any]:
    """AdamW behind a clip by global norm: `((params, mu, nu, count), batch) -> (the next, mean loss)`."""

    def update(state: Any, batch: Batch) -> Any:
        params, mu, nu, count = state
        value, tokens, grads = gradients(params, batch)
        grads = {path: g / tokens for path, g in grads.items()}
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values()))
        clip = jnp.minimum(1.0, CLIP_NORM / norm)
        count = count + 1
        grads = {path: g * clip for path, g in grads.items()}
        mu = {path: optim.beta1 * mu[path] + (1 - optim.beta1) * g for path, g in grads.items()}
        nu = {path: optim.beta2 * nu[path] + (1 - optim.beta2) * jnp.square(g) for path, g in grads.items()}
        fix_mu, fix_nu = 1 - optim.beta1**count, 1 - optim.beta2**count

        def next_param(path: str, param: jax.Array) -> jax.Array:
            step = (mu[path] / fix_mu) / (jnp.sqrt(nu[path] / fix_nu) + optim.eps)
            decay = optim.weight_decay if path.endswith(("kernel", "embedding")) else 0.0
            return param - optim.lr * (step + decay * param)

        return ({path: next_param(path, param) for path, param in params.items()}, mu, nu, count), value / tokens

    return update


# ---------------------------------------------------------------- candidates


@dataclasses.dataclass
class Candidate:
    """A step, what makes its first state, and the state that it has come to.

    `step` may use up a state's memory, and tells something from which `read_loss` takes the loss.
    """

    step: Callable[[Any, Batch], tuple[Any, Any]]
    start: Callable[[], Any]
    read_loss: Callable[[Any], float]
    state: Any = None

    def advance(self, batch: Batch) -> float:
        """One update, to its end; the loss before it."""
        state = self.start() if self.state is None else self.state
        self.state, told = jax.block_until_ready(self.step(state, batch))
        return self.read_loss(told)


def ours(plan: Plan, stage: int, mesh: Mesh, batch: Batch) -> Engine:
    """The engine of a stage, as `meshtrain train` builds it."""
    return initialize(
        from_nnx(lambda rngs: GPT(plan.config, rngs=rngs), GPT.loss),
        batch,
        mesh=mesh,
        rules=RULES,
        optimizer=lambda layout: make_optimizer(
            OPTIM, 1000, param_shapes(layout), {path: leaf.num_stacked for path, leaf in layout.leaves.items()}
        ),
        stage=stage,
    )


def by_hand(plan: Plan, mesh: Mesh, params: Mapping[str, np.ndarray[Any, Any]]) -> dict[Variant, Candidate]:
    """Each hand-written variant, from given parameters."""
    placed = {path: NamedSharding(mesh, HAND_SPECS.get(path, P())) for path in params}
    shardings, replicated = (placed, placed, placed, NamedSharding(mesh, P())), NamedSharding(mesh, P())
    zeros = {path: np.zeros_like(x) for path, x in params.items()}

    def candidate(variant: Variant) -> Candidate:
        update = hand_update(hand_gradients(plan.config.num_layers, variant, mesh), OPTIM)
        step = jax.jit(update, donate_argnums=0, out_shardings=(shardings, replicated))
        return Candidate(step, lambda: jax.device_put((dict(params), zeros, zeros, np.int32(0)), shardings), float)

    return {variant: candidate(variant) for variant in variants(plan)}


def make_batch(plan: Plan) -> Batch:
    """Random tokens, all of which count."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, plan.config.vocab_size, (plan.batch, plan.config.seq_len + 1), np.int32)
    weights = np.ones((plan.batch, plan.config.seq_len), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


# ---------------------------------------------------------------- measuring


def compare_losses(candidates: Mapping[str, Candidate], batch: Batch) -> float:
    """The largest difference of a loss from the first candidate's, over the first updates.

    Raises:
        AssertionError: it is too large: the candidates do not compute the same.
    """
    losses = {name: [one.advance(batch) for _ in range(CHECKED_UPDATES)] for name, one in candidates.items()}
    first = next(iter(losses.values()))
    for name, values in losses.items():
        worst = max(abs(a - b) for a, b in zip(values, first, strict=True))
        if not worst <= LOSS_TOLERANCE:
            raise AssertionError(f"'{name}' computes something else: losses {values} beside {first}")
    return max(abs(a - b) for values in losses.values() for a, b in zip(values, first, strict=True))


def take_turns(candidates: Mapping[K, Candidate], batch: Batch, rounds: int) -> dict[K, list[float]]:
    """Seconds of one update, a figure per round, by candidate."""
    seconds: dict[K, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            candidates[name].advance(batch)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summarize(seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Medians and their ratios to the first candidate's, with the middle half of the ratios within a round."""
    base = next(iter(seconds.values()))
    rows = []
    for name, values in seconds.items():
        low, _, high = statistics.quantiles([a / b for a, b in zip(values, base, strict=True)], n=4, method="inclusive")
        ratio = statistics.median(values) / statistics.median(base)
        rows.append({"name": name, "seconds": statistics.median(values), "ratio": ratio, "low": low, "high": high})
    return rows


def measure(plan: Plan) -> dict[str, Any]:
    """All of one layout; runs in a worker."""
    use_virtual_devices(plan.data * plan.model)
    mesh = make_mesh(plan.data, plan.model)
    host_batch = make_batch(plan)
    engines = {f"stage {stage}": ours(plan, stage, mesh, host_batch) for stage in plan.stages}
    engine = next(iter(engines.values()))
    batch = engine.shard(host_batch)

    hands = by_hand(plan, mesh, {path: np.asarray(x) for path, x in engine.init().params.items()})
    compare_losses({str(variant): hand for variant, hand in hands.items()}, batch)
    pilot = {variant: statistics.median(values) for variant, values in take_turns(hands, batch, plan.pilot).items()}
    fastest = min(pilot, key=pilot.__getitem__)

    final = {name: dataclasses.replace(hands[fastest], state=None) for name in ("by hand", "by hand, again")}
    for name, engine in engines.items():
        final[name] = Candidate(engine.step, engine.init, lambda metrics: float(metrics["loss"]))
    difference = compare_losses(final, batch)
    rows = summarize(take_turns(final, batch, plan.rounds))
    found = {"layout": f"{plan.data}x{plan.model}", "variant": str(fastest), "loss_difference": difference}
    return found | {"pilot": {str(variant): seconds for variant, seconds in pilot.items()}, "rows": rows}


# ---------------------------------------------------------------- start to first update


def train_arguments(sizes: Mapping[str, int], folder: str) -> list[str]:
    """Arguments of `meshtrain`: the example with other sizes."""
    overrides = [f"model.overrides.{key}={value}" for key, value in sizes.items() if key not in ("seq_len", "unroll")]
    if "seq_len" in sizes:
        overrides.append(f"data.seq_len={sizes['seq_len']}")
    config = str(ROOT / "examples" / "gpt_tiny.yaml")
    return ["train", config, f"run.dir={folder}", "log.progress=plain", "train.log_every=1", *overrides]


def first_update(sizes: Mapping[str, int], env: Mapping[str, str]) -> float:
    """Seconds from the start of `meshtrain train` to its line about the first update."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "meshtrain.cli", *train_arguments(sizes, folder)]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step"):
                    seconds = time.perf_counter() - start
                    process.kill()
                    return seconds
    raise RuntimeError("meshtrain ended before its first update")


def start_parts(started: float, sizes: Mapping[str, int]) -> dict[str, float]:
    """Seconds of each part of a start; runs in a worker, which began at `started` (of `time.time`)."""
    laps = [("python, imports", time.time() - started)]

    def lap(name: str) -> None:
        laps.append((name, time.time() - started - sum(seconds for _, seconds in laps)))

    _, path, *overrides = train_arguments(sizes, "unused")
    job = build(load(path, overrides))
    lap("data, model, layout")
    state = jax.block_until_ready(job.engine.init())
    lap("initial state")
    job.engine.lower().compile()
    lap("compile the step")
    batch = {name: np.zeros(x.shape, x.dtype) for name, x in job.batches.abstract.items()}
    jax.block_until_ready(job.engine.step(state, batch))
    lap("first update")
    return dict(laps)


def startup(sizes: Mapping[str, int], parts: bool) -> list[dict[str, Any]]:
    """Seconds to the first update with jax's compilation cache empty and filled, and their parts."""
    rows: list[dict[str, Any]] = [{"cache": cache, "parts": {}} for cache in ("empty", "filled")]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for row in rows:
            row["seconds"] = first_update(sizes, worker_env(first))
        for row in rows if parts else ():
            row["parts"] = run_worker("start", {"started": time.time(), "sizes": dict(sizes)}, worker_env(second))
    return rows


# ---------------------------------------------------------------- processes, output


def worker_env(cache: str = "") -> dict[str, str]:
    """The environment of a child process: its compilation cache is `cache`, or none."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]), "JAX_PLATFORMS": "cpu"}
    if cache:
        env |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return env


def run_worker(kind: str, arguments: Mapping[str, Any], env: Mapping[str, str]) -> Any:
    """Runs this script as a worker and returns what it found."""
    command = [sys.executable, __file__, "--worker", json.dumps([kind, arguments])]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return json.loads(done.stdout.splitlines()[-1])


def work(kind: str, arguments: dict[str, Any]) -> None:
    """What a worker does; its last line is the result."""
    print(json.dumps(start_parts(**arguments) if kind == "start" else measure(Plan(**arguments))))


def layout_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row per layout and candidate."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("data x model", "step"):
        table.add_column(name, no_wrap=True)
    for name in ("ms per update", "/ by hand", "middle half"):
        table.add_column(name, justify="right")
    for result in results:
        for i, row in enumerate(result["rows"]):
            name = f"by hand: {result['variant']}" if i == 0 else row["name"]
            spread = f"{row['low']:.3f} - {row['high']:.3f}" if i else ""
            ratio = f"{row['ratio']:.3f}" if i else ""
            table.add_row("" if i else result["layout"], name, f"{1e3 * row['seconds']:.1f}", ratio, spread)
    return table


def start_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per state of the compilation cache."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("compilation cache", "total", *rows[0]["parts"]):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["cache"], *(f"{seconds:.1f}" for seconds in (row["seconds"], *row["parts"].values())))
    return table


def environment(plan: Plan) -> dict[str, Any]:
    """What the figures depend on."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}
    return {"packages": packages, "cores": os.cpu_count(), "batch": plan.batch, "model": vars(plan.config)}


def make_plans(args: argparse.Namespace) -> Iterator[Plan]:
    """One plan per layout."""
    sizes = {"num_layers": 2, "dim": 64, "num_heads": 4, "seq_len": 64, "unroll": 2} if args.quick else {}
    rounds = args.rounds or (15 if args.quick else 21)
    stages = args.stages or ([0, 3] if args.quick else [0, 1, 2, 3])
    for layout in args.layouts or (["1x1"] if args.quick else ["1x1", "2x1", "1x2", "8x1", "4x2", "2x4"]):
        data, model = map(int, layout.split("x"))
        yield Plan(data, model, args.preset, args.batch, rounds, 7, stages, sizes, args.quick)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", type=lambda text: text.split(","), help="data x model, as in 1x1,2x1,1x2")
    parser.add_argument("--stages", type=lambda text: [*map(int, text.split(","))], help="as in 0,3")
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=16, help="records per update, over all devices")
    parser.add_argument("--rounds", type=int, help="timed updates of each candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="a small model on one device, in under a minute")
    parser.add_argument("--no-start", action="store_true", help="leave out the start to the first update")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Runs the workers and shows what they found."""
    args = parse()
    if args.worker:
        work(*json.loads(args.worker))
        return
    plans = list(make_plans(args))
    facts = environment(plans[0])
    console = Console(width=max(100, Console().width))
    console.print(f"GPT '{args.preset}', {args.batch} x {plans[0].config.seq_len} tokens, jax {jax.__version__}")
    results = []
    for plan in plans:
        with console.status(f"measuring {plan.data}x{plan.model}"):
            results.append(run_worker("steps", dataclasses.asdict(plan), worker_env()))
    console.print(layout_table(results))
    start = [] if args.no_start else startup(plans[0].sizes, parts=not args.quick)
    if start:
        console.print("Seconds from the start of `meshtrain train` to its first update; the parts are of another run")
        console.print(start_table(start))
    if args.json:
        args.json.write_text(json.dumps({"environment": facts, "layouts": results, "startup": start}, indent=1))


if __name__ == "__main__":
    main()
