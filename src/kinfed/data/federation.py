"""Federation: all clients' examples in one pool, and which rows belong to which client and split."""

import copy
import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..core.batches import Ragged
from ..core.graph import Graph, check_graph
from ..core.seeding import generators, tags
from ..core.tasks import Classification, Forecasting, Regression, Task, outputs_of
from ..core.trees import raw
from ..errors import UsageError, list_names, some
from .dataset import Dataset, rows_by_owner
from .split import SPLITS, Rows, Split, fold_rows
from .tables.schema import Description


@dataclass(frozen=True)
class Federation:
    """N clients over a pool of examples `x: [n, ...]`, `y: [n, ...]`, as by `Federation.from_arrays` or `from_csv`.

    `rows[split][i]`, with "train", "validation" and "test" as splits, are client i's rows of the pool (a backdoor adds
    a split, `triggered`). `graph` is the relation that methods may use; `groups: [N]` are the true hidden groups, for
    scoring learned graphs only: no method sees them. Raises UsageError for parts that do not fit each other.
    """

    x: Tensor
    y: Tensor
    rows: Mapping[str, Sequence[Tensor]]
    task: Task
    names: Sequence[str] = ()
    graph: Graph | None = None
    groups: Tensor | None = None
    classes: Sequence[str] = field(default=())
    caution: str = ""  # why scores on its test examples overstate how good a model is, if they do
    scale: Mapping[str, Any] = field(default_factory=dict)  # of inputs and targets, if they were scaled
    in_order: bool = False  # whether its splits follow one another in time
    columns: Description | None = None  # of a table
    places: Tensor | None = None  # [N, 2] latitude and longitude of the clients, for maps only: no method sees them
    blocks: Tensor | None = None  # [n] int64 the block of each example, such as a person, if examples have one
    weights: Tensor | None = None  # [n] as how many rows each example counts, above 0; None: all as one

    def __post_init__(self) -> None:
        count = len(self.rows["train"])
        if not self.names:
            object.__setattr__(self, "names", tuple(str(i) for i in range(count)))
        if (
            set(self.rows) - {"triggered"} != set(SPLITS)
            or any(len(r) != count for r in self.rows.values())
            or count == 0
        ):
            raise UsageError(
                f"a federation needs rows for {', '.join(SPLITS)}, one entry per client, and at least one client"
            )
        if len(self.names) != count or len(set(self.names)) != count:
            raise UsageError(f"{count} clients need {count} different names; got {len(set(self.names))}")
        if len(self.x) != len(self.y):
            raise UsageError(f"x has {len(self.x)} examples but y has {len(self.y)}")
        if self.weights is not None:
            check_weights(self.weights, len(self.x))
        checked = {"x": self.x} if isinstance(self.task, Forecasting) else {"x": self.x, "y": self.y}
        for what, values in checked.items():
            if values.is_floating_point() and not torch.isfinite(_strip_repeats(values)).all():
                bad = (~torch.isfinite(values)).flatten(1).any(1) if values.ndim > 1 else ~torch.isfinite(values)
                where = int(bad.nonzero()[0])
                owner = next((n for n, r in zip(self.names, self.rows["train"], strict=True) if where in r), None)
                raise UsageError(
                    f"{what} holds NaN or infinity in {int(bad.sum())} of {len(values)} examples, first in example "
                    f"{where}{f' (client {owner})' if owner is not None else ''}; fill or drop these values first"
                )
        self.task.check(self.y)
        rows = join_rows(self.rows)
        object.__setattr__(self, "rows", rows)
        for split in ("train", "test") + (("validation",) if rows["validation"].sizes.any() else ()):
            empty = [self.names[i] for i in (rows[split].sizes == 0).nonzero().flatten().tolist()]
            if empty:
                raise UsageError(
                    f"{some(len(empty), count, 'client')} no {split} example: {list_names(empty)}; give them more "
                    "examples or leave these clients out"
                )
        if isinstance(self.task, Classification) and count > 1:  # a single client cannot know the others' classes
            seen, tested = (self.y[rows[split].flat].unique().tolist() for split in ("train", "test"))
            if missing := sorted(set(tested) - set(seen)):
                called = [self.classes[c] if self.classes else str(c) for c in missing]
                problem = f"no client has a training example of class {', '.join(called)}, though some are tested on it"
                if not self.in_order:
                    raise UsageError(f"{problem}; change the partition or the split")
                warnings.warn(f"{problem}, as it occurs only late; it is always mistaken for another", stacklevel=3)
        if self.graph is not None:
            check_graph(self.graph.weights, count)
        if isinstance(self.task, Classification) and self.task.by_class is None:
            uneven = self.task.is_uneven(self.y[rows["train"].flat])
            object.__setattr__(self, "task", replace(self.task, by_class=uneven))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sizes(self) -> Tensor:
        """[N] int64: training examples of each client."""
        return Ragged.join(self.rows["train"]).sizes.clone()

    def total_test_weights(self) -> Tensor:
        """[N] float64: as how many rows the test examples of each client count, the sums of their weights."""
        if self.weights is None:
            return Ragged.join(self.rows["test"]).sizes.double()
        return torch.stack([self.weights[rows].double().sum() for rows in self.rows["test"]])

    def importance(self, split: str) -> list[Tensor] | None:
        """[n] of each client the weights of a split's examples over their mean; None without weights."""
        if self.weights is None:
            return None
        weights = [self.weights[rows].cpu() for rows in self.rows[split]]
        return [values / values.mean() for values in weights]

    @property
    def class_names(self) -> list[str]:
        """[C] the classes' names, or their numbers; raises UsageError without classes."""
        if not isinstance(self.task, Classification):
            raise UsageError("only classification has classes")
        return list(self.classes) or [str(c) for c in range(self.task.classes)]

    @property
    def outputs(self) -> int:
        """How many outputs a model has: one per class, one per target, or what the task says."""
        return outputs_of(self.task, self.y)

    def part(self, ids: Tensor) -> "Federation":
        """The federation of clients ids: [M] only, over the same pool."""
        chosen = ids.tolist()
        graph = self.graph
        return replace(
            self,
            rows={split: [rows[i] for i in chosen] for split, rows in self.rows.items()},
            names=tuple(self.names[i] for i in chosen),
            graph=None if graph is None else replace(graph, weights=graph.weights[..., ids, :][..., ids]),
            groups=None if self.groups is None else self.groups[ids],
            places=None if self.places is None else self.places[ids],
        )

    def __repr__(self) -> str:
        return f"Federation({len(self)} clients, {len(self.x):,} examples {list(self.x.shape[1:])}, {self.task})"

    def digest(self) -> str:
        """SHA-1 of examples, client names, task, splits and graph, to detect data that changed between runs."""
        digest = hashlib.sha1(repr((tuple(self.names), self.task)).encode(), usedforsecurity=False)
        held = join_rows(self.rows).values()
        rows = [parts.flat for parts in held]
        sizes = torch.stack([parts.sizes for parts in held])
        links = [] if self.graph is None else [self.graph.weights]
        weights = [] if self.weights is None else [self.weights]
        for values in (_strip_repeats(self.x), _strip_repeats(self.y), sizes, *rows, *links, *weights):
            digest.update(raw(values))
        return digest.hexdigest()

    def class_counts(self, splits: Iterable[str] = SPLITS, weighted: bool = False) -> Tensor:
        """[N, C] int64: examples of each class that each client has, in these splits together.

        With `weighted` float64, as how many rows they count, if examples have weights.
        """
        if not isinstance(self.task, Classification):
            raise UsageError("class counts exist for classification only")
        owned, classes = list_owned(self, splits), self.task.classes
        if not weighted or self.weights is None:
            return torch.stack([torch.bincount(self.y[rows], minlength=classes) for rows in owned])
        weights = self.weights.double()
        return torch.stack([torch.bincount(self.y[rows], weights[rows], classes) for rows in owned])

    def to(self, device: torch.device) -> "Federation":
        """The same federation with its pool on a device."""
        moved = {split: rows.to(device) for split, rows in join_rows(self.rows).items()}
        weights = None if self.weights is None else self.weights.to(device)
        return self.replace_unchecked(x=_to(self.x, device), y=_to(self.y, device), rows=moved, weights=weights)

    def replace_unchecked(self, **fields: Any) -> "Federation":
        """The same with other fields, whose values are of a federation that has been checked."""
        other = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    @staticmethod
    def from_arrays(
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        client: ArrayLike | Tensor,
        *,
        split: Split | None = None,
        seed: int = 0,
        task: Task | None = None,
        graph: ArrayLike | Tensor | None = None,
        time: ArrayLike | Tensor | None = None,
        weights: ArrayLike | Tensor | None = None,
    ) -> "Federation":
        """A federation from your own arrays.

        Args:
            x: [n, ...] inputs, used as they are: scale them yourself.
            y: [n] labels (integers or text: classification), or [n] or [n, targets] floats (regression).
            client: [n] which client owns each example; clients are ordered by this value.
            split: the shares for validation and test; by default 0.1 and 0.2, stratified by class.
            seed: by which each client's examples are split.
            task: the loss and the scores; by default by the kind of y.
            graph: [N, N] a known relation, in the order of clients.
            time: [n] whole numbers such as days, or datetime64: splits in time order, with the same two cuts for all.
            weights: [n] as how many rows each example counts in training and in scores: from 0, which leaves it out.

        Returns:
            The federation.

        Raises:
            UsageError: the data cannot be trained on; it names what and where.

        >>> import torch
        >>> x, y, client = torch.randn(60, 4), torch.arange(60) % 2, torch.arange(60) % 3
        >>> federation = kinfed.Federation.from_arrays(x, y, client)
        >>> len(federation), [len(rows) for rows in federation.rows["train"]]
        (3, [14, 14, 14])
        """
        if task is not None and not isinstance(task, Task):
            raise UsageError(f"task must be a task, such as kinfed.Classification(3); got {task!r:.80}")
        pool = tensor_of(x, "x")
        pool = pool if pool.is_floating_point() else pool.to(torch.get_default_dtype())
        target, task, classes = _targets(y, task, pool.dtype)
        owner = _owners(client)
        if owner.shape != (len(pool),) or len(pool) != len(target) or not len(pool):
            raise UsageError(
                f"x, y and client must agree on their first axis and not be empty; "
                f"got {len(pool)}, {len(target)} and {list(owner.shape)}"
            )
        names, index = np.unique(owner, return_inverse=True)
        relation = None if graph is None else Graph(tensor_of(graph, "graph").float().cpu(), "given")
        steps = None if time is None else _steps(time, len(pool))
        owners, index_of = tuple(map(str, names)), torch.from_numpy(index)
        dataset = Dataset(
            x=pool,
            y=target,
            task=task,
            classes=classes,
            client=index_of,
            graph=relation,
            owners=owners,
            time=steps,
            stratify=True,
        )
        if weights is not None:
            dataset = with_weights(dataset, weights)
        return divide(dataset, rows_by_owner(dataset), Split() if split is None else split, seed)


