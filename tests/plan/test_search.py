"""The search, with a compiler made up here: what is tried, in which order, what is left out, and why."""

import dataclasses
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshtrain.config import Config, load
from meshtrain.errors import ConfigError, UserError
from meshtrain.plan.candidates import Candidate, candidates, mesh_shapes, rough_facts
from meshtrain.plan.facts import Cluster, Facts
from meshtrain.plan.gpus import CARDS, Card
from meshtrain.plan.hlo import Collective
from meshtrain.plan.search import KEEP, SearchResult, Store, cache_dir, progress_bar, search

CLUSTER = Cluster("h100", nodes=2, gpus_per_node=8)
H100 = CARDS["h100"]
CONFIG = load(None, ["model.preset=gpt2-xl", "data.seq_len=1024", "data.vocab_size=50257", "train.global_batch=64",
                     "precision.compute=bfloat16"])  # fmt: skip
GPT2_XL = 1_557_611_200 + (50304 - 50257) * 1600  # Radford et al. 2019, the table padded to a multiple of 128


class Compiler:
    """Makes up facts: faster with a larger data axis, smaller with a higher stage and with remat."""

    def __init__(self, card_bytes: int = 80_000_000_000) -> None:
        self.card_bytes = card_bytes
        self.seen: list[Config] = []
        self.lock = threading.Lock()

    def __call__(self, config: Config, cluster: Cluster, *, card: Card | None, timeout_s: float) -> Facts:
        with self.lock:
            self.seen.append(config)
        remat = {"none": 4, "dots": 2, "full": 1}[config.train.remat]
        peak = remat * (4 - config.zero.stage) * 5_000_000_000 // config.train.microbatches
        sent = Collective("all-reduce", "model", config.mesh.model, 1, 10**8, 1, "bf16", False, False, "", "")
        return Facts(
            cluster, "cuda", {"data": config.mesh.data, "model": config.mesh.model}, config.zero.stage,
            config.train.microbatches, "bfloat16", config.train.global_batch * config.data.seq_len, GPT2_XL, GPT2_XL,
            {"parameters": 10**6}, (), peak, self.card_bytes, 1.0, 1e13 * config.train.microbatches, 1e13,
            (sent,) * (config.mesh.model > 1), {},
        )  # fmt: skip


def find(tmp_path: Path, compile: Any = None, config: Config = CONFIG, **more: Any) -> SearchResult:
    return search(config, CLUSTER, H100, compile=compile or Compiler(), cache=tmp_path, **more)


def shapes_of(config: Config = CONFIG, cluster: Cluster = CLUSTER) -> dict[int, Any]:
    return {shape.model: shape for shape in mesh_shapes(config, cluster)}


# Candidates


def test_mesh_shapes_that_the_model_does_not_allow_say_why() -> None:
    shapes = shapes_of()  # 25 heads: only a model axis of 1 divides them, of the divisors of 16
    assert sorted(shapes) == [1, 2, 4, 8, 16]
    assert shapes[1].problem == ""
    assert "has size 25" in shapes[2].problem and "does not divide" in shapes[2].problem
    assert list(candidates(CONFIG, shapes[2])) == []


def test_a_batch_that_cannot_be_cut_says_why() -> None:
    config = load(None, ["train.global_batch=8"])
    assert "cannot be cut over data=16" in shapes_of(config)[1].problem
    assert shapes_of(config)[2].problem == ""


def test_candidates_are_all_that_divides() -> None:
    config = load(None, ["train.global_batch=24"])  # tiny: 4 heads, 256 tokens
    shapes = shapes_of(config)
    found = list(candidates(config, shapes[4]))  # data 4: 6 records each, so 1 or 2 microbatches
    assert len(found) == len(set(found)) == 4 * 2 * 3 * 2
    assert {c.microbatches for c in found} == {1, 2}
    odd = load(None, ["train.global_batch=24", "data.seq_len=254"])
    assert {c.sequence_parallel for c in candidates(odd, shapes_of(odd)[4])} == {False}
    alone = shapes_of(config, Cluster("h100", 1, 4))[4]
    assert {c.stage for c in candidates(config, alone)} == {1}  # with one data shard the stages are the same


def test_a_candidate_goes_into_a_config_and_its_overrides_say_the_same() -> None:
    candidate = Candidate(4, 2, 3, 2, "full", True)
    config = load(None, ["train.global_batch=16", "devices=4"])
    changed = candidate.apply(config)
    assert changed == load(None, ["train.global_batch=16", *candidate.overrides()])
    assert str(candidate) == "4 x 2 stage 3, 2 microbatches, remat full, sequence parallel"


