"""The command line: wiring only.

Exit codes: 0 done; 1 a check failed; 2 the user's mistake, in one line on standard error; 75 (EX_TEMPFAIL) stopped by
SIGTERM with a checkpoint saved, run the same command again; 130 the same by Ctrl-C; 76 another process was lost, or a
wait was over its limit.
"""

import argparse
import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import meshtrain
from meshtrain import doctor, lint, prove
from meshtrain.config import Config, dump, fields, load
from meshtrain.errors import PeerError, UserError
from meshtrain.launch import local, slurm
from meshtrain.plan import command as plan
from meshtrain.terminal import Terminal, command_line, command_name, show_path
from meshtrain.trainer import Result, build, memory_advice, train

Run = Callable[[argparse.Namespace], int]

EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
_EXIT_CODES = "Exit codes: 0 done; 2 a mistake in the command, the config or the data"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = _parse(argv)
    sys.path.insert(0, os.getcwd())  # a model of the user's own, named by model.target, lies beside the config
    try:
        with memory_advice():
            code = int(args.run(args))
        sys.stdout.flush()  # a reader that has gone shows here, not when the interpreter ends
        return code
    except PeerError as error:
        _complain(str(error))
        return error.exit_code
    except UserError as error:
        _complain(str(error))
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        _complain(f"{error.filename or 'output'}: {error.strerror}: free some space, or choose another place")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _complain(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {text}", style="red", markup=False)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; overrides may stand before, between and after options, which argparse alone does not take."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.overrides = [*getattr(args, "overrides", []), *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshtrain", description="Tensor parallelism and ZeRO for any Flax model, on a named device mesh."
    )
    parser.add_argument("--version", action="version", version=f"meshtrain {meshtrain.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, add_arguments, text, codes in _COMMANDS:
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"Example: meshtrain {name} examples/gpt_tiny.yaml devices=8 mesh.model=2. {_EXIT_CODES}{codes}.",
        )  # fmt: skip
        command.add_argument("config", metavar="CONFIG", help="a YAML file, or - for the defaults")
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="for instance train.steps=100"
        )
        add_arguments(command)
        command.set_defaults(run=run)
    command = commands.add_parser(
        "doctor", help="look at the machines, alone or under srun: what is wrong, and its cure",
        description="Look at the machines, alone or under srun or `meshtrain launch`: what each process sees, how fast "
        "they reach each other along the mesh, and each problem with its cure.",
        epilog="Example: srun meshtrain doctor examples/gpt_tiny.yaml mesh.model=2. Exit codes: 0 nothing is wrong; 1 "
        "there is a problem; 2 a mistake in the command or the config.",
    )  # fmt: skip
    command.add_argument(
        "config", nargs="?", default="-", metavar="CONFIG", help="whose mesh, limits and run directory"
    )
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="for instance mesh.model=2")
    command.set_defaults(run=_doctor)
    command = commands.add_parser(
        "launch", help="run a command in several processes on this machine",
        description="Run a command in several processes on this machine, as a cluster would: one log, and when one "
        "fails, its last words and its exit code.",
        epilog="Example: meshtrain launch -n 4 --devices-per-process 2 -- train examples/gpt_tiny.yaml. Exit codes: "
        "those of the command; 76 a process was lost.",
    )  # fmt: skip
    local.add_arguments(command)
    command.set_defaults(run=lambda args: local.run(args, [*commands.choices]))
    text = "show every field with its default, or a resolved config"
    command = commands.add_parser(
        "config", help=text,
        description="Show every field of a config with its default and what it does. With a CONFIG, print that file as "
        "it is resolved, overrides and defaults filled in, as YAML that is itself a config.",
        epilog=f"Example: meshtrain config examples/gpt_tiny.yaml mesh.model=2. {_EXIT_CODES}.",
    )  # fmt: skip
    command.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file, or - for the defaults as YAML")
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="for instance train.steps=100")
    command.set_defaults(run=_config)
    return parser


def _load(args: argparse.Namespace) -> Config:
    if "=" in args.config and not Path(args.config).exists():
        raise UserError(
            f"'{args.config}' is an override, and comes after the config file: CONFIG {args.config}, or "
            f"- {args.config} for the defaults"
        )
    return load(None if args.config == "-" else args.config, args.overrides)


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """A command of CONFIG and overrides alone."""


def _on_config(run: Callable[[Config, argparse.Namespace], int]) -> Run:
    return lambda args: run(_load(args), args)


def _train(args: argparse.Namespace) -> int:
    config = _load(args)
    result = train(config)
    if config.log.progress != "none" and result.is_main:
        console = Terminal()
        console.print(_summary(config, result))
        by_hand = jax.process_count() == 1 or "MESHTRAIN_LAUNCHER" in os.environ  # else a scheduler's script does it
        for label, command in _suggestions(config, [args.config, *args.overrides], result) if by_hand else ():
            console.print(Text.assemble((f"{label:<10}", "dim"), command), soft_wrap=True)  # one line, to be copied
    if result.outcome != "stopped":
        return 0
    return EXIT_STOPPED if result.signum == signal.SIGTERM else 128 + result.signum