def join_rows(rows: Mapping[str, Sequence[Tensor]]) -> dict[str, Ragged]:
    """The rows of every split as a federation holds them: no object a client."""
    return {split: Ragged.join(parts) for split, parts in rows.items()}


def list_owned(federation: Federation, splits: Iterable[str] = SPLITS) -> list[Tensor]:
    """[n_i] each client's rows of these splits together."""
    rows_of = [federation.rows[split] for split in splits]
    return [torch.cat(parts) for parts in zip(*rows_of, strict=True)]


def take_fold(federation: Federation, fold: int) -> Federation:
    """The same test examples, and the fold-th part of each client's others for validation; see `Split.fold`.

    Raises UsageError if the splits follow one another in time.
    """
    if federation.in_order and fold:
        raise UsageError("examples that are split in time order have one fold")
    rows = federation.rows
    folded = [fold_rows(*parts, fold) for parts in zip(rows["train"], rows["validation"], strict=True)]
    return replace(federation, rows={**rows, **{name: [parts[name] for parts in folded] for name in folded[0]}})


def _leave_out(rows: Ragged, clients: Sequence[int]) -> Tensor:
    """[n] the rows of all but these clients."""
    left = [part for i, part in enumerate(rows) if i not in clients] if clients else []
    return torch.cat(left) if clients else rows.flat


