"""`meshtrain plan`: what a run costs on a cluster that is not here."""

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path

from meshtrain.atomic import write_text
from meshtrain.config import Config, load
from meshtrain.errors import ConfigError, PlanError
from meshtrain.plan import budget, here, html
from meshtrain.plan.compile import INSTALL, compile_step, platform
from meshtrain.plan.diff import diff
from meshtrain.plan.estimate import NETWORK, estimate
from meshtrain.plan.facts import Cluster, Facts
from meshtrain.plan.gpus import CARDS, Card, read_card
from meshtrain.plan.gpus import card as known_card
from meshtrain.plan.report import Report
from meshtrain.plan.search import progress_bar, search
from meshtrain.plan.traffic import findings
from meshtrain.terminal import Terminal, wide_terminal

GPU = "h100"
GPUS_PER_NODE = 8
# What a mode would otherwise leave undone without a word.
_IGNORED = {
    "diff": ("json", "html", "budget"),
    "search": ("html", "budget"),
    "here": ("json", "html", "budget", "nodes", "gpus_per_node", "gpu", "network"),
}


@dataclasses.dataclass(frozen=True)
class Machines:
    """What is planned for.

    Attributes:
        network: bytes per second of each GPU to other nodes.
    """

    cluster: Cluster
    card: Card
    network: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `meshtrain plan`, beside CONFIG and the overrides."""
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(CARDS)} (default: {GPU})")
    parser.add_argument("--gpu-file", type=Path, metavar="FILE", help="another GPU, described in YAML (docs/plan.md)")
    parser.add_argument("--nodes", type=int, metavar="N", help="default: as many as the config's mesh needs, or 1")
    parser.add_argument("--gpus-per-node", type=int, metavar="M", help="default: 8, or the whole of a smaller mesh")
    parser.add_argument(
        "--network", type=float, metavar="GB/S",
        help=f"of each GPU to other nodes, for the estimate (default: {NETWORK / 1e9:.0f})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page with pictures")
    parser.add_argument("--budget", type=Path, metavar="FILE", help="write a budget, or exit 1 if it is exceeded")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--diff", metavar="OTHER", help="compare with another config, which overrides do not change")
    modes.add_argument("--search", action="store_true", help="find the layouts that fit, the fastest first")
    modes.add_argument("--here", action="store_true", help="run three steps on this machine's GPUs and compare")


def run(config: Config, args: argparse.Namespace) -> int:
    """Plans and prints; the exit code: 1 if the run does not fit or a budget is exceeded, else 0.

    Raises:
        UserError: the options, the config and the cluster do not fit together, or the compiler failed.
    """
    _refuse_ignored(args)
    console = wide_terminal()
    if args.search:
        return _search(config, _machines(config, args), args, console)
    if args.here:
        return _here(config, args, console)
    machines = _machines(config, args)
    facts = _compile(config, machines, console)
    if args.diff:
        return _diff(config, facts, machines, args, console)
    report = _report(facts, machines)
    if args.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        console.print(report.render())
    if args.html:
        _write_html(args.html, report)
    over = _budget(args.budget, facts) if args.budget else False
    return int(over or facts.fits is False)


def _refuse_ignored(args: argparse.Namespace) -> None:
    for mode, ignored in _IGNORED.items():
        for name in ignored:
            if getattr(args, mode) and getattr(args, name) not in (None, False):
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} has no meaning with --{mode}: give one of the two")


def _machines(config: Config, args: argparse.Namespace) -> Machines:
    """The cluster of the options; what they leave open follows from the config's mesh."""
    network = NETWORK / 1e9 if args.network is None else args.network
    if not network > 0:
        raise ConfigError(f"--network {network} must be a positive number of GB/s")
    gpu = args.gpu or GPU
    name, card = _described_card(args) or (gpu, known_card(gpu))
    wanted = config.mesh.data * config.mesh.model if config.mesh.data > 0 else config.devices
    per_node = args.gpus_per_node if args.gpus_per_node is not None else min(wanted or GPUS_PER_NODE, GPUS_PER_NODE)
    nodes = args.nodes if args.nodes is not None else max(1, (wanted or per_node) // max(per_node, 1))
    return Machines(Cluster(name, nodes, per_node), card, network * 1e9)


def _described_card(args: argparse.Namespace) -> tuple[str, Card] | None:
    """The card of --gpu-file, by the file's name; None without one."""
    return (args.gpu_file.stem, read_card(args.gpu_file)) if args.gpu_file else None


def _compile(config: Config, machines: Machines, console: Terminal) -> Facts:
    cluster = machines.cluster
    text = f"compiling for {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}"
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        return compile_step(config, cluster, card=machines.card)


def _report(facts: Facts, machines: Machines) -> Report:
    return Report(facts, estimate(facts, machines.card, network=machines.network), findings(facts))


def _write_html(path: Path, report: Report) -> None:
    try:
        write_text(path, html.render(report.facts, report.estimate, report.findings))
    except OSError as error:
        raise ConfigError(f"{path}: the page cannot be written: {error.strerror or error}") from None
    _note(f"page     {path}")


def _budget(path: Path, facts: Facts) -> bool:
    """Writes a budget that is not there, else checks it; whether it is exceeded."""
    if not path.exists():
        budget.write(path, facts)
        _note(f"budget   {path} written: from now on this command checks it")
        return False
    checked = budget.check(path, facts)
    for line in checked.grown:
        _note(f"over the budget: {line}", "bold red")
    for line in checked.smaller:
        _note(line, "dim")
    if not checked.grown:
        _note(f"budget   {path} is kept", "green")
    return bool(checked.grown)


def _note(text: str, style: str = "") -> None:
    """A line beside the report, on standard error: standard output may be JSON."""
    Terminal(stderr=True, soft_wrap=True, highlight=False).print(text, style=style, markup=False)


def _diff(config: Config, facts: Facts, machines: Machines, args: argparse.Namespace, console: Terminal) -> int:
    other = load(args.diff, [])
    before = _compile(other, machines, console)
    estimates = [estimate(each, machines.card, network=machines.network) for each in (before, facts)]
    table = diff(
        before, facts, config_a=other, config_b=config,
        estimate_a=estimates[0], estimate_b=estimates[1], names=(args.diff, args.config),
    )  # fmt: skip
    console.print(table)
    return int(facts.fits is False)


def _search(config: Config, machines: Machines, args: argparse.Namespace, console: Terminal) -> int:
    errors = Terminal(stderr=True)
    with progress_bar(errors) if errors.is_terminal else contextlib.nullcontext() as report:
        found = search(
            config, machines.cluster, machines.card, compile=compile_step, network=machines.network, report=report
        )
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        console.print(found.table())
    return int(not found.best)


def _here(config: Config, args: argparse.Namespace, console: Terminal) -> int:
    if platform() == "cpu":
        raise PlanError(f"--here compares with the GPU's compiler, which is not installed: {INSTALL}")
    name, card = _described_card(args) or (None, None)
    cluster = here.local_cluster(name)
    card = card or known_card(cluster.gpu)
    facts = _compile(config, Machines(cluster, card, NETWORK), console)
    measured = here.measure(config)
    console.print(here.table(facts, measured, estimate(facts, card).step_s))
    return 0
