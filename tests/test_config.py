"""The schema, its YAML and its error messages."""

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtrain.config import MAX_BYTES, Config, Section, dump, fields, load, validate
from meshtrain.errors import ConfigError


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Loads a text, as the file `tiny.yaml`, with overrides."""

    def read(text: str | bytes, *overrides: str) -> Config:
        path = tmp_path / "tiny.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load(path, overrides)

    return read


@pytest.fixture
def refusal(read: Any) -> Any:
    """The message with which a text is refused: without the folder, and one line."""

    def refusal(text: str | bytes, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            read(text, *overrides)
        message = str(caught.value)
        assert "\n" not in message
        assert caught.value.__context__ is None or caught.value.__suppress_context__
        return re.sub(r"\S*/tiny\.yaml", "tiny.yaml", message)

    return refusal


# ---------------------------------------------------------------- values


def test_an_empty_file_is_the_defaults_and_names_the_run(read: Any) -> None:
    for text in ("", "# nothing\n", "null\n", "---\n", "train:\noptim:\n", "train: {}\n"):
        config = read(text)
        assert config.run.name == "tiny"
        assert config.model_copy(update={"run": Config().run}) == Config()


def test_without_a_file_the_run_has_a_name() -> None:
    assert load(None).run.name == "run"
    assert load(None, ["run.name=mine"]).run.name == "mine"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "1.0e-3", "0.001", ".001", "10e-4"])
def test_scientific_notation_is_a_number(read: Any, text: str) -> None:
    assert read(f"optim: {{lr: {text}}}").optim.lr == 0.001
    assert read("", f"optim.lr={text}").optim.lr == 0.001


def test_a_whole_number_serves_where_a_float_is_asked_for(read: Any) -> None:
    lr = read("optim: {lr: 1}").optim.lr
    assert lr == 1.0 and isinstance(lr, float)


@pytest.mark.parametrize(("text", "seed"), [("010", 10), ("0x10", 16), ("0o10", 8), ("0", 0), ("+7", 7)])
def test_integers_are_those_of_yaml_1_2(read: Any, text: str, seed: int) -> None:
    assert read(f"run: {{seed: {text}}}").run.seed == seed


@pytest.mark.parametrize("name", ["2024-01-01", "1:30", "1_000", "1e", "a=b", "=", "<<", "--", "1.2.3"])
def test_what_only_looks_like_a_number_or_a_date_is_text(read: Any, name: str) -> None:
    assert read("", f"run.name={name}").run.name == name


def test_a_rule_may_cut_a_dim_over_several_axes(read: Any) -> None:
    config = read("model: {rules: [['up/kernel', [null, model]], ['x', [[model, data]]], ['.*', []]]}")
    assert config.model.rules == [("up/kernel", [None, "model"]), ("x", [["model", "data"]]), (".*", [])]


def test_overrides_apply_in_order_and_may_fill_a_whole_section(read: Any) -> None:
    text = "train: {steps: 5}\noptim:\n"
    assert read(text, "train.steps=6", "train.steps=7").train.steps == 7
    assert read(text, "optim.lr=1").optim.lr == 1.0  # the section is null in the file
    merged = read(text, "train={global_batch: 8}").train
    assert (merged.global_batch, merged.steps) == (8, 5)  # the file's other keys stay
    assert read(text, "model.overrides.num_layers=6", "model.overrides.dropout=0.5").model.overrides == {
        "num_layers": 6,
        "dropout": 0.5,
    }
    assert read("optim: {clip_norm: 2.0}", "optim.clip_norm=null").optim.clip_norm is None
    assert read("data: {paths: [x]}", "data.paths=[a, b]").data.paths == ["a", "b"]


def test_overrides_of_one_load_do_not_leak_into_the_next() -> None:
    assert load(None, ["model.overrides.num_layers=6"]).model.overrides == {"num_layers": 6}
    assert load(None).model.overrides == {}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("optim: {lrr: 1}", "optim.lrr", "optim.lr"),
        ("train: {step: 1}", "train.step", "train.steps"),
        ("train: {stpes: 1}", "train.stpes", "train.steps"),
        ("optm: {lr: 1}", "optm", "optim"),
        ("device: 1", "device", "devices"),
        ("lr: 1", "lr", "optim.lr"),  # right word, wrong place
        ("train: {stage: 1}", "train.stage", "zero.stage"),
        ("mesh: {modell: 2}", "mesh.modell", "mesh.model"),  # not the section of that name
    ],
)
def test_an_unknown_key_names_the_nearest_one(refusal: Any, text: str, key: str, near: str) -> None:
    assert refusal(text) == f"tiny.yaml: unknown key '{key}'; did you mean '{near}'?"
    name, _, value = key.partition("=")
    assert f"unknown key '{key}'; did you mean '{near}'?" in refusal("", f"{name}={value or 1}")


def test_an_unknown_key_near_nothing_points_to_the_list(refusal: Any) -> None:
    assert refusal("optim: {zzz: 1}") == "tiny.yaml: unknown key 'optim.zzz'; see `meshtrain config`"


def test_a_key_written_flat_is_told_to_go_into_its_section(refusal: Any) -> None:
    message = refusal("optim.lr: 1e-3")
    assert message == "tiny.yaml: unknown key 'optim.lr': a section's keys go below it, as in optim: {lr: ...}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  steps: 1\n  steps: 2\n", "tiny.yaml:3: the key 'steps' is given twice"),
        ("train: {steps: 1}\nrun: {}\ntrain: {steps: 2}\n", "tiny.yaml:3: the key 'train' is given twice"),
        ("model: {overrides: {dim: 1, dim: 1}}", "tiny.yaml:1: the key 'dim' is given twice"),
    ],
)
def test_a_key_given_twice_is_refused_with_its_line(refusal: Any, text: str, expected: str) -> None:
    assert refusal(text) == expected


def quotes(key: str, value: int) -> str:
    return f""" (YAML reads it so; in quotes it is text: {key}='"{value}"')"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {steps: many}", "train.steps: input should be a valid integer, got 'many'"),
        ("train: {steps: 1.5}", "train.steps: input should be a valid integer, got 1.5"),
        ("train: {steps: 1.0}", "train.steps: input should be a valid integer, got 1.0"),
        ("train: {steps: 1e3}", "train.steps: input should be a valid integer, got 1000.0"),
        ("train: {steps: true}", "train.steps: input should be a valid integer, got True"),
        ("train: {steps: yes}", "train.steps: input should be a valid integer, got True"),
        ("train: {steps: null}", "train.steps: input should be a valid integer, got None"),
        ("train: {steps: [1]}", "train.steps: input should be a valid integer, got [1]"),
        ("run: {seed: 1:30}", "run.seed: input should be a valid integer, got '1:30'"),
        ("run: {seed: -1}", "run.seed: input should be greater than or equal to 0, got -1"),
        ("run: {seed: 4294967296}", "run.seed: input should be less than 4294967296, got 4294967296"),
        ("run: {name: 2024}", "run.name: input should be a valid string, got 2024" + quotes("run.name", 2024)),
        ("optim: {lr: true}", "optim.lr: input should be a valid number, got True"),
        ("optim: {lr: fast}", "optim.lr: input should be a valid number, got 'fast'"),
        ("optim: {lr: .nan}", "optim.lr: input should be a finite number, got nan"),
        ("optim: {lr: .inf}", "optim.lr: input should be a finite number, got inf"),
        ("optim: {lr: -.inf}", "optim.lr: input should be a finite number, got -inf"),
        ("optim: {lr: 1e999}", "optim.lr: input should be a finite number, got inf"),
        ("optim: {lr: -1e-9}", "optim.lr: input should be greater than or equal to 0, got -1e-09"),
        ("optim: {clip_norm: 0}", "optim.clip_norm: input should be greater than 0, got 0"),
        ("optim: {beta2: 1}", "optim.beta2: input should be less than 1, got 1"),
        ("zero: {stage: 4}", "zero.stage: input should be less than or equal to 3, got 4"),
        ("mesh: {model: 0}", "mesh.model: input should be greater than or equal to 1, got 0"),
        ("log: {tensorboard: 1}", "log.tensorboard: input should be a valid boolean, got 1"),
        ("data: {paths: x}", "data.paths: input should be a valid list, got 'x'"),
        ("data: {paths: [1]}", "data.paths.0: input should be a valid string, got 1" + quotes("data.paths.0", 1)),
        ("train: 3", "train: must be a section with keys of its own, got 3"),
        ("train: [1]", "train: must be a section with keys of its own, got [1]"),
        ("1: {}", "1: keys should be strings, got 1"),
        ("model: {rules: [up]}", "model.rules.0: must be a pair [path regex, value], got 'up'"),
        ("model: {rules: [[up]]}", "model.rules.0: must be a pair [path regex, value], got ['up']"),
        ("model: {rules: [[up, model]]}", "model.rules.0.1: input should be a valid list, got 'model'"),
        (
            "model: {rules: [[up, [null, 1]]]}",
            "model.rules.0.1.1: must be null, an axis or a list of axes, got 1",
        ),
        ("optim: {decay_rules: [[up, 1]]}", "optim.decay_rules.0.1: input should be a valid boolean, got 1"),
        (
            "model: {overrides: {dim: [1]}}",
            "model.overrides.dim: must be true, false, a finite number or a text, got [1]",
        ),
        (
            "model: {overrides: {dim: .nan}}",
            "model.overrides.dim: must be true, false, a finite number or a text, got nan",
        ),
    ],
)
def test_a_wrong_value_names_its_key(refusal: Any, text: str, expected: str) -> None:
    assert refusal(text) == f"tiny.yaml: {expected}"


