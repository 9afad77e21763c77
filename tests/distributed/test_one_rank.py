"""A world of one rank, in this process: every number goes through torch.distributed, and the results are those of a keeper alone.

`test_ranks.py` runs the same checks with several processes, which takes longer.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from selfless.distributed import ALONE, Ranks, find_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, in its shards and checkpoints
]


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The checks by name, in a process group of this process."""
    import torch.distributed as dist

    from tests.distributed.checks import WORLD
    from tests.distributed.world import CHECKS

    monkeypatch.setattr(WORLD, "folder", tmp_path)
    monkeypatch.setattr(Ranks, "is_alone", property(lambda self: self is ALONE))  # a world of one sends everything, too
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield CHECKS
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["ddp_decov", "ddp_replay", "fsdp_slnid", "fsdp_errors"])
def test_one_rank_is_a_process_alone(checks: dict[str, Any], name: str) -> None:
    checks[name](0, 1)


def test_a_checkpoint_goes_on(checks: dict[str, Any], tmp_path: Path) -> None:
    """It is loaded sharded and whole; a new one takes the place of the old one; a broken one is not taken for whole."""
    from selfless.keeper import checkpoint
    from tests.distributed.checks import trained

    checks["checkpoint_save"](0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at", "meet", "wanted.pt"]
    checks["checkpoint_load"](0, 1)
    before = (tmp_path / "at" / ".metadata").stat().st_mtime_ns
    (tmp_path / "at.new").mkdir()  # of a process that died
    _, keeper, optimizer = trained(0, 1)
    checkpoint.save(str(tmp_path / "at"), keeper, optimizer)
    assert (tmp_path / "at" / ".metadata").stat().st_mtime_ns > before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at", "meet", "wanted.pt"]
    shutil.move(tmp_path / "at", tmp_path / "at.old")  # it died between the two renames
    assert not checkpoint.is_whole(tmp_path / "at")
    checkpoint.load(tmp_path / "at", keeper)
    (tmp_path / "at.old" / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match="at has no complete checkpoint; give a folder that"):
        checkpoint.load(tmp_path / "at", keeper)


def test_a_keeper_alone_saves_and_loads(tmp_path: Path) -> None:
    """Without torch.distributed being initialised, and without an optimizer."""
    import selfless
    from selfless.keeper import checkpoint

    assert find_ranks() is ALONE
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    keeper = selfless.attach(model, "mas:1")
    keeper.consolidate([torch.randn(5, 3)])
    wanted, weight = {n: t.clone() for n, t in keeper.state_dict().items()}, model[0].weight.detach().clone()
    checkpoint.save(tmp_path / "a" / "at", keeper)
    keeper.consolidate([torch.randn(5, 3)])
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint.load(tmp_path / "a" / "at", keeper)
    assert keeper.tasks == 1
    torch.testing.assert_close(keeper.state_dict(), wanted, rtol=0, atol=0)
    assert torch.equal(model[0].weight, weight)
    other = selfless.attach(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)), "mas:1")
    checkpoint.load(str(tmp_path / "a" / "at"), other)
    torch.testing.assert_close(other.state_dict(), wanted, rtol=0, atol=0)
