"""``everstep run``: train a script over worker processes that may die."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from everstep.cli import output
from everstep.errors import ConfigError
from everstep.telemetry import runs
from everstep.telemetry.summary import to_json


class RunCommand(TyperCommand):
    """Options may stand before or after the script; what is not ours belongs to the script, and all that follows ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
        before = args[: args.index("--")] if "--" in args else args
        for word in (word.partition("=")[0] for word in before if word.startswith("--") and word != "--"):
            near = difflib.get_close_matches(word, ours, n=1, cutoff=0.8)
            if word not in ours and near:
                raise ConfigError(f"no option {word}; did you mean {near[0]}? (an argument of the script's goes after --)")
        return super().parse_args(ctx, args)


def command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT_ARGS", help="Passed on to it.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compute.")] = 2,
    spares: Annotated[int, typer.Option(min=0, help="Processes that wait to take a lost one's place.")] = 0,
    respawn: Annotated[bool, typer.Option("--respawn", help="Replace a lost worker by a fresh process.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run's folder. [default: runs/<script>-<time>]", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --dir, or in the newest run."),
    ] = False,
    policy: Annotated[
        str | None, typer.Option(help="Recover only this way: reroute, repartition, shrink, spare or restore."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings, as TOML.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; may be repeated."),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="Kill a worker on the way: worker=3,step=20,phase=backward, with "
                     "worker=survivable to draw one, or random:SEED; may be repeated."),
    ] = None,
    summary: Annotated[Path | None, typer.Option(help="Write the run's summary to this file, as JSON.")] = None,
    as_json: output.AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing while it runs.")] = False,
) -> None:
    """Train SCRIPT over worker processes; when one dies, recover and go on."""
    if str(script).startswith("-"):
        raise ConfigError(f"no option {script}; everstep run --help lists them")
    if not script.is_file():
        raise ConfigError(f"{script}: no such script")
    from everstep.cli import launch
    from everstep.runtime.agent import RunRequest

    request = RunRequest(
        script=script, arguments=tuple(arguments or ()), workers=workers, spares=spares,
        directory=_folder(directory, script, resume), resume=resume,
        settings=launch.settings_of(config, setting or [], policy, respawn),
        kills=launch.kills_of(kill or [], workers + spares),
    )
    done = launch.launch(request, None if quiet or as_json else Console())
    if done.summary is not None and summary is not None:
        output.write_json(summary, to_json(done.summary))
    if done.summary is not None and as_json:
        output.show(to_json(done.summary))
    if done.outcome.message:
        output.complain(done.outcome.message)
    raise typer.Exit(done.outcome.exit_code)


def _folder(directory: Path | None, script: Path, resume: bool) -> Path:
    from everstep.cli.launch import folder_for

    if resume:
        return runs.find(directory)
    if directory is None:
        return folder_for(script.stem)
    if (directory / runs.AGENT_FILE).exists():
        raise ConfigError(f"{directory} holds a run already; add --resume to go on with it, or name another folder")
    return directory