def test_a_choice_lists_what_there_is(refusal: Any) -> None:
    message = refusal("optim: {name: adam}")
    assert "optim.name" in message and "got 'adam'" in message
    assert all(f"'{name}'" in message for name in ("adamw", "sgd", "lion", "adafactor", "muon", "lamb"))


@pytest.mark.parametrize("overrides", [(), ("run.seed=1",)])
def test_a_quoted_number_is_refused_and_says_why(refusal: Any, overrides: tuple[str, ...]) -> None:
    message = refusal("optim: {lr: '1e-3'}", *overrides)
    assert "optim.lr: input should be a valid number, got '1e-3'" in message
    assert "write 1e-3 without them" in message
    assert message.startswith("tiny.yaml + overrides:" if overrides else "tiny.yaml:")


def test_a_long_value_is_not_repeated_whole(refusal: Any) -> None:
    for value in ("9" * 2000, "x" * 60_000, str(list(range(2000)))):
        message = refusal(f"optim: {{lr: {value}}}")
        assert "optim.lr" in message and len(message) < 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {warmup_steps: 5}\ntrain: {steps: 4}", ["optim.warmup_steps=5", "train.steps=4"]),
        ("train: {global_batch: 10, microbatches: 4}", ["train.global_batch=10", "train.microbatches=4"]),
        ("mesh: {data: 0}", ["mesh.data=0", "-1"]),
        ("mesh: {data: -2}", ["mesh.data=-2", "-1"]),
    ],
)
def test_values_that_contradict_each_other_are_named_together(refusal: Any, text: str, expected: list[str]) -> None:
    message = refusal(text)
    assert message.startswith("tiny.yaml: ")
    assert all(part in message for part in expected)


