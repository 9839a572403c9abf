"""The process that one check runs in: ``python -m gpu_check.child RESULT DRY_RUN LIMIT CALL``.

Writes one JSON object to the file RESULT: status, reason, figures and steps. What it prints goes
where its parent sends it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from .site import CheckFailed, Site, Skip


def main(arguments: list[str]) -> None:
    """Run the check. The process then ends as any other, so one that cannot end is noticed."""
    result, dry_run, limit, call = arguments
    # In time for the stacks to be read before the parent ends this process.
    faulthandler.dump_traceback_later(max(0.5, 0.95 * float(limit) - 1.0), exit=False)
    function, given = json.loads(call)
    site = Site(dry_run=dry_run == "1")
    found = perform(site, function, given)
    Path(result).write_text(json.dumps(found))
    _leave()


def _leave() -> None:
    """As a program should: torch's own process groups are not what is looked at here."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def perform(site: Site, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the check found, as it goes into the report."""
    status, reason = "passed", ""
    try:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(site, **arguments)
        if site.steps:
            site.conclude()
        elif not site.figures:
            raise CheckFailed("it neither checked nor measured anything")
    except Skip as skip:
        status, reason = "skipped", str(skip)
    except BaseException as error:
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        status, reason = "failed", f"{type(error).__name__}: {first}"
    return {"status": status, "reason": reason, "figures": site.figures, "steps": site.steps}


if __name__ == "__main__":
    main(sys.argv[1:])
