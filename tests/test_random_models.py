"""A hundred random models, and what shows that the tester of them finds and shrinks faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from random_case import Case, features, tidy
from random_draw import STRATEGIES, drawn
from random_run import Failure, outcome, run_cases
from random_script import rendered
from random_shrink import shrunk

HERE = Path(__file__).parent
CHUNK = 10


def hundred() -> list[Case]:
    """Those that run here: all strategies in turn, one in six on four ranks."""
    return [
        drawn(seed, strategy=STRATEGIES[seed % 6], ranks=4 if seed // 6 % 6 == 5 else 2)
        for seed in range(100)
    ]


def chunks() -> list[list[Case]]:
    cases = sorted(hundred(), key=lambda case: case.ranks)
    pairs = [case for case in cases if case.ranks == 2]
    others = [case for case in cases if case.ranks > 2]
    return [part[i : i + CHUNK] for part in (pairs, others) for i in range(0, len(part), CHUNK)]


@pytest.mark.parametrize("cases", chunks(), ids=lambda cases: f"seed {cases[0].seed} and on")
def test_random_models_do_as_plain_ones(cases: list[Case]) -> None:
    """Values, gradients and errors are those of one process that has all data."""
    failures: list[Failure] = []
    run_cases(cases, failures.append)
    told = [f"seed {f.case.seed} ({f.case.strategy}): {f.kind}\n{f.report}" for f in failures]
    assert not told, "\n\n".join(told)


#: What the hundred cover, each in several of them.
COVERED = """\
layer: linear|layer: wide|layer: transposed|layer: scalar|layer: vector|layer: row|layer: rows
layer: empty|layer: unused|layer: embedding|layer: chosen rows|layer: convolution
layer: attention|layer: batch norm|layer: layer norm|layer: integer|layer: boolean
layer: complex|layer: other dtype
strategy: zero3|strategy: zero1|strategy: hfsdp|strategy: zero2|strategy: ddp|strategy: hsdp
2 ranks|4 ranks|dtype: float64|dtype: float32|dtype: mixed
optimizer: sgd|optimizer: momentum|optimizer: adamw|optimizer: adamw fused
optimizer: adamw foreach|optimizer: adam loop
returns: tensor|returns: view|returns: tuple|returns: dict|returns: dataclass|returns: nested
returns: parameter|takes: tensor|takes: keyword|takes: nothing
guard: data|guard: rank|calls that the route skips|a unit that nobody enters
a unit that some ranks skip|nested units|a module in a unit that is none
no unit above the others|a shared module|repeated calls|frozen parts|a no-grad section
an output changed in place|tied weights|ties across modules|a kept intermediate
checkpoint inside: plain|checkpoint inside: reentrant
checkpoint around: plain|checkpoint around: reentrant
weights kept gathered|no prefetch|prefetch of several units|a gradient divisor
input gradients|ranks with different amounts of data
operation: forward|operation: backward|operation: step|operation: zero|operation: zero one
operation: clip|operation: scale gradients|operation: set gradient|operation: freeze
operation: save|operation: load|operation: save full|operation: load full|operation: mode
write: in place|write: foreach|write: unsharded|write: copy|write: data
exception in forward|exception in backward
forward: with gradients|forward: no_grad|forward: inference|forward: given up
forward: autocast|forward: unsharded|a child unit alone|a microbatch that is not the last
one backward of two forwards|a kept graph|zero_grad: to None|zero_grad: in place
forwards in flight: backward of the first|forwards in flight: of a later one
forwards in flight: weights change"""


def test_the_hundred_cover_everything() -> None:
    """Every feature that cases may have is in the hundred, and none is missing from the list."""
    found: Counter[str] = Counter()
    for case in hundred():
        found.update(features(case))
    expected = set(COVERED.replace("\n", "|").split("|"))
    assert set(found) == expected


def test_a_seed_is_a_case() -> None:
    """The same seed draws the same case and script; another one another."""
    assert drawn(3) == drawn(3)
    assert rendered(drawn(3)) == rendered(drawn(3))
    assert drawn(3) != drawn(4)


def test_what_refers_to_nothing_is_dropped() -> None:
    """Tidying a drawn case changes nothing, and one without blocks but the root still makes
    sense."""
    for case in hundred():
        assert tidy(case) == case


def run_alone(script: Path, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, under torchrun; with a fault planted if one is named."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    if not fault:
        command = [sys.executable, str(script)]
    else:
        command = [*launcher, "--nproc-per-node", "2", str(HERE / "random_faults.py")]
        command += [fault, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize("fault", ["scaled gradients", "stale weights"])
def test_a_fault_is_found_and_shrinks_to_a_script(fault: str, tmp_path: Path) -> None:
    """A fault of the core is found among a few cases; the smallest case that shows it is a short
    script, which fails by itself with the fault and passes without."""
    found: Failure | None = None
    for seed in range(40):
        case = drawn(seed, strategy="zero3", ranks=2)
        found = outcome(case, fault=fault)
        if found is not None:
            break
    assert found is not None
    kind = found.kind

    def fails_alike(case: Case) -> bool:
        failure = outcome(case, fault=fault)
        return failure is not None and failure.kind == kind

    smallest = shrunk(found.case, fails_alike)
    assert len(smallest.blocks) <= 2
    assert len(smallest.operations) <= 5
    script = tmp_path / "smallest.py"
    script.write_text(rendered(smallest))
    assert run_alone(script).returncode == 0
    with_fault = run_alone(script, fault)
    assert with_fault.returncode != 0
    assert "Difference" in with_fault.stderr
