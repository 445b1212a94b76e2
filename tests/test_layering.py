"""Who may import whom: protocol nobody but itself; syncd and trainer only it, never each other."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"protocol", "syncd", "trainer"}
MAY_IMPORT = {
    "protocol": {"protocol"},
    "syncd": {"syncd", "protocol"},
    "trainer": {"trainer", "protocol"},
}


def imports(source: str) -> Iterator[str]:
    """Yield the top-level name of every import, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield (node.module or "").partition(".")[0]


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_the_packages_below_it(package: str):
    for path in sources(package):
        wrong = set(imports(path.read_text("utf-8"))) & OURS - MAY_IMPORT[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_protocol_imports_the_standard_library_alone():
    for path in sources("protocol"):
        foreign = set(imports(path.read_text("utf-8"))) - {"protocol"} - sys.stdlib_module_names
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_no_program_of_ours_imports_its_tests():
    for package in MAY_IMPORT:
        for path in sources(package):
            assert not set(imports(path.read_text("utf-8"))) & {"tests", "pytest", "hypothesis"}


def test_imports_are_found_wherever_they_stand():
    source = "import a.b\ndef f():\n    from c.d import e\nif x:\n    import g as h, i\n"
    assert sorted(imports(source)) == ["a", "c", "g", "i"]
