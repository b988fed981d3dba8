"""One's own table: from a file and the names of two columns to an experiment, with every choice as a sentence."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.engine import Rounds
from ...core.metrics import effective_rows
from ...core.mixins import Solves
from ...core.tasks import Classification, Counts, Forecasting, Quantiles, Regression
from ...data.datasets import DATASETS
from ...data.datasets.your_files import is_table, usual_model
from ...data.federation import Federation, list_owned
from ...data.split import SPLITS
from ...data.tables.cell_warnings import describe_odd_units
from ...data.tables.columns import Category, Number, Unused
from ...data.tables.encoder import moments_by_owner
from ...data.tables.frame import Frame
from ...data.tables.leaks import is_short_sum
from ...data.tables.new_readings import Series
from ...data.tables.open_table import kind_of, open_table
from ...data.tables.schema import Description, in_own_units
from ...data.tables.table_reader import LEAST, TableReader
from ...data.tables.words import split_names
from ...errors import FEW, SHOWN, UsageError, list_names, several, some
from ...methods.solved import SUITED
from ...verdict.verdict import plain
from .experiment import CLIP, Experiment, Table, find_name, override
from .parts import make, table_of

GROWING = Rounds(207, evaluate_every=10, patience=0.5)  # of 200 trees; a round counts bins, or finishes a tree
SMALL = 10  # fewer rows of a client say little about what it gains
MOSTLY = 0.8  # the share of a class from which accuracy says little
NEAR = 0.01  # how far from a whole number float32 may put one
MANY = 200  # categories of a column, of which most are too rare to learn from
ROUNDED = 1e-6  # of the largest number of a column, what float32 may leave of a zero
EXACT = 0.05  # of a target's deviation, what a line of the inputs may leave of what is no sum of them
MOST = 20_000  # rows from which that is told
SPREAD = 5.0  # times the mean of counts, or a part of it, that their variance may be
ZEROS, WIDER = 0.1, 10.0  # a share of counts that are 0 from which their variance may be so many times larger


def config(
    path: str | Path, client: str, target: str, overrides: list[str], query: str = "", frame: Frame | None = None
) -> Table:
    """The raw config that trains on a table, or a folder of tables, without a method: every owner is a client.

    With a `query` the path is the address of a database; `frame` is what is there, if it has been read.

    Clients with fewer than `LEAST` rows are left out, with a warning. Overrides are dotted.key=value. Raises UsageError
    for a file or columns that cannot be used, in one line that names the fix.
    """
    frame = open_table(path, query) if frame is None else frame
    if not (client and target):
        raise UsageError(_why_unnamed(frame, client, target))
    several = "," in target and target not in frame.columns
    targets = [name.strip() for name in target.split(",")] if several else target
    settings = {"name": kind_of(path), "path": str(path), "client": client, "target": targets, "least": LEAST}
    settings |= {"query": query} if query else {}
    given = override({"federation": {"dataset": settings}}, overrides)
    method = str(find_name(given.get("method")))
    name = SUITED.get(method, usual_model(settings | {"past": _dataset_of(given, path).get("past")}))
    usual: Table = {"model": {"name": name}, "training": {"clip": CLIP}}
    if method == "personal-boosting":
        usual |= {"rounds": GROWING.count, "evaluate_every": GROWING.evaluate_every, "patience": GROWING.patience}
    raw = override({"federation": {"dataset": settings}, **usual}, overrides)
    reader: TableReader = make(DATASETS, _dataset_of(raw, path), "federation.dataset", given=1)[0]
    frame = frame.with_joined(reader.client_column)
    used = [name for name in (reader.client_column, reader.time, reader.weight) if name]
    frame.need([*used, *reader.targets, *reader.features])
    frame.need([*reader.ignore])
    frame.need([*reader.formats.text])
    _check_clients(frame, reader)
    return raw


def _dataset_of(raw: Table, path: str | Path) -> Table:
    """The settings of the data set; raises UsageError if they are of other data than the table's."""
    settings = table_of(table_of(raw, "federation", ""), "dataset", "federation.")
    if not is_table(settings.get("name", "")) or settings.get("path") != str(path):
        raise UsageError(f"the data are {path}; leave federation.dataset.name and federation.dataset.path out")
    return settings