def _check_split(split: Split, dataset: Dataset, in_order: bool, shared: bool) -> None:
    """Raise UsageError for a setting that these examples make meaningless; `shared`: clients share examples."""
    labelled = isinstance(dataset.task, Classification)
    if split.stratify and (in_order or shared or not labelled):
        why = "these have none"
        if in_order:
            why = "these are split in time order; leave it out or set shuffle"
        elif labelled:
            why = "with this partition clients share examples, which are in the same split for all; leave it out"
        raise UsageError(f"split: stratify deals examples by their label, but {why}")
    if split.own_times and not in_order:
        why = "these have none; name the column of times, or leave own_times out"
        if dataset.time is not None:
            why = "with shuffle they are split at random; leave one of the two out"
        raise UsageError(f"split: own_times cuts examples by their times, but {why}")


def _check_periods(split: Split, dataset: Dataset, owned: Sequence[Tensor], parts: Sequence[Rows]) -> None:
    """Raise UsageError if clients have no part of a period of all clients, but could be cut by their own times."""
    short = [i for i, part in enumerate(parts) if not part]
    if split.own_times or not short or split.examples or split.share < 1:
        return
    assert dataset.time is not None
    alone = [split.by_own_time(dataset.time, dataset.span, owned[i], torch.Generator()) for i in short]
    if all(alone):
        names = tuple(dataset.owners) or tuple(str(i) for i in range(len(owned)))
        few = list_names([names[i] for i in short])
        raise UsageError(
            f"{some(len(short), len(owned), 'client')} no examples in one of the periods of training, validation and "
            f"test, which are the same for all clients: {few}; to cut each client's by its own times set "
            "federation.split.own_times=true, kinfed.Split(own_times=True)"
        )


