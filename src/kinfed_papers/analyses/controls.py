"""Graph controls: one method with the known graph, and with graphs that should do better or worse."""

from collections.abc import Sequence

from kinfed.data.federation import Federation
from kinfed.data.graphs import GRAPHS
from kinfed.errors import UsageError
from kinfed.search.study import Finding, Study, score, setting

from ..plots.scores import score_by_name


def controls(study: Study, graphs: Sequence[str] | None = None) -> Finding:
    """Does the graph help? The method's score with each of `graphs` (default: all that these clients can have).

    A graph helps if the known one beats shuffled, random and complete; identity shows the scores without others.
    """
    if graphs is None:
        federation = study.federations(['federation.graph="given"', "seeds=1"])[0]
        graphs = [name for name in GRAPHS if _possible(name, federation)]
    notes = list[str]()
    folders = study.runs({name: [setting("federation.graph.name", name)] for name in graphs}, failed=notes)
    scores = {name: score(folder) for name, folder in folders.items()}
    first = next(iter(scores.values()))
    picture = study.out / "controls.png"
    tests = {name: result.test for name, result in scores.items()}
    score_by_name(tests, f"test {first.metric}", f"{study.method} by known graph", picture)
    if len(scores) > 1 and all((result.test == first.test).all() for result in scores.values()):
        notes.append(f"every graph gives the same: {study.method} with these settings does not use a known graph")
    rows = [{"graph": name, **result.row()} for name, result in scores.items()]
    return Finding(f"{study.method} by known graph", rows, [picture], notes)


def _possible(name: str, federation: Federation) -> bool:
    try:
        return GRAPHS[name](federation, 0) is not None
    except UsageError:
        return False
