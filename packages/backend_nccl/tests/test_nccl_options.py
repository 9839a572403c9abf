"""Options of the backend and of its communicators."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from recorded_cuda import CPU, RecordedNccl

from polyshard import BackendError
from polyshard_nccl import NcclBackend, Options

MINUTE = timedelta(minutes=1)


class Alone:
    """A process group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def make(backend: NcclBackend, **options: object) -> object:
    return backend.communicator(Alone(), CPU, purpose="gather", options=options)  # type: ignore[arg-type]


def test_unknown_options_are_listed() -> None:
    """An unknown option is named, with those that there are, by the backend and by a
    communicator."""
    known = "timeout, high_priority, shared_stream, user_buffers, eager, pg_options"
    for use in (lambda: NcclBackend(speed=3), lambda: make(RecordedNccl(), speed=3)):
        with pytest.raises(ValueError, match=rf"unknown options \['speed'\].*{known}"):
            use()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 5}, "'timeout' must be a positive timedelta, got 5"),
        ({"timeout": timedelta(0)}, "'timeout' must be a positive timedelta"),
        ({"high_priority": 1}, "'high_priority' must be a bool, got 1"),
        ({"shared_stream": "yes"}, "'shared_stream' must be a bool"),
        ({"eager": None}, "'eager' must be a bool"),
        ({"user_buffers": True, "eager": False}, "leave 'eager' True"),
        (
            {"pg_options": SimpleNamespace(is_high_priority_stream=True)},
            "give high_priority=True instead",
        ),
    ],
)
def test_values_without_sense(options: dict[str, object], said: str) -> None:
    """Each is refused with what was expected and what came, before anything is made."""
    with pytest.raises(ValueError, match=said):
        make(RecordedNccl(), **options)
    with pytest.raises(ValueError, match=said):
        RecordedNccl(**options)


def test_a_communicator_starts_from_the_backends_options() -> None:
    """What a communicator is not given, the backend's own options say."""
    options = Options().updated({"timeout": MINUTE, "eager": False})
    assert options.updated({"eager": True}) == Options(timeout=MINUTE, eager=True)
    assert options.updated(None) is options


def test_timeout_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option wins over the environment, that over the group's own."""
    monkeypatch.delenv("POLYSHARD_NCCL_TIMEOUT", raising=False)
    assert Options().timeout_or(MINUTE) == MINUTE
    monkeypatch.setenv("POLYSHARD_NCCL_TIMEOUT", "2.5")
    assert Options().timeout_or(MINUTE) == timedelta(seconds=2.5)
    assert Options(timeout=MINUTE).timeout_or(2 * MINUTE) == MINUTE
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("POLYSHARD_NCCL_TIMEOUT", wrong)
        with pytest.raises(BackendError, match=f"POLYSHARD_NCCL_TIMEOUT='{wrong}' is not a number"):
            Options().timeout_or(MINUTE)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("given_to", ["backend", "communicator"])
def test_streams(given_to: str, high: bool, shared: bool) -> None:
    """Three streams or one, of the priority asked for; of the backend or, as long as none was
    made, of a communicator."""
    options = {"high_priority": high, "shared_stream": shared}
    backend = RecordedNccl(**(options if given_to == "backend" else {}))
    lanes = [backend.lane(role, CPU) for role in ("gather", "reduce", "outer")]
    make(backend, **(options if given_to == "communicator" else {}))
    for lane in lanes:
        lane.submit(lambda: None, label="unit")
    assert len(backend.cuda.made) == (1 if shared else 3)
    assert {stream.high_priority for stream in backend.cuda.made} == {high}


def test_streams_that_exist_stay() -> None:
    """Other options of streams come too late once one was made, and the message says what to do."""
    backend = RecordedNccl()
    backend.lane("gather", CPU).submit(lambda: None, label="unit")
    with pytest.raises(ValueError, match=r"come too late.*backend=NcclBackend\(high_priority=..."):
        make(backend, high_priority=True)
    make(backend, high_priority=False)


@pytest.mark.skipif(
    not dist.is_nccl_available(),
    reason="needs a build of torch for CUDA: this one has no ProcessGroupNCCL to look at",
)
def test_fields_of_process_group_options() -> None:
    """torch's own options have what is set, can be copied, and copies are apart."""
    import copy

    given = dist.ProcessGroupNCCL.Options()
    given.config.max_ctas = 4
    copied = copy.deepcopy(given)
    copied._timeout, copied.group_name = MINUTE, "polyshard gather"
    copied.global_ranks_in_group = [0, 2]
    assert copied.config.max_ctas == 4
    assert given._timeout != MINUTE
    assert given.group_name != "polyshard gather"
    Options(pg_options=given)