def _check_parts(
    names: Sequence[str], owned: Sequence[Tensor], enough: Sequence[bool], in_order: bool, blocks: bool
) -> None:
    """Raise UsageError naming the clients whose examples are too few for all parts, by enough: [N] whether they do."""
    short = [f"{names[i]} ({len(owned[i])})" for i, e in enumerate(enough) if not e]
    if short:
        raise UsageError(
            f"{some(len(short), len(names), 'client')} too few examples for training, validation and test"
            f"{' one after the other' if in_order else ''}: {list_names(short)}"
            f"{', as rows of one group stay together' if blocks and not in_order else ''}"
            "; give each of them more, leave them out, or validate on none (federation.split.validation=0)"
        )


def divide(
    dataset: Dataset,
    owned: Sequence[Tensor],
    split: Split,
    seed: int,
    groups: Tensor | None = None,
    lots: Tensor | None = None,
    newcomers: Sequence[int] = (),
) -> Federation:
    """A federation from each client's rows `owned[i]`, split into train, validation and test.

    `newcomers` are clients whose training rows say nothing of how inputs and targets are scaled. With `lots: [n]`
    in [0, 1), for rows that clients share, an example's lot decides its split for all clients.
    Raises UsageError naming the clients that are left without a training, validation or test example.
    """
    if not isinstance(split, Split):
        raise UsageError(f"split must be like kinfed.Split(test=0.2, validation=0.1); got {split!r}")
    if not isinstance(seed, Integral):
        raise UsageError(f"seed must be a whole number; got {seed!r:.80}")
    names = tuple(dataset.owners) or tuple(str(i) for i in range(len(owned)))
    in_order = dataset.time is not None and not split.shuffle
    _check_split(split, dataset, in_order, lots is not None)
    rows = _split_rows(dataset, names, owned, split, seed, lots)
    if dataset.prepare:
        dataset = dataset.prepare(dataset, _leave_out(rows["train"], newcomers))
    caution = ""
    if split.shuffle and dataset.past + dataset.span > 1:
        caution = "windows were split at random, so those tested on share readings with those trained on"
    return Federation(
        x=dataset.x,
        y=dataset.y,
        rows=rows,
        task=dataset.task,
        names=names,
        graph=dataset.graph,
        groups=groups,
        classes=dataset.classes,
        caution=caution,
        scale=dataset.scale,
        in_order=in_order,
        columns=dataset.columns,
        places=dataset.places if dataset.owners else None,
        blocks=dataset.blocks,
        weights=dataset.weights,
    )


