"""Reasons: why one client of a finished run learns from another: weights, what was compared, scores without it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.mixins import Explains
from ...core.sharing import unwrap
from ...errors import UsageError, note_failure
from ...runs.relations_file import Relations
from ...runs.run import FinalServer, Run, client_index
from ...runs.run_folder import RunFolder
from ...verdict.graph_quality import label_overlap
from ..tables.text_table import Grid, facts, number
from .counterfactual import MIXED, Counterfactual, isolate_client, remove_client
from .relation_difference import relations_of

Array = NDArray[Any]

TOP = 5  # sources that are listed
ROUNDS = 4  # rounds that are listed, beside the selected one
ITSELF, AS_IT_IS = "itself", "as it is"
MOVED = "cosine of how far the saved models moved from the initial one"
APART = "distance of the saved models"
NOT_MEASURED = "the score without an edge is not measured"


class Source(NamedTuple):
    """One that a client learns from. NaN where a number is not known."""

    client: str
    weight: float  # at the selected round; a mean over layers
    layers: tuple[float, ...]  # the same by layer; none for a graph of whole models
    rounds: tuple[float, ...]  # means over layers, by round
    compared: float  # what `Reasons.compared` names
    labels: float  # the share of their labels that both have in common
    last: float  # its weight after the last round, of which the score is
    without: float  # the client's test score with this weight taken out


@dataclass(frozen=True)
class Reasons:
    """Why a client learns from others; `explain` makes one."""

    run: str
    method: str
    client: str
    others: int  # clients beside it
    round: int  # selected by validation, from 1
    last: int  # the last round
    layers: tuple[str, ...]  # [L]; none for a graph of whole models
    rounds: tuple[int, ...]  # of `Source.rounds`
    itself: Source  # its weight for itself
    sources: tuple[Source, ...]  # those of most weight first
    compared: str  # what `Source.compared` is; empty if nothing is known
    metric: str
    is_share: bool  # whether that is a share, in 0..1
    higher_is_better: bool
    score: float  # of the client's mixture after the last round, on its test examples; NaN if not measured
    alone: float  # the same of its own model alone
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; None where a number is not known."""
        sources = {
            "itself": facts(self.itself._asdict()),
            "sources": [facts(source._asdict()) for source in self.sources],
        }
        return facts({key: value for key, value in vars(self).items() if key not in sources}) | sources


class _Scores(NamedTuple):
    """Test scores of one client's mixture, and its weights after the last round; NaN where they are not measured."""

    weights: Mapping[int, float] = {}  # of each other client
    mixed: float = math.nan
    alone: float = math.nan
    without: Mapping[int, float] = {}


class _ClientWeights(NamedTuple):
    """A client's weights."""

    weights: Array  # [T, L, N]
    mean: Array  # [T, N] over layers
    rounds: list[int]  # [T] from 1
    selected: int  # index of a round
    layers: tuple[str, ...]  # [L]; none for a graph of whole models

    @classmethod
    def select(cls, relations: Relations, i: int) -> "_ClientWeights":
        """The weights of client i."""
        row = relations.row(i).astype(np.float64)  # [T, N] or [T, L, N]
        one_layer = row.ndim == 2
        weights = row[:, None] if one_layer else row
        layers = () if one_layer or len(relations.layers) < 2 else tuple(relations.layers)
        return cls(weights, weights.mean(1), relations.rounds.tolist(), relations.selected, layers)

    @property
    def shown_rounds(self) -> list[int]:
        """Indices of some rounds, evenly apart, the selected one among them."""
        even = np.linspace(0, len(self.rounds) - 1, ROUNDS).round().astype(int).tolist()
        return sorted({*even, self.selected})

    def most(self, i: int, top: int) -> list[int]:
        """The others that the client learns from, by weight, at most so many; one of them if there is none."""
        row = self.mean[self.selected]
        order = [j for j in np.argsort(-np.abs(row), kind="stable").tolist() if j != i]
        return [j for j in order if row[j] != 0][:top] or order[:1]

    def source(self, name: str, j: int, compared: float, labels: float, scores: _Scores) -> Source:
        """What is known of client j."""
        layers = tuple(self.weights[self.selected, :, j].tolist()) if self.layers else ()
        by_round = tuple(self.mean[self.shown_rounds, j].tolist())
        measured = compared, labels, scores.weights.get(j, math.nan), scores.without.get(j, math.nan)
        return Source(name, float(self.mean[self.selected, j]), layers, by_round, *measured)


