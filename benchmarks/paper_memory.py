"""The memory and communication figures of the ZeRO paper, from our training step compiled for GPUs that are not here.

    python benchmarks/paper_memory.py --json paper.json     # needs the extra: pip install meshtrain[plan]
    python benchmarks/paper_memory.py --rows zero-13b 1t --tables rows

Four tables (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"):

* rows: the models of the paper's evaluation, one config each under `examples/paper/`, compiled for H100s, their peak
  beside the 32 GB of the paper's V100s; and a trillion parameters on 1,024 GPUs.
* stages: the compiler's peak of the 13B model at each stage.
* states: the paper's table 1, model states by stage and data degree, counted from the layout. Compiles nothing.
* volume: what crosses `data` in one update, in units of the number of parameters.

Each compilation runs in a process of its own, whose time and memory are reported. GB are 1e9 bytes.
"""

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, AxisType
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from meshtrain.config import Config, load  # noqa: E402
from meshtrain.engine import Engine  # noqa: E402
from meshtrain.plan.compile import compile_step  # noqa: E402
from meshtrain.plan.facts import Cluster, Facts  # noqa: E402
from meshtrain.state import state_bytes_per_device  # noqa: E402
from meshtrain.target import load_target  # noqa: E402
from meshtrain.trainer import make_engine  # noqa: E402

CONFIGS = ROOT / "examples" / "paper"
NOMINAL = {
    "zero-6b": 6e9, "zero-8b": 8e9, "zero-13b": 13e9, "zero-40b": 40e9, "zero-60b": 60e9, "zero-100b": 100e9,
    "zero-170b": 170e9, "1t": 1e12,
}  # fmt: skip
V100_BYTES = 32e9
MAX_RSS = 8e9  # of one compilation
GPUS_PER_NODE = 8
TABLES = ("rows", "stages", "states", "volume")
# Of table 1, which gives only the number of parameters: (layers, width, heads) that come within 1 % of it.
STATE_MODELS = {"7.5B": (36, 4096, 32), "128B": (101, 10240, 80), "1T": (128, 25600, 200)}
STATE_GPUS = (1, 4, 16, 64, 256, 1024)
STATE_STAGES = (1, 2, 3)


# ---------------------------------------------------------------- the formulas


def paper_state_bytes(psi: float, num_data: int, stage: int) -> float:
    """Model states of one device in the paper (section 5): fp16 weights and gradients, 12 bytes of Adam in fp32."""
    return {1: 4 * psi + 12 * psi / num_data, 2: 2 * psi + 14 * psi / num_data, 3: 16 * psi / num_data}[stage]


def our_state_bytes(psi: float, num_data: int, stage: int) -> float:
    """The same of ours: fp32 weights and moments rest sharded; bf16 weights, and at stage 1 gradients, whole in a step.

    The shards of the gradients are float32, so at stage 2 they take 2 bytes more than the paper's. With one device
    nothing is gathered, and no copy of the weights held, from stage 2 on.
    """
    if num_data == 1:
        return 16 * psi
    return {1: 4 * psi + 12 * psi / num_data, 2: 2 * psi + 16 * psi / num_data, 3: 16 * psi / num_data}[stage]


def resting_bytes(psi: float, num_devices: int) -> float:
    """What rests between two updates at any stage from 1 on: weights and two moments in float32."""
    return 12 * psi / num_devices


def counted_state_bytes(engine: Engine) -> tuple[int, int]:
    """`(model states of one device in the step, those of them that ZeRO cannot cut)`, leaf by leaf from the layout."""
    layout = engine.layout
    whole = [leaf for leaf in layout.leaves.values() if leaf.zero_dim is None]
    shards = sum(map(layout.bytes_per_device, layout.leaves.values()))  # float32, as gradients are
    gathered = 2 * (layout.num_params if layout.stage == 1 else layout.num_params - sum(map(_size, whole)))
    gradients = 2 * layout.num_params if layout.stage == 1 else shards
    held = state_bytes_per_device(engine.abstract_state()) + gradients + (gathered if layout.stage < 3 else 0)
    per_element = 16 if layout.stage == 1 else 12 + 4
    return held, per_element * sum(map(_size, whole))


def _size(leaf: Any) -> int:
    size = 1
    for dim in leaf.shape:
        size *= dim
    return size


def abstract_engine(config: Config) -> Engine:
    """A config's engine on a mesh of no devices: shapes, layout and state, and nothing that could run."""
    sizes = config.mesh.data, config.mesh.model
    mesh: Any = AbstractMesh(sizes, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    return make_engine(config, load_target(config), mesh)


def state_config(model: str, num_data: int, stage: int) -> Config:
    """One cell of table 1."""
    layers, dim, heads = STATE_MODELS[model]
    sizes = f"{{num_layers: {layers}, dim: {dim}, num_heads: {heads}}}"
    return load(
        CONFIGS / "zero-13b.yaml",
        [f"model.overrides={sizes}", f"mesh.data={num_data}", f"train.global_batch={num_data}", f"zero.stage={stage}"],
    )


# ---------------------------------------------------------------- compiling


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step, with the largest resident memory of the process that compiled it, in bytes."""

    facts: Facts
    rss: int

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.facts.cluster.num_gpus

    def volume(self, op: str) -> float:
        """What each device sends over `data` in collectives of a kind, in units of the parameters of a model shard."""
        found = (each for each in self.facts.collectives if each.op == op and "data" in each.axis.split("+"))
        return sum(each.volume_elements for each in found) / self.facts.shard_params


def compile_config(name: str, overrides: Sequence[str] = ()) -> Compiled:
    """Compiles one config of `examples/paper/` in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{name} {' '.join(overrides)}: {done.stderr.strip()[-2000:]}")
    values = json.loads(done.stdout.splitlines()[-1])
    return Compiled(Facts.from_json(values["facts"]), values["rss"])


def _environment() -> dict[str, str]:
    """Ours, without the flags of another use of XLA."""
    rest = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    return rest | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def worker(name: str, overrides: Sequence[str]) -> None:
    """Compiles a config and prints the facts as JSON."""
    config = load(CONFIGS / f"{name}.yaml", overrides)
    num_nodes = config.mesh.data * config.mesh.model // GPUS_PER_NODE
    facts = compile_step(config, Cluster("h100", num_nodes, GPUS_PER_NODE))
    rss = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"facts": facts.to_json(), "rss": rss * 1024}))


