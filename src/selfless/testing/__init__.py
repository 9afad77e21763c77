"""Check a method, of this package or of one's own: the laws that every preserver and every sparsifier must keep, on small networks.

    from selfless.testing import check
    check(LayerMAS(100))             # raises AssertionError that lists every law the method breaks
    find(LayerMAS(100))              # the same as a list of findings, one per law

On the command line it is `selfless check mine:LayerMAS:100`. It takes a few seconds on a CPU and needs no files.
Imports data, engine, inputs, keeper, models, preserve, sparsify, spec and terms. Imported by cli.
"""

from selfless.testing.checking import Finding, check, find
from selfless.testing.loop import InLoop, train_in_loop
from selfless.testing.small import small_arrays, small_run

__all__ = ["Finding", "InLoop", "check", "find", "small_arrays", "small_run", "train_in_loop"]
