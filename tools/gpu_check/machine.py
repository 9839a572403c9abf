"""``python -m gpu_check.machine``: one line of JSON on what this machine and its torch are.

``problem`` is why nothing can be checked here, or empty.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

_PACKAGES = ("polyshard", "polyshard-gloo", "polyshard-nccl", "pytest", "packaging", "triton")


def describe() -> dict[str, Any]:
    """Versions, names and sizes; None for what cannot be found out."""
    found: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "compute_sanitizer": shutil.which("compute-sanitizer"),
        "torch": None,
        "cuda": None,
        "nccl": None,
        "gpu": None,
        "gpu_memory_bytes": None,
        "gpu_capability": None,
        "gpus": 0,
        "driver": _driver(),
        "problem": "",
    }
    try:
        import torch
    except ImportError as error:
        found["problem"] = f"torch cannot be imported: {error}"
        return found
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    if torch.version.cuda is None:
        found["problem"] = f"torch {torch.__version__} was built without CUDA"
        return found
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if not torch.cuda.is_available():
        found["problem"] = "torch finds no GPU here"
        return found
    try:
        properties = torch.cuda.get_device_properties(0)
        torch.zeros(1, device="cuda:0").sum().item()
    except RuntimeError as error:
        found["problem"] = f"the GPU cannot be used: {str(error).splitlines()[0]}"
        return found
    found["gpus"] = torch.cuda.device_count()
    found["gpu"], found["gpu_memory_bytes"] = properties.name, properties.total_memory
    found["gpu_capability"] = [properties.major, properties.minor]
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


if __name__ == "__main__":
    print(json.dumps(describe()))
    sys.exit(0)
