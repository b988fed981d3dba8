"""What all tests share."""

import os

import pytest
from hypothesis import settings
from matplotlib.figure import Figure

# Property tests draw the same examples in every run of continuous integration, and new ones elsewhere.
settings.register_profile("fixed", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("fixed")


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
