"""How each client's examples are split into training, validation and test."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..core.batches import Ragged
from ..core.field_checks import CountOrZero, In, Settings
from ..core.seeding import generator
from ..errors import UsageError, several
from .dataset import Dataset

SPLITS = ("train", "validation", "test")
LEAST = 5000  # examples that a client keeps at least, if it uses a share of them
Rows = dict[str, Tensor]  # one client's rows of the pool, by split


@dataclass(frozen=True)
class Split(Settings):
    """Which shares of a client's examples are for validation (selecting rounds) and for the final test.

    With `examples` a client uses at most that many, drawn at random, for experiments at a smaller scale. With `share`
    it uses that share of them, rounded up, but at least 5,000 or all that it has.
    Examples that have a time are split in time order, at the same two steps for all clients, or with `own_times` at
    each client's own, where the shares of its steps end; those that reach across a cut are left out. `shuffle` splits
    them at random instead, as some papers do: windows of a series then share readings between training and test, and
    every result says so. Other examples are always split at random.

    With `stratify` a part has as many examples of each class as its share of them, rounded up or down by chance, so
    each example is as likely to be in a part as without, and no class is favoured. None: on for your own table or
    arrays of labels, unless they are split in time order, and off for data sets by name.

    Each `fold` validates on other examples and tests on the same; a client's last fold is followed by its first. Folds
    other than 0 are drawn at random, not stratified.
    """

    test: Annotated[float, In("(0, 1)")] = 0.2  # share of a client's examples for the final test
    validation: Annotated[float, In("[0, 1)")] = 0.1  # share for selecting rounds
    examples: CountOrZero = 0  # the most that a client uses; 0: all
    shuffle: bool = False  # whether examples with a place in time are dealt at random
    own_times: bool = False  # whether a client's examples are cut by its own times alone, and not at all clients' steps
    share: Annotated[float, In("(0, 1]")] = 1.0  # of a client's examples that it uses
    stratify: bool | None = None  # whether each class has its share of every part; left out: for labels of your own
    fold: CountOrZero = 0  # which part of the examples that are not for the test is for validation, the first being 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test + self.validation >= 1:
            raise UsageError(
                f"split: test and validation must leave examples for training, so their sum must be below 1; got "
                f"test={self.test}, validation={self.validation}"
            )

    def __call__(
        self, owned: Sequence[Tensor], draws: Iterable[torch.Generator], labels: Tensor | None = None
    ) -> list[Rows]:
        """Rows of every client, as by `deal`; a client with fewer rows than parts gets nothing."""
        rows, enough = self.deal(owned, draws, labels)
        parts = zip(*(rows[split] for split in SPLITS), strict=True)
        return [
            dict(zip(SPLITS, part, strict=True)) if e else {} for part, e in zip(parts, enough.tolist(), strict=True)
        ]

    def deal(
        self, owned: Sequence[Tensor], draws: Iterable[torch.Generator], labels: Tensor | None = None
    ) -> tuple[dict[str, Ragged], Tensor]:
        """Rows of every client, shuffled and cut; a share above zero gets at least one row, and so does training.

        With labels: [n], of the whole pool, a part is a systematic sample of the client's rows, sorted by label, which
        changes nothing about its size. All clients are handled at once, as there may be a million. The second result,
        [N] bool, is whether a client has as many rows as there are parts.
        """
        owned = Ragged.join(owned)
        held = owned.sizes
        drawn = self._count_drawn(held)  # [N]
        order = torch.empty(int(drawn.sum()), dtype=torch.int64)
        starts = torch.empty(len(held), 2)
        end = 0
        for i, (count, size, draw) in enumerate(zip(held.tolist(), drawn.tolist(), draws, strict=True)):
            begin, end = end, end + size
            if size == count:
                torch.randperm(count, generator=draw, out=order[begin:end])
            else:
                order[begin:end] = torch.randperm(count, generator=draw)[:size]
            if labels is not None:
                torch.rand(2, generator=draw, out=starts[i])
        client = torch.repeat_interleave(drawn)  # [n] the client of each row, in order, here and below
        rows = owned.flat[order + (held.cumsum(0) - held)[client]]
        parts = 2 + (self.validation > 0)
        test = _size(drawn, self.test, drawn - parts + 1)
        validation = _size(drawn, self.validation, drawn - 1 - test) * (drawn >= parts)
        order = torch.arange(len(rows))
        if labels is not None:
            label = labels[rows].cpu().unique(return_inverse=True)[1]
            order = (client * len(rows) + label).argsort(stable=True)
        part = torch.full_like(client, 2)
        begins = (None, None) if labels is None else starts.unbind(1)  # [N] each
        for i, (size, start) in enumerate(zip((test, validation), begins, strict=True)):
            left = order[part[order] == 2]
            part[left[sample(client[left], size, start)]] = i
        dealt = {}
        for i, name in enumerate(("test", "validation", "train")):
            chosen = part == i
            dealt[name] = Ragged(rows[chosen], torch.bincount(client[chosen], minlength=len(owned)))
        if self.fold:
            pairs = zip(dealt["train"], dealt["validation"], strict=True)
            both = [fold_rows(train, validation, self.fold) for train, validation in pairs]
            dealt |= {name: Ragged.join([rows_of[name] for rows_of in both]) for name in both[0]}
        return {name: dealt[name] for name in SPLITS}, drawn >= parts

    def by_block(
        self, owned: Sequence[Tensor], blocks: Tensor, draws: Iterable[torch.Generator], seed: int
    ) -> list[Rows]:
        """Rows of every client, cut between blocks: [n] of all examples, so that all rows of a block are in one part.

        Blocks are dealt as rows are. Where one has rows of several clients, a lot decides its part for all of them.
        """
        blocks_of = [blocks[rows].unique() for rows in owned]
        if len(torch.cat(blocks_of).unique()) < sum(map(len, blocks_of)):
            lots = torch.rand(int(blocks.max()) + 1, generator=generator(seed, "blocks"))[blocks]
            return [self.by_lot(rows, lots, draw) for rows, draw in zip(owned, draws, strict=True)]
        dealt = self(blocks_of, draws)
        return [
            {part: rows[torch.isin(blocks[rows], chosen)] for part, chosen in parts.items()}
            for rows, parts in zip(owned, dealt, strict=True)
        ]

    def by_lot(self, rows: Tensor, lots: Tensor, draw: torch.Generator) -> Rows:
        """Rows of one client, cut by the lots: [n] of all examples; nothing if a share above zero gets no row."""
        rows = self._draw_rows(rows, draw)
        folds = int((1 - self.test) / self.validation + 1e-9) if self.validation else 1
        begin = self.test + self.fold % folds * self.validation
        test = lots[rows] < self.test
        chosen = (lots[rows] >= begin) & (lots[rows] < begin + self.validation)
        parts = {"test": rows[test], "validation": rows[chosen & ~test], "train": rows[~chosen & ~test]}
        enough = all(len(part) for split, part in parts.items() if split != "validation" or self.validation)
        return parts if enough else {}

    def _draw_rows(self, rows: Tensor, draw: torch.Generator) -> Tensor:
        """The rows that a client uses, in random order."""
        return rows[torch.randperm(len(rows), generator=draw)[: int(self._count_drawn(torch.tensor(len(rows))))]]

    def _count_drawn(self, count: Tensor) -> Tensor:
        """[N] how many of its count: [N] rows each client uses."""
        if self.share < 1:
            count = (self.share * count.double()).ceil().long().clamp(min=LEAST).minimum(count)
        return count.clamp(max=self.examples) if self.examples else count

    def by_time(self, dataset: Dataset, owned: Sequence[Tensor], draws: Iterable[torch.Generator]) -> list[Rows]:
        """Rows of every client, cut where the shares of all steps end; nothing for a client left without a part.

        Raises UsageError where a share has fewer steps than one example covers.
        """
        time, span = dataset.time, dataset.span
        assert time is not None
        if self.own_times:
            return [self.by_own_time(time, span, rows, draw) for rows, draw in zip(owned, draws, strict=True)]
        cuts = self.cuts(time[torch.cat(list(owned))].unique(), span)
        return [self.cut(time, span, rows, *cuts, draw) for rows, draw in zip(owned, draws, strict=True)]

    def by_own_time(self, time: Tensor, span: int, rows: Tensor, draw: torch.Generator) -> Rows:
        """Rows of one client, cut where the shares of its own steps end; nothing for one left without a part.

        time: [n] are the steps at which all examples begin; each covers `span`.
        """
        return self.cut(time, span, rows, *self._ends(time[rows].unique()), draw) if len(rows) else {}

    def _ends(self, steps: Tensor) -> tuple[int, int]:
        """Where validation and test begin, by the different steps: [T], ascending, at which examples begin."""
        if self.fold:
            raise UsageError(
                f"split: examples that are split in time order have one fold; got fold={self.fold}, so leave it out"
            )
        test = len(steps) - max(1, round(self.test * len(steps)))
        validation = test - (max(1, round(self.validation * len(steps))) if self.validation else 0)
        return int(steps[max(validation, 0)]), int(steps[test])

    def cuts(self, steps: Tensor, span: int) -> tuple[int, int]:
        """The same; raises UsageError where a share has fewer steps than one example covers, which is `span`."""
        first, second = self._ends(steps)
        for share, length in (("training", first - int(steps[0])), ("validation", second - first)):
            if length < span and (share == "training" or self.validation):
                if span == 1:
                    raise UsageError(
                        f"split: all examples are from {several(len(steps), 'time')}, so splitting in "
                        f"time order leaves none for {share}; change the shares, or leave time out"
                    )
                enough = math.ceil(100 * (span + 0.5) / len(steps)) / 100
                wider = f"validation={enough:g}" if share == "validation" else "test and split.validation smaller"
                raise UsageError(
                    f"split: the {share} share covers {several(length, 'step')}, but an example covers {span}; "
                    f"set federation.split.{wider}, or take shorter windows"
                )
        return first, second

    def cut(self, time: Tensor, span: int, rows: Tensor, first: int, second: int, draw: torch.Generator) -> Rows:
        """Rows of one client, cut at these two steps; nothing for one that is left without a part."""
        if self.examples or self.share < 1:
            rows = self._draw_rows(rows, draw)
        begin = time[rows]
        end = begin + span
        parts = {
            "train": rows[end <= first],
            "validation": rows[(begin >= first) & (end <= second)],
            "test": rows[begin >= second],
        }
        wanted = [part for split, part in parts.items() if split != "validation" or self.validation]
        return parts if all(len(part) for part in wanted) else {}


def fold_rows(train: Tensor, validation: Tensor, fold: int) -> Rows:
    """A client's rows for training and validation, with the fold-th part of both for validation; 0 changes nothing."""
    both, size = torch.cat([validation, train]), len(validation)
    begin = fold % (len(both) // size) * size if size else 0
    inside = torch.zeros(len(both), dtype=torch.bool)
    inside[begin : begin + size] = True
    return {"validation": both[inside], "train": both[~inside]}


def _size(count: Tensor, share: float, most: Tensor) -> Tensor:
    """[N] the size of a part of count: [N] examples: its share, but at least one if it has any, and `most` at most."""
    return (share * count.double()).round().long().clamp(min=int(share > 0)).minimum(most.clamp(min=0))


def sample(client: Tensor, size: Tensor, start: Tensor | None) -> Tensor:
    """[n] whether a row is among the first ones, size: [N], of its client; client: [n], ascending, is whose it is.

    With a start: [N] in [0, 1) it is whether a systematic sample takes it, in which each kind of rows that stand
    together has its share, rounded up or down. Every row is then as likely to be taken, whatever its place.
    """
    count = torch.bincount(client, minlength=len(size))
    place = torch.arange(len(client)) - (count.cumsum(0) - count)[client]
    if start is None:
        return place < size[client]
    begin = (start.double() * count).long()
    return (place * size[client] + begin[client]) % count[client] + size[client] >= count[client]