def _why_unnamed(frame: Frame, client: str, target: str) -> str:
    """What to say of a table whose columns of clients or targets are not named."""
    columns = frame.columns
    wanted = list[str]()
    if not client:
        wanted.append("--client (which client a row belongs to)")
    if not target:
        wanted.append("--target (what to predict)")
    text = f"name the column for {' and the one for '.join(wanted)}; {frame.name} has {list_names(columns, FEW)}"
    kinds = {frame.kind(name) for name in columns}
    if not client and kinds == {"dates", "numbers"}:
        return f"{text}; where each client is a column, docs/data.md turns columns into rows"
    fits = [] if client else [name for name in columns if name != target and _names_clients(frame, name)]
    return f"{text}; --client {fits[0]} would fit" if len(fits) == 1 else text


def _names_clients(frame: Frame, name: str) -> bool:
    """Whether a column could name the clients: text that is not a date, three names or more, each in several rows."""
    if frame.kind(name) != "text":
        return False
    different = len(frame[name].words().names)
    return LEAST <= different <= len(frame) / LEAST


def _check_clients(frame: Frame, reader: TableReader) -> None:
    """Raise UsageError unless two clients or more have enough rows."""
    rows_of = frame[reader.client_column].words().counts
    names, counts = [*rows_of], np.array([*rows_of.values()], np.int64)
    if len(names) == 1:
        raise UsageError(
            f"{frame.name}: '{reader.client_column}' is '{names[0]}' in all rows, so there is one client and nobody "
            "to learn from; name the column that says which client a row belongs to"
        )
    least = max(reader.least, 1)
    enough = int((counts >= least).sum())
    if not reader.past and enough < 2:
        raise UsageError(
            f"{frame.name}: '{reader.client_column}' has {several(len(names), 'different value')}, of which {enough} "
            f"{'has' if enough == 1 else 'have'} {least} rows or more, but two clients are needed, each with rows for "
            "training, validation and test; name the column that says which client a row belongs to, or give more rows"
        )


class Choices(NamedTuple):
    """What an experiment on a table chose, and what to warn of."""

    sentences: dict[str, str]  # one on each choice
    warnings: list[str]


def choices(experiment: Experiment, federation: Federation) -> Choices:
    """The choices of an experiment whose data set is a table, from its federation."""
    reader: Any = experiment.dataset
    assert isinstance(reader, TableReader)
    privacy = experiment.training.privacy
    sentences = {
        "clients": _clients(federation, reader),
        "target": _target(federation, reader),
        **_describe_weights(federation, reader),
        "inputs": _inputs(federation, reader, privacy is not None and privacy.columns is not None),
        "split": _split(experiment, federation, reader),
        "model": _model(experiment, federation),
        "training": _describe_training(experiment),
    }
    return Choices(sentences, [*_warnings_of_clients(federation, reader), *_warnings_of_columns(federation, reader)])


def _rows(federation: Federation) -> list[int]:
    """[N] rows, or windows, of each client."""
    return [len(rows) for rows in list_owned(federation)]


def _clients(federation: Federation, reader: TableReader) -> str:
    rows, what = _rows(federation), "window" if reader.past else "row"
    sizes = f"{min(rows):,} to {max(rows):,} {what}s" if min(rows) < max(rows) else several(rows[0], what)
    column, name = reader.client_column, federation.names[0]
    example = f", such as `{name}`" if len(split_names(column)) > 1 else ""
    return f"{len(federation):,}, named by `{column}`{example}: {sizes} each, {sum(rows):,} in all"


def _describe_weights(federation: Federation, reader: TableReader) -> dict[str, str]:
    """As how many rows the rows count; nothing if all count as one."""
    if federation.weights is None:
        return {}
    used = federation.weights[torch.cat(list_owned(federation))].double()
    span = f"{plain(float(used.min()), '')} to {plain(float(used.max()), '')}"
    unit = "window" if reader.past else "row"
    text = f"`{reader.weight}`: a {unit} counts as {span} {unit}s, all as {plain(float(used.sum()), '')}"
    return {"weights": f"{text}; {effective_rows(used):,.0f} {unit}s of one weight would say as much"}


