"""What the README tells a newcomer to do works as it stands there."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from everstep.cli.main import main

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_each_of_the_two_first_commands_is_one_line_that_bash_can_read():
    demo, tests = blocks("sh")[:2]
    for command, last in ((demo, ".venv/bin/everstep demo"), (tests, ".venv/bin/python -m pytest")):
        assert command.count("\n") == 1
        assert command.rstrip().endswith(last)
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
        assert "--index-url" not in shlex.split(command)


def test_the_quickstart_learns_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script.replace("until=100", "until=41"))
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 4


def test_every_command_that_the_readme_names_exists():
    named = set(re.findall(r"everstep (run|demo|status|explain|audit|plan|[a-z]+)\b(?= [\[A-Z`]|`)", TEXT))
    assert {"run", "demo", "status", "explain", "audit", "plan"} <= named
    for command in sorted(named):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert not ended.value.code, command


def test_every_file_that_the_documents_link_to_exists():
    documents = [README, README.parent / "CONTRIBUTING.md", *README.parent.glob("docs/**/*.md")]
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
