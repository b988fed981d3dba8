"""What all tests share."""

import base64
import functools
import inspect
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
import venv
from pathlib import Path

# More threads would only get in each other's way: tests run side by side. What needs several asks for them itself.
os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported, and for the programs that tests start

import pytest
import torch
from hypothesis import HealthCheck, settings
from matplotlib.figure import Figure
from plain_summary import nest

from kinfed.plots import charts, heatmaps
from kinfed.runs.run_folder import RunFolder

# Property tests draw the same examples in every run of continuous integration, and new ones elsewhere. How long drawing
# them takes says how busy the machine is, and fails nothing.
TIMELESS = {"max_examples": 25, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("kinfed", derandomize=bool(os.environ.get("CI")), **TIMELESS)
settings.load_profile("kinfed")

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter, exitstatus):
    """Continuous integration skips nothing: what was skipped there was not tested."""
    skipped = terminalreporter.stats.get("skipped", [])
    if os.environ.get("CI") and skipped:
        terminalreporter.section("skipped, which continuous integration must not", red=True)
        for report in skipped:
            terminalreporter.line(f"{report.nodeid}: {report.longrepr[-1]}")


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and reporter.stats.get("skipped") and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_runtest_setup(item):
    """A test marked `needs(program, package)` is skipped without that program, and names the package."""
    for mark in item.iter_markers("needs"):
        program, package = mark.args
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install {package}")


@pytest.fixture(autouse=True)
def _seed_models():
    """PyTorch draws a model's weights from a seed of the clock, so that a test would fail at one start in a hundred."""
    torch.manual_seed(0)


BLANK = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
) + bytes(2000)


def blank(draw):
    """What draws a picture, or leaves it blank."""

    @functools.wraps(draw)
    def draw_or_not(*given, **named):
        if drawn:
            draw(*given, **named)
        else:
            bound = inspect.signature(draw).bind(*given, **named).arguments
            Path(bound.get("path") or bound["fname"]).write_bytes(BLANK)

    return draw_or_not


@pytest.fixture(scope="session", autouse=True)
def quick():
    """Nothing waits for the disk, and pictures are blank, whose drawing takes longer than the training of most runs."""
    pictures = [(charts, "accuracy_by_round"), (charts, "accuracy_by_client"), (charts, "classes_by_client")]
    pictures += [(heatmaps, "relation_heatmap"), (heatmaps, "recall_heatmap"), (Figure, "savefig")]
    with pytest.MonkeyPatch.context() as patch:
        for place, name in pictures:
            patch.setattr(place, name, blank(getattr(place, name)))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


drawn = []


@pytest.fixture(autouse=True)
def looked_at(request):
    """Pictures are drawn where a test looks at them."""
    if "pictures" in request.keywords or "figures" in request.fixturenames:
        drawn.append(True)
    yield
    drawn.clear()


@pytest.fixture(autouse=True)
def alone(request, monkeypatch):
    """Local and FedAvg are not trained beside the runs of tests, which are all cheap, unless a test is marked so."""
    if "beside" not in request.keywords:
        monkeypatch.setattr("kinfed.runs.reference_runs.CHEAP", 0)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory):
    """A real MLflow server that is started and stopped; MLFLOW_PYTHON has all of MLflow, or else it is installed."""
    python = os.environ.get("MLFLOW_PYTHON", "")
    if not python:
        place = tmp_path_factory.mktemp("mlflow")
        venv.create(place, with_pip=True)
        python = str(place / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "mlflow"], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("store")
    address, running = f"http://127.0.0.1:{port}", []

    def start():
        options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        options += ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", f"{folder}/files"]
        command = [python, "-m", "mlflow", "server", *options]
        with (folder / "log").open("ab") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        for _ in range(3000):  # a busy machine needs minutes
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError((folder / "log").read_text())

    def stop():
        while running:
            os.killpg(running[-1].pid, 9)
            running.pop().wait()

    yield address, start, stop
    stop()


@pytest.fixture
def finished():
    """Writes a run's summary with what is named, and something plausible for the rest; gives its folder."""

    def write(path, scores=None, **facts):
        every = {"mean": 0.5, "std": 0.1, "worst5": 0.4, "best5": 0.6, "round": 1}
        scores = {name: every | score for name, score in (scores or {"own": {}}).items()}
        folder = RunFolder(path)
        folder.create()
        folder.summary.write_text(json.dumps(nest({"scores": scores, **facts})))
        return folder

    return write


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, still alive for looking into."""
    seen = []
    save = Figure.savefig

    def keep(figure, *where, **how):
        seen.append(figure)
        save(figure, *where, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    return seen


@pytest.fixture
def second_run_interrupted(monkeypatch):
    """Ctrl-C comes when a command begins its second run, the first time that it does; the folders that were begun."""
    from kinfed.runs import launch

    run_job, begun = launch.run_job, []

    def interrupted(job, *how):
        begun.append(job.folder)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return run_job(job, *how)

    monkeypatch.setattr(launch, "run_job", interrupted)
    return begun
