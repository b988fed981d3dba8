"""What is installed: every file that kinfed reads is in the wheel, and the tests pass from there."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from installed import ROOT, built, list_files


def test_every_data_file_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package, patterns in project["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / "src" / package
        declared = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in folder.glob(pattern)}
        data = {path for path in list_files() if path.startswith(f"src/{package}/") and not path.endswith(".py")}
        assert data
        assert data - declared == set()


def test_every_folder_of_code_is_a_package():
    """Or setuptools would leave it out."""
    folders = {path.parent for path in (ROOT / "src").glob("kinfed*/**/*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_a_demo_installs_what_kinfed_needs_and_tests_install_the_rest(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def installs(*words):
        done = subprocess.run(["make", "-n", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return [line.partition("constraints.txt ")[2] for line in done.stdout.splitlines() if " pip install " in line]

    assert installs("demo") == ["-e ."]
    assert installs("demo", "TORCH_INDEX=file:///wheels") == ["--index-url file:///wheels torch", "-e ."]
    assert installs("test") == installs("lint") == ["-e .", "-e '.[dev]'"]


@pytest.mark.slow
def test_the_wheel_has_every_file(tmp_path):
    with zipfile.ZipFile(built(tmp_path)) as wheel:
        names = set(wheel.namelist())
    assert {path.removeprefix("src/") for path in list_files() if path.startswith("src/")} <= names
    assert {name for name in names if name.startswith("tests")} == set()


@pytest.mark.slow
@pytest.mark.parametrize("versions", [[], ["--lowest"]], ids=["newest", "lowest"])
def test_the_tests_pass_from_the_wheel(versions):
    done = subprocess.run([sys.executable, Path(__file__).with_name("installed.py"), *versions], check=False)
    assert done.returncode == 0
