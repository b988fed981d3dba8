"""The page about what comes after training."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kinfed.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("curl", "curl")
def test_the_three_commands_of_the_page_do_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, ROOT / "examples/own_data/shops/make.py"], check=True)
    asked = ["run", "shops.csv", "--client", "shop", "--target", "sold", "--method", "kin", "rounds=1", "--quiet"]
    assert main([*asked, "--out", "shops"]) == 0
    page = (ROOT / "docs/after-training.md").read_text()
    block = re.search(r"```console\n(.*?)```", page.partition("## From a finished run")[2], re.DOTALL).group(1)
    lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == 3
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = "\n".join([*lines, "echo", "kill %1", "wait %1"]).replace("8080", str(port))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    told = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=300, env=os.environ | {"PATH": path}
    )
    assert told.returncode == 0, told.stderr
    health, answers = re.fullmatch(r"(\{.*?\})(\{.*\})\n", told.stdout).groups()
    assert json.loads(health)["status"] == "ok"
    (answer,) = json.loads(answers)["answers"]
    assert (answer["client"], answer["method"]) == ("Shop 7", "kin")
    assert 0 < answer["sold"] < 40
