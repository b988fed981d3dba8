"""FlowerFleet: clients at their own sites, as the round loop sees them.

A round costs one message per client. The models of a round are judged by the message that orders the next: it carries
what the client needs for both, each array once, and the answer holds scores and upload together. Who is not drawn for
the next round is sent the models alone; after the last round everyone is.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import wire
from ..errors import RunError
from ..fleet import Evaluation, Key
from . import messages
from .courier import Check, Courier
from .messages import Message, Words
from .plan import Deployment
from .rehearsal import Rehearsal

Tree = Any


class FleetState(NamedTuple):
    """What a fleet must not forget between two runs of its server."""

    sizes: Tensor  # [N] int64 training examples
    accepted: Tensor  # [N] int64 the last round whose answer was taken, -1 before the first
    missed: Tensor  # [N] int64 rounds in a row that a client was drawn for and did not answer
    replied: Tensor  # [N] bool, in the round just over
    introductions: Tree  # [N, ...]
    words: Tensor  # uint8: names, last scores, the round and the bytes that travelled, as JSON


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
    _scores: dict[str, dict[Key, float]] = field(default_factory=dict)
    _pending: tuple[int, Tensor, Tree] | None = None  # a round to be judged

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training of the cohort: [K]; returns the ids of those who answered and their uploads.

        An upload of another form, with NaN or infinity, or far longer than the others is left out. Nobody answers if
        only clients that were not drawn are there. Raises RunError if fewer than the quorum give a good upload.
        """
        self.courier.round = round + 1
        drawn = [self.names[i] for _, i in self._audible(cohort)]
        if not self.courier.wait(drawn) and any(map(self.courier.is_online, self.names)):
            self.courier.log(f"round {round + 1} passes: none of the clients drawn for it is there")
            self._account(round, cohort, [])
            return torch.zeros(0, dtype=torch.int64), ()
        rows = {i: tree_map(lambda t, at=place: t[at], sent) for place, i in self._audible(cohort)}
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
            return messages.problem_with(answer.arrays, messages.forms(wire.pack(likes[client], "upload/")))

        answers = self._ask(orders, likes, problem)
        uploads = {
            name: wire.unpack(answers[name].arrays, like, "upload/") for name, like in likes.items() if name in answers
        }
        for name, why in _too_long(uploads, self.deployment.norm_bound).items():
            self.courier.log(f"left client {name} out: {why}")
            del uploads[name]
        heard = [i for i in sorted(rows) if self.names[i] in uploads]
        if not heard:
            raise RunError(f"round {round + 1}: no client gave an upload that can be used; go on with --resume")
        self._account(round, cohort, heard)
        return torch.tensor(heard), tree_map(lambda *t: torch.stack(t), *(uploads[self.names[i]] for i in heard))

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Callable[[], Evaluation]:
        """Have the cohort's models judged together with the next round; returns what waits for the scores.

        A client that does not answer counts with its last scores. The models themselves stay at their sites.
        """
        self._pending = (round, cohort, sent)

        def wait() -> Evaluation:
            if self._pending and self._pending[0] == round:
                orders: dict[str, Message] = {}
                self._add_evaluation(orders)
                self._ask(orders, orders)
            keys = list(dict.fromkeys(key for name in self.names for key in self._scores.get(name, {})))
            if not keys:
                raise RunError(f"round {round + 1}: no site has told a score")
            known = [self._scores.get(self.names[i], {}) for i in cohort.tolist()]
            return Evaluation({key: torch.tensor([mine.get(key, math.nan) for mine in known]) for key in keys}, {})

        return wait

    def finish(self) -> None:
        """Tell every site which of its models is best, when the run is over."""
        self.courier.ask("round", {name: self._order(i) for i, name in enumerate(self.names)})

    def join(self, names: Collection[str], needed: int = 0) -> list[str]:
        """Make sites join and count those that do, after all others and in the order of their names; returns them."""
        like = messages.forms(wire.pack(self.rehearsal.introduction, "introduction/"))

        def problem(client: str, answer: Message) -> str:
            size = answer.words.get("size")
            if not isinstance(size, int) or size < 1:
                return f"it says that it has {size!r:.20} training examples"
            return messages.problem_with(answer.arrays, like)

        invited = {name: self.invitation for name in names}
        answers = dict(sorted(self.courier.ask("join", invited, needed, problem=problem).items()))
        if not answers:
            return []
        said = [wire.unpack(a.arrays, self.rehearsal.introduction, "introduction/") for a in answers.values()]
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

    def save(self) -> FleetState:
        """The state, with what is said in words."""
        scores = {name: [[*key, value] for key, value in mine.items()] for name, mine in self._scores.items()}
        courier = {"round": self.courier.round, "travelled": self.courier.travelled}
        text = json.dumps({"names": self.names, "scores": scores, **courier})
        return self.state._replace(words=torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))

    def restore(self, state: FleetState) -> None:
        """Become the fleet that was saved."""
        said = json.loads(bytes(state.words.tolist()))
        self.state, self.names, self.courier.round = state, said["names"], said["round"]
        self.courier.travelled = {
            name: {int(round): both for round, both in mine.items()} for name, mine in said["travelled"].items()
        }
        self._scores = {name: {(m, s, k): v for m, s, k, v in mine} for name, mine in said["scores"].items()}

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
        (round, cohort, sent), self._pending = self._pending, None
        for place, i in self._audible(cohort):
            order = orders.setdefault(self.names[i], self._order(i))
            order.words["evaluated"] = round
            row = tree_map(lambda t, at=place: t[at], sent)
            order.words["evaluate"] = messages.describe(row)
            for name, array in wire.pack(row).items():
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
            try:
                scores = {(str(m), str(s), str(k)): float(v) for m, s, k, v in answer.words.get("scores", [])}
            except (TypeError, ValueError):
                self.courier.log(f"client {name} tells scores that cannot be read")
                continue
            if scores:
                self._scores[name] = scores
        return answers

    def _account(self, round: int, cohort: Tensor, heard: list[int]) -> None:
        """Write down who answered. A silent client that is back online is heard from the next round on."""
        replied, accepted = torch.zeros_like(self.state.replied), self.state.accepted.clone()
        replied[heard] = True
        accepted[heard] = round
        missed, silent = self.state.missed.clone(), self.silent()
        for i in cohort.tolist():
            back = silent is not None and silent[i] and self.courier.is_online(self.names[i])
            missed[i] = 0 if replied[i] or back else missed[i] + 1
        self.state = self.state._replace(accepted=accepted, missed=missed, replied=replied)


def _too_long(uploads: dict[str, Tree], bound: float) -> dict[str, str]:
    """Clients whose upload is more than `bound` times as long as the median, in words."""
    if not bound or len(uploads) < 3:
        return {}
    norms = {}
    for client, tree in uploads.items():
        floats = [t.double().flatten() for t in tree_leaves(tree) if t.is_floating_point()]
        norms[client] = float(torch.cat(floats).norm()) if floats else 0.0
    median = float(torch.tensor(list(norms.values()), dtype=torch.float64).median())
    return {
        client: f"its upload is {norm / median:.3g} times as long as the cohort's median, more than {bound:g}"
        for client, norm in norms.items()
        if median and norm > bound * median
    }
