"""The command ``everstep``: one file a command, and one place where a mistake becomes a message and an exit code.

Exit codes: 0 done; 1 it did not work out; 2 the user's mistake; 130 stopped by Ctrl-C. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from everstep import __version__
from everstep.cli import audit, demo, explain, output, plan, run, simulate, status
from everstep.errors import ConfigError, EverstepError

app = typer.Typer(
    name="everstep", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Keeps a PyTorch training job going while the machines under it fail, leave and join.",
)
app.command("run", cls=run.RunCommand, context_settings={"ignore_unknown_options": True})(run.command)
app.command("demo")(demo.command)
app.command("status")(status.command)
app.command("explain")(explain.command)
app.command("audit")(audit.command)
app.command("plan")(plan.command)
app.command("simulate")(simulate.command)


@app.callback(invoke_without_command=True)
def everstep(version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False) -> None:
    if version:
        output.say(f"everstep {__version__}")
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="everstep")
    except KeyboardInterrupt:
        sys.exit(130)
    except EverstepError as error:
        output.complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
