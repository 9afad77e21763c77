"""A program for two processes: `python lightning_ddp.py FOLDER` trains with strategy="ddp" and writes what each process has.

Lightning starts the second process itself, with the same command line. tests/integrations/test_lightning.py reads the files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning_nets import EPOCHS, QUIET, build, tasks  # this folder is first on the path of a program
from torch.utils.data import DataLoader, DistributedSampler

from selfless import MAS, SLNID
from selfless.integrations.lightning import SelflessCallback


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    module, callback = build(), SelflessCallback(MAS(1.0), SLNID(0.1))
    for loader in tasks():
        own = DistributedSampler(loader.dataset, 2, int(os.environ.get("LOCAL_RANK", "0")), shuffle=False)  # Lightning's shuffles
        trainer = pl.Trainer(callbacks=[callback], max_epochs=EPOCHS, strategy="ddp", devices=2, use_distributed_sampler=False, **QUIET)
        trainer.fit(module, DataLoader(loader.dataset, batch_size=4, sampler=own))
    torch.save({"model": module.state_dict(), "keeper": callback.keeper.state_dict()}, folder / f"rank-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
