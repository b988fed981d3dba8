"""Contents: the numbers of a report, as plain lists for JSON, from the runs that stand side by side."""

import base64
import csv
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.graph import NeighbourLists
from ...core.method import Compared
from ...core.mixins import Explains
from ...core.sharing import unwrap
from ...core.summary import Summary, list_attackers
from ...data.split import SPLITS
from ...errors import UsageError, log_failure
from ...methods.solved import KNOWN
from ...runs.config import plugins
from ...runs.openers import open_models
from ...runs.reference_runs import BASES
from ...runs.run import FinalServer, Run
from ...runs.run_folder import RunFolder
from ...runs.test_scores import by_examples
from ...runs.tested_examples import Tested
from ...verdict.graph_quality import find_communities, order_by_links
from ..explain.mixed_effects import MixedEffects
from ..explain.own_rows import OwnRows
from ..explain.split_columns import SplitColumns
from ..tables.compare import floor_of
from ..tables.run_rows import Row
from ..tables.text_table import Grid
from .gather import Gathered

Array = NDArray[Any]
T = TypeVar("T")

WHOLE, STRONGEST = 200, 20  # clients up to which every link is shown, and links of each above that
MANY, TENTHS = 5000, 10  # clients up to which each is shown, and parts that they are shown in above that
CLUSTERS = 25  # parts that clusters are shown in, the smaller ones together
CURVES, LINKS = 200_000, 240_000  # numbers in the curves of clients, and links in all frames: about 2 MB each
SHORT = {"auc", "mae", "mape", "mse", "nmae", "nmse", "rmse"}  # metrics that are abbreviations
COMPARED = 400  # clients up to which the page has what a method compared: 0.9 MB
NO_GAINS: dict[str, Any] = {"gain": {}, "examples": {}}  # what the page's script reads where something is missing
NO_CURVES: dict[str, Any] = {"rounds": [], "thinned": [], "best": [], "curves": {}}
NO_GRAPH = {"instead": "The graph of this run cannot be shown."}
COUNTS = 100_000  # numbers of examples by client and class


class Parts(NamedTuple):
    """Who is shown: every client, or with very many of them groups of clients."""

    names: list[str]
    labels: Array | None = None  # [N] the part of each client; None: each is shown

    def mean(self, values: Array) -> Array:
        """[..., N] to [..., parts], without clients that have no value."""
        return self._each(values, np.nanmean)

    def sum(self, values: Array) -> Array:
        """The same, added up."""
        return self._each(values, np.nansum)

    def _each(self, values: Array, what: Any) -> Array:
        if self.labels is None:
            return values
        return np.stack([what(values[..., self.labels == i], -1) for i in range(len(self.names))], -1)

    def relation(self, weights: Array | NeighbourLists) -> Array:
        """[N, N] to the mean weight that a client of one part gives those of another, all together."""
        if not isinstance(weights, NeighbourLists):
            return self.mean(self.sum(weights).T).T
        assert self.labels is not None
        sums: Array = weights.add_up(torch.from_numpy(self.labels), len(self.names)).numpy()
        return sums / np.bincount(self.labels, minlength=len(self.names))[:, None]


def contents(gathered: Gathered, parts_of_page: int = 1) -> tuple[dict[str, Any], list[str]]:
    """The numbers of a report, and notes on what it lacks; scores and curves are means over seeds, those of one seed as
    its history has them.

    A page of several parts has as many curves and links in all as one of a single part.
    """
    main = gathered.rows[gathered.main]
    tested = [{seed: run.by_client for seed, run in row.by_seed.items()} for row in gathered.rows]
    first = main.runs[0].folder
    summary, facts, notes = main.summary, first.read_clients(), list[str]()
    names = summary.clients.names
    facts = facts if facts.get("names") == names else {}
    parts = _parts(names, facts, first, _scores(tested[gathered.main], names), notes)
    baseline, alone = _read_baseline(gathered)
    graphs = max(1, sum(row.method not in BASES for row in gathered.rows))
    methods = []
    for i, (row, mine) in enumerate(zip(gathered.rows, tested, strict=True)):
        entry: dict[str, Any] = {"label": gathered.labels[i], "method": row.method, "seeds": list(row.seeds)}
        entry["scores"] = _json(parts.mean(_scores(mine, names)))
        most_rounds = CURVES // (2 * parts_of_page * len(gathered.rows) * len(parts.names))
        links = 0 if row.method in BASES else LINKS // (graphs * parts_of_page)  # theirs never change
        lacks = f"{gathered.labels[i]} is shown without its"
        entry |= attempt(notes, f"{lacks} gains", NO_GAINS, partial(_compare, row, mine, alone, names, parts))
        entry |= attempt(notes, f"{lacks} curves", NO_CURVES, partial(_curves, row, parts, most_rounds, notes))
        entry |= attempt(notes, f"{lacks} graph", NO_GRAPH, partial(_show_relation, row, parts, links, notes))
        methods.append(entry)
    relations = [entry.pop("selected", None) for entry in methods]  # of the selected rounds, which order the clients
    data = {
        "metric": main.metric.name,
        "word": word(main.metric.name),
        "percent": main.metric.is_share,
        "higher": main.metric.higher_is_better,
        "clients": {"names": parts.names, "attackers": list_attackers(summary), **_list_facts(facts, parts)},
        "order": _order(len(parts.names), facts if parts.labels is None else {}, relations[gathered.main]),
        "methods": methods,
        "main": gathered.main,
        "baseline": baseline,
    }
    return data, list(dict.fromkeys(notes))


