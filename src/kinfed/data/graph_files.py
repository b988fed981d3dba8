"""Relation graphs between clients, from known links, from distances or from files."""

import csv
import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..core.field_checks import Settings
from ..core.graph import Graph, check_graph
from ..errors import UsageError, list_names, nearest, reason_of
from .tables.words import known_name


def adjacency(weights: ArrayLike | Tensor) -> Graph:
    """The graph of known links, `weights: [N, N]`: row i has the weights of the others' models for client i.

    Raises UsageError unless the weights are a square of finite numbers that are not negative.
    """
    links = _square(weights, "weights")
    check_graph(links, len(links))
    return Graph(links.float(), "given")


def distance(distances: ArrayLike | Tensor, *, sigma: float | None = None, threshold: float = 0.1) -> Graph:
    r"""$w_{ij} = \exp(-d_{ij}^2 / \sigma^2)$, or 0 where that is below `threshold` (Shuman et al., 2013).

    `distances: [N, N]` in any unit, infinite where there is no way from i to j; `sigma` in the same unit (default:
    the standard deviation of the finite distances between different clients). Raises UsageError on NaN, on negative
    distances, and if sigma must be given because distances do not differ.
    """
    lengths = _square(distances, "distances").double()
    if torch.isnan(lengths).any() or (lengths < 0).any():
        row, column = (torch.isnan(lengths) | (lengths < 0)).nonzero()[0].tolist()
        raise UsageError(
            f"distances must be zero or more, infinite where there is no way; entry [{row}, {column}] is "
            f"{float(lengths[row, column])}"
        )
    if not 0 <= threshold <= 1:
        raise UsageError(f"threshold is the least weight to keep, in [0, 1]; got {threshold}")
    if sigma is None:
        finite = lengths[torch.isfinite(lengths) & ~torch.eye(len(lengths), dtype=torch.bool)]
        sigma = float(finite.std(correction=0)) if len(finite) else 0.0
        if sigma == 0:
            raise UsageError("the distances between clients do not differ, so they give no scale; set sigma")
    if not sigma > 0:
        raise UsageError(f"sigma is a distance, so it must be positive; got {sigma}")
    near = torch.exp(-(lengths / sigma).square())
    return Graph(torch.where(near >= threshold, near, 0.0).float(), "given")


def _usual_scale(distances: Tensor, threshold: float) -> float | None:
    """The mean of distances: [N, N] that hardly differ, such as those of neighbours; else None: see `distance`."""
    finite = distances[torch.isfinite(distances) & ~torch.eye(len(distances), dtype=torch.bool)].double()
    if not len(finite) or not finite.mean() > 0:
        return None
    spread = finite.std(correction=0)
    leaves = spread > 0 and bool((torch.exp(-(finite / spread).square()) >= threshold).any())
    return None if leaves else float(finite.mean())


@dataclass(frozen=True)
class GraphFile(Settings):
    """A file of links between clients, and how it is read; see `read`."""

    path: str  # .csv, .graphml, .npz or .npy
    weights: str = "weight"  # its column of weights
    distances: str = "distance"  # its column of distances, in place of weights
    directed: bool = False  # whether a link holds in one direction alone
    sigma: float | None = None  # of the kernel that turns distances into weights; left out: their deviation
    threshold: float = 0.1  # weights below it are no link


