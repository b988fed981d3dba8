"""run: the round loop, the same for a simulation and for a real federation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..errors import RunError, UsageError, is_out_of_memory
from ..interrupts import defer_signals
from .field_checks import CountOrZero, In, Settings, check
from .fleet import Evaluation, Fleet, Reduced, is_finite
from .graph import NeighbourLists, Relation, relate_members
from .history import Recorder
from .method import Method, Roster, measure_updates
from .mixins import Lists, Solves, reduce_uploads
from .private.private_sums import check_masks, protects_clients, sum_privately
from .round_records import RoundRecords, check_state
from .round_selection import Selection
from .rows import Written, copy_shared, index, put
from .seeding import fold, key
from .sharing import find_shared_layout, unwrap
from .training import Training
from .trees import Axis, Tree, axes, bytes_down, pick, size

AUTO = 200, 0.25  # the most rounds, and the patience, of rounds="auto"
LEAST, STEPS = 4, 100  # rounds without a better score, and local steps of the smallest client, before training stops
RELATED = 1 << 13  # with more clients no relation is kept that is a table [N, N] in every evaluated round
SENT = 1 << 30  # bytes of what everyone would be sent, above which a method with lists makes it piece by piece


class ServerError(RunError):
    """The server's part of a method has raised something that it should not, which is the cause of this error."""


@dataclass(frozen=True)
class Participation(Settings):
    """The share of clients in a round; in every `by_group`-th round, that share of each hidden group (0: never).

    A share `late` of all clients, drawn once, joins after `joins` rounds: never, if the run ends before. Until then
    the server does not know them, and each is scored with the model it would be sent if it joined now.
    """

    share: Annotated[float, In("(0, 1]")] = 1.0  # share of the clients that take part in a round
    by_group: CountOrZero = 0  # every so many rounds the share is drawn from each hidden group; 0: never
    late: Annotated[float, In("[0, 1)")] = 0.0  # share of the clients that join late
    joins: CountOrZero = 0  # rounds before the late clients join

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.late > 0) != (self.joins > 0):
            raise UsageError(
                "participation.late, a share of clients, and participation.joins, the rounds before these join, go "
                f"together; got late={self.late} and joins={self.joins}"
            )


@dataclass(frozen=True)
class Rounds:
    """How many rounds there are, after which of them models are scored, and by which score one is selected.

    Every `evaluate_every`-th round is scored, and the last. `select_by` is the validation score that selects the round
    and the kind of model instead of the task's metric, such as "auc" or "loss"; its mean is over the clients that have
    it. With `patience` training stops once the selected round lies further back than this share of the rounds so far,
    and than `LEAST` rounds, but not before the smallest client has taken `STEPS` local steps; `count` is then the most.
    Raises UsageError for invalid counts.
    """

    count: int = 20  # rounds of training
    evaluate_every: int = 1  # every so many rounds models are scored, and after the last
    select_by: str = ""  # the validation score that selects; "": the task's metric
    until: int = 0  # pause after this round: a fit with the same folder continues; 0: train all rounds
    keep: str = ""  # the kind of model that is kept; "": the one that validation prefers
    patience: float = 0.0  # the share of rounds without a better validation score that ends training; 0: none does

    def __post_init__(self) -> None:
        check_count("rounds", self.count, 1, 31)
        check_count("evaluate_every", self.evaluate_every, 1, 31)
        if not isinstance(self.select_by, str):
            raise UsageError(f"select_by: no score {self.select_by!r:.80} can select rounds")
        check(self.patience, Annotated[float, In("[0, 1)")], "patience, a share of the rounds,")
        check_count("until", self.until, 0, 31)
        if self.until > self.count or (self.until % self.evaluate_every and self.until < self.count):
            when = f"every {self.evaluate_every} of {self.count}"
            raise UsageError(f"until must be a round that is evaluated, {when}; got {self.until}")

    @classmethod
    def parse(cls, given: Any) -> "Rounds":
        """Rounds as they are given: how many, or "auto", or themselves."""
        if isinstance(given, Rounds):
            return given
        return cls(AUTO[0], patience=AUTO[1]) if given == "auto" else cls(given)

    @property
    def selection(self) -> Selection:
        """How a history of these rounds selects one."""
        return Selection(self.select_by, self.keep)

    @property
    def last(self) -> int:
        """How many rounds are trained before the run ends or pauses."""
        return self.until or self.count

    def is_due(self, round: int) -> bool:
        """Whether models are scored after a round."""
        return (round + 1) % self.evaluate_every == 0 or round + 1 == self.last

    def go_on(self, begin: int, recorder: Recorder, roster: Roster, share: float) -> Iterator[int]:
        """The rounds from `begin` on, as long as training goes on; a `share` of the clients takes part in each."""
        steps = share * int(roster.training.count_steps(roster.sizes).min()) if self.patience else 0.0
        for round in range(begin, self.last):
            if round * steps >= STEPS and self._is_over(round, recorder):
                return
            yield round

    def _is_over(self, done: int, recorder: Recorder) -> bool:
        """Whether after so many rounds validation has stopped improving; a run's last round is evaluated."""
        recorder.settle()
        history = recorder.history
        scored = history.rounds[-1:] == [done - 1]
        return scored and done - 1 - history.select(history.preference) > max(LEAST, self.patience * done)


