"""The layout's rules: what importing each module pulls in, and the size of things."""

from __future__ import annotations

import ast
import configparser
import functools
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mlaunch.features import FEATURES, OPTIONS
from mlaunch.rank import device
from tests.conftest import ROOT
from tests.sources import nodes_of, tree_of

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "mlaunch").rglob("*.py")
)
NEEDS_TORCH = {"mlaunch.comm", "mlaunch.compat.rank.megengine"} | {
    f"mlaunch.comm.rank{name}" for name in ("", ".exchange", ".reduction", ".world")
}
NEEDS_TORCH |= {"mlaunch.rendezvous.store_client"}


# What peers' users call with as many arguments as they do, and the options of the decorator.
PUBLIC_AND_WIDE = {"caller.py:launch", "join.py:join", "launcher.py:__new__"}

SURVEY = """
import json, sys
sys.modules["torch"] = None
import mlaunch
print(json.dumps([name for name in sys.modules if name.startswith("mlaunch")]))
lack = []
for name in sys.argv[1:]:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        lack += [name] * (error.name.partition(".")[0] == "torch")
print(json.dumps(lack))
"""


def test_who_needs_torch() -> None:
    """All in one interpreter: what has been imported without torch needs none, whoever imports it."""
    command = [sys.executable, "-c", SURVEY, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    public, lack = map(json.loads, done.stdout.splitlines())
    assert sorted(public) == ["mlaunch", "mlaunch._version"]
    assert set(lack) == NEEDS_TORCH


# Ordered as the processes fork: a module imports from its own room and from those to the right of it.
ROOMS = (
    "top",
    "notebook",
    "cli",
    "member",
    "caller",
    "forkserver",
    "agent",
    "rank",
    "rendezvous",
    "protocol",
    "torch_parts",
    "base",
)


# A feature is a folder. Its files are named after the process that runs them: whose room they are in.
ROOM_OF_FILE = {
    "__init__": "top", "__main__": "top", "command": "cli", "kernel": "notebook", "plugin": "caller",
    "caller": "caller", "member": "member", "server": "forkserver", "agent": "agent", "rank": "rank",
    "gate": "rendezvous", "link": "rendezvous", "wire": "protocol",
}  # fmt: skip
ROOM_OF_NAME = {"_version": "base", "features": "base", "core": "protocol"}
NAMES = {feature.name for feature in FEATURES}


def room_of(module: str) -> int:
    """The rooms are packages; what lies beside them is for users, except the version and the list of features.

    So is what a feature's package itself has.
    """
    _, name, file, *_ = [*module.split("."), "__init__", ""]
    name = ROOM_OF_FILE.get(file, "base") if name in NAMES else ROOM_OF_NAME.get(name, name)
    return ROOMS.index(name) if name in ROOMS else ROOMS.index("top")


@functools.cache
def imports_of(module: str, *, types: bool = True) -> set[str]:
    """The modules of this package that it imports anywhere: in functions and, with ``types``, for type checkers, too.

    Of the core's hook points only what they import as they run: they describe all processes, and run in each.
    """
    path = ROOT / (module.replace(".", "/"))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = tree_of(path)
    if not types or module.startswith("mlaunch.core."):
        types_only = [
            node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        tree = ast.Module([node for node in tree.body if node not in types_only], [])
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name in MODULES and name != module}


def test_imports_follow_forks() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in imports_of(module)
        if room_of(imported) < room_of(module)
    ]
    assert not wrong, "\n".join(wrong)
    assert len([edge for module in MODULES for edge in imports_of(module)]) > 200  # it has found them


def test_files_of_features_name_their_process() -> None:
    for feature in NAMES:
        files = {path.name.partition(".")[0] for path in (ROOT / "mlaunch" / feature).iterdir()}
        assert files - {"__pycache__"} <= ROOM_OF_FILE.keys(), feature


# What else builds on a feature comes after it.
USED_BY = {
    "agreed_stop": {"engines", "machines"},
    "comm": {"compat", "pytest"},
    "compat": {"launch"},
    "engines": {"run"},
    "insight": {"debug"},
    "leases": {"pytest"},
    "ranks": {"cells", "engines", "pytest", "sweeps"},
    "sweeps": {"engines"},
}


def test_nobody_imports_a_feature_but_itself() -> None:
    """``core/load.py`` does, by its name, where a launch has asked for it: so each can be taken out.

    Types of what public methods return do not count.
    """
    wrong = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in imports_of(module, types=False)
        for feature in NAMES & {*imported.split(".")[1:2]}
        if not {module.split(".")[1], ".".join(module.split(".")[1:3])} & {feature, *USED_BY.get(feature, ())}
    ]
    assert not wrong, "\n".join(wrong)