def test_rough_figures_by_hand() -> None:
    shape = shapes_of()[1]
    candidate = Candidate(16, 1, 1, 4, "full", False)
    facts = rough_facts(candidate, CONFIG, shape, CLUSTER, H100)
    assert facts.params == GPT2_XL
    sizes = {part.name: part.bytes for part in facts.memory}
    # float32 weights and two moments over 16 devices; a few small scalars and what 16 does not divide come on top
    assert sizes["state"] == pytest.approx(12 * GPT2_XL / 16, rel=1e-3)
    assert sizes["gathered weights"] == 2 * GPT2_XL
    outside = (50304 + 1024 + 2) * 1600  # embeddings and the last norm; all others are scanned over
    assert sizes["gradients"] == 4 * GPT2_XL + 2 * (GPT2_XL - outside)  # accumulated, beside one microbatch's
    assert sizes["activations"] == 48 * 1 * 1024 * 1600 * 2  # layers of [1, 1024, 1600] in bfloat16
    assert [(c.op, c.count, c.bytes) for c in facts.collectives] == [
        ("all-gather", 1, 2 * GPT2_XL), ("reduce-scatter", 1, 4 * GPT2_XL)
    ]  # fmt: skip
    third = rough_facts(dataclasses.replace(candidate, stage=3), CONFIG, shape, CLUSTER, H100)
    assert [c.count for c in third.collectives] == [8, 4]
    assert third.peak_bytes < facts.peak_bytes
    whole = rough_facts(dataclasses.replace(candidate, stage=0), CONFIG, shape, CLUSTER, H100)
    assert whole.memory[0].bytes == pytest.approx(12 * GPT2_XL, rel=1e-6)


def test_the_model_axis_costs_two_sums_a_layer_and_pass() -> None:
    config = load(None, ["train.global_batch=16", "precision.compute=bfloat16"])
    shape = shapes_of(config)[4]
    facts = rough_facts(Candidate(4, 4, 1, 2, "none", False), config, shape, CLUSTER, H100)
    (model,) = [c for c in facts.collectives if c.axis == "model"]
    assert (model.op, model.count, model.bytes) == ("all-reduce", 2 * 2 * 4 * 2, 2 * 256 * 128 * 2)
    full = rough_facts(Candidate(4, 4, 1, 2, "full", False), config, shape, CLUSTER, H100)
    assert full.collectives[-1].count == 2 * 3 * 4 * 2
    assert full.flops == pytest.approx(4 / 3 * facts.flops)


