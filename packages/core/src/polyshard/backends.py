"""Finds installed backends, chooses one, and refuses those that do not fit.

Backends are entry points in the group ``polyshard.backends``. Their metadata is read without
importing them; a backend's package is imported only when it is about to be used. Knows backends
by their registered names, never their packages.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TypeAlias

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from .backend_messages import (
    PREFERRED,
    describe,
    distribution_of,
    install_hint,
    missing_message,
    unsuitable_message,
)
from .errors import BackendError
from .spi import SPI_VERSION, Capabilities, CollectiveBackend

_ENTRY_POINT_GROUP = "polyshard.backends"
_ENVIRONMENT_VARIABLE = "POLYSHARD_BACKEND"

# Filled with what succeeded only, so that a backend installed after an error is found.
_instances: dict[str, CollectiveBackend] = {}
_choices: dict[tuple[str | None, str], CollectiveBackend] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class BackendStatus:
    """One registered backend and whether it can be used here.

    Args:
        name: what ``backend=`` and ``POLYSHARD_BACKEND`` call it.
        distribution: the name that pip knows its package by.
        version: of the distribution.
        spi: version of the collective interface it was written for; None if it cannot be loaded.
        device_types: those it serves, sorted; empty if it cannot be loaded.
        reasons: why it cannot be loaded; or, by device type, why it cannot serve that one here;
            None if it can serve all of ``device_types``.
    """

    name: str
    distribution: str
    version: str
    spi: tuple[int, int] | None
    device_types: tuple[str, ...]
    reasons: str | Mapping[str, str] | None

    @property
    def usable_device_types(self) -> tuple[str, ...]:
        """The device types that it can serve here and now."""
        if self.reasons is None:
            return self.device_types
        return tuple(kind for kind in self.device_types if kind not in self.reasons)


@dataclass(frozen=True)
class _Problem:
    """Why a backend cannot be used; ``text`` continues a sentence that begins with its name.

    ``is_defect`` tells something to repair from a backend that is merely for other machines.
    """

    text: str
    cause: Exception | None = None
    is_defect: bool = True


#: A backend that was tried before the one chosen, as messages call it, and what was wrong.
_PassedOver: TypeAlias = tuple[str, _Problem]


@dataclass(frozen=True)
class BackendChoice:
    """What ``backend=None`` comes to for one device type.

    Args:
        device_type: the ``type`` of a ``torch.device``.
        name: the backend that is taken; None if none can be.
        reason: why that one; or why none and what to do.
    """

    device_type: str
    name: str | None
    reason: str


def choose_backend(
    backend: str | CollectiveBackend | None, *, device_type: str, use_symm_mem: bool = False
) -> CollectiveBackend:
    """The backend to communicate with on devices of ``device_type``.

    Args:
        backend: an installed backend's name; an instance, which is used as it is; or None for
            the one that ``POLYSHARD_BACKEND`` names, else the first that can serve
            ``device_type``: gloo on cpu, nccl on cuda, then any other in order of name.
        device_type: the ``type`` of a ``torch.device``.
        use_symm_mem: the same as ``backend="symm_mem"``.

    Returns:
        The process's one instance of that backend.

    Raises:
        ValueError: ``backend`` is of another type, or contradicts ``use_symm_mem``.
        BackendError: the backend is missing, broken, incompatible with this version of polyshard,
            unavailable here, or its name is registered twice.
    """
    if use_symm_mem:
        given = getattr(backend, "name", backend)
        if given not in (None, "symm_mem"):
            raise ValueError(
                f"use_symm_mem=True means backend='symm_mem', but backend={given!r} was given as "
                "well; drop one of the two."
            )
        backend = "symm_mem" if backend is None else backend
    if isinstance(backend, CollectiveBackend):
        return _check_instance(backend, device_type)
    if backend is not None and not isinstance(backend, str):
        raise ValueError(
            f"backend must be a name, a CollectiveBackend or None, got {backend!r} of type "
            f"{type(backend).__name__}; make an instance if it is a class."
        )
    source = ""
    if backend is None and os.environ.get(_ENVIRONMENT_VARIABLE):
        backend = os.environ[_ENVIRONMENT_VARIABLE]
        source = f" The environment variable {_ENVIRONMENT_VARIABLE} chose it."
    # Reading the metadata of all that is installed takes milliseconds; every unit comes by here.
    with _lock:
        choice = _choices.get((backend, device_type))
        if choice is None:
            if backend is None:
                choice = _require_best(device_type)
            else:
                choice = _choose_named(backend, device_type, source)
            _choices[backend, device_type] = choice
    return choice


def available_backends() -> tuple[BackendStatus, ...]:
    """Every registered backend in order of name, with what it serves here or why it cannot.

    Imports all of them; what goes wrong becomes a reason, never an exception. A name that several
    distributions register has one entry for each.
    """
    loaded = [(entries, _load(entries)) for entries in _registered().values()]
    return tuple(_status(entry, result) for entries, result in loaded for entry in entries)


def explain_choice(device_type: str) -> BackendChoice:
    """The backend that ``choose_backend(None, device_type=device_type)`` takes, and why that one.

    Imports what it takes to know; what goes wrong becomes a reason, never an exception.
    """
    if os.environ.get(_ENVIRONMENT_VARIABLE):
        try:
            named = choose_backend(None, device_type=device_type)
        except BackendError as error:
            return BackendChoice(device_type, None, str(error))
        return BackendChoice(device_type, named.name, f"{_ENVIRONMENT_VARIABLE} names it")
    best, passed_over = _choose_best(device_type)
    if best is None:
        hint = install_hint(device_type, _registered())
        return BackendChoice(device_type, None, hint or "nothing that is installed can serve it")
    if best.name == PREFERRED.get(device_type):
        return BackendChoice(device_type, best.name, f"preferred on {device_type}")
    defects = [f"; {text} {problem.text}" for text, problem in passed_over if problem.is_defect]
    reason = f"the first in order of name that can serve {device_type}" + "".join(defects)
    return BackendChoice(device_type, best.name, reason)


def _status(entry: metadata.EntryPoint, loaded: CollectiveBackend | _Problem) -> BackendStatus:
    distribution, version = distribution_of(entry)
    if isinstance(loaded, _Problem):
        return BackendStatus(entry.name, distribution, version, None, (), loaded.text)
    device_types = tuple(sorted(loaded.capabilities.device_types))
    problems = {kind: _availability_problem(loaded, kind) for kind in device_types}
    reasons = {kind: problem.text for kind, problem in problems.items() if problem is not None}
    spi = loaded.spi
    return BackendStatus(entry.name, distribution, version, spi, device_types, reasons or None)


def _choose_named(name: str, device_type: str, source: str) -> CollectiveBackend:
    registered = _registered()
    if name not in registered:
        raise BackendError(missing_message(name, registered, source))
    result = _load_for(registered[name], device_type)
    if isinstance(result, _Problem):
        message = f"Backend {describe(registered[name])} {result.text}{source}"
        raise BackendError(message) from result.cause
    return result


def _choose_best(device_type: str) -> tuple[CollectiveBackend | None, list[_PassedOver]]:
    """The first in order of preference that can serve ``device_type``, importing no further; and
    those before it with what stood in their way."""
    preferred = PREFERRED.get(device_type)
    registered = _registered()
    passed_over: list[_PassedOver] = []
    for name in sorted(registered, key=lambda name: (name != preferred, name)):
        result = _load_for(registered[name], device_type)
        if not isinstance(result, _Problem):
            return result, passed_over
        passed_over.append((describe(registered[name]), result))
    return None, passed_over


def _require_best(device_type: str) -> CollectiveBackend:
    best, passed_over = _choose_best(device_type)
    if best is None:
        cause = next((problem.cause for _, problem in passed_over if problem.cause), None)
        sentences = [f"{description} {problem.text}" for description, problem in passed_over]
        raise BackendError(unsuitable_message(device_type, sentences, _registered())) from cause
    for description, problem in passed_over:
        if problem.is_defect:
            # Another transport than the one installed for this device must not go unnoticed.
            warnings.warn(
                f"Using backend {best.name!r}, because backend {description} {problem.text}",
                RuntimeWarning,
                stacklevel=4,
            )
    return best


def _check_instance(backend: CollectiveBackend, device_type: str) -> CollectiveBackend:
    package = type(backend).__module__.partition(".")[0]
    problem = _declaration_problem(backend, package) or _availability_problem(backend, device_type)
    if problem is not None:
        name = getattr(backend, "name", type(backend).__qualname__)
        message = f"Backend {name!r} (an instance from {package!r}) {problem.text}"
        raise BackendError(message) from problem.cause
    return backend


def _registered() -> dict[str, list[metadata.EntryPoint]]:
    """The registrations of every name, in order of name; imports nothing."""
    registered: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=_ENTRY_POINT_GROUP):
        registered.setdefault(entry.name, []).append(entry)
    return dict(sorted(registered.items()))


def _load_for(entries: list[metadata.EntryPoint], device_type: str) -> CollectiveBackend | _Problem:
    """As ``_load``, and it can serve ``device_type`` here."""
    loaded = _load(entries)
    if isinstance(loaded, _Problem):
        return loaded
    return _availability_problem(loaded, device_type) or loaded


def _load(entries: list[metadata.EntryPoint]) -> CollectiveBackend | _Problem:
    """The process's one instance of the backend that ``entries``, all of one name, register."""
    entry = entries[0]
    distribution, _ = distribution_of(entry)
    if len(entries) > 1:
        owners = " and ".join(sorted(distribution_of(entry)[0] for entry in entries))
        return _Problem(f"is registered more than once, by {owners}. Uninstall all but one.")
    with _lock:
        if entry.name in _instances:
            return _instances[entry.name]
        if problem := _requirement_problem(entry):
            return problem
        try:
            factory = entry.load()
        except Exception as error:
            return _broken(f"importing {entry.value!r}", error, distribution)
        # A class of another interface version may not even be instantiable: say so first.
        spi = getattr(factory, "spi", None)
        if isinstance(spi, tuple) and (problem := _spi_problem(spi, distribution)):
            return problem
        try:
            instance: CollectiveBackend = factory()
            problem = _declaration_problem(instance, distribution, entry.name)
        except Exception as error:
            return _broken(f"constructing {entry.value!r}", error, distribution)
        if problem is not None:
            return problem
        _instances[entry.name] = instance
        return instance