def attempt(notes: list[str], lacks: str, instead: T, make: Callable[[], T]) -> T:
    """What is made, or what stands in its place if that fails: then a note says what the page lacks, and why.

    A folder whose files are broken or of another run, or may not be read, is refused whole.
    """
    try:
        return make()
    except (UsageError, OSError):
        raise
    except Exception as problem:
        notes.append(f"{lacks}: {log_failure(problem)}")
        return instead


def word(metric: str) -> str:
    """A metric as people write it."""
    return metric.upper() if metric in SHORT else metric.replace("_", " ")


def _scores(runs: Mapping[int, Tested], names: Sequence[str]) -> Array:
    """[N] every client's test score, a mean over the seeds that have it; NaN for an attacker."""
    by_seed: Array = np.array([[run.means.get(name, math.nan) for name in names] for run in runs.values()], np.float64)
    scored = ~np.isnan(by_seed)
    return np.where(scored.any(0), np.nansum(by_seed, 0) / np.maximum(scored.sum(0), 1), math.nan)


def _parts(names: list[str], facts: dict[str, Any], folder: RunFolder, scores: Array, notes: list[str]) -> Parts:
    """Who is shown: above `MANY` clients their groups, clusters by who learns from whom, or tenths of them by score."""
    if len(names) <= MANY:
        return Parts(names)
    lists: list[NeighbourLists] = []
    if "groups" not in facts and folder.read_summary().relation is not None and folder.relations.exists():
        relations = folder.read_relations()
        lists = relations.lists and [relations.lists[relations.selected]]
    if "groups" in facts:
        groups, labels = np.unique(facts["groups"], return_inverse=True)
        called = [f"group {group}" for group in groups]
    elif lists and (label := find_communities(lists[0])).max() > 0:
        labels = np.where(label < 0, CLUSTERS, np.minimum(label, CLUSTERS - 1))
        called = [f"cluster {i + 1}" for i in range(CLUSTERS - 1)] + ["smaller clusters", "never took part"]
        used, labels = np.unique(labels, return_inverse=True)
        called = [called[i] for i in used]
        notes.append("clients of a cluster learn much from each other, by the weights of their lists")
    else:
        ranks = np.argsort(np.argsort(np.nan_to_num(scores, nan=-math.inf)))
        labels = ranks * TENTHS // len(names)
        called = [f"tenth {i + 1} by score" for i in range(TENTHS)]
    counts = np.bincount(labels, minlength=len(called))
    notes.append(
        f"{len(names):,} clients are too many to show one by one: where this page says client, it shows one of "
        f"{len(called)} parts of them, with means over its clients"
    )
    return Parts([f"{name} ({count:,} clients)" for name, count in zip(called, counts, strict=True)], labels)


def _list_facts(facts: dict[str, Any], parts: Parts) -> dict[str, Any]:
    """What each client has: examples, group, classes and place."""
    of_clients: dict[str, Any] = {split: _json(parts.sum(np.array(facts[split]))) for split in SPLITS if split in facts}
    if "counts" in facts and np.size(facts["counts"]) <= COUNTS:
        of_clients["classes"] = facts["classes"]
        of_clients["counts"] = parts.sum(np.array(facts["counts"]).T).T.tolist()
    if parts.labels is None:
        of_clients |= {key: facts[key] for key in ("groups", "places") if key in facts}
    return of_clients


