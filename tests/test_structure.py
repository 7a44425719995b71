"""Imports go one way, and importing the package brings in nothing that only some users need."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jaxsim").rglob("*.py"))
EXTRAS = {"matplotlib", "tqdm", "xarray", "pandas", "optimistix"}

# What a module, or every module of a package, may import of jaxsim; a package stands for its modules too.
ALLOWED = {
    "jaxsim.solve": (),
    "jaxsim.system": (),
    "jaxsim.trigonometry": (),
    "jaxsim.trajectory": ("jaxsim.schemes.state",),
    "jaxsim.tune": (),
    "jaxsim.systems": ("jaxsim.system", "jaxsim.trigonometry"),
    "jaxsim.contact": ("jaxsim.contact", "jaxsim.solve"),
    "jaxsim.schemes": ("jaxsim.system", "jaxsim.contact", "jaxsim.solve", "jaxsim.schemes"),
    "jaxsim.simulate": ("jaxsim.schemes.state", "jaxsim.system", "jaxsim.trajectory", "jaxsim.tune"),
    "jaxsim.sensitivity": ("jaxsim.trajectory",),
    "jaxsim.plot": ("jaxsim.trajectory",),
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imported(path, everywhere=True):
    """Names of all imported modules; those imported inside functions only if `everywhere`."""
    names = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path} imports relatively"
            # `from jaxsim import systems` imports a module, `from jaxsim import Moreau` does not
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= inner or {node.module}
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return names


def within(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def internal(name):
    """The modules of jaxsim that this one imports."""
    return {other for other in imported(MODULES[name]) if within(other, ["jaxsim"])}


def test_the_package_is_found():
    assert {"jaxsim", "jaxsim.simulate", "jaxsim.schemes.moreau", "jaxsim.contact.complementarity"} <= MODULES.keys()
    assert internal("jaxsim.simulate") >= {"jaxsim.system", "jaxsim.schemes.state"}
    assert "tqdm.auto" in imported(MODULES["jaxsim.simulate"])
    assert "tqdm.auto" not in imported(MODULES["jaxsim.simulate"], everywhere=False)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    for package, allowed in ALLOWED.items():
        if not within(name, [package]):
            continue
        own = (package,) if MODULES[name].name == "__init__.py" else ()  # a package gathers its modules
        wrong = {other for other in internal(name) if not within(other, allowed + own)}
        assert not wrong, f"{name} imports {sorted(wrong)}, it may import {allowed}"


def test_no_cycles():
    """Whatever the modules are called: none imports, through others, itself."""
    above: list[str] = []
    done = set()

    def visit(name):
        assert name not in above, f"cycle: {' -> '.join([*above[above.index(name) :], name])}"
        if name in done:
            return
        above.append(name)
        for other in sorted(internal(name) & MODULES.keys()):
            visit(other)
        above.pop()
        done.add(name)

    for name in MODULES:
        visit(name)


@pytest.mark.parametrize("name", MODULES)
def test_extras_are_imported_where_they_are_needed(name):
    found = {other.split(".")[0] for other in imported(MODULES[name], everywhere=False)}
    assert not found & EXTRAS, f"{name} imports {sorted(found & EXTRAS)} at module level"


def test_no_utils():
    names = [path.name for folder in ("jaxsim", "experiments", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert not {"utils.py", "util.py", "helpers.py", "misc.py"} & set(names)


def test_no_home_paths():
    home = re.compile(r"/(home|root|Users)/\w|[A-Z]:\\\\?Users")
    suffixes = {".py", ".md", ".toml", ".ipynb", ".json", ".txt"}
    files = [path for folder in ("jaxsim", "experiments", "notebooks") for path in (ROOT / folder).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    found = [str(path) for path in files if path.suffix in suffixes and home.search(path.read_text(errors="replace"))]
    assert not found