def _broken(attempt: str, error: Exception, distribution: str) -> _Problem:
    return _Problem(
        f"is broken: {attempt} raised {type(error).__name__}: {error}. Repair or reinstall "
        f"{distribution}.",
        error,
    )


def _requirement_problem(entry: metadata.EntryPoint) -> _Problem | None:
    """Whether the distribution of ``entry`` asks for another version of polyshard than this."""
    distribution, _ = distribution_of(entry)
    assert entry.dist is not None
    core = _core_version()
    if core is None:
        return None
    for line in entry.dist.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            return _broken(f"reading its requirement {line!r}", error, distribution)
        if canonicalize_name(requirement.name) != "polyshard":
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(core, prereleases=True):
            culprit = "polyshard" if _asks_for_newer(requirement.specifier, core) else distribution
            return _Problem(
                f"is incompatible: it requires polyshard {requirement.specifier}, but polyshard "
                f"{core} is installed. Upgrade {culprit}."
            )
    return None


def _core_version() -> Version | None:
    """This package's version, or None where it runs from sources that were never installed."""
    try:
        return Version(metadata.version("polyshard"))
    except metadata.PackageNotFoundError:
        return None


def _asks_for_newer(specifier: SpecifierSet, core: Version) -> bool:
    """Whether ``core`` misses a lower bound of ``specifier``."""
    return any(
        Version(clause.version.removesuffix(".*")) >= core
        for clause in specifier
        if clause.operator in (">=", ">", "~=", "==")
        and not clause.contains(core, prereleases=True)
    )


