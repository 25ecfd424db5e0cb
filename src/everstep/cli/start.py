"""Where the command ``everstep`` begins: for commands that train, the fork server first, since it takes longest to load."""

from __future__ import annotations

import sys

_TRAINING = ("run", "demo")


def main() -> None:
    """Run one command and exit."""
    if sys.argv[1:2] and sys.argv[1] in _TRAINING and "--help" not in sys.argv:
        from everstep.runtime import processes

        processes.warm_up()
    from everstep.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
