"""`meshtrain plan` from the command line: what each option prints, writes and exits with."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtrain import cli
from meshtrain.config import Config
from meshtrain.errors import PlanError
from meshtrain.plan import command, here
from meshtrain.plan.facts import Cluster, Facts
from meshtrain.plan.gpus import Card
from tests.plan.made_facts import FACTS, made

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


class Compiler:
    """Answers with facts made by hand, for the mesh and stage asked for, and notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Config, Cluster, Card | None]] = []
        self.facts = FACTS

    def __call__(
        self, config: Config, cluster: Cluster, *, card: Card | None = None, timeout_s: float = 600.0
    ) -> Facts:
        self.asked.append((config, cluster, card))
        return dataclasses.replace(self.facts, cluster=cluster, stage=config.zero.stage)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(command, "compile_step", compiler)
    return compiler


@pytest.fixture
def plan(tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Runs `meshtrain plan` on the example: `(exit code, standard output, standard error)`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text((ROOT / "examples" / "gpt_tiny.yaml").read_text())

    def plan(*args: str) -> tuple[int, str, str]:
        code = cli.main(["plan", "run.yaml", *args])
        return code, *capsys.readouterr()

    return plan


def refused(result: tuple[int, str, str]) -> str:
    """The one line of a mistake of the user's."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


# ---------------------------------------------------------------- the cluster


@pytest.mark.parametrize(
    ("args", "cluster"),
    [
        ((), Cluster("h100", 1, 8)),
        (("--nodes", "16"), Cluster("h100", 16, 8)),
        (("--nodes", "2", "--gpus-per-node", "4", "--gpu", "b200"), Cluster("b200", 2, 4)),
        (("mesh.data=16", "mesh.model=8"), Cluster("h100", 16, 8)),
        (("mesh.data=2", "mesh.model=2"), Cluster("h100", 1, 4)),
        (("mesh.data=8", "mesh.model=2", "--gpus-per-node", "4"), Cluster("h100", 4, 4)),
        (("devices=4",), Cluster("h100", 1, 4)),
    ],
)
def test_the_cluster_follows_options_then_the_mesh(plan: Run, compiler: Compiler, args: Any, cluster: Cluster) -> None:
    code, out, _ = plan(*args)
    assert code == 0
    assert compiler.asked[-1][1] == cluster
    assert f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}" in out


def test_a_card_of_the_users_own(plan: Run, compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "like: h100\nname: NVIDIA Mine\nmemory_bytes: 50000000000\nmatrix_flops: 5e14\n"
    )
    code, out, err = plan("--gpu-file", "mine.yaml")
    assert (code, err) == (0, "")
    _, cluster, card = compiler.asked[-1]
    assert cluster.gpu == "mine"
    assert card is not None and card.memory_bytes == 50_000_000_000
    assert "1 x 8 mine" in out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--gpu", "h10"), "did you mean 'h100'?"),
        (("--network", "0"), "--network 0.0 must be a positive number"),
        (("--network", "nan"), "--network nan must be a positive number"),
        (("--gpu-file", "none.yaml"), "none.yaml: the GPU's file cannot be read: No such file"),
        (("--gpu-file", "run.yaml"), "run.yaml: unknown"),
        (("mesh.mdel=2",), "did you mean 'mesh.model'?"),
        (("--diff", "none.yaml"), "none.yaml"),
        (("--diff", "run.yaml", "--json"), "--json has no meaning with --diff"),
        (("--search", "--html", "a.html"), "--html has no meaning with --search"),
        (("--here", "--nodes", "2"), "--nodes has no meaning with --here"),
        (("--here", "--gpu", "a100"), "--gpu has no meaning with --here"),
        (("--here", "--network", "50"), "--network has no meaning with --here"),
        (("--here",), "--here"),
        (("--html", "no/such/folder/a.html"), "no/such/folder/a.html: the page cannot be written"),
    ],
)
def test_mistakes_are_one_line(plan: Run, args: Any, told: str) -> None:
    result = plan(*args)
    if "--html" in args and "--search" not in args:
        result = (result[0], "", result[2])  # the report was printed before the page failed
    assert told in refused(result)


def test_a_cluster_without_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By the compiler itself, before it starts a process."""
    monkeypatch.chdir(ROOT)
    for args in (("--nodes", "0"), ("--gpus-per-node", "0"), ("--nodes", "-1")):
        code = cli.main(["plan", "examples/gpt_tiny.yaml", *args])
        assert "give at least one each" in refused((code, *capsys.readouterr()))


# ---------------------------------------------------------------- what is printed and written


def test_json_is_one_object(plan: Run) -> None:
    code, out, err = plan("--json", "--nodes", "2")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert (values["gpu"], values["nodes"], values["peak_bytes"]) == ("h100", 2, FACTS.peak_bytes)


def test_what_does_not_fit_exits_1(plan: Run, compiler: Compiler) -> None:
    compiler.facts = made(peak_bytes=90_000_000_000)
    code, out, _ = plan()
    assert code == 1
    assert "does not fit: 10.0 GB too much" in out


def test_a_page_is_written_beside_the_report(plan: Run, tmp_path: Path) -> None:
    code, out, err = plan("--html", "page.html")
    assert code == 0
    assert "9.0 GB" in out
    assert "page.html" in err
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_budget_is_written_kept_and_exceeded(plan: Run, compiler: Compiler, tmp_path: Path) -> None:
    code, _, err = plan("--budget", "b.yaml")
    assert code == 0 and "b.yaml written" in err
    before = (tmp_path / "b.yaml").read_text()
    code, _, err = plan("--budget", "b.yaml")
    assert code == 0 and "b.yaml is kept" in err

    compiler.facts = made(peak_bytes=12_000_000_008)
    code, out, err = plan("--budget", "b.yaml", "--json")
    assert code == 1
    assert "over the budget: peak_bytes: 9,000,000,008 -> 12,000,000,008 bytes (+3.0 GB)" in err
    assert json.loads(out)["peak_bytes"] == 12_000_000_008  # what standard output holds stays JSON
    assert (tmp_path / "b.yaml").read_text() == before


def test_a_collective_more_exceeds_the_budget(plan: Run, compiler: Compiler) -> None:
    plan("--budget", "b.yaml")
    compiler.facts = made(collectives=(*FACTS.collectives, FACTS.collectives[0]))
    code, _, err = plan("--budget", "b.yaml")
    assert code == 1
    assert "all-gather" in err


def test_two_configs_are_compared(plan: Run, compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text((tmp_path / "run.yaml").read_text())
    code, out, _ = plan("--diff", "other.yaml", "zero.stage=3")
    assert code == 0
    assert sorted(config.zero.stage for config, _, _ in compiler.asked) == [1, 3]
    assert any("zero.stage" in line and "1" in line and "3" in line for line in out.splitlines())


def test_the_search_ranks_what_it_compiled(plan: Run, compiler: Compiler) -> None:
    code, out, _ = plan("--search", "--json", "--gpus-per-node", "2", "data.source=random")
    values = json.loads(out)
    assert code == 0
    assert values["best"] and values["compiled"] == len(compiler.asked)
    speeds = [each["tokens_per_s_per_gpu"] for each in values["best"]]
    assert speeds == sorted(speeds, reverse=True)


def test_a_search_that_finds_nothing_exits_1(plan: Run, compiler: Compiler) -> None:
    compiler.facts = made(peak_bytes=90_000_000_000)
    code, out, _ = plan("--search", "--gpus-per-node", "1", "data.source=random")
    assert code == 1
    assert out


def test_here_runs_and_compares(plan: Run, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "platform", lambda: "cuda")
    monkeypatch.setattr(here, "local_cluster", lambda name=None: Cluster(name or "h100", 1, 8))
    monkeypatch.setattr(here, "measure", lambda config: here.Measured(9_900_000_000, 0.5))
    code, out, _ = plan("--here")
    assert code == 0
    assert "1.100" in out
    assert compiler.asked[-1][1] == Cluster("h100", 1, 8)


def test_here_takes_a_card_that_is_not_known(
    plan: Run, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t4.yaml").write_text("like: a100-40gb\nname: NVIDIA T4\nmatrix_flops: 6.5e13\n")
    named: list[str | None] = []
    monkeypatch.setattr(command, "platform", lambda: "cuda")
    monkeypatch.setattr(here, "local_cluster", lambda name=None: named.append(name) or Cluster(name or "", 1, 1))
    monkeypatch.setattr(here, "measure", lambda config: here.Measured(9_000_000_000, 0.5))
    code, _, _ = plan("--here", "--gpu-file", "t4.yaml")
    assert code == 0
    assert named == ["t4"]


def test_a_compiler_that_fails_is_one_line(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **more: Any) -> Facts:
        raise PlanError("the compiler was killed, most likely because this machine has too little memory")

    monkeypatch.setattr(command, "compile_step", fail)
    assert "too little memory" in refused(plan())