def check_count(name: str, count: Any, least: int, below: int) -> None:
    """Raise UsageError unless this is a whole number in [least, 2**below)."""
    if not isinstance(count, Integral) or not least <= int(count) < 2**below:
        raise UsageError(f"{name} must be a whole number, at least {least} and below 2**{below}; got {count!r}")


def check_seed(seed: Any) -> None:
    """Raise UsageError unless this is a whole number that a run can have as its seed."""
    check_count("seed", seed, 0, 62)


def latecomers(seed: int, tags: Tensor, share: float) -> Tensor:
    """[M] sorted ids of the share of clients, tags: [N], that joins late: at least one, but never all."""
    count = min(max(1, round(share * len(tags))), len(tags) - 1) if share else 0
    return fold(key(seed, "late", device=tags.device), tags).argsort()[:count].sort().values


def sample(roster: Roster, share: float, groups: Tensor | None = None) -> Tensor:
    """[K] sorted ids of this round's cohort, drawn without replacement; at least one client of each of groups: [N]."""
    groups = torch.zeros_like(roster.sizes) if groups is None else groups
    sizes = torch.bincount(groups)
    count = (share * sizes.double()).round().long().clamp(min=1)
    lots = fold(key(roster.seed, "cohort", roster.round, device=roster.tags.device), roster.tags)
    order = lots.argsort()
    order = order[groups[order].argsort(stable=True)]  # group by group, each in the order of its lots
    place = roster.everyone - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[place < count.repeat_interleave(sizes)].sort().values


