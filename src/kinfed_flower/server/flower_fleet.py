"""Clients at their own sites, as the round loop sees them.

A round costs one message per client. The models of a round are evaluated by the message that starts the next: it
carries what the client needs for both, each array once, and the reply holds scores and upload together. Clients not
drawn for the next round are sent the models only; after the last round all clients are.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kinfed.core import trees
from kinfed.core.fleet import Evaluation, Key
from kinfed.core.trees import Tree
from kinfed.errors import RunError, UsageError

from ..plan import Plan
from ..wire import messages
from ..wire.messages import Fields, Message
from . import validation
from .broker import Broker, Check, too_few
from .masked_round import MaskedRound, TooFew
from .nodes import LARGEST
from .shape_inference import DryRun

SKIPS = 3  # rounds in a row without enough good uploads, after which a run ends
NORMS = 20  # earlier uploads with whose norms new ones are compared


class FleetState(NamedTuple):
    """What a fleet must remember when its server is restarted."""

    sizes: Tensor  # [N] int64 training examples that clients claim to have
    accepted: Tensor  # [N] int64 the last round whose reply was accepted, -1 before the first
    missed: Tensor  # [N] int64 rounds in a row that a client was drawn for without replying
    replied: Tensor  # [N] bool, in the round just over
    client_statistics: Tree  # [N, ...]
    notes: Tensor  # uint8: names, the round, bytes that travelled, and all of `Notes`, as JSON


@dataclass
class Notes:
    """What a fleet remembers of its clients and their uploads, by the names that it has in a checkpoint."""

    scores: dict[str, dict[Key, float]] = field(default_factory=dict)  # the last of each client
    keys: list[Key] = field(default_factory=list)  # the names of scores, the headline model's first
    used: dict[str, list[int]] = field(default_factory=dict)  # by client, rounds from 1 whose upload was used
    norms: list[float] = field(default_factory=list)  # of the last good uploads
    moves: list[float] = field(default_factory=list)  # and of what they had changed
    skipped: int = 0  # rounds in a row without enough good uploads
    weights: dict[str, float] = field(default_factory=dict)  # that clients claim, where examples have weights
    spent: dict[str, Fields] = field(default_factory=dict)  # by client, what it says of its ledger


@dataclass
class FlowerFleet:
    """A fleet whose clients are reached by a broker. Results come in the order of the clients' ids.

    `invitation` is the message by which a site joins the experiment, with `additions` of its own. `selection` says
    which models are best so far, for the sites to keep. `stale: [N] bool` are clients for which the method sent nothing
    last: they get no message.
    """

    broker: Broker
    planned: Plan
    dry_run: DryRun
    invitation: Message
    selection: Callable[[], Fields] = dict
    stale: Callable[[], Tensor | None] = lambda: None
    additions: Callable[[str], Fields] = lambda client: {}
    masks: MaskedRound | None = None  # how uploads are summed that no one sees; None: the server sees each
    names: Sequence[str] = ()
    state: FleetState = field(init=False)
    notes: Notes = field(default_factory=Notes)
    _pending: tuple[int, dict[int, Tree]] | None = None  # a round to be evaluated, and what is sent to whom

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training of the cohort: [K]; returns the ids of the clients that replied, and their uploads.

        An upload of another form, with NaN or infinity, or with far too large a norm is left out. A round is skipped,
        and no upload is returned, if none of the clients drawn is online while others are, or if fewer than the quorum
        give a good upload. Raises RunError if that happens SKIPS times in a row, or if too many clients are silent.
        """
        self.broker.traffic.round = round + 1
        rows = {i: trees.pick(sent, place) for place, i in _find_active(cohort, self.stale())}
        drawn = [self.names[i] for i in rows]
        if not self.broker.wait(drawn) and any(map(self.broker.nodes.is_online, self.names)):
            return self._skip(round, cohort, "none of the clients drawn for it is online")
        requests, likes = {}, {}
        for i, row in rows.items():
            name = self.names[i]
            requests[name], likes[name] = self._message(i), self.dry_run.upload(round, row)
            requests[name].fields["round"] = round
            messages.put(row, requests[name], "train")
        if self.masks is not None and rows:
            return self._train_masked(self.masks, round, cohort, rows, requests, next(iter(likes.values())))
        self._add_evaluation(requests)

        def problem(client: str, reply: Message) -> str:
            if client not in likes:
                return ""
            if reply.fields.get("round") != round:
                return f"it replies for round {reply.fields.get('round')!r:.20}"
            return messages.problem_with(reply.arrays, messages.forms(trees.pack(likes[client], "upload/")))

        replies = self._request(requests, likes, problem)
        uploads = {
            name: trees.unpack(replies[name].arrays, like, "upload/") for name, like in likes.items() if name in replies
        }
        sent_to = {self.names[i]: row for i, row in rows.items()}
        norms = {name: validation.norm(upload) for name, upload in uploads.items()}
        moves = {name: validation.movement(sent_to[name], upload) for name, upload in uploads.items()}
        bound = self.planned.deployment.norm_bound
        left_out = validation.too_large(moves, self.notes.moves, bound, "what it has changed")
        left_out |= validation.too_large(norms, self.notes.norms, bound)
        for name, why in left_out.items():
            self.broker.log(f"left client {name} out: {why}")
            self.broker.problems[name] = why
            del uploads[name], norms[name], moves[name]
        needed = max(1, math.ceil(self.planned.deployment.quorum * len(likes)))
        if len(uploads) < needed:
            return self._skip_again(round, cohort, too_few(likes, uploads, needed, self.broker.problems))
        self.notes.norms = [*self.notes.norms, *norms.values()][-NORMS:]
        self.notes.moves = [*self.notes.moves, *moves.values()][-NORMS:]
        replied = [i for i in sorted(rows) if self.names[i] in uploads]
        self._account(round, cohort, replied)
        return torch.tensor(replied), tree_map(lambda *t: torch.stack(t), *(uploads[self.names[i]] for i in replied))

    def _train_masked(
        self,
        masks: MaskedRound,
        round: int,
        cohort: Tensor,
        rows: dict[int, Tree],
        train: dict[str, Message],
        like: Tree,
    ) -> tuple[Tensor, Tree]:
        """The same with masked uploads, of which no single one is seen; `rows` are alike, as all are sent the same."""
        row = next(iter(rows.values()))
        self.dry_run.check_masks(round, row)
        if len(rows) < (least := masks.privacy.members):
            raise UsageError(
                f"{len(rows)} sites are drawn for a round, and privacy.members={least} must be in a sum; let more take "
                "part (participation), or agree to fewer members"
            )

        pending, scored = self._pending, set[str]()

        def ask(kind: str, requests: dict[str, Message], needed: int, check: Check) -> dict[str, Message]:
            members, together = {*requests}, {**requests}
            if kind == "round":
                self._add_evaluation(together)

            def problem(client: str, reply: Message) -> str:
                return check(client, reply) if client in members else ""

            replies = self._request(together, members, problem, kind, needed)
            scored.update(name for name, reply in replies.items() if "evaluated" in reply.fields)
            return {name: replies[name] for name in requests if name in replies}

        try:
            opened = masks.open_sum(round, self.invitation, train, row, like, ask)
        except TooFew as problem:
            if pending is not None:  # those who did not answer are asked for their scores alone
                left = {i: row for i, row in pending[1].items() if self.names[i] not in scored}
                self._pending = (pending[0], left) if left else None
            return self._skip_again(round, cohort, str(problem))
        uploaded = {*opened.names}
        replied = [i for i in sorted(rows) if self.names[i] in uploaded]
        self._account(round, cohort, replied)
        return torch.tensor(replied), opened.uploads

    def _skip_again(self, round: int, cohort: Tensor, why: str) -> tuple[Tensor, Tree]:
        """Skip a round without enough good uploads; raises RunError if that happens SKIPS times in a row."""
        self.notes.skipped += 1
        if self.notes.skipped == SKIPS:
            raise RunError(f"round {round + 1}, the {SKIPS}rd in a row: {why}")
        return self._skip(round, cohort, why)

    def _skip(self, round: int, cohort: Tensor, why: str) -> tuple[Tensor, Tree]:
        self.broker.log(f"skipped round {round + 1}: {why}")
        self._account(round, cohort, [])
        return torch.zeros(0, dtype=torch.int64), ()

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Callable[[], Evaluation]:
        """Have the cohort's models evaluated together with the next round; returns what waits for the scores.

        A client that does not reply counts with its last scores. The models themselves stay at their sites.
        """
        rows = {i: trees.pick(sent, place) for place, i in _find_active(cohort, self.stale())}
        self._pending = round, rows
        self.notes.keys = self.notes.keys or self.dry_run.scores(round, next(iter(rows.values())))

        def wait() -> Evaluation:
            if self._pending and self._pending[0] == round:
                requests: dict[str, Message] = {}
                self._add_evaluation(requests)
                self._request(requests, requests)
            if not (self.planned.learning.training.noise or any(self.notes.scores.values())):
                raise RunError(f"round {round + 1}: no site has reported a score")
            by_client = [self.notes.scores.get(self.names[i], {}) for i in cohort.tolist()]
            by_key = {key: [scores.get(key, math.nan) for scores in by_client] for key in self.notes.keys}
            return Evaluation({key: torch.tensor(values) for key, values in by_key.items()}, {})

        return wait

    def finish(self) -> None:
        """Tell every site which of its models is best, when the run is over."""
        self.broker.request("round", {name: self._message(i) for i, name in enumerate(self.names)})

    def join(self, names: Collection[str], needed: int = 0) -> list[str]:
        """Invite sites, and add those that join after all others, in the order of their names; returns them.

        Raises RunError if fewer than needed join.
        """
        like = self.dry_run.client_statistics
        forms = messages.forms(trees.pack(like, "client_statistics/"))

        def problem(client: str, reply: Message) -> str:
            size = reply.fields.get("size")
            if type(size) is not int or not 0 < size < LARGEST:
                return f"it claims to have {size!r:.20} training examples"
            if type(weight := reply.fields.get("weight", 1.0)) not in (int, float) or not 0 < weight < LARGEST:
                return f"it claims that its examples count as {weight!r:.20}"
            return messages.problem_with(reply.arrays, forms)

        invited = {name: _add_fields(self.invitation, self.additions(name)) for name in names}
        replies = dict(sorted(self.broker.request("join", invited, needed, problem=problem).items()))
        if len(replies) < needed:
            raise RunError(too_few(invited, replies, needed, self.broker.problems))
        if not replies:
            return []
        statistics = [trees.unpack(reply.arrays, like, "client_statistics/") for reply in replies.values()]
        zeros = torch.zeros(len(replies), dtype=torch.int64)
        new = FleetState(
            sizes=torch.tensor([reply.fields["size"] for reply in replies.values()]),
            accepted=zeros - 1,
            missed=zeros,
            replied=zeros.bool(),
            client_statistics=tree_map(lambda *leaves: torch.stack(leaves), *statistics),
            notes=torch.zeros(0, dtype=torch.uint8),
        )
        self.state = tree_map(lambda a, b: torch.cat((a, b)), self.state, new) if self.names else new
        self.notes.weights |= {n: float(r.fields["weight"]) for n, r in replies.items() if "weight" in r.fields}
        self.names = [*self.names, *replies]
        return list(replies)

    def save(self) -> FleetState:
        """The state, with what is no tensor as JSON."""
        traffic = self.broker.traffic
        notes = vars(self.notes) | {"names": self.names, "round": traffic.round, "traffic": traffic.bytes}
        notes["scores"] = {
            name: [[*key, value] for key, value in scores.items()] for name, scores in self.notes.scores.items()
        }
        text = json.dumps(notes)
        return self.state._replace(notes=torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))

    def restore(self, state: FleetState) -> None:
        """Become the fleet that was saved."""
        notes = json.loads(bytes(state.notes.tolist()))  # JSON has no tuples, and no whole numbers as keys
        self.state, self.names = state, notes.pop("names")
        by_site = notes.pop("traffic").items()
        self.broker.traffic.round = notes.pop("round")
        self.broker.traffic.bytes = {name: {int(r): both for r, both in rounds.items()} for name, rounds in by_site}
        notes["scores"] = {name: {tuple(key): v for *key, v in rows} for name, rows in notes["scores"].items()}
        notes["keys"] = [tuple(key) for key in notes["keys"]]
        self.notes = Notes(**notes)

    def _message(self, i: int) -> Message:
        fields = {"experiment": self.invitation.fields["experiment"], "layout": self.invitation.fields["layout"]}
        return Message(fields | {"accepted": int(self.state.accepted[i]), **self.selection()}, {})

    def _add_evaluation(self, requests: dict[str, Message]) -> None:
        """Add the models to be evaluated to the messages; arrays that a message has already do not travel twice."""
        if self._pending is None:
            return
        (round, rows), self._pending = self._pending, None
        for i, row in rows.items():
            message = requests.setdefault(self.names[i], self._message(i))
            message.fields["evaluated"] = round
            message.fields["evaluate"] = messages.describe(row)
            for name, array in trees.pack(row).items():
                twin = message.arrays.get(f"train/{name}")
                if twin is None or twin.dtype != array.dtype or not torch.equal(twin, array):
                    message.arrays[f"evaluate/{name}"] = array

    def _request(
        self,
        requests: dict[str, Message],
        counted: Collection[str],
        problem: Check = lambda client, reply: "",
        kind: str = "round",
        needed: int = 0,
    ) -> dict[str, Message]:
        """Send requests by the broker, have sites that lost their state join again, and keep the scores reported."""
        lost = set()

        def check(client: str, reply: Message) -> str:
            if reply.fields.get("join"):
                lost.add(client)
                return ""
            return problem(client, reply)

        needed = needed or math.ceil(self.planned.deployment.quorum * len(counted))
        replies = self.broker.request(kind, requests, needed, counted, check)
        if lost:
            self.broker.log(f"joining again, as their state is lost: {', '.join(sorted(lost))}")
            again = {}
            for name in sorted(lost):
                del replies[name]
                accepted = {"accepted": int(self.state.accepted[self.names.index(name)])}
                again[name] = _add_fields(self.invitation, self.additions(name) | accepted)
            back = self.broker.request("join", again)
            replies |= self.broker.request(kind, {name: requests[name] for name in back}, problem=problem)
        for name, reply in replies.items():
            if self.planned.learning.training.noise and "privacy" in reply.fields:
                try:
                    self.notes.spent[name] = validation.read_ledger(reply.fields["privacy"])
                except (LookupError, TypeError, ValueError, OverflowError):
                    self.broker.log(f"ignored what client {name} says of its ledger: it cannot be read")
            if "scores" in reply.fields:
                try:
                    scores = validation.read_scores(reply.fields["scores"], self.notes.keys, self.dry_run.task)
                    self.notes.scores[name] = scores
                except (TypeError, ValueError, OverflowError):
                    self.broker.log(f"ignored the scores of client {name}: they cannot be read")
        return replies

    def _account(self, round: int, cohort: Tensor, ids: list[int]) -> None:
        """Record who replied. A stale client that is back online takes part from the next round on."""
        replied = torch.zeros_like(self.state.replied)
        accepted = self.state.accepted.clone()
        replied[ids] = True
        accepted[ids] = round
        self.notes.skipped = 0 if ids else self.notes.skipped
        for i in ids:
            self.notes.used.setdefault(self.names[i], []).append(round + 1)
        missed, stale = self.state.missed.clone(), self.stale()
        for i in cohort.tolist():
            back = stale is not None and stale[i] and self.broker.nodes.is_online(self.names[i])
            missed[i] = 0 if replied[i] or back else missed[i] + 1
        self.state = self.state._replace(accepted=accepted, missed=missed, replied=replied)


def _add_fields(message: Message, fields: Fields) -> Message:
    return message._replace(fields=message.fields | fields)


def _find_active(cohort: Tensor, stale: Tensor | None) -> list[tuple[int, int]]:
    """Place and id of the clients of a cohort for which something was sent."""
    return [(place, i) for place, i in enumerate(cohort.tolist()) if stale is None or not stale[i]]
