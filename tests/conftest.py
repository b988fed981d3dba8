"""What all tests share."""

import os
import shutil

# More threads would only get in each other's way: tests run side by side. What needs several asks for them itself.
os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported, and for the programs that tests start

import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure

# Property tests draw the same examples in every run of continuous integration, and new ones elsewhere.
settings.register_profile("fixed", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("fixed")

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