def explain(
    run: str | Path, client: int | str, of: int | str | None = None, data_dir: str | Path | None = None, top: int = TOP
) -> Reasons:
    """Why a client of a finished run learns from others.

    Args:
        run: its folder. Its data must still be there, unchanged: the models of the last round are mixed again without
            one of them, and scored.
        client: whose mixture is explained, by name.
        of: one other client; by default the `top` clients of most weight.
        data_dir: the folder of data sets that are not files of yours.
        top: how many clients.

    Returns:
        For each of these clients its weight by layer and by round, what the method compared, and the client's test
        score without it. What cannot be told is left out, and `notes` say why.

    Raises:
        UsageError: the run has no relation, or is one of real sites, or there is no such client.
    """
    folder = RunFolder(run)
    summary = folder.read_summary()
    names = summary.clients.names
    if summary.sites is not None:
        raise UsageError(f"{folder} is a run of real sites, where models and data stayed: nothing can be measured here")
    i = client_index(names, client)
    weights = _ClientWeights.select(relations_of(folder), i)
    places = weights.most(i, top) if of is None else [client_index(names, of)]
    if places == [i]:
        raise UsageError(f"client '{names[i]}' is the one that is explained; name another client")
    notes = list[str]()
    if of is not None and weights.mean[weights.selected, places[0]] == 0:
        notes.append(
            f"client '{names[i]}' learns nothing from '{names[places[0]]}' in round {weights.rounds[weights.selected]}"
        )
    saved, server = _open_run(folder, notes)
    what, comparison = _compare_models(saved, server, i, places, notes)
    labels = _labels(folder, names, [i, *places])
    scores = _score_mixtures(server, i, places, data_dir, notes)
    if not math.isnan(scores.mixed) and summary.selection.chosen != MIXED:
        chosen = summary.selection.chosen
        notes.append(f"validation chose the model '{chosen}'; the scores are of '{MIXED}', as the client is sent it")

    def source(j: int) -> Source:
        compared = math.nan if comparison is None else float(comparison[j])
        return weights.source(names[j], j, compared, labels.get(j, math.nan), scores)

    return Reasons(
        run=str(run),
        method=summary.method,
        client=names[i],
        others=len(names) - 1,
        round=weights.rounds[weights.selected],
        last=weights.rounds[-1] if server is None else server.state.done,
        layers=weights.layers,
        rounds=tuple(weights.rounds[t] for t in weights.shown_rounds),
        itself=source(i),
        sources=tuple(source(j) for j in places),
        compared=what,
        metric=summary.metric.name,
        is_share=summary.metric.is_share,
        higher_is_better=summary.metric.higher_is_better,
        score=scores.mixed,
        alone=scores.alone,
        notes=tuple(notes),
    )


def _open_run(folder: RunFolder, notes: list[str]) -> tuple[Run | None, FinalServer | None]:
    """The run, and its server after the last round, as far as they can be opened."""
    saved = server = None
    with note_failure(notes, "nothing but weights is known"):
        saved = Run.open(folder.path)
    if saved is not None:
        with note_failure(notes, NOT_MEASURED):
            server = FinalServer(saved, saved.task)
    return saved, server


def _compare_models(
    saved: Run | None, server: FinalServer | None, i: int, places: Sequence[int], notes: list[str]
) -> tuple[str, Array | None]:
    """What the method compared: [N], if the run has left it; else how the saved models of these clients are alike."""
    if saved is None:
        return "", None
    if server is not None and (compared := server.compare_clients()) is not None:
        return f"{compared.what}, after round {server.state.done}", compared.row(
            i, len(saved.names)
        ).double().cpu().numpy()
    weighs = "" if server is None else Explains.from_method(unwrap(server.method)).weighs
    why = weighs or f"the run kept nothing of what {saved.summary.method} compares"
    notes.append(f"{why}; saved models are compared instead")
    learned = saved.layout.trainable
    models = {j: saved.theta(position=j)[learned].double() for j in dict.fromkeys([i, *places])}
    values = np.full(len(saved.names), math.nan)
    if server is not None:
        moved = {j: theta - server.model.theta[learned].double() for j, theta in models.items()}
        for j, way in moved.items():
            values[j] = float(torch.nn.functional.cosine_similarity(way, moved[i], dim=0))
        return MOVED, values
    for j, theta in models.items():
        values[j] = float((theta - models[i]).norm())
    return APART, values


