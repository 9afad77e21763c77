"""Images stay loaded while somebody holds them, and no longer."""

from __future__ import annotations

import gc
import weakref

from selfless.data.holding import hold, holding


class Loaded:
    pass


def test_what_is_loaded_stays_until_the_outermost_ends() -> None:
    with holding():
        with holding():
            kept = weakref.ref(hold(Loaded()))
        gc.collect()
        assert kept() is not None
    gc.collect()
    assert kept() is None


def test_nothing_is_held_where_nobody_holds() -> None:
    kept = weakref.ref(hold(Loaded()))
    gc.collect()
    assert kept() is None
