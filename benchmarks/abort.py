"""How long an abort takes to free processes that wait in a reduction for a peer which takes no part.

    python benchmarks/abort.py --rounds 20

Two of three processes begin an all-reduce, the third never does. Counted is the time from the order to abort until both have
said that they are free; deadlines are set to a minute. The same for gloo, which is cut by its own connections.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.conformance.peers import Peers

WAITING = (0, 1)


def rounds(kind: str, count: int) -> list[float]:
    """Milliseconds of each abort; every round is a group of its own in a view of its own."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        peers = Peers(kind, 3, Path(scratch))
        try:
            for number in range(count):
                peers.ask(peers.pipes, "open", 2 * number + 1, [0, 1, 2])
                peers.tell(WAITING, "reduce", 100_000, False, 1)
                time.sleep(0.05)  # until both are in it
                began_s = time.monotonic()
                peers.tell(WAITING, "abort", 2 * number + 2)
                for _ in range(2):  # the abort has returned; the reduction was freed
                    assert len(peers.answers(WAITING)) == len(WAITING)
                found.append(1000 * (time.monotonic() - began_s))
                peers.ask((2,), "abort", 2 * number + 2)
        finally:
            for process in peers.processes.values():
                process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    value = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    for kind in ("tcp", "gloo"):
        found = rounds(kind, options.rounds)
        value |= {f"{kind}_abort_ms_p50": median(found), f"{kind}_abort_ms_max": max(found)}
    print(json.dumps(value) if options.json else "\n".join(f"{name}: {figure:.3g}" for name, figure in value.items()))


if __name__ == "__main__":
    main()