def _score_mixtures(
    server: FinalServer | None, i: int, places: Sequence[int], data_dir: str | Path | None, notes: list[str]
) -> _Scores:
    """Scores of the client's mixture as it is, without each of these, and of its own model alone."""
    if server is None:
        return _Scores()
    scores = None
    with note_failure(notes, NOT_MEASURED):
        client = Counterfactual(server, i, None if data_dir is None else Path(data_dir))
        row = client.row
        less = {j: remove_client(row, j) for j in places}
        scores = {j: math.nan if mixture is None else client.score(mixture) for j, mixture in less.items()}
        mixed, unmixed = client.score(row), client.score(isolate_client(row, i))
    if scores is None:
        return _Scores()
    if any(mixture is None for mixture in less.values()):
        notes.append("where nothing would be left of a row there is no score")
    weights = row.reshape(-1, row.shape[-1]).double().mean(0).tolist()
    return _Scores(dict(enumerate(weights)), mixed, unmixed, scores)


def _labels(folder: RunFolder, names: list[str], clients: list[int]) -> dict[int, float]:
    """The share of its labels that each of these has in common with the first; nothing where labels are not known."""
    facts = folder.read_clients()
    if facts.get("names") != names or "counts" not in facts:
        return {}
    common = label_overlap(torch.tensor(facts["counts"])[clients])[0]
    return dict(zip(clients, common.tolist(), strict=True))


def grids(reasons: Reasons) -> list[Grid]:
    """Reasons as tables: which clients it learns from, by layer, by round, and scores."""
    every = [reasons.itself, *reasons.sources]
    named = [ITSELF, *(source.client for source in reasons.sources)]

    def table(name: str, title: str, headings: Sequence[str], rows: list[list[str]], notes: Sequence[str] = ()) -> Grid:
        return Grid(name, title, ["", *headings], [rows], notes)

    what = [f"compared: {reasons.compared}"] if reasons.compared else []
    if any(not math.isnan(source.labels) for source in every):
        what.append("labels: the share of their labels that both clients have in common")
    result = [
        table(
            "sources",
            f"the clients that '{reasons.client}' learns from in {reasons.run} ({reasons.method}, round "
            f"{reasons.round}), {len(reasons.sources)} of {reasons.others}",
            ["weight", "compared", "labels"],
            [[n, *map(number, (o.weight, o.compared, o.labels))] for n, o in zip(named, every, strict=True)],
            what,
        )
    ]
    if reasons.layers:
        rows = [[n, *map(number, o.layers)] for n, o in zip(named, every, strict=True)]
        result.append(table("layers", f"weights by layer, round {reasons.round}", reasons.layers, rows))
    if len(reasons.rounds) > 1:
        rows = [[n, *map(number, o.rounds)] for n, o in zip(named, every, strict=True)]
        result.append(table("rounds", "weights by round", [f"round {r}" for r in reasons.rounds], rows))
    if not math.isnan(reasons.score):
        result.append(table("scores", *_scores_table(reasons)))
    last = result[-1]
    result[-1] = Grid(last.name, last.title, last.headings, last.blocks, (*last.notes, *reasons.notes))
    return result


def _scores_table(reasons: Reasons) -> tuple[str, list[str], list[list[str]]]:
    scale, digits = (100, 2) if reasons.is_share else (1, 4)

    def cells(name: str, weight: float, score: float) -> list[str]:
        if math.isnan(score):
            return [name, number(weight), "", ""]
        difference = f"{scale * (score - reasons.score):+.{digits}f}" if name != AS_IT_IS else ""
        return [name, number(weight), f"{scale * score:.{digits}f}", difference]

    rows = [cells(AS_IT_IS, math.nan, reasons.score)]
    rows += [cells(f"without {source.client}", source.last, source.without) for source in reasons.sources]
    rows.append(cells("its own model alone", reasons.itself.last, reasons.alone))
    unit = (", %" if reasons.is_share else "") + ("" if reasons.higher_is_better else ", lower is better")
    measure = f"{reasons.metric}{unit}"
    title = f"its mixture of the models of round {reasons.last}, the last, on its own test examples ({measure})"
    return title, ["weight", reasons.metric, "difference"], rows