def _target(federation: Federation, reader: TableReader) -> str:
    named = ", ".join(f"`{name}`" for name in reader.targets)
    if not isinstance(federation.task, Classification):
        return f"{named}: {_numbers(federation, reader)}"
    counts = federation.class_counts().sum(0)
    order = counts.argsort(descending=True, stable=True).tolist()
    shares = (100 * counts / counts.sum()).tolist()
    called = [f"{federation.class_names[c]} ({shares[c]:.0f} %)" for c in order]
    few = len(called) <= SHOWN
    listed = (
        f"{', '.join(called[:-1])} and {called[-1]}" if few else f"most often {called[0]}, most rarely {called[-1]}"
    )
    text = f"{named}: {len(called):,} classes, {listed}"
    if len(called) > 2 and all(name.lstrip("-").isdecimal() for name in federation.class_names):
        text += "; to predict it as a number: federation.dataset.labels=false, or as a count: .counts=true"
    return text


def _numbers(federation: Federation, reader: TableReader) -> str:
    """What targets without classes are, and how they are scored."""
    scale, task = federation.scale.get("targets", {}), federation.task
    spans = [f"mean {plain(target['mean'])} and deviation {plain(target['deviation'])}" for target in scale.values()]
    if len(reader.targets) > 1 and isinstance(task, Regression):
        listed = "; ".join(f"`{name}` of {span}" for name, span in zip(scale, spans, strict=True))
        return f"regression of {len(spans)} numbers, each scored in its own unit: {listed}"
    of = f" of {', '.join(spans)}" if spans else ""
    if isinstance(task, Counts):
        return f"counts{of}, scored by Poisson's deviance, and MAE"
    if isinstance(task, Quantiles):
        listed = ", ".join(f"{q:g}" for q in task.quantiles)
        return f"readings{of}, their quantiles {listed} scored by the pinball loss in their own unit"
    if isinstance(task, Forecasting):
        return f"readings{of}, scored by {task.metric.upper()} in their own unit"
    if not isinstance(task, Regression):
        what = "classes" if federation.classes else f"a number{of}"
        return f"{what}, scored by {task.metric} ({type(task).__name__})"
    text = f"regression of a number{of}, scored by {task.metric.upper()} in its own unit"
    return f"{text}; it may be a count: federation.dataset.counts=true" if looks_like_counts(federation.y) else text


def looks_like_counts(y: torch.Tensor) -> bool:
    """Whether targets may count something: whole numbers, some near 0 beside their spread, that are no points in steps.

    The variance of counts is near their mean, or larger where many are 0. Prices and sizes, in a unit of any size, are
    far off.
    """
    y = y.flatten().double()
    mean, variance = float(y.mean()), float(y.var(correction=0))
    most = SPREAD * (WIDER if float((y == 0).double().mean()) >= ZEROS else 1.0)
    near = 0 <= float(y.min()) <= variance**0.5 and mean / SPREAD <= variance <= most * mean
    return near and bool((y == y.round()).all()) and math.gcd(*map(int, y.unique().tolist())) == 1


def _inputs(federation: Federation, reader: TableReader, public: bool) -> str:
    if reader.past:
        last = several(reader.past, "reading")
        text = f"the last {last} of `{reader.targets[0]}`, to predict the next {reader.horizon}"
        return text + _describe_covariates(Series.of_scale(federation.scale))
    kinds = _by_kind(federation)
    numbers = kinds["number"]
    by_client = list(next(iter(federation.scale.get("clients", {}).values()), {}))
    whose = "all clients' training rows" if len(by_client) < len(numbers) else "each client's training rows"
    how = "scaled by the ranges of privacy.columns" if public else f"scaled to mean 0 and deviation 1 over {whose}"
    text = f"{several(len(numbers), 'column')} ({list_names(numbers)}), {how}"
    if by_client and len(by_client) < len(numbers):
        text += (
            f", but {list_names(by_client)} over each client's, as if in units of its own (federation.dataset.scale)"
        )
    if not public and not by_client and (differing := _differing_numbers(federation, numbers)):
        text += (
            f"; {list_names(differing)} {'differs' if len(differing) == 1 else 'differ'} much between clients: "
            "federation.dataset.scale=auto, if each has a unit of its own"
        )
    parts = list[str]()
    if numbers:
        parts.append(text.replace("column", "number", 1) if len(kinds) > 1 else text)
    for kind, what in (("category", "of text, an input for each category"), ("date", "of dates, by the calendar")):
        if kind in kinds:
            parts.append(f"{len(kinds[kind])} {what} ({list_names(kinds[kind])})")
    if reader.ignore:
        parts.append(f"left out: {list_names(reader.ignore)}")
    return "; ".join(parts)


