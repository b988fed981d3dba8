"""Graph controls: one method with the known graph, and with graphs that should do better or worse."""

from collections.abc import Sequence

from ..errors import UsageError
from ..relations import GRAPHS
from ..runs import read_summary
from ..study import Finding, Row, Study


def controls(
    study: Study, graphs: Sequence[str] = ("oracle", "label_overlap", "random", "identity", "complete")
) -> Finding:
    """Does the graph help? The method's score with each of `graphs` (names from `kinfed list graphs`).

    A graph helps where the known one beats shuffled, random and complete, and identity shows what clients reach alone.
    """
    unknown = [name for name in graphs if name not in GRAPHS]
    if unknown:
        raise UsageError(f"analysis.graphs: there is no '{unknown[0]}'; known: {', '.join(GRAPHS)}")
    rows: list[Row] = []
    for name in graphs:
        summary = read_summary(study.run(name, [f'federation.graph="{name}"']))
        score = summary["scores"][summary["chosen"]]
        rows.append(
            {
                "graph": name,
                "model": summary["chosen"],
                f"test {summary['metric']}": score["mean"],
                "over clients": score["std"],
                "over seeds": score.get("std_seeds", 0.0),
            }
        )
    return Finding(f"{study.table['method']['name']} with other graphs", rows)
