"""The conformance suite as a pytest class: every test of the contract, for one backend.

Owns what a subclass may say and what it may not. Knows no test.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import new_class
from typing import Any, ClassVar

import pytest

from ...errors import BackendError
from ...spi import CollectiveBackend
from ..zygote import MAX_WORLD_SIZE
from .clauses import Check, all_checks
from .running import ConformanceFailure, run_check
from .subject import Subject, backend_reference

_CHECKS = all_checks()
_FORBIDDEN_MARKS = frozenset({"skip", "skipif", "xfail"})


class _Sealed(type):
    """The class of suites: a standard test can neither be replaced nor be left out."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in _CHECKS:
            raise TypeError(_refusal(cls.__name__, name))
        if name == "pytestmark":
            _refuse_marks(cls.__name__, value)
        super().__setattr__(name, value)


class BackendConformance(metaclass=_Sealed):
    """Holds a backend to ``docs/contract.md``. Subclass it in a test module::

        class TestMine(BackendConformance):
            backend = "mine"
            device_type = "cpu"
            world_size = 4

    and pytest finds one test or more for every clause. None can be overridden, skipped or marked;
    what a backend does not do yet is listed in ``expected_failures`` and must fail.

    Attributes:
        backend: a registered name, or a subclass of CollectiveBackend at the top level of a
            module that other processes can import.
        device_type: the ``type`` of a ``torch.device``; of several devices, rank r uses index r.
        world_size: ranks, each a process. Four, or more, see most: two ranks cannot tell in what
            precision a sum was accumulated, and have no mesh of two axes.
        expected_failures: reasons by names of tests, like ``{"test_training_with_ddp": "..."}``.
            Such a test is reported as an expected failure, and fails where it passes.
        largest_numel: elements that are more than any piece the backend moves at a time.
        timeout: seconds in which every test must end.
        options: of every communicator.
    """

    backend: ClassVar[str | type[CollectiveBackend]]
    device_type: ClassVar[str] = "cpu"
    world_size: ClassVar[int] = 2
    expected_failures: ClassVar[Mapping[str, str]] = {}
    largest_numel: ClassVar[int] = Subject.largest_numel
    timeout: ClassVar[float] = Subject.timeout
    options: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if base is BackendConformance:
                break
            for name in vars(base):
                if name in _CHECKS:
                    raise TypeError(_refusal(cls.__name__, name))
            _refuse_marks(cls.__name__, vars(base).get("pytestmark", ()))
        unknown = sorted(set(cls.expected_failures) - set(_CHECKS))
        if unknown:
            raise TypeError(
                f"{cls.__name__}.expected_failures names {', '.join(unknown)}, which "
                f"{'is no test' if len(unknown) == 1 else 'are no tests'} of this suite."
            )
        for name, reason in cls.expected_failures.items():
            if not isinstance(reason, str) or not reason.strip():
                raise TypeError(
                    f"{cls.__name__}.expected_failures gives no reason for {name}; say why the "
                    "backend is expected to fail it."
                )
        if not hasattr(cls, "backend"):
            raise TypeError(f"{cls.__name__} does not say which backend it tests: set 'backend'.")
        subject_of(cls)


def subject_of(suite: type[BackendConformance]) -> Subject:
    """What ``suite`` tests. Raises TypeError where one of its attributes makes no sense."""
    name = suite.__name__
    try:
        reference = backend_reference(suite.backend)
    except (TypeError, BackendError) as error:
        raise TypeError(f"{name}.backend: {error}") from None
    size = suite.world_size
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_WORLD_SIZE:
        raise TypeError(f"{name}.world_size must be from 1 to {MAX_WORLD_SIZE}, got {size!r}.")
    if not isinstance(suite.device_type, str):
        raise TypeError(f"{name}.device_type must be like 'cpu', got {suite.device_type!r}.")
    if not suite.timeout > 0 or not suite.largest_numel >= 1000:
        raise TypeError(f"{name}: timeout must be above 0, and largest_numel 1000 or more.")
    return Subject(
        reference,
        suite.device_type,
        size,
        suite.largest_numel,
        suite.timeout,
        dict(suite.options),
    )


def suite_for(subject: Subject, expected_failures: Mapping[str, str]) -> type[BackendConformance]:
    """A suite that tests ``subject``. Raises TypeError as a subclass would."""
    names = ("device_type", "world_size", "largest_numel", "timeout", "options")
    attributes = {name: getattr(subject, name) for name in names}
    # A name that has a colon is that of a class, which Subject finds by itself.
    attributes |= {"backend": subject.backend, "expected_failures": dict(expected_failures)}
    return new_class(
        "TestBackend", (BackendConformance,), exec_body=lambda space: space.update(attributes)
    )


@lru_cache
def _choice_problem(reference: str, device_type: str) -> str | None:
    """Why the backend cannot be had, in its own words."""
    try:
        Subject(reference, device_type).make_backend()
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
    return None


def _run(check: Check, suite: type[BackendConformance], record: Callable[[str, Any], None]) -> None:
    """Run one test as its suite wants it."""
    subject, reason = subject_of(suite), suite.expected_failures.get(check.name)
    record("clauses", ", ".join(check.clauses))
    record("since", check.version)
    problem = _choice_problem(subject.backend, subject.device_type)
    if problem is not None:
        pytest.fail(f"{subject} cannot be tested. {problem}", pytrace=False)
    failure = None
    try:
        run_check(check, subject)
    except ConformanceFailure as found:
        failure = found
    if failure is not None and reason is not None:
        pytest.xfail(reason)
    if failure is not None:
        pytest.fail(str(failure), pytrace=False)
    if reason is not None:
        pytest.fail(
            f"clause {', '.join(check.clauses)}: {check.name} passes, but {suite.__name__} expects "
            f"it to fail ({reason}); remove it from expected_failures.",
            pytrace=False,
        )


def _method(check: Check) -> Callable[..., None]:
    def test(self: BackendConformance, record_property: Callable[[str, Any], None]) -> None:
        _run(check, type(self), record_property)

    test.__name__ = check.name
    test.__qualname__ = f"{BackendConformance.__name__}.{check.name}"
    test.__doc__ = f"{check.demand}\n\nClauses {', '.join(check.clauses)}, since {check.version}."
    return test


def _refusal(suite: str, name: str) -> str:
    return (
        f"{suite} replaces {name}, a standard test; a backend that cannot pass it says so, with a "
        "reason, in 'expected_failures'."
    )


def _refuse_marks(suite: str, marks: Any) -> None:
    for mark in _flattened(marks):
        if getattr(mark, "name", None) in _FORBIDDEN_MARKS:
            raise TypeError(
                f"{suite} is marked {mark.name!r}, but no standard test can be left out; a backend "
                "that cannot pass one says so, with a reason, in 'expected_failures'."
            )


def _flattened(marks: Any) -> Iterator[Any]:
    if isinstance(marks, list | tuple):
        for mark in marks:
            yield from _flattened(mark)
    else:
        yield marks


for _check in _CHECKS.values():
    type.__setattr__(BackendConformance, _check.name, _method(_check))
