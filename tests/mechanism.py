"""What a mutant of one of the core's mechanisms is. The lists are in ``mechanisms_of_passes`` and
``mechanisms_at_rest``.

A mutant replaces a few words of one of the core's files, found exactly once there. Waits, settles,
joins and releases are on no list: their mutants are made from the source.
"""

from __future__ import annotations

from dataclasses import dataclass

FOLDERS = {"core": "packages/core/tests", "ranks": "tests"}


@dataclass(frozen=True)
class Mutant:
    """The core without one mechanism.

    Args:
        mechanism: what the core no longer does.
        file: of the core, by its name.
        before: what is replaced, found once in the file.
        after: what stands there instead.
        killer: the test that is to fail, as ``folder::file::test``; see :data:`FOLDERS`. Without
            the mutant it passes.
    """

    mechanism: str
    file: str
    before: str
    after: str
    killer: str

    @property
    def test(self) -> str:
        """The killer as pytest is given it."""
        folder, file, test = self.killer.split("::", 2)
        return f"{FOLDERS[folder]}/test_{file}.py::{test}"
