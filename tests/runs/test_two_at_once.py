"""Two programs in one run's folder are kept apart; one that has ended, even killed, is in nobody's way."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import kinfed
from kinfed.cli import main
from kinfed.files import LOCK, lock_folder

HOLD = """
import sys
from pathlib import Path
from kinfed.files import lock_folder

with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
RUN = ["run", "fedavg", "rounds=6", "model=linear", "federation.clients=4", "federation.partition.groups=2"]


@pytest.fixture
def other():
    """Has another program hold a folder until it is told to end."""
    begun = []

    def hold(folder):
        program = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        begun.append(program)
        assert program.stdout.readline() == "held\n"
        return program

    yield hold
    for program in begun:
        program.kill()
        program.wait()
        program.stdin.close()
        program.stdout.close()


def federation():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    return kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(60) % 3)


def fit(folder, rounds=2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kinfed.fit(kinfed.FedAvg(), federation(), torch.nn.Linear(4, 2), rounds=rounds, folder=folder)


def test_a_second_fit_in_a_folder_is_refused_until_the_first_has_ended(other, tmp_path):
    fit(tmp_path, kinfed.Rounds(4, until=2))
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    first = other(tmp_path)
    with pytest.raises(kinfed.UsageError, match=r"^another program works in .*; wait until it has ended, or stop it$"):
        fit(tmp_path, 4)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    first.stdin.close()
    assert first.wait(20) == 0
    assert not (tmp_path / LOCK).exists()
    assert torch.equal(fit(tmp_path, 4).theta(0), fit(None, 4).theta(0))
    assert not (tmp_path / LOCK).exists()


def test_one_that_was_killed_is_in_nobodys_way(other, tmp_path):
    first = other(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(20)
    assert (tmp_path / LOCK).exists()  # which says nothing
    fit(tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_a_second_resume_and_a_second_run_are_refused_in_one_line(other, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert main([*RUN, "--beside", "none", "--out", str(out)]) == 0
    (out / "summary.json").unlink()  # as if it were not finished
    first = other(out)
    assert main(["resume", str(out)]) == 2
    told = capsys.readouterr().err
    assert " ".join(told.split()).endswith(f"another program works in {out}; wait until it has ended, or stop it")
    first.stdin.close()
    first.wait(20)
    assert main(["resume", str(out)]) == 0
    assert not (out / LOCK).exists()


def test_blocks_are_nested_in_a_thread_and_kept_apart_from_those_of_another(tmp_path):
    said = []

    def second():
        try:
            with lock_folder(tmp_path):
                said.append("in")
        except kinfed.UsageError as problem:
            said.append(str(problem))

    with lock_folder(tmp_path):
        with lock_folder(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert said == [f"another program works in {tmp_path}; wait until it has ended, or stop it"]
    second()
    assert said[1:] == ["in"]
    assert not (tmp_path / LOCK).exists()


def test_of_many_that_begin_together_one_is_in_at_a_time(tmp_path):
    """However often the file of the lock is made and removed."""
    code = """
import sys, time
from pathlib import Path
from kinfed.errors import UsageError
from kinfed.files import lock_folder

folder, inside = Path(sys.argv[1]), Path(sys.argv[1]) / "inside"
end, count = time.monotonic() + 1.5, 0
while time.monotonic() < end:
    try:
        with lock_folder(folder):
            inside.open("x").close()  # an error if another one is in
            inside.unlink()
            count += 1
    except UsageError:
        pass
print(count)
"""
    programs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for program in programs:
        out, problem = program.communicate(timeout=60)
        assert program.returncode == 0, problem.decode()
        assert int(out) > 0