def _declaration_problem(backend: object, package: str, name: str | None = None) -> _Problem | None:
    """Whether ``backend`` is what the interface demands; ``name`` is what it is registered as."""
    if not isinstance(backend, CollectiveBackend):
        made = type(backend).__name__
        return _Problem(f"is broken: its entry point made a {made}, not a CollectiveBackend.")
    own_name = getattr(backend, "name", None)
    if not isinstance(own_name, str) or own_name != (name or own_name):
        return _Problem(
            f"is broken: it calls itself {own_name!r}; its 'name' must be that of its entry point."
        )
    if not isinstance(getattr(backend, "capabilities", None), Capabilities):
        return _Problem("is broken: its 'capabilities' are missing; set them to a Capabilities.")
    return _spi_problem(getattr(backend, "spi", None), package)


def _spi_problem(spi: object, package: str) -> _Problem | None:
    """Whether ``spi`` is a version of the collective interface that this core does not speak."""
    match spi:
        case (int(major), int(minor)):
            pass
        case _:
            return _Problem(
                f"is broken: its 'spi' is {spi!r}; set it to the version of the collective "
                f"interface that it was written for, like {SPI_VERSION}."
            )
    if major == SPI_VERSION[0] and minor <= SPI_VERSION[1]:
        return None
    culprit = package if (major, minor) < SPI_VERSION else "polyshard"
    return _Problem(
        f"is incompatible: it was written for version {major}.{minor} of the collective "
        f"interface, but this polyshard has {SPI_VERSION[0]}.{SPI_VERSION[1]}. Upgrade {culprit}."
    )


def _availability_problem(backend: CollectiveBackend, device_type: str) -> _Problem | None:
    served = sorted(backend.capabilities.device_types)
    if device_type not in served:
        return _Problem(
            f"is unavailable for device type {device_type!r}: it serves "
            f"{' and '.join(served) or 'none'}.",
            is_defect=False,
        )
    try:
        reason = backend.unavailable_reason(device_type)
    except Exception as error:
        return _Problem(
            f"is broken: unavailable_reason({device_type!r}) raised {type(error).__name__}: "
            f"{error}. Report this to its authors.",
            error,
        )
    if reason is None:
        return None
    text = f"is unavailable for device type {device_type!r} here: {reason.rstrip('.')}."
    return _Problem(text, is_defect=False)
