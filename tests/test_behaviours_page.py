"""The page that tells users what holds says what tests show."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "behaviours.md"


def marked() -> dict[int, list[str]]:
    """The tests marked with each number."""
    found: dict[int, list[str]] = {}
    for path in sorted([*ROOT.glob("tests/test_*.py"), *ROOT.glob("packages/*/tests/test_*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                if ast.unparse(decorator).startswith("pytest.mark.behaviour("):
                    assert isinstance(decorator, ast.Call)
                    for number in map(ast.literal_eval, decorator.args):
                        found.setdefault(number, []).append(f"{path.name}::{node.name}")
    return found


def test_every_line_is_shown() -> None:
    """Each numbered line has tests that say so, and no test names a line that is not there."""
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", PAGE.read_text(), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert sorted(marked()) == numbers