@pytest.mark.parametrize(
    ("preset", "gpus", "batch", "mesh", "peaks"),
    [
        ("zero-13b", 128, 2, (128, 1), (53.4, 29.2, 4.2)),
        ("zero-100b", 256, 32, (16, 16), (37.5, 34.7, 14.5)),
    ],
)
def test_the_bound_is_below_what_the_compiler_needs(
    preset: str, gpus: int, batch: int, mesh: tuple[int, int], peaks: tuple[float, ...]
) -> None:
    """GB of these models' steps at stages 1 to 3, full remat, sequence parallel, as XLA compiled them for H100s."""
    data, model = mesh
    config = load(None, [f"model.preset={preset}", "data.seq_len=1024", "data.vocab_size=50257",
                         f"train.global_batch={batch * data}", "precision.compute=bfloat16"])  # fmt: skip
    cluster = Cluster("h100", gpus // 8, 8)
    shape = next(shape for shape in mesh_shapes(config, cluster) if shape.model == model)
    for stage, peak in enumerate(peaks, 1):
        candidate = Candidate(data, model, stage, 1, "full", model > 1)
        bound = rough_facts(candidate, config, shape, cluster, H100).peak_bytes / 1e9
        assert 0.6 * peak < bound <= peak


BASE = Candidate(8, 2, 1, 2, "dots", True)


@pytest.mark.parametrize(
    ("change", "needs_no_less"),
    [
        ({}, True),
        ({"stage": 0}, True),
        ({"remat": "none"}, True),
        ({"sequence_parallel": False}, True),
        ({"stage": 2}, False),
        ({"remat": "full"}, False),
        ({"microbatches": 4}, False),
        ({"microbatches": 1}, False),  # whole gradients in 16 bits, not accumulated in 32
        ({"data": 4, "model": 4}, False),
    ],
)
def test_what_needs_no_less_memory(change: dict[str, Any], needs_no_less: bool) -> None:
    assert dataclasses.replace(BASE, **change).needs_no_less_than(BASE) is needs_no_less


def test_one_microbatch_needs_no_less_where_nothing_whole_accumulates() -> None:
    second = dataclasses.replace(BASE, stage=2)
    assert dataclasses.replace(second, microbatches=1).needs_no_less_than(second)


# The search


def test_the_best_are_the_fastest_that_fit(tmp_path: Path) -> None:
    compiler = Compiler(card_bytes=20_000_000_000)
    result = find(tmp_path, compiler)
    assert len(result.best) == KEEP
    assert all(each.facts.peak_bytes <= 20_000_000_000 for each in result.best)
    speeds = [each.estimate.tokens_per_s for each in result.best]
    assert speeds == sorted(speeds, reverse=True)
    assert {each.candidate.mesh for each in result.best} == {"16 x 1"}
    assert result.num_compiled == len(compiler.seen) and result.num_cached == 0
    assert {each.candidate.stage for each in result.best} <= {0, 1, 2, 3}


def test_every_candidate_is_accounted_for_once(tmp_path: Path) -> None:
    result = find(tmp_path, Compiler(card_bytes=20_000_000_000))
    everything = [c for shape in shapes_of().values() for c in candidates(CONFIG, shape)]
    told = [each.candidate for each in (*result.best, *result.dropped) if each.candidate is not None]
    assert sorted(told) == sorted(everything)
    assert {each.mesh for each in result.dropped if each.candidate is None} == {"8 x 2", "4 x 4", "2 x 8", "1 x 16"}


def test_what_needs_more_than_something_too_big_is_not_compiled(tmp_path: Path) -> None:
    compiler = Compiler(card_bytes=1)
    result = find(tmp_path, compiler, workers=1)
    assert result.best == ()
    big = [each for each in result.dropped if each.why == "too big"]
    like = [each for each in result.dropped if each.why == "as big as one too big"]
    assert len(big) == len(compiler.seen)
    assert like and all(each.over > 0 for each in (*big, *like))
    assert "nothing fits" in show(result)


def test_formulas_rule_out_what_cannot_fit(tmp_path: Path) -> None:
    config = load(None, ["model.preset=zero-13b", "data.seq_len=1024", "data.vocab_size=50257",
                         "train.global_batch=64", "precision.compute=bfloat16"])  # fmt: skip
    compiler = Compiler()
    result = find(tmp_path, compiler, config)
    assert not any(c.zero.stage == 0 and c.mesh.model == 1 for c in compiler.seen)  # 12 x 12.7 GB of state
    out = [each for each in result.dropped if each.why == "too big by formula" and each.mesh == "16 x 1"]
    assert out and all(each.over > 0 for each in out)
    assert "do not fit, by formula: the nearest (16 x 1" in show(result)


def test_a_second_search_compiles_nothing(tmp_path: Path) -> None:
    first = find(tmp_path)
    again = find(tmp_path, refuse)
    assert again.best == first.best
    assert (again.num_compiled, again.num_cached) == (0, first.num_compiled)


def refuse(*args: Any, **kwargs: Any) -> Facts:
    raise AssertionError("nothing is left to compile")


def test_a_search_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    class Interrupted(Compiler):
        def __call__(self, *args: Any, **kwargs: Any) -> Facts:
            if len(self.seen) == 4:
                raise KeyboardInterrupt
            return super().__call__(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        find(tmp_path, Interrupted(), workers=1)
    compiler = Compiler()
    result = find(tmp_path, compiler)
    assert result.num_cached == 4
    assert result.best == find(tmp_path / "new").best


def test_when_the_time_is_up_what_is_there_is_ranked(tmp_path: Path) -> None:
    now = [0.0]

    class Slow(Compiler):
        def __call__(self, *args: Any, **kwargs: Any) -> Facts:
            assert kwargs["timeout_s"] == 100 - now[0]
            now[0] += 30
            return super().__call__(*args, **kwargs)

    result = find(tmp_path, Slow(), workers=1, budget_s=100, clock=lambda: now[0])
    assert result.num_compiled == len(result.best) == 4
    assert any(each.why == "no time left" for each in result.dropped)
    assert "the time was up: the same command goes on" in show(result)


def test_a_compile_that_ran_out_of_time_did_not_fail(tmp_path: Path) -> None:
    now = [0.0]

    def late(*args: Any, timeout_s: float, **kwargs: Any) -> Facts:
        now[0] += timeout_s
        raise UserError("took too long")

    result = find(tmp_path, late, workers=1, budget_s=100, clock=lambda: now[0])
    assert {each.why for each in result.dropped if each.candidate and each.why != "too big by formula"} == {
        "no time left"
    }


def test_a_failed_compile_is_told_and_tried_again(tmp_path: Path) -> None:
    class Failing(Compiler):
        def __call__(self, config: Config, *args: Any, **kwargs: Any) -> Facts:
            if config.zero.stage == 1:
                raise UserError("the compiler [/aborted]")
            return super().__call__(config, *args, **kwargs)

    result = find(tmp_path, Failing())
    failed = [each for each in result.dropped if each.why == "failed"]
    assert failed and {each.candidate.stage for each in failed if each.candidate} == {1}
    assert "the compiler [/aborted]" in show(result)
    again = Compiler()
    find(tmp_path, again)
    assert again.seen and {config.zero.stage for config in again.seen} == {1}


def test_a_compiler_that_never_works_ends_the_search(tmp_path: Path) -> None:
    seen = []

    def broken(*args: Any, **kwargs: Any) -> Facts:
        seen.append(args)
        raise UserError("ptxas is missing")

    with pytest.raises(UserError, match="the first 6 layouts failed alike: ptxas is missing"):
        find(tmp_path, broken)
    assert len(seen) == 6


def test_a_step_compiled_for_cpu_is_ranked_as_not_known(tmp_path: Path) -> None:
    def on_cpu(*args: Any, **kwargs: Any) -> Facts:
        return dataclasses.replace(Compiler()(*args, **kwargs), platform="cpu", card_bytes=0)

    result = find(tmp_path, on_cpu)
    assert result.best and result.best[0].facts.fits is None
    assert "not known" in show(result)


def test_a_model_that_does_not_exist_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such preset"):
        find(tmp_path, config=load(None, ["model.preset=nothing"]))


def test_the_report_counts_up_to_all(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    find(tmp_path, report=lambda *args: told.append(args))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1] > 0


def test_the_bar_takes_any_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress_bar(console) as report:
        report(1, 10, "16 x 1 [/red]")
    assert "search" in console.file.getvalue()  # type: ignore[attr-defined]


def test_json_holds_plain_values(tmp_path: Path) -> None:
    values = json.loads(json.dumps(find(tmp_path).to_json()))
    assert values["best"][0]["data"] == 16
    assert values["best"][0]["overrides"][0] == "mesh.data=16"
    assert len(values["best"]) == KEEP


def show(result: SearchResult) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(result.table())
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_table_tells_the_best_and_why_the_others_fell_out(tmp_path: Path) -> None:
    text = show(find(tmp_path, Compiler(card_bytes=20_000_000_000)))
    for part in ("2 x 8 h100", "16 x 1", "tokens/s", "estimates", "the first is mesh.data=16", "Why the others",
                 "does not divide", "all"):  # fmt: skip
        assert part in text, part


# The cache


def test_the_key_depends_on_what_the_step_depends_on(tmp_path: Path) -> None:
    store = Store(tmp_path, CONFIG, H100)
    key = store.key(CONFIG, CLUSTER)
    assert key == Store(tmp_path, CONFIG, H100).key(CONFIG, CLUSTER)
    unseen = load(None, ["run.name=x", "log.progress=none", "checkpoint.keep=9"])
    assert store.key(unseen, CLUSTER) == store.key(load(None), CLUSTER)
    others = {
        key,
        store.key(load(None), CLUSTER),
        store.key(Candidate(16, 1, 2, 1, "none", False).apply(CONFIG), CLUSTER),
        store.key(CONFIG, dataclasses.replace(CLUSTER, nodes=4)),
        Store(tmp_path, CONFIG, dataclasses.replace(H100, memory_bytes=1)).key(CONFIG, CLUSTER),
    }
    assert len(others) == 5


def test_a_model_of_another_module_has_a_key_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "own_model_of_search.py"
    module.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load(None, ["model.target=own_model_of_search:Model"])
    before = Store(tmp_path, config, H100).key(config, CLUSTER)
    module.write_text("x = 2\n")
    assert Store(tmp_path, config, H100).key(config, CLUSTER) != before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cluster": 1}', "null"])
def test_a_broken_entry_is_none(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path, CONFIG, H100)
    (tmp_path / "key.json").write_text(text)
    assert store.read("key") is None
    facts = Compiler()(Candidate(16, 1, 1, 1, "none", False).apply(CONFIG), CLUSTER, card=None, timeout_s=1)
    store.write("key", facts)
    assert store.read("key") == facts


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert find(tmp_path / "file" / "cache").best


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "meshtrain" / "plan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "meshtrain" / "plan"
