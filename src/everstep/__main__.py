"""``python -m everstep``, the same as the command ``everstep``."""

from everstep.cli.start import main

if __name__ == "__main__":
    main()
