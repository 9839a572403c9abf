"""Runs checks, each in a process of its own that is ended when its time is over.

Knows no torch and no check.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .registry import Check

_LAST_LINES = 60
_LEAST_SECONDS = 5.0


@dataclass
class Outcome:
    """What came of one check.

    Args:
        status: ``passed``, ``failed`` or ``skipped``.
        reason: why it failed or was skipped, in a line.
        seconds: that its process took, its start included.
        figures: what it measured or counted, by name.
        steps: what came of its parts, by name.
        output: the last lines that it printed, if it failed.
    """

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Runner:
    """Args:
    folder: for what processes print and find; exists.
    paths: to import from, before all others.
    dry_run: on a CPU.
    seconds: for all checks together; what is not begun by then is skipped.
    jobs: checks that run at a time, but for those that measure.
    note: called with what came of a check when it ends, from one thread at a time.
    """

    def __init__(
        self,
        folder: Path,
        paths: Sequence[str],
        *,
        dry_run: bool = False,
        seconds: float = 345.0,
        jobs: int = 1,
        note: Callable[[Outcome], object] = lambda outcome: None,
    ) -> None:
        self._folder, self._paths, self._dry_run = folder, list(paths), dry_run
        self._deadline = time.monotonic() + seconds
        self._jobs, self._note = jobs, note
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._noting = threading.Lock(), threading.Lock()

    def run(self, checks: Sequence[Check]) -> list[Outcome]:
        """Those that measure first, one by one; then the others. In the order given."""
        found: dict[str, Outcome] = {}
        try:
            for check in checks:
                if check.measures:
                    found[check.name] = self._one(check)
            with ThreadPoolExecutor(self._jobs) as pool:
                others = [check for check in checks if not check.measures]
                try:
                    for check, outcome in zip(others, pool.map(self._one, others), strict=True):
                        found[check.name] = outcome
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._end_all()
                    raise
        finally:
            self._end_all()
        return [found[check.name] for check in checks]

    def probe(self, seconds: float = 120.0) -> dict[str, Any]:
        """What ``gpu_check.machine`` says of this machine; ``{"problem": ...}`` if it cannot."""
        command = [sys.executable, "-m", "gpu_check.machine"]
        try:
            done = subprocess.run(
                command,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"problem": f"asking torch for its GPU took more than {seconds:g} s"}
        except (IndexError, ValueError):
            return {"problem": f"torch cannot be asked: {done.stderr.strip()[-500:]}"}
        return answer

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """That of a child: everything that it writes goes into the folder."""
        before = os.environ.get("PYTHONPATH")
        folder = str(self._folder)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*self._paths, *([before] if before else [])]),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": folder,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            **(more or {}),
        }

    def _one(self, check: Check) -> Outcome:
        began = time.monotonic()
        limit = min(check.seconds, self._deadline - began)
        if limit < _LEAST_SECONDS:
            outcome = Outcome(check.name, "skipped", "the time for all checks was over")
        else:
            outcome = self._perform(check, limit)
        outcome.seconds = round(time.monotonic() - began, 2)
        with self._noting:
            self._note(outcome)
        return outcome

    def _perform(self, check: Check, limit: float) -> Outcome:
        result, printed = self._folder / f"{check.name}.json", self._folder / f"{check.name}.txt"
        call = json.dumps([check.function, check.arguments])
        command = [sys.executable, "-m", "gpu_check.child", str(result)]
        command += ["1" if self._dry_run else "0", str(limit), call]
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=self.environment(check.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            with self._lock:
                self._running.add(process)
            try:
                process.wait(limit)
                ended = True
            except subprocess.TimeoutExpired:
                ended = False
            finally:
                self._end(process)
        outcome = Outcome(check.name, "failed")
        if result.exists():
            with suppress(ValueError):  # cut off while it was written
                outcome = Outcome(check.name, **json.loads(result.read_text()))
        if not ended:
            found = " (it had found all it looked for, and did not end)" if result.exists() else ""
            outcome.status, outcome.reason = "failed", f"not over after {limit:.0f} s{found}"
        elif process.returncode != 0 or not result.exists():
            outcome.status = "failed"
            outcome.reason = outcome.reason or f"its process ended with {process.returncode}"
        if outcome.status == "failed":
            lines = printed.read_text(errors="replace").splitlines()
            outcome.output = lines[-_LAST_LINES:]
        return outcome

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End it and what it started in its session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with self._lock:
            self._running.discard(process)

    def _end_all(self) -> None:
        with self._lock:
            running = list(self._running)
        for process in running:
            self._end(process)
