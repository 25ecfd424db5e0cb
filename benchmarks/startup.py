"""From the command to the begin of the first step: eight workers of the tiny GPT, files cached.

    python benchmarks/startup.py --runs 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import runpy, sys, time
import everstep
plain = everstep.Job.steps
def steps(self, until):
    for step in plain(self, until):
        if step.number == 0:
            print("first step at", time.time(), flush=True)
        yield step
everstep.Job.steps = steps
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def seconds(workers: int) -> float:
    """Of one start, to the moment when the last worker is handed its first step."""
    with tempfile.TemporaryDirectory() as scratch:
        script, folder = Path(scratch) / "timed.py", Path(scratch) / "run"
        script.write_text(SCRIPT)
        began_s = time.time()
        subprocess.run(
            [sys.executable, "-m", "everstep.cli.start", "run", "--quiet", "--workers", str(workers), "--dir", str(folder),
             str(script), "--", str(ROOT / "examples" / "tiny_gpt.py"), "--steps", "1"], check=True, cwd=scratch,
        )
        told = "".join(path.read_text() for path in (folder / "logs").iterdir())
        return max(float(line.split()[-1]) for line in told.splitlines() if line.startswith("first step at")) - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds(options.workers)  # brings the files into memory
    found = [seconds(options.workers) for _ in range(options.runs)]
    value = {"startup_s_p50": median(found), "startup_s": found, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps(value) if options.json else "\n".join(f"{name}: {figure}" for name, figure in value.items()))


if __name__ == "__main__":
    main()