def read(links: str | Path | GraphFile, names: Sequence[str], *, strangers: bool = False, **settings: Any) -> Graph:
    """The relation of the clients `names` from a file; a client that is not in the file has no links.

    Other names may be in the file only with `strangers`; their links are ignored. Settings are those of `GraphFile`.

    `.csv`: a heading with the columns `from` and `to`, which name clients, and optionally one of weights (default 1) or
    of distances, which `kinfed.data.graph_files.distance` turns into weights with `sigma` and `threshold`; `weights`
    and `distances` are the names of these columns. Where distances differ so little that their standard deviation would
    leave no link, their mean is sigma. Links go both ways unless `directed`; then a row "from" i "to" j
    gives j's model a weight for client i. `.graphml`: nodes named as the clients, or with such a `label`, edges
    optionally with a `weight`; the file says if they are directed. `.npz` and `.npy`: an array `adjacency: [N, N]`, in
    the order of an array `names: [N]` if the file has one, otherwise of the clients.
    Raises UsageError naming the file, and the line if there is one, on anything else.
    """
    given = links if isinstance(links, GraphFile) else GraphFile(str(links), **settings)
    path, sigma, threshold = Path(given.path), given.sigma, given.threshold
    kind = path.suffix.lower()
    readers: dict[str, Callable[[Path, list[str], bool], tuple[Tensor, bool]]] = {
        ".csv": partial(_from_csv, given=given),
        ".graphml": _from_graphml,
        ".npz": _from_arrays,
        ".npy": _from_arrays,
    }
    if kind not in readers:
        raise UsageError(f"{path}: a graph is read from {', '.join(readers)}; got '{kind}'")
    try:
        table, are_distances = readers[kind](path, list(names), strangers)
        if not are_distances:
            return adjacency(table)
        if sigma is None:
            sigma = _usual_scale(table, threshold)
        graph = distance(table, sigma=sigma, threshold=threshold)
        has_links = torch.isfinite(table).sum() > len(table)  # beside the diagonal
        if has_links and (graph.weights > 0).sum() == len(table):
            raise UsageError(
                f"all distances are so long that their weights are below threshold={threshold:g}; set a larger sigma"
            )
        return graph
    except FileNotFoundError:
        raise UsageError(f"there is no graph file {path}") from None
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}") from None
    except Exception as problem:  # damage can surface in any layer of these formats
        reason = reason_of(problem)
        if kind in (".npz", ".npy") and "pickle" in reason:  # NumPy's message for any unknown file
            reason = f"it is not a {kind} file of plain numbers"
        raise UsageError(f"{path} cannot be read as a graph: {reason}") from problem


Links = Iterable[tuple[str, str, str, float]]  # place in the file, from, to, value


def _from_csv(path: Path, names: list[str], strangers: bool, given: GraphFile) -> tuple[Tensor, bool]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, restkey="", strict=True)
        heading = rows.fieldnames = [name.strip() for name in rows.fieldnames or []]
        twice = sorted({name for name in heading if heading.count(name) > 1})
        if twice:
            raise UsageError(f"two columns are named '{twice[0]}'")
        value = _find_values(heading, given.weights, given.distances)
        others = [column for column in heading if column not in ("from", "to")]
        if value is None and others:
            warnings.warn(
                f"{path}: every link has the weight 1, because no column is named weight or distance and "
                f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} ignored; to use a column, set "
                f"weights='{others[0]}' or distances='{others[0]}' beside the file's path",
                stacklevel=4,
            )

        def links() -> Links:
            for row in rows:
                place = f"line {rows.line_num}"
                if "" in row or None in row.values():
                    raise UsageError(f"{place} must have {len(heading)} entries, as the header has")
                yield place, row["from"].strip(), row["to"].strip(), _number(row[value], place) if value else 1.0

        are_distances = value == given.distances
        return _table(links(), names, given.directed, strangers, math.inf if are_distances else 0.0), are_distances


def _find_values(heading: list[str], weight: str, distance: str) -> str | None:
    """Which of the two columns there is, None if neither; raises UsageError for a heading that is none of links."""
    if not {"from", "to"} <= set(heading):
        raise UsageError(f"the header must have the columns from and to; got {', '.join(heading) or 'nothing'}")
    for setting, named, usual in (("weights", weight, "weight"), ("distances", distance, "distance")):
        if named != usual and named not in heading:
            raise UsageError(f"there is no column '{named}', as {setting} says; {nearest(named, heading)}")
    if weight in heading and distance in heading:
        raise UsageError("a link has a weight or a distance, not both; leave one of these columns out")
    if weight in heading or distance in heading:
        return weight if weight in heading else distance
    for column in heading:  # others may be notes
        if meant := difflib.get_close_matches(column, ["weight", "distance"], 1):
            raise UsageError(
                f"unknown column '{column}'; did you mean '{meant[0]}'? Rename it, or set {meant[0]}s='{column}' "
                "beside the file's path"
            )
    return None


