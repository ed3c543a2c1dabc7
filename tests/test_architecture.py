"""The rules that keep the code readable, held by reading it: who imports whom, what is forbidden, how long it is."""

import ast
import graphlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the bottom to the top: a module imports what stands before it, never what stands after it. A subpackage is one
# entry, and inside it the imports must only be free of cycles.
ORDER = (
    "errors", "atomic", "terminal", "config", "mesh", "distributed", "rules", "layout", "precision", "activations",
    "attention", "losses", "jaxprs", "flops", "zero", "adapters", "optim", "state", "step", "engine", "target", "data",
    "checkpoint", "metrics", "runs", "logs", "trainer", "lint", "shrink", "prove", "plan", "doctor", "launch", "cli",
)  # fmt: skip
# A model is plain Flax code: of meshtrain it sees helpers that are the identity, or plain mathematics, on one device.
FOR_MODELS = {"meshtrain", "meshtrain.activations", "meshtrain.attention", "meshtrain.errors", "meshtrain.losses"}

MAX_FUNCTION, MAX_MEDIAN, MAX_FILE = 60, 12, 500  # lines

Function = ast.FunctionDef | ast.AsyncFunctionDef
Checker = Callable[[str, ast.Module], Iterator[str]]


def read(package: str) -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of each module of a package; a package goes by its own name, without `__init__`."""
    modules = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return modules


MESHTRAIN, MODELS = read("meshtrain"), read("models")
MODULES = {**MESHTRAIN, **MODELS}


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields `(module, line)`; `from package import name` gives the submodule where `name` is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield ("." if node.level else "") + (full if full in MODULES else node.module or ""), node.lineno


def functions(tree: ast.AST) -> Iterator[Function]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def check_direction(name: str, tree: ast.Module) -> Iterator[str]:
    """meshtrain's modules in ORDER; never models; models only the public helpers; no relative imports."""
    part = name.split(".")[1] if "." in name else ""
    for module, line in imports(tree):
        package, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if module.startswith("."):
            yield f"{name}:{line}: relative import of {module}"
        elif name.startswith("models"):
            if package == "meshtrain" and module not in FOR_MODELS:
                yield f"{name}:{line}: {module} is not for models"
        elif package == "models":
            yield f"{name}:{line}: meshtrain must not import models"
        elif package == "meshtrain" and part and target != part:
            if part not in ORDER or (target and target not in ORDER):
                yield f"{name}:{line}: give {part} and {target} a place in ORDER"
            elif not target:
                if part != ORDER[-1]:  # the package itself imports nearly everything
                    yield f"{name}:{line}: import the module that defines it, not meshtrain"
            elif ORDER.index(target) > ORDER.index(part):
                yield f"{name}:{line}: {part} stands below {target} and must not import it"


