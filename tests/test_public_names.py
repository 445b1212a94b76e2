"""The public names of protocol are its interface: a change of one is seen in a review.

To accept a change, edit tests/data/public_names.txt, one line a module.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "data" / "public_names.txt"


def public_names(path: Path) -> list[str]:
    """The names that a module defines at its top level, less those that begin with `_`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return sorted(name for name in names if not name.startswith("_"))


def test_the_public_names_of_protocol_are_those_on_the_list():
    found = {path.stem: public_names(path) for path in sorted((ROOT / "protocol").glob("*.py"))}
    listed = {}
    for line in LISTED.read_text("utf-8").splitlines():
        module, _, names = line.partition(": ")
        listed[module] = names.split()
    assert {module: names for module, names in found.items() if names} == listed