def _split_rows(
    dataset: Dataset, names: Sequence[str], owned: Sequence[Tensor], split: Split, seed: int, lots: Tensor | None
) -> dict[str, Ragged]:
    """The rows of each split; raises UsageError naming the clients whose examples are too few for all parts."""
    draws, blocks = generators(seed, "split", tags(names).tolist()), dataset.blocks
    in_order = dataset.time is not None and not split.shuffle
    if in_order:
        parts = split.by_time(dataset, owned, draws)
        _check_periods(split, dataset, owned, parts)
    elif lots is not None:
        parts = [split.by_lot(rows, lots, draw) for rows, draw in zip(owned, draws, strict=True)]
    elif blocks is not None:
        parts = split.by_block(owned, blocks, draws, seed)
    else:
        stratified = dataset.stratify if split.stratify is None else split.stratify
        labels = dataset.y if stratified and isinstance(dataset.task, Classification) else None
        dealt, enough = split.deal(owned, draws, labels)
        _check_parts(names, owned, enough.tolist(), in_order, blocks=False)
        return dealt if labels is None else _trained_on(dealt, labels)
    _check_parts(names, owned, [bool(part) for part in parts], in_order, blocks is not None)
    return {name: Ragged.join([part[name] for part in parts]) for name in SPLITS}


def with_weights(dataset: Dataset, weights: ArrayLike | Tensor) -> Dataset:
    """The data set whose examples have weights: [n], which belong to nobody where these are 0.

    Raises UsageError that names the first example whose weight is none, or an owner none of whose examples counts.
    """
    numbers, count = tensor_of(weights, "weights").to(torch.float64).cpu(), len(dataset.x)
    numbers = numbers.reshape(-1) if numbers.shape == (count, 1) else numbers
    if numbers.shape != (count,):
        raise UsageError(f"weights must be a number for each of {count} examples; got {list(numbers.shape)}")
    if len(wrong := (~(numbers >= 0) | numbers.isinf()).nonzero()):
        at = int(wrong[0])
        raise UsageError(
            f"weights: example {at} has {float(numbers[at]):g}, and a weight is a finite number from 0; correct it, or "
            "set it to 0 to leave the example out"
        )
    client = dataset.client
    assert client is not None
    lost = sorted({*client[client >= 0].tolist()} - {*client[numbers > 0].tolist()})
    if lost:
        raise UsageError(f"all examples of client {dataset.owners[lost[0]]} have weight 0; leave it out, or weigh some")
    counted = torch.where(numbers > 0, numbers, 1.0).to(torch.get_default_dtype())
    return replace(dataset, client=torch.where(numbers > 0, client, -1), weights=counted)


def check_weights(weights: Tensor, count: int) -> None:
    """Raise UsageError unless weights: [count] are finite numbers above 0."""
    if weights.shape != (count,) or not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise UsageError(
            f"a federation's weights must be {count} finite numbers above 0, one for each example; leave examples "
            "without weight out of the clients' rows"
        )


def _trained_on(dealt: dict[str, Ragged], y: Tensor) -> dict[str, Ragged]:
    """The clients' rows such that somebody trains on each class: where nobody does, a client swaps two of its rows.

    One of the class, of its other splits, is trained on in place of one whose class others train on as well.
    """
    y = y.unique(return_inverse=True)[1]
    count = torch.bincount(y[dealt["train"].flat], minlength=int(y.max()) + 1)
    if count.all():
        return dealt
    parts = [dict(zip(dealt, part, strict=True)) for part in zip(*dealt.values(), strict=True)]  # views
    held = [{split: y[rows] for split, rows in part.items()} for part in parts]
    for part, labels in zip(parts, held, strict=True):
        for split in ("validation", "test"):
            for at in (count[labels[split]] == 0).nonzero().flatten().tolist():
                spare = (count[labels["train"]] > 1).nonzero().flatten()
                if len(spare) and not count[labels[split][at]]:
                    place = int(spare[0])
                    count[labels["train"][place]] -= 1
                    count[labels[split][at]] += 1
                    for values in (part, labels):
                        taken = values["train"][place].clone()
                        values["train"][place] = values[split][at]
                        values[split][at] = taken
    return dealt