def _slurm(args: argparse.Namespace) -> int:
    overrides = [word.replace("%a", "0") for word in args.overrides]  # what holds for one of an array holds for all
    return slurm.run(_load(argparse.Namespace(config=args.config, overrides=overrides)), args)


def _doctor(args: argparse.Namespace) -> int:
    if "=" in args.config and not Path(args.config).exists():
        args.config, args.overrides = "-", [args.config, *args.overrides]  # here the config may be left out
    return doctor.run(_load(args))


def _layout(args: argparse.Namespace) -> int:
    layout = build(_load(args)).engine.layout
    console = Terminal()
    if console.is_terminal:
        console.print(layout.table())
    else:
        print(layout)  # a file or a pipe has no width to fit
    return 0


def _config(args: argparse.Namespace) -> int:
    console = Terminal()
    if args.config is not None:
        console.print(dump(_load(args)), end="", markup=False, highlight=False, soft_wrap=True)
        return 0
    table = Table(box=box.SIMPLE_HEAD, caption="set in the YAML file, or as key=value after it", caption_justify="left")
    for name in ("key", "default", "what it is"):
        table.add_column(name, overflow="fold")
    for key, kind, default, text in fields():
        table.add_row(key, Text(_yaml(default)), Text.assemble(text, " ", (f"({kind})", "dim")))
    console.print(table)
    return 0


_STOPPED = (
    "; 75 stopped by SIGTERM and 130 by Ctrl-C, with a checkpoint saved if an update was done: the same command goes "
    "on; 76 another process was lost"
)
# Name, what it runs, its own options, what it does, exit codes beside those that all have.
_COMMANDS: tuple[tuple[str, Run, Callable[[argparse.ArgumentParser], None], str, str], ...] = (
    ("train", _train, _no_arguments, "train a model, resuming from the run's newest checkpoint", _STOPPED),
    ("layout", _layout, _no_arguments, "show where each parameter lies, without training", ""),
    ("lint", _on_config(lint.run), lint.add_arguments, "list everything that is wrong with a layout, in seconds",
     "; 1 it found errors (with --strict, or warnings)"),
    ("plan", _on_config(plan.run), plan.add_arguments, "compile a run for a cluster that is not here: what it costs",
     "; 1 a check failed"),
    ("prove", _on_config(prove.run), prove.add_arguments, "compare a layout's gradients and updates with one device's",
     "; 1 the layout computes something else"),
    ("slurm", _slurm, slurm.add_arguments, "write or submit a batch script that trains on a SLURM cluster", ""),
)  # fmt: skip


def _yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false", "": '""'}
    return words[value] if value is None or isinstance(value, bool) or value == "" else str(value)


def _summary(config: Config, result: Result) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, text in _summary_rows(result):
        table.add_row(label, text)
    titles = {
        "complete": f"run complete: {_count(result.step, 'update')}",
        "already complete": f"this run is complete already: {result.step:,} updates",
        "stopped": f"stopped at update {result.step:,} of {config.train.steps:,}; the state is saved"
        if result.step
        else "stopped before the first update; there was nothing to save",
    }
    return Panel(table, title=titles[result.outcome], title_align="left", expand=False, padding=(1, 2))


def _summary_rows(result: Result) -> list[tuple[str, str]]:
    rows = []
    unigram = f"unigram entropy of the text {result.unigram:.4f}"
    if not math.isnan(result.val_loss):
        rows.append(("validation loss", f"{result.val_loss:.4f} nats per token   ({unigram})"))
    if result.bits_per_byte is not None:
        per_byte = result.unigram / math.log(2)
        rows.append(("bits per byte", f"{result.bits_per_byte:.4f}   (unigram {per_byte:.4f})"))
    if not math.isnan(result.train_loss):
        mean = f"mean of the last {_count(result.num_averaged, 'update')}"
        rows.append(("training loss", f"{result.train_loss:.4f}, {mean}"))
    if not math.isnan(result.tokens_per_s):
        rows.append(("speed", f"{result.tokens_per_s:,.0f} tokens/s"))
    files = f"config.yaml, metrics.jsonl{f', checkpoints/{result.step}' if result.step else ''}"
    rows.append(("where", f"{show_path(result.path)}/ ({files})"))
    return rows


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _suggestions(config: Config, arguments: Sequence[str], result: Result) -> list[tuple[str, str]]:
    """What to do next, as commands to copy."""

    program = os.environ.get("MESHTRAIN_LAUNCHER") or command_name(sys.argv[0])

    def command(*changes: str) -> str:
        return f"{program} train {command_line(*arguments, *changes)}"

    if result.outcome == "stopped":
        return [("go on", f"{command()}   (the same command: it resumes here)")]
    found = [("extend it", command(f"train.steps={2 * config.train.steps}"))]
    if config.run.name != "tp":
        found.append(("try next", command("run.name=tp", "devices=8", "mesh.model=2", "zero.stage=3")))
    return found


if __name__ == "__main__":
    sys.exit(main())
