"""What a rank does with scripts: it runs them. Knows no cases and no draw.

A module of its own, because ranks import what they run.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from random_faults import planted


def run_scripts(
    rank: int, scripts: Sequence[tuple[int, str]], progress: str, fault: str = ""
) -> Counter[str]:
    """Run each script's ``main``; the names of the errors that both sides raised, counted.

    The seed that runs is written to the file ``progress`` by rank 0, for whoever finds the ranks
    stuck. ``fault`` names one of random_faults that is planted meanwhile.
    """
    raised: Counter[str] = Counter()
    with planted(fault):
        for seed, text in scripts:
            if rank == 0:
                Path(progress).write_text(str(seed))
            raised.update(error for error in run_script(rank, seed, text) if error)
    return raised


def run_script(rank: int, seed: int, text: str) -> list[str]:
    """What ``main`` of the script returns, run as a module of its own."""
    name = f"random_script_{seed}"
    file = f"<{name}>"
    module = types.ModuleType(name)
    sys.modules[name] = module
    # So that tracebacks show its lines.
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    try:
        exec(compile(text, file, "exec"), vars(module))
        return module.main(rank)
    finally:
        del sys.modules[name], linecache.cache[file]