def run(
    method: Method,
    roster: Roster,
    fleet: Fleet,
    recorder: Recorder,
    *,
    rounds: int | Rounds,
    participation: float | Participation = 1.0,
    groups: Tensor | None = None,
    server: Tree = None,
    begin: int = 0,
    after: Callable[[int, Tree], None] = lambda round, server: None,
) -> Tree:
    """Train from round `begin` until the last of `rounds`, and return the server's last state.

    `roster` and `groups: [N]`, which `participation` may draw from, list all clients, late ones too. `server` is the
    state to resume from if `begin` is not 0; `after(round, server)` is called after each round, once the `recorder` has
    it.
    """
    rounds, drawn = Rounds.parse(rounds), _make_participation(participation, groups)
    roster = replace(roster, rounds=rounds.count)
    records = RoundRecords(type(unwrap(method)).__name__, len(roster))
    full, late = roster, latecomers(roster.seed, roster.tags, drawn.late)
    here = full.others(late) if begin <= drawn.joins else full.everyone  # [n] who has joined, in the server's order
    roster = full.part(here) if len(here) < len(full) else full
    solver = Solves.from_method(method)
    recorder.history.selector.selection = _select_by(rounds.selection, solver, roster.training)
    if begin == 0:
        server = _start(method, roster)
    elif begin >= drawn.joins and solver.is_solved(server) and recorder.history.rounds:
        return server
    for round in rounds.go_on(begin, recorder, full, drawn.share):
        full, roster = replace(full, round=round), replace(roster, round=round)
        with _server(method, round):
            if round == drawn.joins and len(late):
                here, roster, server = full.everyone, full, method.add_clients(full, server, late)
            by_group = drawn.by_group and (round + 1) % drawn.by_group == 0
            cohort = sample(roster, drawn.share, groups[here] if by_group and groups is not None else None)
            sent = method.send(roster, server, cohort)
        requested, down = cohort, bytes_down(sent, len(cohort))
        replied, uploads = fleet.train(round, here[requested], sent)
        if not len(replied):  # no client replied: the round is skipped
            with defer_signals():
                recorder.add(round, down, size(uploads))
                after(round, server)
            continue
        cohort = torch.searchsorted(here, replied)
        sent = _pick_replied(sent, requested, cohort, server)
        examples = int(roster.training.count_examples(roster.sizes[cohort]).sum())
        with _give_away(roster, server) as written:
            server, given = _aggregate(method, records, roster, server, cohort, sent, uploads, written)
            evaluation = relation = diagnostics = None
            solved = solver.is_solved(server) and round + 1 >= drawn.joins
            if solved or rounds.is_due(round):
                with _server(method, round):
                    prospect, relation = _outlook(method, full, roster, here, server, cohort)
                evaluation = fleet.evaluate(round, full.everyone, prospect)
                notes = _take_notes(method, records, roster, server, cohort, sent, uploads, given)
                diagnostics = {name: full.note(here, value) if value.ndim else value for name, value in notes.items()}
                relation = records.check_relation(round, _relate(relation, evaluation))
            with defer_signals():  # an interruption comes before the round or after it
                recorder.add(round, down, _count_bytes(uploads), evaluation, relation, diagnostics, examples, replied)
                written.settle()
                after(round, server)
        if solved:
            break
    full.memo.clear()
    recorder.settle()
    return server


def _relate(relation: Relation | None, evaluation: Evaluation | Callable[[], Evaluation]) -> Relation | None:
    """The server's relation; without one that of the shares which clients keep, where these can be seen."""
    shares = evaluation.shares if isinstance(evaluation, Evaluation) else None
    if relation is not None or shares is None or len(shares) > RELATED:
        return relation
    return relate_members(shares)


def _select_by(selection: Selection, solver: Solves, training: Training) -> Selection:
    """How rounds are selected: of a solver, and under privacy, where scores have no price, it is the last."""
    private = training.noise is not None
    return selection._replace(last=solver.solves or private, unseen=private)


def _start(method: Method, roster: Roster) -> Tree:
    """The server's first state."""
    with _server(method, 0):
        return method.start(roster)


def _make_participation(participation: float | Participation, groups: Tensor | None) -> Participation:
    """How clients are drawn; raises UsageError if that is from groups which they do not have."""
    drawn = participation if isinstance(participation, Participation) else Participation(participation)
    if drawn.by_group and groups is None:
        raise UsageError(
            "participation.by_group draws from each hidden group, but these clients have none; use a partition that "
            "makes them, such as topologies or rotations, or leave by_group out"
        )
    return drawn


@contextmanager
def _give_away(roster: Roster, server: Tree) -> Iterator[Written]:
    """What a round may write in place of the server's state; a round that fails in this block changes nothing."""
    kept = [roster.theta, *tree_leaves(roster.client_statistics)]
    written = Written((t for t in tree_leaves(server) if isinstance(t, Tensor)), kept)
    try:
        yield written
    except BaseException:
        written.undo()
        raise


def _pick_replied(sent: Tree, requested: Tensor, cohort: Tensor, server: Tree) -> Tree:
    """What the cohort was sent, of those requested: not the server's own rows, which are written next."""
    if len(cohort) == len(requested):
        return sent
    places = torch.isin(requested, cohort).nonzero().squeeze(1).tolist()
    return _unshare(pick(sent, index(places, cohort.device)), server)


def _unshare(message: Tree, server: Tree) -> Tree:
    """The message in memory of its own, where it is rows of the server's state themselves."""
    leaves, structure = tree_flatten(message)
    return tree_unflatten(copy_shared(leaves, tree_leaves(server)), structure)