def _from_graphml(path: Path, names: list[str], strangers: bool) -> tuple[Tensor, bool]:
    import networkx  # here, as few read such a file

    graph = networkx.read_graphml(path)
    called = {node: str(node if str(node) in names else held.get("label", node)) for node, held in graph.nodes.items()}
    edges = graph.edges(data="weight", default=1.0)
    links = ((f"edge {a} - {b}", called[a], called[b], _number(w, f"edge {a} - {b}")) for a, b, w in edges)
    return _table(links, names, graph.is_directed(), strangers, 0.0), False


def _from_arrays(path: Path, names: list[str], strangers: bool) -> tuple[Tensor, bool]:
    held = np.load(path, allow_pickle=False)
    if isinstance(held, np.ndarray):
        return _check_size(names, _square(held, "the array")), False
    with held:
        if "adjacency" not in held.files:
            raise UsageError(f"it must hold the array adjacency; it holds {', '.join(held.files) or 'nothing'}")
        table = _square(held["adjacency"], "adjacency")
        if "names" not in held.files:
            return _check_size(names, table), False
        order = [known_name(str(name), names) for name in held["names"].flat]
    if len(order) != len(table) or len(set(order)) < len(order):
        raise UsageError(
            f"names must name the client of each of the {len(table)} rows of adjacency; it has {len(order)} names, "
            f"{len(set(order))} of them different"
        )
    if not strangers:
        _check_names(set(order), names, "names")
    place = [order.index(name) for name in names if name in order]
    complete = torch.zeros(len(names), len(names), dtype=table.dtype)
    at = torch.tensor([i for i, name in enumerate(names) if name in order])
    complete[at[:, None], at] = table[place][:, place]
    return complete, False


def _check_size(names: list[str], table: Tensor) -> Tensor:
    if len(table) != len(names):
        raise UsageError(
            f"the array is {list(table.shape)}, but there are {len(names)} clients; name its rows' clients with names"
        )
    return table


def _table(links: Links, names: list[str], directed: bool, strangers: bool, empty: float) -> Tensor:
    """[N, N] values of the links, `empty` where there is none."""
    index = {name: i for i, name in enumerate(names)}
    table = torch.full((len(names), len(names)), empty, dtype=torch.float64)
    if math.isinf(empty):
        table.fill_diagonal_(0)
    given: dict[tuple[int, int], tuple[str, float]] = {}
    for place, begin, end, value in links:
        a, b = known_name(begin, index), known_name(end, index)
        if not strangers:
            _check_names({a, b}, index, place)
        elif not {a, b} <= index.keys():
            continue
        i, j = index[a], index[b]
        for pair in {(i, j)} if directed else {(i, j), (j, i)}:
            before, other = given.setdefault(pair, (place, value))
            if other != value:
                raise UsageError(
                    f"{place} gives '{a}' - '{b}' the value {value:g}, but {before} gave {other:g}"
                    f"{'' if directed else '; set directed if the two directions differ'}"
                )
            table[pair] = value
    return table


def _check_names(given: set[str], names: Iterable[str], place: str) -> None:
    strange = sorted(given - set(names))
    if strange:
        clients = list(names)
        raise UsageError(
            f"{place}: there is no client {list_names([*map(repr, strange)], 5)}; "
            f"the {len(clients)} clients are named '{clients[0]}' to '{clients[-1]}'"
        )


def _number(value: Any, place: str) -> float:
    try:
        number = float(str(value).replace("_", "?"))  # Python takes 1_0 for 10
    except (TypeError, ValueError):
        raise UsageError(f"{place}: '{value}' is not a number") from None
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{place}: a weight or distance must be finite and not negative; got {value}")
    return number


def _square(values: ArrayLike | Tensor, what: str) -> Tensor:
    try:
        table = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as problem:
        shown = f"; got {values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else f": {problem}"
        raise UsageError(f"{what} must be numbers [N, N]{shown}") from None
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not len(table) or table.is_complex():
        raise UsageError(f"{what} must be real numbers [N, N], one row per client; got {list(table.shape)}")
    return table
