"""Members on several streams, and how many samples are in a pass: what only a GPU does, checked on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfless.engine import batches
from selfless.engine.batches import FleetData, Numbers
from selfless.engine.native import hardware

H200, SMALL = 139 * 2**30, 8 * 2**30
VGG = (1_124_306, 262_144)  # the numbers of a sample of vgg-slim, and of its largest layer


class Stream:
    """A stream that knows which kernels have ended before the next one begins."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.ended: set[object] = set()

    def wait_stream(self, other: Stream) -> None:
        self.ended |= other.ended


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """A capture on a GPU that is not there: the streams that are in use, the main one first."""
    in_use, others = [Stream()], [Stream() for _ in range(hardware.STREAMS)]

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        in_use.append(stream)
        try:
            yield
        finally:
            in_use.pop()

    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: True,
        "current_stream": lambda: in_use[-1],
        "stream": use,
        "Stream": lambda device: others.pop(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(hardware, "streams_of", hardware.streams_of.__wrapped__)
    return in_use


@pytest.mark.parametrize("members", [1, 3, 4, 9])
def test_members_wait_for_what_was_before_and_what_follows_waits_for_them(streams: list[Stream], members: int) -> None:
    (main,) = streams
    main.ended.add("before")

    def work(f: int) -> int:
        assert "before" in streams[-1].ended
        streams[-1].ended.add(f)
        return f

    assert hardware.side_by_side(work, members) == list(range(members))
    assert streams == [main]
    assert main.ended >= {"before", *range(members)}


def test_streams_are_joined_when_a_member_fails(streams: list[Stream]) -> None:
    def work(f: int) -> None:
        if f == 2:
            raise torch.cuda.OutOfMemoryError("no room for member 2")
        streams[-1].ended.add(f)

    with pytest.raises(torch.cuda.OutOfMemoryError, match="no room for member 2"):
        hardware.side_by_side(work, 5)
    assert len(streams) == 1
    assert streams[0].ended == {0, 1}


@pytest.mark.parametrize("memory", [SMALL, H200])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("members", "numbers"), [(20, Numbers(*VGG, 2)), (20, Numbers(*VGG, 4)), (64, Numbers(8_500, 4_096, 2))])
def test_a_pass_fits_into_memory_and_a_tensor_into_32_bits(
    members: int, numbers: Numbers, trains: bool, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "memory_of", lambda device: memory)
    data: Any = SimpleNamespace(offset=torch.empty(members, device="meta"), n=60_000)

    def fits(samples: int) -> bool:
        bytes_needed = samples * members * numbers.total * numbers.size * (3 if trains else 2)
        return samples * members * numbers.largest < 2**31 and bytes_needed <= memory / 8

    samples = FleetData.at_once(data, numbers, mixes=False, trains=trains)
    assert fits(samples)
    assert not fits(samples + 1)