def test_values_at_the_edge_of_a_contradiction_pass(read: Any) -> None:
    config = read("optim: {warmup_steps: 4}\ntrain: {steps: 4, global_batch: 12, microbatches: 4}\nmesh: {data: 1}")
    assert (config.optim.warmup_steps, config.train.steps) == (4, 4)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "'train.steps' is not of the form key=value, for instance train.steps=100"),
        ("=5", "'=5' is not of the form key=value, for instance train.steps=100"),
        ("devices.x=5", "'devices.x': 'devices' is a value, not a section"),
        ("train.steps=[", "override train.steps:1: "),
        ("train..steps=5", "unknown key 'train.'"),
        ("train=3", "train: must be a section with keys of its own, got 3"),
        ("train.steps.x=5", "train.steps: input should be a valid integer, got {'x': 5}"),
    ],
)
def test_a_bad_override_is_named(refusal: Any, override: str, expected: str) -> None:
    assert expected in refusal("devices: 3", override)


def test_every_problem_is_told_up_to_ten(read: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read("optim: {lr: x, lrr: 1}\ntrian: {}")
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(ConfigError) as caught:
        read("".join(f"a{i}: 1\n" for i in range(5000)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 11 and lines[-1].endswith("and 4990 more problems")


# ---------------------------------------------------------------- hostile files

BOMB = "a: &a [x, x, x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}, *{before}, *{before}]\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)
MERGE_BOMB = "a: &a {k: 1}\nb: {<<: *a}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, "tiny.yaml:2: an alias (*name) is not allowed in a config: write the value out"),
        (MERGE_BOMB, "tiny.yaml:2: an alias (*name) is not allowed in a config: write the value out"),
        ("a: &a [*a]", "tiny.yaml:1: an alias (*name) is not allowed in a config: write the value out"),
        ("[" * 5000, "tiny.yaml:1: nested more than 20 deep"),
        ("[" * 5000 + "]" * 5000, "tiny.yaml:1: nested more than 20 deep"),
        ("{a: " * 5000, "tiny.yaml:1: nested more than 20 deep"),
        ("- " * 5000, "tiny.yaml:1: nested more than 20 deep"),
        ("? " * 5000, "tiny.yaml:1: nested more than 20 deep"),
        ("x: " + "a" * 5_000_000, f"tiny.yaml: larger than {MAX_BYTES} bytes"),
        ("#" * (MAX_BYTES + 1), f"tiny.yaml: larger than {MAX_BYTES} bytes"),
        ("- a\n" * 15_000, "tiny.yaml: must hold sections such as 'train:', not ['a', 'a', "),
        ("a: " + "1" * 60_000, "tiny.yaml: not valid YAML: Exceeds the limit"),
        ("!!python/object/apply:os.system ['x']", "tiny.yaml:1: a tag (tag:yaml.org,2002:python/object/apply:os.s"),
        ("run: !!python/name:os.system", "tiny.yaml:1: a tag "),
        ("run: {name: !!binary aGk=}", "tiny.yaml:1: a tag (tag:yaml.org,2002:binary) is not allowed in a config"),
        ("run: {name: !!timestamp abc}", "tiny.yaml:1: a tag "),
        ("run: {seed: !!int ''}", "tiny.yaml:1: a tag "),
        ("run: {seed: !!bool abc}", "tiny.yaml:1: a tag "),
        ("run: !mine {name: a}", "tiny.yaml:1: a tag (!mine) is not allowed in a config: write a plain value"),
        ("[a]: 2", "tiny.yaml:1: a key must be a word"),
        ("? {a: 1}\n: 2", "tiny.yaml:1: a key must be a word"),
        ('"a\\n b": 2', "tiny.yaml: unknown key 'a b'"),
        ("a: b: c", "tiny.yaml:1: mapping values are not allowed here"),
        ("run:\n\tname: a", "tiny.yaml:2: found character"),
        ("a: 'b", "tiny.yaml:1: found unexpected end of stream"),
        ("a: 1\n---\nb: 2", "tiny.yaml:2: but found another document"),
        ("%YAML 9.9\n---\na: 1", "tiny.yaml:1: found incompatible YAML document"),
        ("run: {name: '\x00'}", "tiny.yaml: not valid YAML: unacceptable character #x0000"),
        (b"\xff\xfe\xff", "tiny.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (b"run: {name: caf\xe9}", "tiny.yaml: cannot be read: 'utf-8' codec can't decode byte 0xe9"),
        ("hello", "tiny.yaml: must hold sections such as 'train:', not 'hello'"),
        ("3", "tiny.yaml: must hold sections such as 'train:', not 3"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line(refusal: Any, text: str | bytes, expected: str) -> None:
    start = time.thread_time()
    message = refusal(text)
    assert message.startswith(expected)
    assert len(message) < 300
    assert time.thread_time() - start < 1  # of this thread's own time: what it guards against takes minutes


@pytest.mark.parametrize(
    "call", ["os.system ['touch {}']", "pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{}']]"]
)
def test_a_tag_runs_nothing(refusal: Any, tmp_path: Path, call: str) -> None:
    canary = tmp_path / "canary"
    payload = "!!python/object/apply:" + call.format(canary)
    assert yaml.compose(payload) is not None  # the payload itself is well formed
    for text in (payload, f"run: {{name: {payload}}}", f"? {payload}\n: 1"):
        assert "a tag (" in refusal(text)
    assert "a tag (" in refusal("", f"run.name={payload}")
    assert not canary.exists()


def test_a_path_that_is_no_readable_file_is_named(tmp_path: Path) -> None:
    for path, why in [
        (tmp_path / "missing.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (Path("a\0b"), "null byte"),
        (Path("/dev/zero"), f"larger than {MAX_BYTES} bytes"),  # endless, and of size 0
    ]:
        with pytest.raises(ConfigError, match=re.escape(why)) as caught:
            load(path)
        assert str(caught.value).startswith(str(path))


# ---------------------------------------------------------------- the schema itself


def sections(section: type[Section] = Config) -> list[type[Section]]:
    """A section and those below it."""
    below = [info.annotation for info in section.model_fields.values()]
    return [section] + [
        inner for kind in below if isinstance(kind, type) and issubclass(kind, Section) for inner in sections(kind)
    ]


def test_every_field_has_a_description_and_a_readable_type() -> None:
    listed = list(fields())
    assert all(len(text) > 5 for _, _, _, text in listed)
    assert all(section.__doc__ for section in sections())
    kinds = {key: kind for key, kind, _, _ in listed}
    assert kinds["optim.decay_steps"] == "int | null"
    assert kinds["data.dtype"] == "uint8 | uint16 | uint32 | null"
    assert kinds["model.rules"] == "list[tuple[str, list[str | list[str] | null]]] | null"
    assert kinds["model.overrides"] == "dict[str, bool | int | float | str]"


def test_there_are_at_most_60_fields_and_their_keys_differ() -> None:
    keys = [key for key, *_ in fields()]
    assert len(keys) == len(set(keys)) <= 60
    assert {"devices", "run.seed", "zero.stage", "mesh.model", "optim.lr"} <= set(keys)


def test_the_listed_defaults_are_the_defaults() -> None:
    values = Config().model_dump()
    for key, _, default, _ in fields():
        node: Any = values
        for part in key.split("."):
            node = node[part]
        assert node == default, key


@pytest.mark.parametrize("section", sections())
def test_sections_are_frozen_and_closed(section: type[Section]) -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        setattr(section(), next(iter(section.model_fields)), 1)
    with pytest.raises(pydantic.ValidationError, match="extra"):
        section(no_such_field=1)  # type: ignore[call-arg]


# ---------------------------------------------------------------- dump and load

LOOKALIKES = [
    "1e-3",
    "1",
    "0o7",
    "0x1f",
    "1:30",
    "010",
    "null",
    "~",
    "true",
    "yes",
    "off",
    ".inf",
    "-",
    "",
    " ",
    "a: b",
]
LOOKALIKES += [
    "#",
    "'",
    '"',
    "\\",
    "[a]",
    "{a}",
    "*a",
    "&a",
    "!a",
    "%",
    "@",
    "a\nb",
    "\t",
    "<<",
    "=",
    "2024-01-01",
    "\x85",
]
TEXTS = st.one_of(st.sampled_from(LOOKALIKES), st.text(max_size=8))
PATTERNS = st.one_of(TEXTS, st.just(r"ln_[12]/(scale|bias)"))
AXES = st.one_of(st.none(), TEXTS, st.lists(TEXTS, max_size=2))


@pytest.mark.parametrize("text", LOOKALIKES)
def test_a_text_that_looks_like_something_else_survives(tmp_path: Path, text: str) -> None:
    config = validate({"run": {"name": text or "x", "dir": text}, "model": {"overrides": {"kind": text}}})
    (tmp_path / "dumped.yaml").write_text(dump(config), encoding="utf-8")
    assert load(tmp_path / "dumped.yaml") == config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=TEXTS.filter(bool),
    paths=st.lists(TEXTS, max_size=3),
    overrides=st.dictionaries(
        TEXTS,
        st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
        max_size=4,
    ),
    rules=st.one_of(st.none(), st.lists(st.tuples(PATTERNS, st.lists(AXES, max_size=3)), max_size=3)),
    decay_rules=st.one_of(st.none(), st.lists(st.tuples(PATTERNS, st.booleans()), max_size=3)),
    lr=st.floats(0, 1e30),
    seed=st.integers(0, 2**32 - 1),
)
def test_dump_and_load_return_the_same_config(tmp_path: Path, **drawn: Any) -> None:
    config = validate(
        {
            "run": {"name": drawn["name"], "seed": drawn["seed"]},
            "model": {"overrides": drawn["overrides"], "rules": drawn["rules"]},
            "data": {"paths": drawn["paths"]},
            "optim": {"lr": drawn["lr"], "decay_rules": drawn["decay_rules"]},
        }
    )
    path = tmp_path / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8")
    again = load(path)
    assert again == config
    elsewhere = yaml.safe_load(dump(config))  # by a program that knows YAML 1.1
    assert elsewhere["run"] == config.run.model_dump() and elsewhere["data"] == config.data.model_dump()
    assert [type(value) for value in again.model.overrides.values()] == [
        type(value) for value in config.model.overrides.values()
    ]  # 1 == True == 1.0


def test_the_dump_of_one_list_used_twice_has_no_alias(tmp_path: Path) -> None:
    shared = ["model"]
    config = validate({"run": {"name": "x"}, "model": {"rules": [("a", [shared, None]), ("b", [shared])]}})
    (tmp_path / "dumped.yaml").write_text(dump(config))
    assert load(tmp_path / "dumped.yaml") == config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "any.yaml").write_text(text, encoding="utf-8", newline="")
    for attempt in (
        lambda: load(tmp_path / "any.yaml"),
        lambda: load(None, [f"run.name={text}"]),
        lambda: load(None, [text]),
    ):
        with contextlib.suppress(ConfigError):
            assert isinstance(attempt(), Config)


def test_the_shipped_example_loads() -> None:
    config = load(Path(__file__).parents[1] / "examples" / "gpt_tiny.yaml")
    assert config.run.name == "gpt_tiny" and config.optim.lr == 3e-3
