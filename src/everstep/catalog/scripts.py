"""Training scripts that are shipped: in a wheel beside this file, in a checkout in the repository's ``examples``."""

from __future__ import annotations

from pathlib import Path

from everstep.errors import ConfigError


def path(name: str) -> Path:
    """Where the script ``name`` lies.

    Raises:
        ConfigError: there is none; says where it was looked for.
    """
    here = Path(__file__).resolve().parent
    places = [here / "examples", here.parents[2] / "examples"]
    for folder in places:
        if (found := folder / f"{name}.py").is_file():
            return found
    raise ConfigError(f"no script {name}.py in {' or '.join(map(str, places))}")