def _differing_numbers(federation: Federation, numbers: Sequence[str]) -> list[str]:
    """The numbers whose means or deviations differ between clients as much as they do in units of each one's own."""
    assert federation.columns is not None
    places = {name: i for i, name in enumerate(federation.columns.names)}
    owned = federation.rows["train"]
    x = federation.x[torch.cat(list(owned))][:, [places[name] for name in numbers]].double()  # [n, F]
    who = torch.arange(len(federation)).repeat_interleave(torch.tensor([len(rows) for rows in owned]))
    differs = in_own_units(*moments_by_owner(x, who, len(federation))).tolist()
    return [name for i, name in enumerate(numbers) if differs[i] and len(x[:, i].unique()) > 2]


CALLED = {"clock": "time of day", "week": "first day of the week", "year": "first month of the year"}  # as inputs


def _describe_covariates(series: Series) -> str:
    """What else is an input of windows: columns, by when they are known, and the calendar."""
    names = [] if series.covariates is None else [column.name for column in series.covariates.inputs if column.parts]
    past = [name for name in names if name not in (*series.future, *series.static)]
    parts = list[str]()
    if past:
        parts.append(f"{list_names(past)}, known until then")
    if series.future:
        parts.append(f"{list_names(series.future)}, known ahead")
    if series.static:
        parts.append(f"{list_names(series.static)}, the same in all rows of a client")
    if series.calendar:
        parts.append(f"the {' and '.join(CALLED.get(feature, feature) for feature in series.calendar)}")
    return "".join(f"; {part}" for part in parts)


def _by_kind(federation: Federation) -> dict[str, list[str]]:
    """The names of the columns of each kind that is there."""
    assert federation.columns is not None
    kinds: dict[str, list[str]] = defaultdict(list)
    for column in federation.columns.inputs:
        kinds[column.kind].append(column.name)
    return kinds


def _split(experiment: Experiment, federation: Federation, reader: TableReader) -> str:
    split = experiment.split
    how = "at random"
    if reader.time and not split.shuffle:
        how = f"in order of `{reader.time}`"
    elif isinstance(federation.task, Classification) and split.stratify is not False:
        how = "at random, stratified by class"
    how += f", those of one `{reader.group}` together" if reader.group else ""
    sizes = [sum(len(rows) for rows in federation.rows[name]) for name in SPLITS]
    text = ", ".join(
        f"{size:,} for {'the test' if name == 'test' else name}" for name, size in zip(SPLITS, sizes, strict=True)
    )
    return text.replace("train,", "training,") + f": each client's {'windows' if reader.past else 'rows'} {how}"


def _model(experiment: Experiment, federation: Federation) -> str:
    name = experiment.table["model"]["name"]
    hidden = experiment.table["model"].get("hidden")
    count = sum(p.numel() for p in experiment.module(federation, experiment.seed).parameters())
    inputs = federation.x[0].numel()
    widths = [hidden] if isinstance(hidden, int) else hidden
    layers = f"{inputs} in, {', '.join(map(str, widths))} hidden, {federation.outputs} out, " if widths else ""
    return f"{name}: {layers}{several(count, 'parameter')}"


def _describe_training(experiment: Experiment) -> str:
    training = experiment.training
    name = type(training.optimiser).__name__
    rate = f" at rate {training.optimiser.lr:g}" if hasattr(training.optimiser, "lr") else ""
    local = several(training.epochs, "epoch") if training.steps is None else several(training.steps, "step")
    rounds = several(experiment.rounds.count, "round")
    if not Solves.from_method(experiment.method).takes_gradients:
        return f"at most {rounds}, in which the method works its models out without gradient steps"
    if experiment.rounds.patience:
        rounds = f"at most {rounds}"
    return f"{rounds} of {local} at each client, {name}{rate}, batches of {training.batch}"


