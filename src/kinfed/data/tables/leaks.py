"""Leaks: what in a table may give its target away, as one look at the training rows shows."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import cell_warnings
from .schema import Raw
from .words import Codes, Numbers

ROWS, LEAST = 4_000, 60  # rows that are looked at, at most and at least
COLUMNS = 12  # of which pairs are looked at
WRONG, LEFT = 0.005, 0.05  # the largest share of rows, and of those the commonest class has wrong, that are not named
NEAR = 3  # rows beside a cut that the other half of the rows does not know
NOISE, REST = 0.05, 0.02  # of a number's deviation, what one column may leave, and what two may
RARE = 10  # rows that a class, or an empty column, must have
DEPTH = 3  # of a tree
FEW = 10  # rows of a client from which it has a line of its own
MANY, MOST = 20, 0.7  # values that persons have, at least, and what they may leave of a deviation
EACH, FIXED = 10, 0.98  # rows that a person has at most, and the share of persons whose rows share a cell
PERSONS = 20_000  # rows of persons that are looked at, at most
DIGITS = 5  # of a column's deviation in which copies agree, as files keep numbers with fewer digits or more
COPIES, SHARE = 3, 0.01  # rows outside training, and their share, that stand in training too


class Look(NamedTuple):
    """Some training rows: inputs by column, and the target."""

    columns: Mapping[str, Raw]
    y: Numbers  # [n] places of classes, or numbers
    who: Codes  # [n] places of clients

    @classmethod
    def sample(cls, columns: Mapping[str, Raw], y: Numbers, who: Codes) -> "Look":
        """At most `ROWS` rows, evenly apart."""
        rows = np.unique(np.linspace(0, len(y) - 1, min(ROWS, len(y))).astype(np.int64))
        return cls({name: Raw(raw.values[rows], raw.texts) for name, raw in columns.items()}, y[rows], who[rows])


def warn_of_leaks(
    table: str,
    columns: Mapping[str, Raw],
    targets: Mapping[str, Numbers],
    who: Codes,
    train: Codes,
    classes: Sequence[str],
    is_grouped: bool = False,
) -> None:
    """Warn of columns that tell a target: [n] in nearly all training rows; of `classes`, or of numbers without any.

    `who`: [n] are places of clients, and `train` those of rows. What is a copy of the target in all rows is left out,
    because `cell_warnings.warn` names it where the table is read. A column is named, too, if rows with the same value
    have nearly the same target, or the same cells elsewhere, as rows of one person do that stand on both sides of the
    split; not if the split `is_grouped`, which keeps such rows together or goes by their time.
    """
    inputs = {name: Raw(raw.values[train], raw.texts) for name, raw in columns.items()}
    persons = {} if is_grouped else dict(_persons_by_cells(inputs, who[train]))
    for target, y in targets.items():
        others = (name for name, raw in columns.items() if cell_warnings.find_copy(raw, y, bool(classes)) is None)
        look = Look.sample({name: inputs[name] for name in others}, y[train], who[train])
        if len(look.y) < LEAST or len(look.columns) == 0:
            continue
        leaks = list(_leaks_of_class(look, target, classes) if classes else _leaks_of_number(look, target))
        for leak in leaks:
            warnings.warn(f"{table}: {leak}; what is not known before '{target}' is left out with ignore", stacklevel=5)
        if not leaks and not is_grouped:
            persons |= {name: f"nearly the same '{target}'" for name in _names_of_persons(look, bool(classes))}
    for name, shared in persons.items():
        warnings.warn(
            f"{table}: rows with the same '{name}' have {shared}; if new rows are of others, group={name} keeps such "
            "rows in one part of the split",
            stacklevel=5,
        )


def warn_of_copies(table: str, x: Numbers, y: Numbers, train: Codes) -> None:
    """Warn of rows x: [n, F] with targets y: [n, k] outside of training that stand in training, too.

    Rows are copies only if two columns or more have a value that no other row has, as coarse rows agree by chance.
    """
    cells = np.column_stack([x, y])
    cells = cells[:, ~np.isnan(cells).all(0)]  # an empty column has no deviation
    spread = np.nanstd(cells, 0)
    cells = np.round(cells / np.where(spread > 0, spread, 1.0), DIGITS)
    held = np.ones(len(x), bool)
    held[train] = False
    if not held.any() or cells.shape[1] < 2:
        return
    bits = np.ascontiguousarray(np.where(np.isnan(cells), np.inf, cells + 0.0)).view(np.uint64)
    keys = np.zeros(len(x), np.uint64)
    for column in bits.T:
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    _, place, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    trained = np.zeros(len(sizes), bool)
    trained[place[train]] = True
    twice = np.flatnonzero(held & trained[place])
    if len(twice) < COPIES:
        return
    alone = np.zeros(len(twice), np.int64)
    for column in bits.T:
        _, value, count = np.unique(column, return_inverse=True, return_counts=True)
        alone += count[value[twice]] == sizes[place[twice]]
    copies = int((alone >= 2).sum())
    if copies >= max(COPIES, SHARE * held.sum()):
        warnings.warn(
            f"{table}: {copies:,} of {int(held.sum()):,} rows outside of training ({100 * copies / held.sum():.0f} %) "
            "stand in training too, cell by cell, so scores are too good there; keep each row once",
            stacklevel=4,
        )


def _leaks_of_class(look: Look, target: str, classes: Sequence[str]) -> Iterator[str]:
    """What to say of columns, alone or two together, by which a class is known."""
    y = look.y.astype(np.int64)
    counts = np.sort(np.bincount(y))
    if len(y) - counts[-1] < RARE:
        return
    bound = min(WRONG + NEAR / len(y), LEFT * (1 - counts[-1] / len(y)))
    scores = dict[str, float]()
    for name, raw in look.columns.items():
        empty = np.isnan(raw.values)
        if RARE <= empty.sum() <= len(y) - RARE and (share := _share_wrong(empty[:, None] * 1.0, y)) <= bound:
            which = classes[int(np.bincount(y[empty]).argmax())]
            yield f"whether '{name}' is empty tells '{target}' in {_percent(share)} of rows ('{which}' where it is)"
            continue
        scores[name] = _share_wrong(_inputs_of(raw), y)
        if scores[name] <= bound:
            yield f"'{name}' alone tells '{target}' in {_percent(scores[name])} of rows"
    unsure = sorted((name for name, share in scores.items() if share > bound), key=lambda name: scores[name])
    for first, second in itertools.combinations(unsure[:COLUMNS], 2):
        share = _share_wrong(_inputs_of_pair(look.columns[first], look.columns[second]), y)
        if share <= bound:
            yield f"'{first}' and '{second}' together tell '{target}' in {_percent(share)} of rows"
            return


def _percent(wrong: float) -> str:
    return f"{100 * (1 - wrong):.3g} %"


def _inputs_of(raw: Raw) -> Numbers:
    """[n, k] what a tree may split a column by: its number and whether it is empty, or each of its frequent words."""
    empty = np.isnan(raw.values)
    if not raw.texts:
        return np.stack([np.where(empty, np.nanmedian(raw.values) if not empty.all() else 0.0, raw.values), empty], 1)
    return _codes_as_inputs(np.where(empty, len(raw.texts), raw.values).astype(np.int64))


def _codes_as_inputs(codes: Codes) -> Numbers:
    """[n, k] an input for each code that stands in several rows."""
    counts = np.bincount(codes)
    frequent = np.argsort(-counts, kind="stable")[:64]
    return np.asarray(codes[:, None] == frequent[counts[frequent] >= 2], np.float64)


def _inputs_of_pair(left: Raw, right: Raw) -> Numbers:
    """[n, k] the same of two columns: of two numbers also their sum and difference, of words each pair."""
    first, second = _inputs_of(left), _inputs_of(right)
    if not left.texts and not right.texts:
        sums = np.stack([first[:, 0] + second[:, 0], first[:, 0] - second[:, 0]], 1)
        return np.concatenate([first, second, sums], 1)
    if left.texts and right.texts:
        filled = [np.where(np.isnan(raw.values), len(raw.texts), raw.values).astype(np.int64) for raw in (left, right)]
        pairs = np.unique(filled[0] * (len(right.texts) + 1) + filled[1], return_inverse=True)[1]
        return np.concatenate([first, second, _codes_as_inputs(pairs)], 1)
    return np.concatenate([first, second], 1)


def _share_wrong(x: Numbers, y: Codes) -> float:
    """The share of rows whose class a tree has wrong that has seen the other half of the rows: at most by chance."""
    if not x.shape[1]:
        return 1.0
    from sklearn.tree import DecisionTreeClassifier

    wrong = 0
    deep = max(DEPTH, min(x.shape[1], 64) if set(np.unique(x)) <= {0.0, 1.0} else DEPTH)
    for odd in (0, 1):
        seen: NDArray[np.bool_] = np.arange(len(y)) % 2 == odd
        tree = DecisionTreeClassifier(max_depth=deep, random_state=0).fit(x[seen], y[seen])
        wrong += int((tree.predict(x[~seen]) != y[~seen]).sum())
    return wrong / len(y)


def _leaks_of_number(look: Look, target: str) -> Iterator[str]:
    """What to say of columns of which a number is a copy, a function, a sum, a product, or a ratio."""
    y, named, rest = look.y, False, dict[str, float]()
    if np.ptp(y) == 0 or not np.isfinite(y).all():
        return
    for name, raw in look.columns.items():
        there = np.isfinite(raw.values)
        if there.sum() < max(LEAST, len(y) / 2):
            continue
        x, out, who = raw.values[there], y[there], look.who[there]
        if raw.texts:
            left, where = _left_of_names(x, out), ""
        else:
            rest[name] = _left_of(x[:, None], out)
            left, where = min(rest[name], _left_of_neighbours(x, out)), ""
            if left > NOISE:
                left, where = _left_at_clients(x, out, who), " at each client"
        if left <= NOISE:
            named = True
            yield f"'{name}' tells '{target}'{where} except {100 * left:.2g} % of its deviation"
    varying = (name for name in rest if 0 < np.ptp(look.columns[name].values) < np.inf)  # and complete, else it is NaN
    near = sorted(varying, key=rest.__getitem__)
    for first, second in itertools.combinations([] if named else near[:COLUMNS], 2):
        pair = np.stack([look.columns[first].values, look.columns[second].values], 1)
        for what, inputs, output in (("weighted sum", pair, y), *_logarithms(pair, y), *_products(pair, y)):
            if (left := _left_of(inputs, output)) <= REST:
                but = f"except {100 * left:.2g} % of its deviation"
                yield f"'{target}' is nearly a {what} of '{first}' and '{second}', {but}"
                return


def _names_of_persons(look: Look, labelled: bool) -> Iterator[str]:
    """Columns of text or whole numbers, `MANY` or more, that tell most of a target, which numbers nearby do not."""
    y = np.asarray(look.y == np.bincount(look.y.astype(np.int64)).argmax(), float) if labelled else look.y
    y = y - _means_at(look.who, y)[look.who]
    if not (y != 0).any():
        return
    for name, raw in look.columns.items():
        if np.isnan(raw.values).any() or (not raw.texts and (raw.values % 1 != 0).any()):
            continue
        values, codes, counts = np.unique(raw.values, return_inverse=True, return_counts=True)
        if len(values) < MANY or counts[codes].mean() > len(y) / MANY or np.median(counts) < 2:
            continue
        left = _left_of_names(raw.values, y)
        nearby = np.convolve(_means_at(codes, y), [0.5, 0, 0.5], "same")[codes]  # the mean of the two values next to it
        if left <= MOST and (raw.texts or (y - nearby).std() > max(MOST, left / 0.8) * y.std()):
            yield name


def _persons_by_cells(columns: Mapping[str, Raw], who: Codes) -> Iterator[tuple[str, str]]:
    """Columns of text or whole numbers whose value a few rows share, each with the text of what else these rows share.

    That is the cells of two other columns, which differ between the rows of a client; who: [n] are places of clients.
    """
    for name, raw in columns.items():
        if np.isnan(raw.values).any() or (not raw.texts and (raw.values % 1 != 0).any()):
            continue
        rows = _draw_by_value(raw.values, max(1, len(who) // PERSONS))
        values, codes, counts = np.unique(raw.values[rows], return_inverse=True, return_counts=True)
        if len(values) < MANY or counts[codes].mean() > EACH or np.median(counts) < 2:
            continue
        several, clients = counts > 1, np.unique(who[rows], return_inverse=True)[1]
        shared = []
        for other, cells in columns.items():
            places = np.unique(cells.values[rows], return_inverse=True)[1]  # an empty cell is one, too
            if other == name or not 1 < places.max() + 1 <= len(values) / 3:
                continue
            if _is_constant(codes, places)[several].mean() >= FIXED and _is_constant(clients, places).mean() < 0.5:
                shared.append(f"'{other}'")
        if len(shared) > 1:
            yield name, f"the same {shared[0]} and {shared[1]}"


def _is_constant(codes: Codes, places: Codes) -> NDArray[np.bool_]:
    """[K] whether the places: [n] of all rows with a code are the same."""
    low, high = np.full(codes.max() + 1, places.max()), np.zeros(codes.max() + 1, np.int64)
    np.minimum.at(low, codes, places)
    np.maximum.at(high, codes, places)
    return np.asarray(low == high)


def _means_at(codes: Codes, y: Numbers) -> Numbers:
    """[K] the mean of y: [n] by code."""
    return np.bincount(codes, y) / np.maximum(np.bincount(codes), 1)


def is_short_sum(x: Numbers, y: Numbers) -> bool:
    """Whether one or two of the columns x: [n, d] tell y: [n], so that `warn_of_leaks` has named them."""
    left = [_left_of(column[:, None], y) for column in x.T]
    near = np.argsort(left)[:COLUMNS].tolist()
    pairs = (x[:, list(pair)] for pair in itertools.combinations(near, 2))
    return min(left, default=1.0) <= NOISE or any(_left_of(pair, y) <= REST for pair in pairs)


def _logarithms(pair: Numbers, y: Numbers) -> list[tuple[str, Numbers, Numbers]]:
    """Factors and their product as logarithms, where all are positive and the product has some digits."""
    if (pair <= 0).any() or (y <= 0).any() or y.std() < 0.05 * y.mean():
        return []
    return [("weighted product", np.log(pair), np.log(y))]


def _products(pair: Numbers, y: Numbers) -> Iterator[tuple[str, Numbers, Numbers]]:
    """The product of two numbers of any sign, and their ratios."""
    yield "product", pair.prod(1)[:, None], y
    for numbers in (pair, pair[:, ::-1]):
        if (numbers[:, 1] != 0).all():
            yield "ratio", (numbers[:, 0] / numbers[:, 1])[:, None], y


def _left_of(x: Numbers, y: Numbers) -> float:
    """The share of the deviation of y: [n] that a weighted sum of x: [n, k] leaves."""
    x, y = x - x.mean(0), y - y.mean()
    spread = x.std(0)
    if not (spread > 0).all() or not y.std() > 0:
        return 1.0
    weights = np.linalg.lstsq(x / spread, y, rcond=None)[0]
    return float((y - x / spread @ weights).std() / y.std())


def _left_of_neighbours(x: Numbers, y: Numbers) -> float:
    """The share of the deviation of y: [n] that a curve of x: [n] leaves, as both neighbours by x tell."""
    y = y[np.argsort(x, kind="stable")]
    rest = y[1:-1] - (y[:-2] + y[2:]) / 2
    return float(rest.std() / 1.5**0.5 / y.std()) if y.std() > 0 else 1.0


def _draw_by_value(values: Numbers, times: int) -> Codes:
    """[m] all rows of about one in so many different values: [n], the same in every run."""
    hashes = np.ascontiguousarray(values).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    return np.flatnonzero(hashes % np.uint64(times) == 0)


def _left_at_clients(x: Numbers, y: Numbers, who: Codes) -> float:
    """The share of y's deviation within clients that a line of x: [n] leaves for each client of `FEW` rows or more."""
    large = np.bincount(who)[who] >= FEW
    if large.sum() < max(LEAST, len(y) / 2):
        return 1.0
    x, y, who = x[large], y[large], np.unique(who[large], return_inverse=True)[1]
    x, y = x - _means_at(who, x)[who], y - _means_at(who, y)[who]
    square = np.bincount(who, x * x)
    slope = np.bincount(who, x * y) / np.where(square > 0, square, 1.0)
    free = len(y) - 2 * len(square)
    spread = ((y * y).sum() / (len(y) - len(square))) ** 0.5
    return float((((y - slope[who] * x) ** 2).sum() / free) ** 0.5 / spread) if spread > 0 else 1.0


def _left_of_names(codes: Numbers, y: Numbers) -> float:
    """The share of the deviation of y: [n] that the mean of the other rows with the same code: [n] leaves.

    Rows whose code no other row has say nothing; 1 if these are half of all.
    """
    places = np.unique(codes, return_inverse=True)[1]
    count, total = np.bincount(places)[places], np.bincount(places, y)[places]
    several = count > 1
    if several.mean() <= 0.5 or not y.std() > 0:
        return 1.0
    others = (total - y)[several] / (count[several] - 1)
    return float((y[several] - others).std() / y.std())
