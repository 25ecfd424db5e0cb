"""Ways to call the command."""

from __future__ import annotations

import subprocess
import sys

from everstep import __version__


def test_the_package_can_be_called_as_a_module() -> None:
    found = subprocess.run([sys.executable, "-m", "everstep", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"everstep {__version__}"