def _warnings_of_clients(federation: Federation, reader: TableReader) -> list[str]:
    """What to warn of: who has which rows."""
    rows, lines, what = _rows(federation), [], "windows" if reader.past else "rows"
    small = [f"{name} ({n})" for name, n in zip(federation.names, rows, strict=True) if n < SMALL]
    if small:
        who = some(len(small), len(rows), "client")
        lines.append(f"{who} fewer than {SMALL} {what}, too few to tell what they gain: {list_names(small)}")
    most = rows.index(max(rows))
    if len(rows) > 2 and rows[most] > sum(rows) / 2:
        share = 100 * rows[most] / sum(rows)
        lines.append(f"client '{federation.names[most]}' has {share:.0f} % of all {what}; a mean by size is mostly its")
    if isinstance(federation.task, Classification) and (only := _of_one_class(federation)):
        who = some(len(only), len(rows), "client")
        whose = "its own model" if len(only) == 1 else "their own models"
        lines.append(f"{who} training rows of one class alone, so {whose} can predict no other: {list_names(only)}")
    if not any(len(part) for part in federation.rows["validation"]):
        lines.append("there are no validation examples, so the last round's models are kept and nothing can be chosen")
    return lines


def _of_one_class(federation: Federation) -> list[str]:
    """The clients whose training rows are all of one class, and that class."""
    counts = federation.class_counts(["train"])  # [N, C]
    names = federation.class_names
    return [
        f"{federation.names[i]} ({names[int(counts[i].argmax())]})"
        for i in ((counts > 0).sum(1) == 1).nonzero().flatten().tolist()
    ]


