"""What a shell offers when the tab key is pressed."""

import shutil
import subprocess

import pytest

from kinfed.cli import main

ASK = """
. {script}
COMP_WORDS=({words}) COMP_CWORD={last}
_kinfed
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    def write(shell):
        assert main(["completion", shell]) == 0
        path = tmp_path / shell
        path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["re"], "resume reproduce report reference"),
        (["run", "--tr"], "--track"),
        (["run", "mine.toml", "--executor", ""], "auto fused loop vmap"),
        (["flower", "d"], "down"),
        (["flower", "up", "--m"], "--metrics"),
        (["run", "up", "--m"], "--method"),
        (["completion", "z"], "zsh"),
    ],
)
def test_bash_offers_what_may_come(script, typed, offered):
    words = " ".join(f"'{word}'" for word in ["kinfed", *typed])
    asked = ASK.format(script=script("bash"), words=words, last=len(typed))
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == offered


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-f", "-n"]), ("fish", ["--no-config", "-n"])])
def test_other_shells_can_read_theirs(script, shell, check):
    path = script(shell)
    assert "--track" in path.read_text() or "-l track" in path.read_text()
    if shutil.which(shell):
        subprocess.run([shell, *check, path], check=True)


def test_another_shell_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "invalid choice: 'tcsh'" in line
