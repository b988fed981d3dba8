"""What a shell offers when the tab key is pressed."""

import shutil
import subprocess

import pytest

from kinfed.cli import main
from kinfed.cli.program import SHELLS

ASK = """
. {script}
COMP_WORDS=({words}) COMP_CWORD={last} COMP_LINE=
_shtab_kinfed 2>/dev/null
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    def write(shell):
        with pytest.raises(SystemExit) as end:
            main(["--print-completion", shell])
        assert end.value.code == 0
        path = tmp_path / shell
        path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["res"], "resume"),
        (["run", "--tr"], "--track"),
        (["flower", "d"], "down"),
        (["flower", "up", "--i"], "--insecure"),
        (["export", "my-run", "--format", ""], "onnx safetensors"),
    ],
)
def test_bash_offers_what_may_come(script, typed, offered):
    words = " ".join(f"'{word}'" for word in ["kinfed", *typed])
    asked = ASK.format(script=script("bash"), words=words, last=len(typed))
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_that_names_every_command(script, shell):
    path = script(shell)
    assert all(word in path.read_text() for word in ("onboard", "track", "insecure"))
    check = {"zsh": ["-f", "-n"], "fish": ["--no-config", "-n"], "bash": ["-n"], "tcsh": ["-n"]}.get(shell)
    if check and shutil.which(shell):
        subprocess.run([shell, *check, path], check=True)


def test_another_shell_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["--print-completion", "ksh"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no 'ksh'" in line