def _warnings_of_columns(federation: Federation, reader: TableReader) -> list[str]:
    """What to warn of: classes and inputs."""
    lines = []
    if isinstance(federation.task, Classification):
        counts = federation.class_counts()  # [N, C]
        held = (counts > 0).sum(0).tolist()
        rare = [
            f"{name} ({n})"
            for name, n in zip(federation.class_names, held, strict=True)
            if n <= max(1, len(counts) // 10)
        ]
        if rare:
            lines.append(f"few of the {len(counts):,} clients have these classes: {list_names(rare)}")
        largest = int(counts.sum(0).argmax())
        share = float(counts.sum(0).max() / counts.sum())
        if share > MOSTLY and federation.task.metric == "accuracy":
            lines.append(
                f"{100 * share:.0f} % of rows are '{federation.class_names[largest]}', so accuracy says little; "
                "federation.scored=log_loss compares probabilities, and training.class_weights=balanced may help"
            )
    rows = torch.cat(list_owned(federation))  # [n] of the pool
    who = torch.arange(len(federation)).repeat_interleave(torch.tensor(_rows(federation)))  # [n] whose they are
    numbers = _numbers_of(federation, reader, rows, who)
    measured = {}
    if isinstance(federation.task, Regression) and not reader.past:
        measured = dict(zip(reader.targets, federation.y[rows].double().T, strict=True))
    counting = [] if reader.past else [name for name, values in numbers.items() if _names_rows(values)]
    units = {name: values for name, values in (numbers | measured).items() if name not in counting}
    lines += _warnings_of_units(federation, units, who)
    if reader.past:
        described = Series.of_scale(federation.scale).covariates
        return [*lines, *([] if described is None else _warnings_of_text(described))]
    lines += _warnings_of_sums(federation, reader)
    if isinstance(federation.task, Regression):
        targets = zip(reader.targets, federation.y.double().T, strict=True)
        if naming := [f"`{name}`" for name, values in targets if _names_rows(values)]:
            lines.append(f"{list_names(naming)} is different in every row, as identifiers are: is it what to predict?")
    assert federation.columns is not None
    lines += _warnings_of_text(federation.columns)
    lines += _warnings_of_missing(federation, rows, who)
    missing = {column.name for column in federation.columns.inputs if isinstance(column, Number) and column.missing}
    if counting := [name for name in counting if name not in missing]:
        lines.append(f"different in every row, as identifiers are: {list_names(counting)}; --ignore leaves columns out")
    return lines


def _warnings_of_text(described: Description) -> list[str]:
    """The columns of which nothing is an input, and those of so much different text that most of it is not."""
    return [
        f"`{column.name}`: {column}; --ignore leaves columns out"
        for column in described.inputs
        if isinstance(column, Unused) or (isinstance(column, Category) and column.different > MANY)
    ]


def _warnings_of_missing(federation: Federation, rows: torch.Tensor, who: torch.Tensor) -> list[str]:
    """The clients none of whose rows has a value in a column that others have."""
    assert federation.columns is not None
    lines, count = list[str](), torch.bincount(who, minlength=len(federation))  # [N]
    columns = {column.name for column in federation.columns.inputs}
    for place, part in enumerate(federation.columns.names):
        name = part.removesuffix(" is missing")
        if name == part or name not in columns:
            continue
        without = federation.x[rows, place] > float(federation.x[rows, place].mean())
        empty = torch.bincount(who[without], minlength=len(federation)) == count
        names = [federation.names[i] for i in empty.nonzero().flatten().tolist()]
        if names and len(names) < len(federation):
            lines.append(
                f"`{name}` has no value in any row of {list_names(names)}: it is filled in as missing cells are"
            )
    return lines


def _warnings_of_units(federation: Federation, numbers: Mapping[str, torch.Tensor], who: torch.Tensor) -> list[str]:
    """The clients at which a number is so much larger or smaller than at most that it may be in another unit."""
    lines = list[str]()
    rows = torch.bincount(who, minlength=len(federation)).clamp(min=1)  # [N]
    for name, values in numbers.items():
        nothing = torch.zeros(len(federation), dtype=torch.float64)
        means = nothing.index_add(0, who, values) / rows
        deviations = (nothing.index_add(0, who, (values - means[who]).square()) / rows).sqrt()
        for moments in (means, deviations):
            moments[moments.abs() < ROUNDED * values.abs().max()] = 0  # what scaling and back leave of a zero
        lines.append(describe_odd_units(name, federation.names, means.numpy(), deviations.numpy()))
    return [line for line in lines if line]


def _warnings_of_sums(federation: Federation, reader: TableReader) -> list[str]:
    """Whether a target is nearly a weighted sum of three inputs or more, as what is worked out from them is."""
    if not isinstance(federation.task, Regression):
        return []
    rows = torch.cat(list(federation.rows["train"]))[:MOST]
    x = torch.cat([federation.x[rows].flatten(1), torch.ones(len(rows), 1)], 1).double()
    y = federation.task.standardise(federation.y[rows].double()).reshape(len(rows), -1)
    if len(rows) < 10 * x.shape[1]:
        return []
    weights = torch.linalg.lstsq(x, y, driver="gelsd").solution
    left = ((y - x @ weights).square().mean(0) / y.var(0, correction=0)).sqrt().tolist()
    return [
        f"`{name}` is nearly a weighted sum of the inputs, off by {100 * share:.1g} % of its deviation; "
        "if one of them is known only when it is, leave it out with ignore"
        for name, share, values in zip(reader.targets, left, y.T, strict=True)
        if share < EXACT and not is_short_sum(x[:, :-1].numpy(), values.numpy())
    ]


def _numbers_of(
    federation: Federation, reader: TableReader, rows: torch.Tensor, who: torch.Tensor
) -> dict[str, torch.Tensor]:
    """[n] the numbers of these rows, by column: of windows, the reading before the first that is to be forecast."""
    if reader.past:
        scale = federation.scale["inputs"]["reading"]
        return {reader.targets[0]: federation.x[rows, -1, 0].double() * scale["deviation"] + scale["mean"]}
    assert federation.columns is not None
    places = {name: i for i, name in enumerate(federation.columns.names)}
    numbers = [column.name for column in federation.columns.inputs if isinstance(column, Number)]
    return {name: _read(federation, rows, who, places[name], name) for name in numbers}


def _read(federation: Federation, rows: torch.Tensor, who: torch.Tensor, column: int, name: str) -> torch.Tensor:
    """[n] an input of these rows as it is in the file, up to rounding; `who` says whose they are."""
    by_client = federation.scale.get("clients", {})
    values = federation.x[:, column][rows].double()
    scales = [by_client.get(client, {}).get(name, federation.scale["inputs"][name]) for client in federation.names]
    mean, deviation = (torch.tensor([scale[key] for scale in scales]).double() for key in ("mean", "deviation"))
    return values * deviation[who] + mean[who]


def _names_rows(values: torch.Tensor) -> bool:
    """Whether values: [n] are whole numbers that are different in every row, as identifiers are."""
    if bool(((values[:MANY] - values[:MANY].round()).abs() >= NEAR).any()):  # most columns, at once
        return False
    integers = bool((values - values.round()).abs().max() < NEAR)
    return integers and len(values) > SMALL and len(values.round().unique()) == len(values)
