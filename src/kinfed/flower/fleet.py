"""FlowerFleet: clients at their own sites, as the round loop sees them.

A round costs one message per client. The models of a round are judged by the message that orders the next: it carries
what the client needs for both, each array once, and the answer holds scores and upload together. Who is not drawn for
the next round is sent the models alone; after the last round everyone is.
"""

import json
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core import trees
from ..core.fleet import Evaluation, Key
from ..core.tasks import ALWAYS, Classification
from ..core.trees import Tree
from ..errors import RunError
from . import messages
from .broker import LARGEST, Check, Courier, short
from .dry_run import Rehearsal
from .messages import Message, Words
from .plan import Deployment

PASSES = 3  # rounds in a row without enough good uploads, after which a run ends
NORMS = 20  # uploads before, with whose length new ones are compared


class FleetState(NamedTuple):
    """What a fleet must not forget between two runs of its server."""

    sizes: Tensor  # [N] int64 training examples that clients say they have
    accepted: Tensor  # [N] int64 the last round whose answer was taken, -1 before the first
    missed: Tensor  # [N] int64 rounds in a row that a client was drawn for and did not answer
    replied: Tensor  # [N] bool, in the round just over
    client_statistics: Tree  # [N, ...]
    words: Tensor  # uint8: names, last scores, the round, what travelled and what was counted, as JSON