# What the core calls of features' files: functions there, or methods of their parts.
HOOKS = {
    "caller.acquire", "caller.adapt", "caller.handle", "caller.of_deadline", "caller.server", "caller.watch",
    "agent.part", "agent.visited", "agent.welcome", "rank.at_breakpoint", "rank.part", "member.part",
    "command.findings",
}  # fmt: skip


METHODS = {"acquire", "visited", "welcome"}


def names_of(paths: list[Path]) -> set[str]:
    """What files define at their top, or import there."""
    found = set()
    for node in (node for path in paths for node in tree_of(path).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def methods_of(paths: list[Path]) -> set[str]:
    classes = [node for path in paths for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    return {item.name for node in classes for item in node.body if isinstance(item, ast.FunctionDef)}


def test_features_have_the_hooks_that_they_list() -> None:
    """And list those that they have: the core does not load a file to look."""
    for feature in FEATURES:
        has = set()
        for hook in HOOKS:
            process, _, name = hook.partition(".")
            folder = ROOT / "mlaunch" / feature.name / process
            entry = [path for path in (folder.with_suffix(".py"), folder / "__init__.py") if path.exists()]
            found = methods_of([*entry, *folder.glob("*.py")]) if name in METHODS else names_of(entry)
            has |= {hook} if name in found else set()
        # Each agent's file has a part; listed is one that is made with the launch.
        assert has - ({"agent.part"} - {*feature.hooks}) == {*feature.hooks}, feature.name
        assert all((ROOT / "mlaunch" / feature.name / path).exists() for path in (*feature.runs, *feature.around))


# Which have left the core, down to its comments.
WORDS_OF_FEATURES = ("zygote", "widget", "display_pub", "scriptrank", "virtual_local_rank", "linkedpeers")
WORDS_IN_NAMES = ("debug",)  # in no name that the core gives
OTHERS_NAMES = {"set_debug_level_from_env"}  # torch's
# The options that users' editors need to see are listed here, with what is written where.
LISTS_OPTIONS = {"options", "features.py"}


def names_in(module: ast.Module) -> set[str]:
    """What attributes, parameters, functions and classes are called, and which modules are imported."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "log":
            found.add(node.attr)
        elif isinstance(node, ast.keyword | ast.arg):
            found.add(str(node.arg))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(alias.name for alias in node.names)}
    return found


def test_the_core_names_no_feature() -> None:
    """Neither a feature nor an option of one, in code: words that explain may."""
    for path in (ROOT / "mlaunch").rglob("*.py"):
        inside = {*path.relative_to(ROOT / "mlaunch").parts}
        if inside.isdisjoint(LISTS_OPTIONS | NAMES):
            named = names_in(tree_of(path))
            assert not named & OPTIONS, path
            assert not [name for name in named - OTHERS_NAMES for word in WORDS_IN_NAMES if word in name.lower()], path
            text = path.read_text(encoding="utf-8").lower()
            assert not [word for word in WORDS_OF_FEATURES if word in text], path


def test_no_circle_of_modules() -> None:
    graph = {module: imports_of(module) for module in MODULES}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def functions_of(path: Path) -> list[tuple[str, int, int]]:
    """(name, lines of the body without the docstring, parameters without self)."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            size = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            counted = len([name for name in names if name not in {"self", "cls"}])
            found.append((f"{path.name}:{node.name}", size, counted))
    return found


def test_functions_fit_on_a_screen() -> None:
    functions = [item for path in (ROOT / "mlaunch").rglob("*.py") for item in functions_of(path)]
    assert not [name for name, size, _ in functions if size > 40]
    assert len([name for name, size, _ in functions if size < 16]) >= 0.9 * len(functions)


def test_hook_points_can_be_read_at_once() -> None:
    assert len((ROOT / "mlaunch" / "core" / "parts.py").read_text().splitlines()) <= 200


def test_files_can_be_read_at_once() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in (ROOT / "mlaunch").rglob("*.py")}
    assert not {path.name: size for path, size in sizes.items() if size > 500}


def test_a_name_stands_for_one_thing() -> None:
    process = {f"{name}.py" for name in ROOM_OF_FILE}
    paths = [path for path in (ROOT / "mlaunch").rglob("*.py") if path.name not in {"__init__.py", "main.py", *process}]
    trees = [tree_of(path) for path in (ROOT / "mlaunch").rglob("*.py")]
    classes = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    files = [path.name for path in paths if path.parent != ROOT / "mlaunch"]  # those are public
    for names in (files, classes):
        assert not [name for name, count in Counter(names).items() if count > 1]


def test_few_parameters() -> None:
    functions = [item for path in (ROOT / "mlaunch").rglob("*.py") for item in functions_of(path)]
    assert not [name for name, _, parameters in functions if parameters > 8 and name not in PUBLIC_AND_WIDE]


def test_the_versions_that_are_promised() -> None:
    """The same everywhere, and each of them in the table of what was tried."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = [line.rpartition(" ")[2] for line in setup["metadata"]["classifiers"].splitlines() if ":: 3." in line]
    oldest = ".".join(map(str, device._OLDEST))
    promise = f"Python {named[0]} to {named[-1]}, torch {oldest} or later"
    install = (ROOT / "docs" / "install.rst").read_text()
    assert promise in (ROOT / "README.rst").read_text()
    assert promise in install
    assert setup["options"]["python_requires"] == f">={named[0]}"
    assert f"torch>={oldest}" in setup["options"]["install_requires"].split()
    first_columns = " ".join(line[:16] for line in install.partition("====")[2].rpartition("====")[0].splitlines())
    tried = {".".join(release.split(".")[:2]) for release in re.findall(r"3\.\d+[.\d]*", first_columns)}
    assert tried == set(named)
    assert sys.version_info[:2] in [tuple(map(int, version.split("."))) for version in named]


def test_no_assertion_guards_a_user() -> None:
    for path in (ROOT / "mlaunch").rglob("*.py"):
        assert not [node for node in nodes_of(path) if isinstance(node, ast.Assert)], path


def lacks_encoding(call: ast.Call) -> bool:
    """Tells whether a call that opens a text leaves its encoding to the locale."""
    name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
    given = {word.arg: word.value for word in call.keywords}
    if "encoding" in given:
        return False
    if name == "open" and isinstance(call.func, ast.Name):
        mode = given.get("mode", call.args[1] if len(call.args) > 1 else None)
        return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
    return name in {"read_text", "write_text"} or "text" in given or "universal_newlines" in given


def test_one_module_knows_forks() -> None:
    """So that a fork forgets, closes and unlocks what is its parent's in one order, whatever of it fails."""
    sources = (ROOT / "mlaunch").rglob("*.py")
    found = [path.name for path in sources if "register_at_fork" in path.read_text(encoding="utf-8")]
    assert found == ["fds.py"]


def test_texts_have_their_encoding() -> None:
    paths = [path for folder in ("mlaunch", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and lacks_encoding(node)
    ]
    assert not found


# Where torch has what it documents nothing of.
TORCHS = (
    "torch", "torch._C", "torch._C._distributed_c10d", "torch.cuda", "torch.distributed", "torch.library",
    "torch.utils", "torch.distributed.distributed_c10d", "torch.distributed.rendezvous",
    "torch.storage", "torch.xpu",
)  # fmt: skip
# Python's own, under the same names; and the packages of all that is private.
NOT_TORCHS = {"_", "_C", "_abc_impl", "_distributed_c10d", "_handle", "_member_type_", "_run", "_shutdown"}


def private_names_of_torch() -> set[str]:
    modules = [importlib.import_module(name) for name in TORCHS]
    kinds = [found for module in modules for found in vars(module).values() if issubclass(type(found), type)]
    theirs = [kind for kind in kinds if kind.__module__.partition(".")[0] == "torch"]
    names = {name for found in (*modules, *theirs) for name in vars(found)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - NOT_TORCHS


def private_names_in(module: ast.Module) -> set[str]:
    """Names of others with an underscore: attributes of what is not one's own object or class, and names in strings."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", "cls", "super()"}:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            found |= {alias.name for alias in node.names}
    return found


def test_what_is_private_of_torch_is_named_once() -> None:
    """So that one module is to be changed when a torch renames it, and one knows what holds without it."""
    pytest.importorskip("torch", reason="its names are read from torch")
    private, named = private_names_of_torch(), dict[str, list[str]]()
    assert {"_world", "_get_sequence_number_for_group", "_create_c10d_store"} <= private
    for path in sorted((ROOT / "mlaunch").rglob("*.py")):
        for name in private_names_in(tree_of(path)) & private:
            named.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in named.items() if len(paths) > 1}
    assert len(named) > 10  # it has found them
