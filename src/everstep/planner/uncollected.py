"""No garbage collection while a decision is made.

A decision makes tens of thousands of values that live on in its plans or go as soon as nobody refers to them; none form
cycles. The collector, which is set off by their number, would look through all of them, and through all plans that are
kept, several times: a third of a decision's time for a thousand nodes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it nothing is collected. Whether anything is afterwards is as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