def check_late_imports(name: str, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        for module, line in imports(function):
            if module.split(".")[0] in ("meshtrain", "models", ""):
                yield f"{name}:{line}: {module} is imported inside {function.name}"


def check_orbax(name: str, tree: ast.Module) -> Iterator[str]:
    if name != "meshtrain.checkpoint":
        yield from (f"{name}:{line}: only checkpoint.py imports {m}" for m, line in imports(tree) if "orbax" in m)


def check_unsafe(name: str, tree: ast.Module) -> Iterator[str]:
    """What would run code found in data: pickle and its kin, eval, exec, YAML loaders other than our own safe one."""
    for module, line in imports(tree):
        if module.split(".")[0] in ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"):
            yield f"{name}:{line}: {module}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        text = ast.unparse(call.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if text in ("eval", "exec", "__import__", "os.system") or keywords.get("allow_pickle", "False") != "False":
            yield f"{name}:{call.lineno}: {ast.unparse(call)}"
        if keywords.get("shell", "False") != "False":
            yield f"{name}:{call.lineno}: {ast.unparse(call)}"
        safe = text == "yaml.safe_load" or keywords.get("Loader") == "_Loader"
        if text.startswith("yaml.") and "load" in text and not safe:
            yield f"{name}:{call.lineno}: {ast.unparse(call)}"


def check_lengths(name: str, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        if lines(function) > MAX_FUNCTION:
            yield f"{name}: {function.name} has {lines(function)} lines"
    if (last := max((node.end_lineno or 0 for node in tree.body), default=0)) > MAX_FILE:
        yield f"{name}: {last} lines"


def check_annotations(name: str, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        spec = function.args
        named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
        bare = [arg.arg for arg in named if arg.annotation is None and arg.arg not in ("self", "cls")]
        if bare or function.returns is None:
            yield f"{name}: {function.name} leaves {', '.join(bare) or 'its result'} without a type"


def check_docstrings(name: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield f"{name} has no docstring"
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{name}: {node.name} has no docstring"


def check_names(name: str, tree: ast.Module) -> Iterator[str]:
    """A drawer for everything is where nothing is found."""
    if name.split(".")[-1] in ("common", "helpers", "misc", "tools", "util", "utils"):
        yield f"{name}: name the module after what it does"


CHECKERS: tuple[Checker, ...] = (
    check_direction, check_late_imports, check_orbax, check_unsafe, check_lengths, check_annotations, check_docstrings,
    check_names,
)  # fmt: skip


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__.removeprefix("check_"))
def test_every_module(checker: Checker) -> None:
    assert [fault for name, tree in MODULES.items() for fault in checker(name, tree)] == []


def test_imports_have_no_cycle() -> None:
    # The package's own __init__ only re-exports; importing it from inside is caught by check_direction.
    graph = {
        name: {module for module, _ in imports(tree) if module in MODULES and module != "meshtrain"}
        for name, tree in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_the_median_function_is_short() -> None:
    assert statistics.median(lines(node) for tree in MODULES.values() for node in functions(tree)) <= MAX_MEDIAN


def test_every_module_has_a_place_in_the_order() -> None:
    assert {name.split(".")[1] for name in MESHTRAIN if "." in name} <= set(ORDER)


def test_the_public_names_are_few_and_exist() -> None:
    tree = MESHTRAIN["meshtrain"]
    (names,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and _is_all(node)]
    bound = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(names) <= bound
    assert len(names) <= 30


def _is_all(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["__all__"]


LONG = "def f() -> int:\n    '''Doc.'''\n" + "    x = 1\n" * 58 + "    return x"


@pytest.mark.parametrize(
    ("checker", "name", "source", "fault"),
    [
        (check_direction, "meshtrain.mesh", "import meshtrain.trainer", "mesh stands below trainer"),
        (check_direction, "meshtrain.mesh", "from meshtrain import trainer", "mesh stands below trainer"),
        (check_direction, "meshtrain.data.batches", "from meshtrain.trainer import train", "data stands below trainer"),
        (check_direction, "meshtrain.mesh", "from meshtrain import make_mesh", "import the module that defines it"),
        (check_direction, "meshtrain.mesh", "from . import rules", "relative import"),
        (check_direction, "meshtrain.mesh", "import models.gpt", "must not import models"),
        (check_direction, "meshtrain.novel", "import meshtrain.mesh", "give novel and mesh a place in ORDER"),
        (check_direction, "models.gpt", "from meshtrain.zero import Zero", "meshtrain.zero is not for models"),
        (check_late_imports, "m", "def f():\n    from meshtrain.mesh import make_mesh", "imported inside f"),
        (check_orbax, "meshtrain.state", "import orbax.checkpoint as ocp", "only checkpoint.py"),
        (check_unsafe, "m", "from pickle import loads", "pickle"),
        (check_unsafe, "m", "np.load(path, allow_pickle=True)", "allow_pickle=True"),
        (check_unsafe, "m", "yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        (check_unsafe, "m", "yaml.unsafe_load(text)", "yaml.unsafe_load"),
        (check_unsafe, "m", "eval('1')", "eval"),
        (check_unsafe, "m", "subprocess.run(command, shell=True)", "shell=True"),
        (check_lengths, "m", LONG, "f has 61 lines"),
        (check_lengths, "m", "\n" * 500 + "x = 1", "501 lines"),
        (check_annotations, "m", "def f(x, *y: int) -> None: ...", "leaves x without a type"),
        (check_annotations, "m", "class C:\n    def f(self): ...", "leaves its result without a type"),
        (check_docstrings, "m", "'''Doc.'''\nclass C: ...", "C has no docstring"),
        (check_names, "meshtrain.utils", "", "name the module after what it does"),
    ],
)  # fmt: skip
def test_a_fault_is_found(checker: Checker, name: str, source: str, fault: str) -> None:
    (found,) = checker(name, ast.parse(source))
    assert fault in found


@pytest.mark.parametrize(
    ("checker", "name", "source"),
    [
        (check_direction, "meshtrain.trainer", "from meshtrain.mesh import make_mesh\nimport jax"),
        (check_direction, "meshtrain.cli", "import meshtrain"),
        (check_direction, "models.gpt", "from meshtrain.activations import name"),
        (check_late_imports, "m", "def f():\n    import tensorboardX"),
        (check_orbax, "meshtrain.checkpoint", "import orbax.checkpoint as ocp"),
        (check_unsafe, "m", "yaml.load(text, Loader=_Loader)\nyaml.safe_dump(x)\nnp.load(path, allow_pickle=False)"),
        (check_lengths, "m", LONG.replace("    x = 1\n", "", 1)),
        (check_annotations, "m", "class C:\n    def f(self, x: int, *args: int, **kwargs: int) -> None: ..."),
        (check_docstrings, "m", "'''Doc.'''\ndef _f(): ..."),
    ],
)  # fmt: skip
def test_what_is_allowed_passes(checker: Checker, name: str, source: str) -> None:
    assert list(checker(name, ast.parse(source))) == []