def _aggregate(
    method: Method,
    records: RoundRecords,
    roster: Roster,
    server: Tree,
    cohort: Tensor,
    sent: Tree,
    uploads: Tree,
    written: Written,
) -> tuple[Tree, Tree]:
    """The server's next state, and what the method got of the uploads; raises RunError if it holds NaN or infinity."""
    round = roster.round
    with _server(method, round):
        if roster.training.masks and not isinstance(uploads, Reduced):
            check_masks(method, sent, uploads, roster.client_statistics)
        if isinstance(uploads, Reduced):
            given = uploads.tree
        elif protects_clients(roster.training):
            given = sum_privately(method, roster, cohort, sent, uploads)
        else:
            given = reduce_uploads(method, roster, cohort, uploads)
        with written.allow():
            server = method.aggregate(roster, server, cohort, given)
    check_state(records.method, round, server)
    if not all(map(is_finite, written.changes(tree_leaves(server)))):
        raise RunError(f"round {round + 1}: the server's state holds NaN or infinity; lower the method's own rates")
    return server, given


def _count_bytes(uploads: Tree) -> int:
    """Bytes of all uploads of a round."""
    return uploads.nbytes if isinstance(uploads, Reduced) else size(uploads)


def _take_notes(
    method: Method,
    records: RoundRecords,
    roster: Roster,
    server: Tree,
    cohort: Tensor,
    sent: Tree,
    uploads: Tree,
    given: Tree,
) -> dict[str, Tensor]:
    """A round's diagnostics; the length of each update is among them also if the method does not get the uploads.

    They are copies, because what a method notes may be a view of its state, which the next round writes in place.
    """
    with _server(method, roster.round):
        notes = method.diagnostics(roster, server, cohort, sent, given)
        notes = records.check_diagnostics(roster.round, notes, len(roster))
        notes = {name: value.clone() for name, value in notes.items()}
    if given is uploads or isinstance(uploads, Reduced) or protects_clients(roster.training):
        return notes
    part = replace(roster, layout=find_shared_layout(method, roster.layout))
    return measure_updates(part, cohort, sent, uploads) | notes


@contextmanager
def _server(method: Method, round: int) -> Iterator[None]:
    """Whatever the method's server code raises becomes a ServerError that names the method and the round."""
    try:
        yield
    except (UsageError, RunError, MemoryError, Warning):  # a warning is one where users ask for that
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        name = type(unwrap(method)).__name__
        raise ServerError(
            f"round {round + 1}: the server's part of {name} failed: {type(problem).__name__}: {problem}"
        ) from problem


def _outlook(
    method: Method, full: Roster, roster: Roster, here: Tensor, server: Tree, cohort: Tensor
) -> tuple[Tree, Relation | None]:
    """The message that every client would be sent now, [N, ...], and the relation of all.

    `roster` lists the clients that have joined, here: [n]. The others are treated as if they joined now, and get the
    shared parts of the message to those that have joined.
    """
    lists = Lists.from_method(method)
    listed = lists.keeps_lists(len(full))
    few = len(full) <= RELATED or listed
    relation = method.relation(roster, server, cohort) if few else None
    if len(here) == len(full):
        if listed and len(full) * roster.theta.nbytes > SENT:
            return lambda at: lists.prospect(roster, server, roster.everyone[at]), relation
        return _unshare(method.send(roster, server, roster.everyone), server), relation
    sent = method.send(roster, server, roster.everyone)
    joined = method.add_clients(full, server, full.others(here))
    prospect = method.send(full, joined, full.everyone)
    outlook = method.relation(full, joined, here[cohort]) if few else None
    if isinstance(outlook, NeighbourLists):
        outlook = outlook.with_rows(here, relation) if isinstance(relation, NeighbourLists) else None
    elif isinstance(outlook, Tensor) and isinstance(relation, Tensor):
        if relation.ndim == 1:
            outlook = relation.new_zeros(len(full)).index_copy(0, here, relation)
        else:
            outlook = outlook.clone()
            outlook[..., here, :] = 0
            outlook[..., here[:, None], here] = relation
    sent = tree_map(
        lambda axis, wide, narrow: narrow if axis is Axis.SHARED else put(wide, here, narrow),
        axes(sent),
        prospect,
        sent,
    )
    return sent, outlook
