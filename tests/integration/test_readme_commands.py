"""The README's commands, run as they stand there: all but the tests' own, and the long one shortened by its option.

Making the environment and installing into it is the same line for demo and tests, so whoever runs these tests has run it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.integration.harness import ROOT

TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split(" #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    for line in block.splitlines()
]


def run(command: str, folder: Path) -> str:
    words = command.split()
    program = {"everstep": [sys.executable, "-m", "everstep.cli.main"], "python": [sys.executable]}[Path(words[0]).name]
    done = subprocess.run(
        [*program, *words[1:]], cwd=folder, capture_output=True, text=True, check=False, timeout=170,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demonstration_ends_well_when_it_is_shortened(tmp_path: Path) -> None:
    (command,) = [line.split(" && ")[-1] for line in COMMANDS if line.endswith("everstep demo")]
    told = run(f"{command} --steps 40", tmp_path)
    assert "largest difference of the losses" in told
    assert len(re.findall(r"workers? .* killed in step", told)) == 3
    assert [path.name for path in tmp_path.glob("runs/demo-*/losses.png")] == ["losses.png"]


def test_the_commands_for_an_own_script_work(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    commands = [line for line in COMMANDS if "train.py" in line]
    assert len(commands) == 3
    told = [run(command, tmp_path) for command in commands]
    assert "killed in step 30" in told[1]
    for command in ("everstep status", "everstep explain", "everstep audit"):
        assert run(command, tmp_path)