# ---------------------------------------------------------------- the tables


def gb(num_bytes: float) -> str:
    """Bytes in GB."""
    return f"{num_bytes / 1e9:.2f}"


def make_table(title: str, columns: Iterable[str]) -> Table:
    """An empty table in Markdown."""
    table = Table(title=title, box=box.MARKDOWN, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def rows_table(names: Sequence[str], found: dict[str, Any]) -> Table:
    """The models of the paper's evaluation."""
    columns = ("row", "params", "GPUs", "mesh", "stage", "batch", "12 psi/N", "at rest", "states, paper", "ours",
               "peak", "32 GB", "compile", "RSS")  # fmt: skip
    table = make_table("GB per GPU, records per model group; RSS: of the compiler, GB", columns)
    for name in names:
        config, made = load(CONFIGS / f"{name}.yaml"), compile_config(name)
        facts, (data, model) = made.facts, made.facts.mesh.values()
        paper, ours = (form(facts.params / model, data, facts.stage) for form in (paper_state_bytes, our_state_bytes))
        table.add_row(
            name, f"{facts.params / 1e9:.2f}B", str(made.num_gpus), f"{data}x{model}", str(facts.stage),
            str(config.train.global_batch // data), gb(resting_bytes(facts.params, made.num_gpus)),
            gb(facts.state_bytes), gb(paper), gb(ours), gb(facts.peak_bytes),
            "fits" if facts.peak_bytes < V100_BYTES else "no", f"{facts.compile_seconds:.0f} s", gb(made.rss),
        )  # fmt: skip
        volume = {op: made.volume(op) for op in ("all-gather", "reduce-scatter")}
        found[name] = {"facts": _summary(facts), "rss": made.rss, "volume": volume}
    return table


def stages_table(found: dict[str, Any]) -> Table:
    """One model at each stage."""
    table = make_table("13B on 128x1, GB per GPU", ("stage", "states, the paper's", "ours", "peak"))
    for stage in STATE_STAGES:
        facts = compile_config("zero-13b", [f"zero.stage={stage}"]).facts
        paper, ours = (form(facts.params, 128, stage) for form in (paper_state_bytes, our_state_bytes))
        table.add_row(str(stage), gb(paper), gb(ours), gb(facts.peak_bytes))
        found[str(stage)] = _summary(facts)
    return table


def states_table(found: dict[str, Any]) -> Table:
    """The paper's table 1: ours, counted / the paper's formula."""
    table = make_table("Model states, GB per device: ours / the paper's", ("model", "stage", *map(str, STATE_GPUS)))
    for model in STATE_MODELS:
        for stage in STATE_STAGES:
            cells = []
            for num_data in STATE_GPUS:
                engine = abstract_engine(state_config(model, num_data, stage))
                held, uncut = counted_state_bytes(engine)
                paper = paper_state_bytes(engine.layout.num_params, num_data, stage)
                cells.append(f"{held / 1e9:.4g} / {paper / 1e9:.4g}")
                found[f"{model} stage {stage} on {num_data}"] = {"ours": held, "paper": paper, "uncut": uncut}
            table.add_row(model, str(stage), *cells)
    return table


def volume_table(found: dict[str, Any]) -> Table:
    """What crosses `data`."""
    columns = ("stage", "M", "all-gather", "reduce-scatter", "all-reduce", "sum", "ZeRO's flow")
    table = make_table("8B on 128x1: volume over `data` in psi, M microbatches", columns)
    expected: dict[int, Callable[[int], int]] = {0: lambda m: 2, 1: lambda m: 2, 2: lambda m: 1 + m, 3: lambda m: 3 * m}
    for stage, flow in expected.items():
        for m in (1, 2):
            made = compile_config("zero-8b", [f"zero.stage={stage}", f"train.microbatches={m}"])
            parts = [made.volume(op) for op in ("all-gather", "reduce-scatter", "all-reduce")]
            table.add_row(str(stage), str(m), *(f"{part:.4f}" for part in (*parts, sum(parts))), str(flow(m)))
            found[f"stage {stage}, M={m}"] = parts
    return table


def _summary(facts: Facts) -> dict[str, Any]:
    """The facts that the tables are made of."""
    keys = ("mesh", "stage", "params", "state", "peak_bytes", "compile_seconds")
    return {key: value for key, value in facts.to_json().items() if key in keys}


def main() -> None:
    """Prints the tables that were asked for."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=list(NOMINAL), default=list(NOMINAL))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    console, found = Console(width=max(170, Console().width)), {name: {} for name in args.tables}
    makers: dict[str, Callable[[dict[str, Any]], Table]] = {
        "rows": lambda found: rows_table(args.rows, found),
        "stages": stages_table,
        "states": states_table,
        "volume": volume_table,
    }
    for name, figures in found.items():
        console.print(makers[name](figures))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
