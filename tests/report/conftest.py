import pytest
from matplotlib.figure import Figure


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
