"""Checks that do what a check may do wrong, for test_gpu_check.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def passes(site: Any, number: int) -> None:
    print("this is not in the report")
    site.figures["number"] = number


def raises(site: Any) -> None:
    print("printed before")
    raise RuntimeError("broken on purpose\nsecond line")


def dies(site: Any) -> None:
    site.figures["never"] = "seen"
    os._exit(3)


def skips(site: Any) -> None:
    from gpu_check.site import Skip

    raise Skip("nothing to see here")


def does_nothing(site: Any) -> None:
    pass


def half(site: Any) -> None:
    """A step that fails between two that do not."""
    for name, wrong in (("first", 0), ("second", 1), ("third", 0)):
        with site.step(name):
            assert not wrong, "wrong"


def hangs(site: Any, note: str) -> None:
    """With a process of its own, whose number it notes."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(note).write_text(str(sleeper.pid))
    time.sleep(600)


def ends_late(site: Any) -> None:
    """It has found everything, and its process does not end."""
    import threading

    site.figures["found"] = True
    threading.Thread(target=time.sleep, args=(600,)).start()
