"""Writes ``gpu_check.json`` and ``gpu_check.md``. Knows no check."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runner import Outcome

FORMAT = 1
_NUMBERS_SHOWN = 8


def write(
    folder: Path,
    machine: dict[str, Any],
    outcomes: Sequence[Outcome],
    *,
    commit: str | None,
    dry_run: bool,
    seconds: float,
) -> None:
    """Both files, into ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "dry_run_on_cpu": dry_run,
        "commit": commit,
        "seconds": round(seconds, 1),
        "machine": machine,
        "checks": [outcome.as_dict() for outcome in outcomes],
    }
    (folder / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "gpu_check.md").write_text(summary(content))


def summary(content: dict[str, Any]) -> str:
    """The same to read: a table, the figures, and what failing checks printed."""
    machine, checks = content["machine"], content["checks"]
    counts = Counter(check["status"] for check in checks)
    told = ", ".join(
        f"{counts[status]} {status}" for status in ("passed", "failed", "skipped") if counts[status]
    )
    lines = ["# What one GPU shows of polyshard", ""]
    if content["dry_run_on_cpu"]:
        lines += ["**A dry run on a CPU: it shows that the checks run, and nothing of a GPU.**", ""]
    lines += [f"{told}; {content['seconds']:.0f} s; commit {content['commit'] or 'unknown'}", ""]
    lines += ["| what | here |", "|---|---|"]
    for name in ("gpu", "driver", "torch", "cuda", "nccl", "python", "machine", "cpus"):
        lines.append(f"| {name} | {_cell(machine.get(name))} |")
    missing = [name for name, version in machine.get("packages", {}).items() if version is None]
    lines.append(f"| packages that are missing | {', '.join(missing) or 'none'} |")
    lines += ["", "| check | status | seconds | steps | why |", "|---|---|---|---|---|"]
    for check in checks:
        passed = sum(outcome == "passed" for outcome in check["steps"].values())
        steps = f"{passed} of {len(check['steps'])}" if check["steps"] else ""
        lines.append(
            f"| {check['name']} | {check['status']} | {check['seconds']:.1f} | {steps} | "
            f"{_cell(check['reason'])} |"
        )
    for check in checks:
        lines += _details(check)
    return "\n".join(lines) + "\n"


def _details(check: dict[str, Any]) -> list[str]:
    wrong = {k: v for k, v in check["steps"].items() if not v.startswith("passed")}
    if not (check["figures"] or wrong or check["output"]):
        return []
    lines = ["", f"## {check['name']}", ""]
    if check["figures"]:
        lines += ["| figure | value |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in check["figures"].items()]
        lines.append("")
    lines += [f"- {name}: {outcome}" for name, outcome in wrong.items()]
    if check["output"]:
        lines += ["", "```", *(line.replace("```", "'''") for line in check["output"]), "```"]
    return lines


def _cell(value: Any) -> str:
    """In a table: short, and without what would end a cell."""
    if isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, dict):
        shown = [f"{name} {_cell(each)}" for name, each in list(value.items())[:_NUMBERS_SHOWN]]
        text = ", ".join(shown) + (", ..." if len(value) > _NUMBERS_SHOWN else "")
    elif isinstance(value, list):
        text = ", ".join(map(_cell, value[:_NUMBERS_SHOWN]))
        text += ", ..." if len(value) > _NUMBERS_SHOWN else ""
    else:
        text = "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
