"""A small step under compute-sanitizer, which sees every access of every kernel to memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from .site import CheckFailed, Site, Skip

_FOUND_ERRORS = 99
_SECONDS = 110


def run(site: Site) -> None:
    """One step: memcheck. In a dry run the program runs without it."""
    if site.dry_run:
        with site.step("the program"):
            _run([sys.executable, "-m", "gpu_check.sanitized_step", "cpu"])
    with site.step("memcheck"):
        site.require_cuda("compute-sanitizer")
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            raise Skip("compute-sanitizer is not on the PATH")
        options = ["--tool", "memcheck", "--error-exitcode", str(_FOUND_ERRORS)]
        text = _run(
            [tool, *options, sys.executable, "-m", "gpu_check.sanitized_step", "cuda"],
            # Otherwise torch's allocator hides where one tensor ends and the next begins.
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        found = re.search(r"ERROR SUMMARY: (\d+) error", text)
        if found is None:
            raise CheckFailed("compute-sanitizer gave no summary")
        site.figures["memcheck errors"] = int(found[1])


def _run(command: list[str], more: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    print(done.stdout, flush=True)
    if "Device not supported" in done.stdout:
        raise Skip("compute-sanitizer says that this device is not supported here")
    if done.returncode != 0:
        raise CheckFailed(f"{os.path.basename(command[0])} ended with {done.returncode}")
    return done.stdout
