"""What the cell says of pip's work is short, and names what is large."""

from __future__ import annotations

import pytest

from syncd.notebook.start import SHOWN_PACKAGES, _came

# In the environment of the tests these are from small to large; the last is in none.
PACKAGES = ["iniconfig-2.1", "pluggy-1.6", "psutil-7.1", "numpy-2.3", "no-such-package-1.0"]


@pytest.mark.parametrize(
    ("packages", "told"),
    [
        (["numpy-2.3"], "installed 1 package: numpy 2.3"),
        (PACKAGES[:2], "installed 2 packages: pluggy 1.6, iniconfig 2.1"),
        (PACKAGES, "installed 5 packages: numpy 2.3, psutil 7.1, pluggy 1.6, iniconfig 2.1, …"),
    ],
)
def test_the_largest_packages_are_named(packages: list[str], told: str) -> None:
    output = f"Collecting x\nSuccessfully installed {' '.join(packages)}\n"
    assert _came(output) == told
    assert told.count(",") <= SHOWN_PACKAGES


def test_where_nothing_was_missing_that_is_said() -> None:
    assert _came("Requirement already satisfied: x\n") == "installed nothing: all was there"
