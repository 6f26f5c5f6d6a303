"""The direction of imports. A wrong one is shown as ``file:line -> module``."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import minisgl
import minisgl_cli
import minisgl_plugins
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry

LAYERS = (
    ("base",),
    ("plugin",),
    ("config",),
    ("sched", "wire", "observe"),
    ("runtime",),
    ("nn",),
    ("text", "engine"),
    ("client",),
    ("launch",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TORCH_MODULES = ("minisgl.runtime", "minisgl.nn", "minisgl.api.device")
PUBLIC = ("minisgl.api", "minisgl.nn", "minisgl.testing")  # what plugins may import
CORE, PLUGINS, CLI = (Path(str(m.__file__)).parent for m in (minisgl, minisgl_plugins, minisgl_cli))


class Import(NamedTuple):
    file: Path
    line: int
    owner: str  # the importing module
    module: str
    top: bool  # at module level, thus run by an import
    typing: bool  # under TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.file}:{self.line} -> {self.module}"


def modules(root: Path) -> Iterator[tuple[Path, str]]:
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        yield file, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path) -> Iterator[Import]:
    for file, owner in modules(root):
        yield from _walk(ast.parse(file.read_text(), str(file)), file, owner, True, False)


def _walk(node: ast.AST, file: Path, owner: str, top: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(file, child.lineno, owner, a.name, top, typing) for a in child.names)
        elif isinstance(child, ast.ImportFrom):
            source = _absolute(child, file, owner)
            names = [f"{source}.{a.name}" for a in child.names] if source == "minisgl" else [source]
            yield from (Import(file, child.lineno, owner, name, top, typing) for name in names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(child, file, owner, top, True)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, file, owner, top and not inside, typing)


def _absolute(node: ast.ImportFrom, file: Path, owner: str) -> str:
    """The module of ``from ..x import y``."""
    package = owner.split(".") if file.name == "__init__.py" else owner.split(".")[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def show(wrong: Iterator[Import]) -> str:
    return "\n".join(map(str, wrong))


def test_core_modules_import_only_lower_layers() -> None:
    def wrong(i: Import) -> bool:
        mine, theirs = layer(i.owner), layer(i.module)
        if i.typing or not within(i.module, ("minisgl",)) or mine in ("", theirs):
            return False
        if mine in ("api", "testing"):
            return theirs == "launch"
        return LEVEL.get(theirs, len(LAYERS)) >= LEVEL[mine]

    assert show(i for i in imports(CORE) if wrong(i)) == ""


def test_every_core_package_has_a_layer() -> None:
    packages = {layer(owner) for _, owner in modules(CORE)} - {"", "api", "testing"}
    assert packages == set(LEVEL)


def test_core_imports_neither_plugins_nor_command_line() -> None:
    assert show(i for i in imports(CORE) if within(i.module, ("minisgl_plugins", "minisgl_cli"))) == ""


def test_nothing_imports_the_command_line() -> None:
    assert show(i for i in imports(PLUGINS) if within(i.module, ("minisgl_cli",))) == ""


def test_the_command_line_does_not_import_plugins() -> None:
    assert show(i for i in imports(CLI) if within(i.module, ("minisgl_plugins",))) == ""


def test_bundled_plugins_import_only_the_public_interface() -> None:
    wrong = (i for i in imports(PLUGINS) if within(i.module, ("minisgl",)) and not within(i.module, PUBLIC))
    assert show(wrong) == ""


def test_plugins_of_one_kind_do_not_import_those_of_another() -> None:
    wrong = (
        i for i in imports(PLUGINS) if within(i.module, ("minisgl_plugins",)) and layer(i.module) != layer(i.owner)
    )
    assert show(wrong) == ""


TORCH_PACKAGES = tuple(
    f"minisgl_plugins.{p}" for p in ("attention", "logits", "models", "ops", "quant", "sampler")
)  # helpers too


def torch_kind_modules() -> tuple[str, ...]:
    refs = Registry.scan(bundled_only=True).refs()
    return tuple(r.target.partition(":")[0] for r in refs if KINDS[r.kind].torch)


def test_torch_is_imported_at_module_level_only_where_devices_are_driven() -> None:
    kinds = (*TORCH_PACKAGES, *torch_kind_modules())
    allowed = (*TORCH_MODULES, "minisgl.testing", *kinds)
    wrong = (
        i
        for root in (CORE, PLUGINS, CLI)
        for i in imports(root)
        if i.top and not i.typing and within(i.module, ("torch", *TORCH_MODULES)) and not within(i.owner, allowed)
    )
    assert show(wrong) == ""


def test_torch_free_modules_leave_torch_out() -> None:
    """Import all of them in a fresh interpreter: what they import in turn counts as well."""
    skip = (*TORCH_MODULES, "minisgl.testing", *TORCH_PACKAGES, *torch_kind_modules())
    names = [
        m
        for root in (CORE, PLUGINS, CLI)
        for _, m in modules(root)
        if not within(m, skip) and not m.endswith("__main__")
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_this_check_finds_what_it_is_for(tmp_path: Path) -> None:
    package = tmp_path / "minisgl" / "sched"
    package.mkdir(parents=True)
    (package / "x.py").write_text(
        "import torch\nif TYPE_CHECKING:\n    import a\ndef f():\n    from minisgl.client import b\n"
    )
    found = list(imports(tmp_path / "minisgl"))
    assert [(i.line, i.owner, i.module, i.top, i.typing) for i in found] == [
        (1, "minisgl.sched.x", "torch", True, False),
        (3, "minisgl.sched.x", "a", True, True),
        (5, "minisgl.sched.x", "minisgl.client", False, False),
    ]