@dataclass
class FlowerFleet:
    """A fleet whose clients are reached by a courier. Results come in the order of the clients' ids.

    `invitation` is the message that makes a site join the experiment. `verdict` says which models are best so far, for
    the sites to keep. `silent: [N] bool` are clients left out of what was sent last: they are not asked.
    """

    courier: Courier
    deployment: Deployment
    rehearsal: Rehearsal
    invitation: Message
    verdict: Callable[[], Words] = dict
    silent: Callable[[], Tensor | None] = lambda: None
    names: Sequence[str] = ()
    state: FleetState = field(init=False)
    counted: dict[str, list[int]] = field(default_factory=dict)  # by client, rounds from 1 whose upload was used
    bounded: dict[str, tuple[int, int]] = field(default_factory=dict)  # sizes not believed: said, and counted as
    _scores: dict[str, dict[Key, float]] = field(default_factory=dict)
    _keys: list[Key] = field(default_factory=list)  # what scores are named, the headline's first
    _pending: tuple[int, dict[int, Tree]] | None = None  # a round to be judged, and what is for whom
    _norms: list[float] = field(default_factory=list)  # of the last good uploads
    _passed: int = 0  # rounds in a row without enough good uploads

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training of the cohort: [K]; returns the ids of those who answered and their uploads.

        An upload of another form, with NaN or infinity, or far longer than the others is left out. A round passes, and
        nobody answers, if only clients that were not drawn are there, or if fewer than the quorum give a good upload.
        Raises RunError if that is so PASSES times in a row, or if too many are silent.
        """
        self.courier.round = round + 1
        drawn = [self.names[i] for _, i in self._audible(cohort)]
        if not self.courier.wait(drawn) and any(map(self.courier.is_online, self.names)):
            self.courier.log(f"round {round + 1} passes: none of the clients drawn for it is there")
            self._account(round, cohort, [])
            return torch.zeros(0, dtype=torch.int64), ()
        rows = {i: trees.pick(sent, place) for place, i in self._audible(cohort)}
        orders, likes = {}, {}
        for i, row in rows.items():
            name = self.names[i]
            orders[name], likes[name] = self._order(i), self.rehearsal.upload(round, row)
            orders[name].words["round"] = round
            messages.put(row, orders[name], "train")
        self._add_evaluation(orders)

        def problem(client: str, answer: Message) -> str:
            if client not in likes:
                return ""
            if answer.words.get("round") != round:
                return f"it answers for round {answer.words.get('round')!r:.20}"
            return messages.problem_with(answer.arrays, messages.forms(trees.pack(likes[client], "upload/")))

        answers = self._ask(orders, likes, problem)
        uploads = {
            name: trees.unpack(answers[name].arrays, like, "upload/") for name, like in likes.items() if name in answers
        }
        norms = {name: _norm(upload) for name, upload in uploads.items()}
        for name, why in _too_long(norms, self._norms, self.deployment.norm_bound).items():
            self.courier.log(f"left client {name} out: {why}")
            del uploads[name], norms[name]
        needed = max(1, math.ceil(self.deployment.quorum * len(likes)))
        if len(uploads) < needed:
            self._passed += 1
            why = short(likes, uploads, needed)
            if self._passed == PASSES:
                raise RunError(f"round {round + 1}, the {PASSES}rd in a row: {why}")
            self.courier.log(f"round {round + 1} passes: {why.partition(' and go on')[0]}")
            self._account(round, cohort, [])
            return torch.zeros(0, dtype=torch.int64), ()
        self._passed, self._norms = 0, [*self._norms, *norms.values()][-NORMS:]
        heard = [i for i in sorted(rows) if self.names[i] in uploads]
        self._account(round, cohort, heard)
        return torch.tensor(heard), tree_map(lambda *t: torch.stack(t), *(uploads[self.names[i]] for i in heard))

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Callable[[], Evaluation]:
        """Have the cohort's models judged together with the next round; returns what waits for the scores.

        A client that does not answer counts with its last scores. The models themselves stay at their sites.
        """
        rows = {i: trees.pick(sent, place) for place, i in self._audible(cohort)}
        self._pending = round, rows
        self._keys = self._keys or self.rehearsal.scores(round, next(iter(rows.values())))

        def wait() -> Evaluation:
            if self._pending and self._pending[0] == round:
                orders: dict[str, Message] = {}
                self._add_evaluation(orders)
                self._ask(orders, orders)
            if not any(self._scores.values()):
                raise RunError(f"round {round + 1}: no site has told a score")
            known = [self._scores.get(self.names[i], {}) for i in cohort.tolist()]
            return Evaluation(
                {key: torch.tensor([mine.get(key, math.nan) for mine in known]) for key in self._keys}, {}
            )

        return wait

    def finish(self) -> None:
        """Tell every site which of its models is best, when the run is over."""
        self.courier.ask("round", {name: self._order(i) for i, name in enumerate(self.names)})

    def join(self, names: Collection[str], needed: int = 0) -> list[str]:
        """Make sites join and count those that do, after all others and in the order of their names; returns them.

        Raises RunError if fewer than needed can.
        """
        like = messages.forms(trees.pack(self.rehearsal.introduction, "introduction/"))

        def problem(client: str, answer: Message) -> str:
            size = answer.words.get("size")
            if type(size) is not int or not 0 < size < LARGEST:
                return f"it says that it has {size!r:.20} training examples"
            return messages.problem_with(answer.arrays, like)

        invited = {name: self.invitation for name in names}
        answers = dict(sorted(self.courier.ask("join", invited, needed, problem=problem).items()))
        if len(answers) < needed:
            raise RunError(short(invited, answers, needed))
        if not answers:
            return []
        said = [trees.unpack(a.arrays, self.rehearsal.introduction, "introduction/") for a in answers.values()]
        none = torch.zeros(len(answers), dtype=torch.int64)
        new = FleetState(
            torch.tensor([answer.words["size"] for answer in answers.values()]),
            none - 1,
            none,
            none.bool(),
            tree_map(lambda *leaves: torch.stack(leaves), *said),
            torch.zeros(0, dtype=torch.uint8),
        )
        self.state = tree_map(lambda a, b: torch.cat((a, b)), self.state, new) if self.names else new
        self.names = [*self.names, *answers]
        return list(answers)

    def sizes(self) -> Tensor:
        """[N] int64 examples as they count: what a client says, up to `size_bound` times the median of the others."""
        said, bound = self.state.sizes.tolist(), self.deployment.size_bound
        counted = _bounded(said, bound)
        before = self.bounded
        self.bounded = {name: (a, b) for name, a, b in zip(self.names, said, counted, strict=True) if a != b}
        for name, (a, b) in self.bounded.items():
            if before.get(name) != (a, b):
                self.courier.log(
                    f"client {name} says that it has {a:,} training examples and counts as if it had {b:,}: more than "
                    f"{bound:g} times the median of the others (flower.size_bound)"
                )
        return torch.tensor(counted)

    def save(self) -> FleetState:
        """The state, with what is said in words."""
        scores = {name: [[*key, value] for key, value in mine.items()] for name, mine in self._scores.items()}
        told = {"round": self.courier.round, "travelled": self.courier.travelled, "counted": self.counted}
        kept = {"norms": self._norms, "passed": self._passed, "keys": self._keys}
        text = json.dumps({"names": self.names, "scores": scores, **told, **kept})
        return self.state._replace(words=torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))

    def restore(self, state: FleetState) -> None:
        """Become the fleet that was saved."""
        said = json.loads(bytes(state.words.tolist()))
        self.state, self.names, self.courier.round = state, said["names"], said["round"]
        self.courier.travelled = {
            name: {int(round): both for round, both in mine.items()} for name, mine in said["travelled"].items()
        }
        self._scores = {name: {(m, s, k): v for m, s, k, v in mine} for name, mine in said["scores"].items()}
        self._keys = [(m, s, k) for m, s, k in said["keys"]]
        self.counted, self._norms, self._passed = said["counted"], said["norms"], said["passed"]

    def _order(self, i: int) -> Message:
        words = {"experiment": self.invitation.words["experiment"], "layout": self.invitation.words["layout"]}
        return Message(words | {"accepted": int(self.state.accepted[i]), **self.verdict()}, {})

    def _audible(self, cohort: Tensor) -> list[tuple[int, int]]:
        """Place and id of the cohort's clients for which something was sent."""
        silent = self.silent()
        return [(place, i) for place, i in enumerate(cohort.tolist()) if silent is None or not silent[i]]

    def _add_evaluation(self, orders: dict[str, Message]) -> None:
        """Add the models to be judged to the orders; arrays that an order has already do not travel twice."""
        if self._pending is None:
            return
        (round, rows), self._pending = self._pending, None
        for i, row in rows.items():
            order = orders.setdefault(self.names[i], self._order(i))
            order.words["evaluated"] = round
            order.words["evaluate"] = messages.describe(row)
            for name, array in trees.pack(row).items():
                twin = order.arrays.get(f"train/{name}")
                if twin is None or twin.dtype != array.dtype or not torch.equal(twin, array):
                    order.arrays[f"evaluate/{name}"] = array

    def _ask(
        self, orders: dict[str, Message], counted: Collection[str], problem: Check = lambda client, answer: ""
    ) -> dict[str, Message]:
        """Ask as the courier does, have sites that lost their state join anew, and keep the scores that are told."""
        lost = set()

        def check(client: str, answer: Message) -> str:
            if answer.words.get("join"):
                lost.add(client)
                return ""
            return problem(client, answer)

        needed = math.ceil(self.deployment.quorum * len(counted))
        answers = self.courier.ask("round", orders, needed, counted, check)
        if lost:
            self.courier.log(f"joining anew, as their state is lost: {', '.join(sorted(lost))}")
            again = {}
            for name in sorted(lost):
                del answers[name]
                words = self.invitation.words | {"accepted": orders[name].words["accepted"]}
                again[name] = self.invitation._replace(words=words)
            back = self.courier.ask("join", again)
            answers |= self.courier.ask("round", {name: orders[name] for name in back}, problem=problem)
        for name, answer in answers.items():
            if "scores" in answer.words:
                try:
                    self._scores[name] = self._read(answer.words["scores"])
                except (TypeError, ValueError, OverflowError):
                    self.courier.log(f"client {name} tells scores that cannot be read")
        return answers

    def _read(self, said: Any) -> dict[Key, float]:
        """The scores that a client tells; raises ValueError, TypeError or OverflowError if they can be none."""
        told = {(str(m), str(s), str(k)): float(v) for m, s, k, v in said}
        for (_, _, metric), value in told.items():
            most, task = sys.float_info.max, self.rehearsal.task
            if isinstance(task, Classification) and metric != "loss":
                most = task.classes - 1 if metric == ALWAYS else 1
            if not math.isnan(value) and not 0 <= value <= most:
                raise ValueError(f"{metric} is {value}")
        return {key: told[key] for key in self._keys if key in told}

    def _account(self, round: int, cohort: Tensor, heard: list[int]) -> None:
        """Write down who answered. A silent client that is back online is heard from the next round on."""
        replied, accepted = torch.zeros_like(self.state.replied), self.state.accepted.clone()
        replied[heard] = True
        accepted[heard] = round
        for i in heard:
            self.counted.setdefault(self.names[i], []).append(round + 1)
        missed, silent = self.state.missed.clone(), self.silent()
        for i in cohort.tolist():
            back = silent is not None and silent[i] and self.courier.is_online(self.names[i])
            missed[i] = 0 if replied[i] or back else missed[i] + 1
        self.state = self.state._replace(accepted=accepted, missed=missed, replied=replied)


def _bounded(sizes: list[int], bound: float) -> list[int]:
    """Sizes, none above `bound` times the median of the others; a bound of 0 is none."""
    if not bound or len(sizes) < 2:
        return sizes
    return [min(size, int(bound * median(sizes[:i] + sizes[i + 1 :]))) for i, size in enumerate(sizes)]


def _norm(upload: Tree) -> float:
    floats = [t.double().flatten() for t in tree_leaves(upload) if t.is_floating_point()]
    return float(torch.cat(floats).norm()) if floats else 0.0


def _too_long(norms: dict[str, float], before: list[float], bound: float) -> dict[str, str]:
    """Clients whose upload is more than `bound` times as long as the median of the cohort's, in words.

    In a cohort of one or two the uploads `before` count as well; the first two of all have nothing to be compared with.
    """
    known = [*norms.values(), *(before if len(norms) < 3 else [])]
    if not bound or len(known) < 3:
        return {}
    median = float(torch.tensor(known, dtype=torch.float64).median())
    return {
        client: f"its upload is {norm / median:.3g} times as long as the median of others, more than {bound:g}"
        for client, norm in norms.items()
        if median and norm > bound * median
    }