def _targets(y: ArrayLike | Tensor, task: Task | None, kind: torch.dtype) -> tuple[Tensor, Task, tuple[str, ...]]:
    """The targets, as labels or floats of this kind; the task, inferred from y unless given; names of classes."""
    classes: tuple[str, ...] = ()
    if task is None and (labels := _texts(y)) is not None:
        names, y = np.unique(labels, return_inverse=True)
        classes = tuple(map(str, names))
    target = tensor_of(y, "y")
    if target.is_floating_point():
        return target.to(kind), Regression() if task is None else task, classes  # of what a model makes of x
    target = target.to(torch.int64)
    if target.ndim == 2 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.ndim != 1 and isinstance(task, Classification | None):
        raise UsageError(
            f"y must be a label for each example, [n]; got {list(target.shape)}; of rows with a 1 in the place of the "
            "class take y.argmax(1), and make targets of a regression floats"
        )
    if task is None:
        largest = int(target.max()) if target.numel() else 0
        if largest > target.numel():
            raise UsageError(
                f"y holds the label {largest}, but there are only {target.numel()} examples: labels must number the "
                "classes from 0; renumber them, or give the number of classes: task=kinfed.Classification(...)"
            )
        task = Classification(largest + 1)
    return target, task, classes


def _owners(client: ArrayLike | Tensor) -> NDArray[Any]:
    """[n] which client owns each example, all by numbers or all by text."""
    try:
        owner = np.asarray(client.cpu() if isinstance(client, Tensor) else client)
    except ValueError:  # of unlike lengths
        owner = np.array(None)
    if (named := _texts(owner)) is not None:
        owner = named
    if owner.ndim == 2 and owner.shape[1] == 1:
        owner = owner[:, 0]
    if owner.dtype.kind not in "biuUSf" or (owner.dtype.kind == "f" and np.isnan(owner).any()):
        raise UsageError("client must name the owner of every example, each by a number or each by text")
    return owner


def _steps(time: ArrayLike | Tensor, count: int) -> Tensor:
    """[n] int64: the time of each example, dates in microseconds."""
    if not isinstance(time, Tensor):
        with suppress(ValueError):  # of several lengths, which is refused below
            time = np.asarray(time)  # a list, or a column of pandas, may hold dates
    if isinstance(time, np.ndarray) and time.dtype.kind == "M":
        if np.isnat(time).any():
            raise UsageError(f"time must be a date for each example; number {int(np.isnat(time).argmax())} is NaT")
        time = time.astype("datetime64[us]").astype(np.int64)
    steps = tensor_of(time, "time")
    if steps.shape != (count,) or steps.is_floating_point():
        raise UsageError(
            f"time must be a whole number for each of {count} examples; got {steps.dtype} {list(steps.shape)}"
        )
    return steps.to("cpu", torch.int64)


def _texts(values: ArrayLike | Tensor) -> NDArray[np.str_] | None:
    """The values as an array of text, if they are text."""
    if isinstance(values, Tensor):
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        return None
    if array.dtype.kind == "U" or (array.dtype.kind == "O" and all(isinstance(entry, str) for entry in array.flat)):
        return array.astype(str)
    return None


def tensor_of(values: ArrayLike | Tensor, name: str) -> Tensor:
    """The numbers as a tensor; raises UsageError, with this name, if they are none."""
    tensor = values
    try:
        if not isinstance(tensor, Tensor):
            array = np.asarray(values)
            if array.dtype.kind in "biuf":  # PyTorch has neither mirrored arrays nor all of NumPy's kinds of numbers
                kind = np.dtype(np.float64) if array.dtype == np.longdouble else array.dtype.newbyteorder("=")
                array = np.ascontiguousarray(array, kind).reshape(array.shape)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes into a pool
                tensor = torch.as_tensor(array)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be an array of numbers, all of its rows of one shape") from None
    if tensor.is_complex() or not tensor.ndim:
        raise UsageError(f"{name} must be an array of real numbers; got {tensor.dtype} {list(tensor.shape)}")
    return tensor


def _strip_repeats(t: Tensor) -> Tensor:
    """The numbers under a view that repeats some, as windows do, once each; other tensors as they are."""
    stored = t.untyped_storage().nbytes() // t.element_size()
    return t.as_strided((stored,), (1,), 0) if t.numel() > stored else t


def _to(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a view with repeated values stays such a view there."""
    moved = _strip_repeats(t).to(device)
    return moved if moved.shape == t.shape else moved.as_strided(t.shape, t.stride(), t.storage_offset())