def _read_baseline(gathered: Gathered) -> tuple[str, dict[int, Tested]]:
    """The best baseline without others of the run that is judged, and its test scores by seed; none without Local."""
    row, at = gathered.rows[gathered.main], gathered.find_method("local")
    if at is None:
        return "", {}
    local = gathered.rows[at].by_seed
    seeds = [seed for seed in row.seeds if seed in local]
    if not seeds:
        return "", {}
    best = floor_of(row, seeds, local, None, gathered.rows).alone
    return ("", {}) if best is None else (best.name, dict(zip(seeds, best.tested, strict=True)))


def _compare(
    row: Row, mine: Mapping[int, Tested], alone: Mapping[int, Tested], names: Sequence[str], parts: Parts
) -> dict[str, Any]:
    """Against the best baseline without others, by client: the gain, what test examples say, and who gains or loses."""
    result: dict[str, Any] = {"gain": {}, "examples": {}}
    if alone and row.method != "local" and mine.keys() <= alone.keys():
        theirs = {seed: alone[seed] for seed in mine}
        gain = (_scores(mine, names) - _scores(theirs, names)) * (1 if row.metric.higher_is_better else -1)
        result["gain"]["alone"] = _json(parts.mean(gain))
        pairs = list(mine.values()), list(theirs.values())
        comparisons = by_examples(*pairs, row.metric.higher_is_better) if parts.labels is None else {}
        if comparisons:
            result["examples"]["alone"] = [list(comparisons[name]) if name in comparisons else None for name in names]
    if row.verdict is not None and row.method != "local" and parts.labels is None:
        sides = {name: side for side in ("gain", "lose", "undecided") for name in row.verdict[side]}
        result["side"] = [sides.get(name, "") for name in names]
    return result


def _read_tests(folder: RunFolder, model: str, metrics: Sequence[str]) -> tuple[Array, dict[str, Array]]:
    """The evaluated rounds, and the test scores of a model: [T, N] each, or [0] of one that the run does not have."""
    rows = folder.read_rows()
    read = {metric: folder.read_scores(model, metric, missing=True, rows=rows) for metric in metrics}
    return read[metrics[0]][0], {metric: scores for metric, (_, scores) in read.items()}


def _curves(row: Row, parts: Parts, most: int, notes: list[str]) -> dict[str, Any]:
    """Test score and loss by round: the mean over clients with the range over seeds, and every client's."""
    wanted = list(dict.fromkeys([row.metric.name, "loss"]))
    read = [_read_tests(run.folder, row.model, wanted) for run in row.runs]
    rounds = read[0][0]
    read = [tests for tests in read if np.array_equal(tests[0], rounds)]
    selected = [int(run.summary.scores[row.model].get("round", rounds[-1])) for run in row.runs]
    at = _thin_out(len(rounds), max(2, most), [int(np.flatnonzero(rounds == r)[0]) for r in selected if r in rounds])
    if len(at) < len(rounds):
        notes.append(f"curves of single clients have {len(at)} of {len(rounds)} rounds, to keep this page small")
    curves = {}
    for metric in wanted:
        curves_of_clients = [tests[1][metric] for tests in read if len(tests[1][metric])]
        if len(curves_of_clients) < len(read) or len({scores.shape for scores in curves_of_clients}) > 1:
            continue
        stack = np.stack(curves_of_clients)  # [S, T, N]
        by_seed = np.nanmean(stack, 2)
        curves[metric] = {
            "mean": _json(by_seed.mean(0)),
            "low": _json(by_seed.min(0)),
            "high": _json(by_seed.max(0)),
            "clients": _json(parts.mean(stack[0] if len(stack) == 1 else stack.mean(0))[at]),
        }
    return {"rounds": rounds.tolist(), "thinned": rounds[at].tolist(), "best": selected, "curves": curves}


def _thin_out(count: int, most: int, needed: Sequence[int]) -> list[int]:
    """At most about `most` positions of `count`, evenly spread, with the first, the last and those needed."""
    even = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    return sorted({*even, *needed, 0, count - 1}) if count > most else list(range(count))


