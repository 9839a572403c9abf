"""The guide to writing a backend shows code that is really in its example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "backend-guide.md"
EXAMPLE = ROOT / "examples" / "third_party_backend"

#: (file, code) of every block that begins with the name of a file.
EXCERPTS = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_every_block_of_code_names_its_file() -> None:
    """No code in the guide goes unchecked."""
    assert len(EXCERPTS) == len(re.findall("```(?:python|toml)\n", GUIDE.read_text())) > 10


@pytest.mark.parametrize(("file", "code"), EXCERPTS, ids=[file for file, _ in EXCERPTS])
def test_excerpts_are_in_the_example(file: str, code: str) -> None:
    """Every excerpt is in the file that it names, line by line; dots stand for what was left
    out."""
    source = (EXAMPLE / file).read_text()
    position = 0
    for piece in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
        position = source.find(piece, position)
        assert position >= 0, f"not in {file}, or not in this order:\n{piece}"


def test_links_lead_somewhere() -> None:
    """Every file that the guide links to is there, and the pages that lead to it link to it."""
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text()):
        assert (GUIDE.parent / target).exists(), target
    for page, link in (
        ("README.md", "docs/backend-guide.md"),
        ("docs/architecture.md", "backend-guide.md"),
    ):
        assert f"]({link})" in (ROOT / page).read_text(), page