def _show_relation(row: Row, parts: Parts, most: int, notes: list[str]) -> dict[str, Any]:
    """The relation of the first seed in frames, one a round and layer; or what the method has instead."""
    folder, summary = row.runs[0].folder, row.summary
    result: dict[str, Any] = {}
    if (clusters := _clusters(folder)) is not None and parts.labels is None:
        result["clusters"] = clusters
    if (shares := _show_columns(folder, parts)) is not None:
        result["columns"] = shares
    if summary.relation is None or not folder.relations.exists():
        return result | {"instead": _instead(summary, bool(clusters), result.get("columns", {}).get("kind") == "own")}
    relations = folder.read_relations()
    weights = relations.by_layer
    layers, count = relations.layers, len(parts.names)
    links = count * min(STRONGEST if count > WHOLE else count, count)
    several = len(layers) if len(weights[0]) > 1 else 0
    frames = max(1, most // links)
    shown = _thin_out(len(weights), max(1, frames // (1 + several)), [relations.selected])
    if frames < 1 + several or (len(shown) > max(1, frames) and frames < len(weights)):
        shown = [relations.selected]
    if most and len(shown) < len(weights):
        notes.append(f"{row.method}: the graph has {len(shown)} of {len(weights)} rounds, to keep this page small")
    if count > WHOLE:
        notes.append(f"of each client's links the {STRONGEST} strongest are shown, as there are {count:,} clients")
    result["frames"] = [
        [_pack_relation(parts, layer) for layer in (relations.mean(t), *weights[t][:several])] for t in shown
    ]
    result |= _why(folder, row, parts)
    result["layers"] = ["mean of all layers", *layers] if several else ["whole model"]
    result["at"] = {"rounds": relations.rounds[shown].tolist(), "selected": shown.index(relations.selected)}
    result["seed"] = summary.seeds[0]
    if relations.lists and parts.labels is None:  # in an order that needs no table of all pairs
        return result
    return result | {"selected": parts.relation(relations.mean(relations.selected))}


def _why(folder: RunFolder, row: Row, parts: Parts) -> dict[str, Any]:
    """What the method compared to choose its weights, where its run has left that; and what is shown, in a sentence."""
    if row.method == "local":
        return {}
    comparison = read_comparison(folder) if parts.labels is None and len(parts.names) <= COMPARED else ""
    if not isinstance(comparison, str):
        what, round = comparison[0].what, comparison[1]
        values = _pack(comparison[0].values.detach().cpu().numpy(), "<f4")
        why = f"Compared: the {what}, from which {row.method} derives the weights, after round {round}."
        return {"compared": {"what": what[:1].upper() + what[1:], "values": values}, "why": why}
    if comparison:
        return {"why": f"{comparison[:1].upper()}{comparison[1:]}."}
    if row.origin in ("given", "oracle"):
        return {"why": "The weights follow a graph that was given; the method compares no models."}
    if row.origin == "fixed":
        return {"why": "The weights are fixed by numbers of examples; the method compares no models."}
    if len(parts.names) > COMPARED:
        return {"why": f"What {row.method} compared is left out, as there are more than {COMPARED} clients."}
    return {
        "why": f"This run kept nothing of what {row.method} compared; what is known of both clients is shown instead."
    }


def read_comparison(folder: RunFolder) -> tuple[Compared, int] | str:
    """What was compared after the last round, and that round; or in a clause how weights come about instead.

    No code of a user's own is loaded for it: of a run with such parts nothing is known, and the clause is empty, as it
    is of one that has kept nothing. Its folder must be that of one seed.
    """
    if not (folder.state.exists() and folder.models.exists() and folder.is_begun):
        return ""
    try:
        if _has_own_code(folder):
            return ""
        saved = Run.open(folder.path)
        run = FinalServer(saved, saved.task)
        comparison = run.compare_clients()
    except Exception as problem:  # of another version, or with parts that are gone: nothing else of the run is lost
        log_failure(problem)
        return ""
    return Explains.from_method(unwrap(run.method)).weighs if comparison is None else (comparison, run.state.done)


def _show_columns(folder: RunFolder, parts: Parts) -> dict[str, Any] | None:
    """How much clients' own rows weigh, by column, or columns in their trees; None as of `compared`, or of neither."""
    try:
        saved = None if _has_own_code(folder) else open_models(folder)
        if saved is None:
            return None
        if (rows := OwnRows.from_run(saved)) is not None:
            return {"kind": "own", "names": rows.columns, "weights": _pack(parts.mean(rows.weights.T).T, "<f4")}
        if (trees := SplitColumns.from_run(saved)) is None:
            return None
    except Exception as problem:
        log_failure(problem)
        return None
    weights = parts.mean(trees.weights.T).T
    return {"kind": "trees", "names": trees.columns, "weights": _pack(weights, "<f4"), "mean": trees.shared.tolist()}


def tabulate_effects(row: Row, notes: list[str]) -> list[Grid]:
    """The estimates of a mixed model, of its first seed, or a note on why they are not shown; none of other methods."""
    folder = row.runs[0].folder
    try:
        effects = None if _has_own_code(folder) else MixedEffects.read(folder)
    except UsageError as problem:
        notes.append(f"{row.method} is shown without its estimates: {problem}")
        return []
    return [] if effects is None else effects.grids()


def _has_own_code(folder: RunFolder) -> bool:
    """Whether its config names files of a user's own."""

    def names(table: dict[str, Any]) -> bool:
        return any(names(value) if isinstance(value, dict) else plugins.is_path(value) for value in table.values())

    return names(folder.read_config())


def _pack_relation(parts: Parts, relation: Array | NeighbourLists) -> dict[str, str]:
    """A relation as its links, row by row: where each row begins, its columns and weights; and own weights."""
    if isinstance(relation, NeighbourLists) and parts.labels is None:
        return _pack_lists(relation)
    return _pack_table(parts.relation(relation).astype(np.float32))


def _pack_lists(relation: NeighbourLists) -> dict[str, str]:
    """The links of lists, the strongest of each row."""
    itself = torch.arange(len(relation))[:, None]
    near = relation.near.long()
    weights = relation.weights.masked_fill(relation.near == itself, 0.0)
    strongest = weights.topk(min(STRONGEST, weights.shape[1])).indices.sort(1).values
    weights, near = weights.gather(1, strongest), near.gather(1, strongest)
    linked = weights != 0
    return _pack_links(linked.sum(1).numpy(), near[linked].numpy(), weights[linked].numpy(), relation.own.numpy())


def _pack_table(weights: Array) -> dict[str, str]:
    """The links of a table: [n, n], all of them, or of many clients the strongest of each row, the first of equals."""
    others = weights.copy()
    own_weights = others.diagonal().copy()
    np.fill_diagonal(others, 0)
    count = len(others)
    if count > WHOLE:
        weakest = np.partition(others, count - STRONGEST, 1)[:, count - STRONGEST]
        above = (others > weakest[:, None]).sum(1)
        tied = (others == weakest[:, None]) & (others != 0)
        keep = tied & (tied.cumsum(1) <= (STRONGEST - above)[:, None])
        others = np.where((others > weakest[:, None]) | keep, others, 0)
    rows, columns = np.nonzero(others)
    return _pack_links(np.bincount(rows, minlength=count), columns, others[rows, columns], own_weights)


def _pack_links(counts: Array, columns: Array, weights: Array, own_weights: Array) -> dict[str, str]:
    return {
        "starts": _pack(np.concatenate([[0], counts.cumsum()]), "<u4"),
        "to": _pack(columns, "<u2"),
        "weights": _pack(weights, "<f4"),
        "own": _pack(own_weights, "<f4"),
    }


def _pack(values: Array, kind: str) -> str:
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def _clusters(folder: RunFolder) -> list[int] | None:
    """[N] the last clusters that the method noted; None if it notes none, or every client is alone in its own."""
    if not folder.diagnostics.exists():
        return None
    with folder.diagnostics.open(newline="", encoding="utf-8") as file:
        if not any(len(line) > 2 and line[2] == "cluster" for line in csv.reader(file)):
            return None
    last: list[int] = folder.read_clusters()[-1].tolist()
    return last if len(set(last)) < len(last) else None


def _instead(summary: Summary, clusters: bool, solved: bool) -> str:
    """What a method without a relation has, in sentences."""
    if solved:
        return f"{summary.method} draws every client's coefficients to the mean of all clients, column by column."
    text = f"{summary.method} keeps no graph of who learns from whom."
    if summary.method in KNOWN:
        text += f" {KNOWN.summary(summary.method).rstrip('.')}."
    if clusters:
        return f"{text} It puts clients into clusters; choose them as colours."
    if summary.sharing is not None:
        shared, personal = (summary.sharing[key]["numbers"] for key in ("shared", "personal"))
        stays = f", and {personal:,} stay with each client" if personal else ""
        text += f" Through the server all clients share {shared:,} numbers of the model{stays}."
    return text


def _order(count: int, facts: dict[str, Any], relation: Array | None) -> list[int]:
    """Clients such that those who learn from each other stand together: by group, and within by the relation."""
    groups = np.array(facts.get("groups", [0] * count))
    shown = relation is not None and relation.shape == (count, count) and count <= MANY
    leaves = order_by_links(relation) if relation is not None and shown else np.arange(count)
    return leaves[np.argsort(groups[leaves], kind="stable")].tolist()


def _json(values: Array) -> Any:
    """For JSON: numbers as they are written in files, None for what is none."""
    if values.ndim > 1:
        return [_json(row) for row in values]
    return values.tolist() if np.issubdtype(values.dtype, np.integer) else [_number(value) for value in values]


def _number(value: Any) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None
