"""One client at its own place: its examples, its private state, its personalised model.

A site replies to these kinds of messages. "hello": the server asks who it is and what its examples look like.
"describe": the server says what columns all sites have, and a site replies with counts and sums of its training rows.
"join": the server invites it to an experiment, with the description of all sites' training rows. "round": evaluate the
models of the previous round, and train for this one. "verdict": the run is over, and the site finds what learning
from others was worth to it. Where uploads are masked, "offer", "share", "confirm" and "reveal" come around a "round".
Everything that a round changes is in one file, which is replaced as a whole; so a site that was killed replies again as
if nothing had happened, and never trains the same round twice.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kinfed import __version__
from kinfed.core import trees
from kinfed.core.metrics import ALWAYS, effective_rows
from kinfed.core.mixins import weigh
from kinfed.core.model import Model
from kinfed.core.private.privacy import NoisedSteps
from kinfed.core.private.private_sums import check_masks, find_noise
from kinfed.core.private.private_training import SecretLots
from kinfed.core.sharing import Sharing
from kinfed.core.trees import Axis, Tree
from kinfed.data.federation import Federation
from kinfed.data.split import Split
from kinfed.errors import Fault, RunError, UsageError, note_failure
from kinfed.runs.config import parts, plugins
from kinfed.simulation.devices import pick_device
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

from .. import plan
from ..masking.upload_numbers import check_digits, find_largest, flatten_upload
from ..wire import contents, messages
from ..wire.messages import Fields, Message
from . import agreements, site_examples, site_verdict
from .agreed_columns import check_task, read_description
from .agreements import Agreements
from .drawn_rows import Disclosure, Withheld
from .ledger import Ledger
from .masked_rounds import MaskedRounds
from .model_store import ModelStore
from .policy import LONGEST, Policy, passes
from .site_cohort import Outcome, Part, compute, computing
from .site_examples import OwnFileError, at_home
from .site_files import ExperimentFolder, SiteState
from .site_predictor import keep_errors, model_of
from .site_reading import Reading
from .site_series import SiteSeries

T = TypeVar("T")
NO_MASKS = (
    "this site cannot take part in masked rounds, as nothing stays in its memory between messages; start it with "
    "kinfed flower node"
)
SENT, PLAN, STAYS = "sent: ", "plan: ", "stays here: "  # begin what is told of a reply, of what is asked, of scores


class Work(NamedTuple):
    """A round of a site's, begun: all but what must be computed."""

    fields: Fields  # the message's
    folder: ExperimentFolder
    models: ModelStore
    state: SiteState
    part: Part
    rounds: int  # of the plan


class Site:
    """Replies to the server's messages for one client; nothing but its replies leaves its folder.

    `code` are the files whose methods, models and other parts the server may name; it can have no other code run.
    """

    def __init__(
        self,
        name: str,
        data: Path,
        folder: Path,
        device: str = "auto",
        reading: Reading | None = None,
        code: Sequence[Path] = (),
        report: Callable[[str], object] = lambda text: None,
        policy: Policy | None = None,
        masks: MaskedRounds | None = None,
    ) -> None:
        """`report` is told what the site's operator should know; of a table, more than the server is told.

        Without a policy only plans run that the operator has agreed to. Without `masks`, which a site keeps in memory
        between messages, it takes part in no plan with masks.
        """
        self.name, self.folder = name, folder / name
        self._data, self._device, self._code = data, pick_device(device), code
        self._reading, self._report, self._masks = reading or Reading(), report, masks
        rules = self._policy = policy or Policy()
        self._agreements = Agreements(self.folder, rules.runs == "agreed")
        self.ask: Callable[[Sequence[plan.Plan]], object] = lambda plans: None  # told once of plans to be agreed to
        self._asked: Any = None  # what the operator was asked last
        self._given = ""  # how many answers of this kind the run has had
        rows = (1, 1) if self._reading.few_rows else (rules.training_rows, rules.step_rows)
        self._limits = Disclosure(folder / f"{name}.draws.json", *rows)
        self._last: tuple[Any, Federation, Simulation] | None = None  # see `_load`

    def reply(self, kind: str, message: Message) -> Message:
        """The reply to a message. What cannot be done is refused: {"refused": why}."""
        actions: dict[str, Callable[[Message], Message]] = {  # and nothing else is called
            "hello": self._hello,
            "describe": self._describe,
            "join": self._join,
            "round": self._round,
            "verdict": self._verdict,
            "offer": self._offer,
        } | dict.fromkeys(("share", "confirm", "reveal"), lambda asking: self._answer_masked(kind, asking))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            reply = self.answering(lambda: actions[kind](message))
        if (
            kind != "hello"
            and "refused" not in reply.fields
            and (what := contents.describe_reply(reply.fields, messages.numbers(reply)))
        ):
            self._report(f"{SENT}{what}{self._given}")
        self._given = ""
        for warning in caught if kind == "describe" else []:  # once, not with every round
            self._report(f"{self._data.name}: {str(warning.message).removeprefix(f'{self._data}: ')}")
        return reply

    def answering(self, do: Callable[[], T]) -> T | Message:
        """What `do` gives, or the refusal that the server is told of when it raises; more is told to the operator."""
        try:
            return do()
        except (UsageError, RunError, OSError) as problem:
            self._report(f"client {self.name}: {problem}")
            why = problem.public if isinstance(problem, OwnFileError) else str(problem)
        except Exception as problem:
            problems = list[str]()
            with note_failure(problems, f"client {self.name}"):
                raise
            self._report(problems[0])
            why = f"unexpected {type(problem).__name__}"  # what it says may be of the site's examples
        kept = (self.folder.parent, self._data.parent, *(path.parent for path in self._code))
        for folder in sorted(
            {f"{folder_path}/" for path in kept for folder_path in (path, path.resolve())}, key=len, reverse=True
        ):
            why = why.replace(folder, "")  # where a site keeps its files is not the server's affair
        return messages.refusal(self.name, why)

    def _answer(self, **fields: Any) -> Message:
        return Message({"client": self.name, **fields}, {})

    def _hello(self, message: Message) -> Message:
        if why := self._ask_for_agreement(message.fields):
            return self._answer(kinfed=__version__, refused=why, waits=True)
        data = site_examples.find(self._data, self.name, self._reading)
        with at_home(data):
            return self._answer(kinfed=__version__, **data.hello())

    def _ask_for_agreement(self, fields: Fields) -> str:
        """Why the operator must agree before a run begins, and asks for that once; empty if there is no need."""
        plans, experiment = fields.get("plans", []), str(fields.get("experiment", ""))
        if not isinstance(plans, list) or not all(isinstance(table, dict) for table in plans):
            raise UsageError(f"the server's plans must be a list of tables; got {plans!r:.80}")
        why = self._agreements.missing(plans, experiment)
        if why and plans and (plans, why) != self._asked:
            planned = [self._plan({"table": table}) for table in plans]  # raises for what is no plan
            self._agreements.keep_asked(plans)
            self._report(f"{PLAN}the server asks for a run: {why}; until then nothing leaves this site but its name")
            for line in [line for each_plan in planned for line in agreements.summary(each_plan)]:
                self._report(f"{PLAN}{line}")
            self._asked = plans, why
            self.ask(planned)
        return why

    def _describe(self, message: Message) -> Message:
        fields = message.fields
        messages.check("describe", fields)
        split = parts.call(Split, fields["split"], "federation.split")[0]
        self._agreements.allow_description(fields)
        if self._policy.epsilon is not None:
            raise Withheld("its policy asks for privacy, under which a description of its rows has no price")
        data = site_examples.find(self._data, self.name, self._reading, self._limits)
        with understanding(), at_home(data):
            description = data.describe(fields["agreed"], split, fields["seed"])
        return self._answer(**self._policy.coarser(description))

    def _join(self, invitation: Message) -> Message:
        fields = invitation.fields
        if fields.get("kinfed") != __version__:
            raise UsageError(
                f"this site runs kinfed {__version__}, the server {fields.get('kinfed')}; install the same version"
            )
        messages.check("join", fields)
        planned = self._allow_plan(invitation)
        federation, model = self._examples(invitation, planned)
        simulation = self._simulate(planned, federation, model)
        _check_layout(fields, simulation)
        self._report(f"tensors: {Sharing.from_method(planned.learning.method, simulation.model.layout).plan}")
        if planned.learning.training.masks:
            check_masks(simulation.method, (), (), simulation.client_statistics())
        folder, accepted = self._folder_of(fields), messages.round_of(fields, "accepted")
        data = site_examples.find(self._data, self.name, self._reading)
        code = [str(path.resolve()) for path in self._code]
        with understanding(), at_home(data), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told when the columns were described
            reading = data.describe_reading(fields, federation)
        self._agreements.join(planned, fields)  # once nothing can be wrong with what it binds the server to
        owner = {"client": self.name, "experiment": folder.path.name}
        folder.save_description({**owner, "code": code, "examples": federation.digest(), **reading})
        folder.save_invitation(invitation)
        reply = self._answer(size=int(simulation.sizes[0]))
        if simulation.weights is not None:
            total = self._limits.round_score(float(simulation.weights[0]), _rows_that_count(simulation)["train"])
            reply.fields["weight"] = total
        messages.put(tree_map(lambda t: t[0], simulation.client_statistics()), reply, "client_statistics")
        if folder.state() is None:
            state = tree_map(lambda t: t[0].clone(), simulation.state)
            folder.save_state(SiteState(state, state, accepted, accepted, "", Message({}, {}), {}))
        return reply

    def _offer(self, message: Message) -> Message:
        """Keys of this site's for a masked round."""
        messages.check("offer", message.fields)
        folder = self._folder_of(message.fields)
        if not any(folder.stamp):
            return self._answer(join=True)
        masks = self._require_masks()  # what the site allows is looked at when it is asked for its upload
        run = masks.find_run(folder)
        round = messages.round_of(message.fields, "round")
        self._agreements.check_masked(run.table, message.fields["experiment"], round)
        context = messages.round_digest(run.digest, round, message.fields["model"])
        return masks.offer_keys(run.privacy, context, message.fields)

    def _answer_masked(self, kind: str, message: Message) -> Message:
        messages.check(kind, message.fields)
        return self._require_masks().answer(kind, message.fields)

    def _require_masks(self) -> MaskedRounds:
        if self._masks is None:
            raise Withheld(NO_MASKS)
        return self._masks

    def _round(self, message: Message) -> Message:
        begun = self.begin(message)
        return begun if isinstance(begun, Message) else self.finish(begun, compute([begun.part]))

    def begin(self, message: Message) -> "Message | Work":
        """A round up to what must be computed for it; a reply if it needs nothing."""
        messages.check("round", message.fields)
        folder = self._folder_of(message.fields)
        invitation = folder.invitation()
        if invitation is None:
            return self._answer(join=True)
        planned = self._allow_plan(invitation)  # before the state is read, whose types its method may define
        state = folder.state()
        if state is None:
            return self._answer(join=True)
        model = messages.model_digest(message)
        digest = messages.request_digest(message, model)
        if state.digest == digest:
            is_masked = planned.learning.training.masks is not None and "round" in state.reply.fields
            return self._require_masks().repeat(message.fields) if is_masked else state.reply
        federation, simulation = self._load(invitation, planned)
        _check_layout(message.fields, simulation)
        accepted = messages.round_of(message.fields, "accepted")
        base = self._base(state, accepted)
        round = messages.round_of(message.fields, "round") if "train" in message.fields else None
        if round is not None and round <= accepted:
            raise UsageError(f"round {round + 1} is over: the server accepted this client's round {accepted + 1}")
        state = state._replace(
            base=base,
            state=base,
            accepted=accepted,
            trained=accepted,
            digest=digest,
            reply=self._answer(),
            forms={**state.forms},
        )
        models = ModelStore(folder.path, simulation.model)
        models.select(message.fields)
        evaluate = _receive_evaluation(message, state) if "evaluate" in message.fields else None
        train = None if round is None else (round, _receive(message, "train", state.forms))
        if train is not None:
            _check_sums(self._limits, simulation, *train)
        masked = self._open_shares(planned, folder, message, train, model)
        parts = {"evaluation": evaluate, "training": train}
        kinds = [kind for kind, part in parts.items() if part is not None]
        if kinds:  # counted before it is computed, so that a site that is killed has counted it
            table = invitation.fields["table"]
            self._given = f" ({self._agreements.give(table, message.fields['experiment'], kinds, masked)})"
        if train is not None:
            self._spend(planned, simulation, base, train, state.reply, message.fields["experiment"])
        rounds = planned.learning.rounds.count
        return Work(message.fields, folder, models, state, Part(federation, simulation, base, evaluate, train), rounds)

    def finish(self, work: "Work", outcome: Outcome) -> Message:
        """The reply of a round, once what was computed is saved."""
        state, reply = work.state, work.state.reply
        if work.part.evaluate is not None:
            self._keep_evaluation(work, outcome)
        if work.part.train is not None:
            reply.fields["round"] = work.part.train[0]
            reply = self._add_upload(work, tree_map(lambda t: t[0], outcome.upload))
            state_after = tree_map(lambda t: t[0].clone(), outcome.state)
            state = state._replace(state=state_after, trained=work.part.train[0])
        else:  # the selection is final
            keep_errors(work.folder.path, work.part.federation)
        work.folder.save_state(state)
        return reply

    def _add_upload(self, work: "Work", upload: Tree) -> Message:
        """The reply of a round with the upload: under this site's masks, if the plan has them, and then in no file."""
        simulation, train = work.part.simulation, work.part.train
        privacy, reply = simulation.training.masks, work.state.reply
        if privacy is None:
            messages.put(upload, reply, "upload")
            return reply
        assert train is not None
        rounds, roster = work.rounds, simulation.roster()
        check_masks(simulation.method, train[1], upload, roster.client_statistics)
        weight = float(weigh(simulation.method, roster, roster.everyone)[0])
        numbers = flatten_upload(privacy, rounds, train[1], upload, weight)
        return self._require_masks().mask(work.fields, reply.fields, numbers, find_largest(privacy, rounds))

    def _keep_evaluation(self, work: "Work", outcome: Outcome) -> None:
        """Keep the models of a round, and reply with their scores, or tell them to the operator under privacy."""
        assert work.part.evaluate is not None
        round, evaluation, simulation = work.part.evaluate[0], outcome.evaluation, work.part.simulation
        work.state.reply.fields["evaluated"] = round
        if evaluation is None:
            self._report(f"{STAYS}why the models of round {round + 1} have no scores: {outcome.problem}")
            return
        work.models.save(round, {name: trees.pick(model, 0) for name, model in evaluation.models.items()})
        rows = _rows_that_count(simulation)
        scores = []
        for (model, split, metric), value in evaluation.scores.items():
            if self._policy.lets_out(metric):
                score = float(value) if metric == ALWAYS else self._limits.round_score(float(value), rows[split])
                scores.append([model, split, metric, score])
        work.models.select(work.fields)
        if simulation.training.noise is None:
            work.state.reply.fields["scores"] = scores
            return
        metric = work.part.federation.task.metric
        line = contents.describe_reply({"scores": [row for row in scores if row[2] == metric], "evaluated": round}, {})
        self._report(f"{STAYS}{line}")

    def _open_shares(
        self,
        planned: plan.Plan,
        folder: ExperimentFolder,
        message: Message,
        train: tuple[int, Tree] | None,
        model: str,
    ) -> int:
        """Take what others have shared for a masked round; returns which round it is, -1 if none is masked.

        `model` is the hash of the model that the site has received.
        """
        privacy = planned.learning.training.masks
        if privacy is None or train is None:
            return -1
        masks = self._require_masks()
        context = messages.round_digest(masks.find_run(folder).digest, train[0], model)
        count = masks.open_shares(message.fields, context)
        if privacy.unit == "client":
            privacy.check_count(count)
        return train[0]

    def _spend(
        self, planned: plan.Plan, simulation: Simulation, base: Tree, train: tuple[int, Tree], reply: Message, run: str
    ) -> None:
        """Count what a round of private training costs before it is computed, and add it to the reply.

        Raises Withheld if that is more than the budget.
        """
        privacy, (round, received) = planned.learning.training.noise, train
        if privacy is None:
            return
        simulation.state = tree_map(lambda t: t[None].clone(), base)
        if privacy.unit == "client":
            steps = NoisedSteps(1.0, find_noise(privacy, planned.learning.rounds.count), 1)
        else:
            with computing():
                steps = simulation.price_round(round, torch.tensor([0]), received)
        if steps.steps:
            reply.fields["privacy"] = Ledger(self.folder).spend(run, steps, privacy, self._policy.budget(privacy))

    def _verdict(self, message: Message) -> Message:
        """Compare the site's model with one that it learns alone, and perhaps with FedAvg's; the operator is told."""
        fields = message.fields
        messages.check("verdict", fields)
        folder, kept = self._folder_of(fields), {}
        named = {"own": fields["experiment"]} | ({"fedavg": fields["fedavg"]} if "fedavg" in fields else {})
        for name, experiment in named.items():
            place = self._folder_of(fields | {"experiment": experiment})
            invitation = place.invitation()
            if invitation is None or not (place.path / "model.safetensors").exists():
                raise UsageError(f"this site has no model of the experiment {experiment}, so it cannot compare")
            kept[name] = model_of(place.path, self._plan(invitation.fields), invitation.fields)[0]
        joined = folder.invitation()
        assert joined is not None
        planned = self._allow_plan(joined)
        if planned.learning.training.noise is not None:
            raise Withheld("scores have no price under privacy, so none leave")
        federation, model = self._examples(joined, planned)
        self._policy.check_score(federation.task.metric)
        self._agreements.give(joined.fields["table"], fields["experiment"], ("verdict",))
        beside = str(fields.get("fedavg", ""))
        verdict, baselines = site_verdict.compare(
            planned, federation, model, kept, folder.path, str(self._device), beside
        )
        self._report(verdict.sentence)
        counts = [_effective_rows(federation.weights, federation.rows[split][0]) for split in ("validation", "test")]
        for scores in baselines.values():
            for i, (score, rows) in enumerate(zip(scores, counts, strict=True)):
                scores[i] = score if score is None else self._limits.round_score(score, rows)
        return self._answer(baselines=baselines)

    def _base(self, state: SiteState, accepted: int) -> Tree:
        """The private state that the server has accepted: training whose reply it did not accept is undone."""
        if accepted == state.trained:
            return state.state
        if accepted == state.accepted:
            return state.base
        raise RunError(
            f"the server last accepted round {accepted + 1} of this client, but this site remembers only rounds "
            f"{state.accepted + 1} and {state.trained + 1} (0: none): server or site went back to an older copy of its "
            f"files; delete {self.folder} to join again"
        )

    def _allow_plan(self, invitation: Message) -> plan.Plan:
        """The plan of an experiment; raises Withheld unless the site's rules allow it, as they are now."""
        fields = invitation.fields
        planned = self._plan(fields)
        self._folder_of(fields)  # raises for a name that no folder can have
        self._policy.check(planned, fields["table"], self.folder, fields["experiment"])
        if planned.learning.training.masks:
            self._require_masks()
        self._agreements.check(fields["table"], fields)
        self._policy.check_disk(self.folder)
        return planned

    def _plan(self, fields: Fields) -> plan.Plan:
        """The server's config, made of kinfed's parts and of those in this site's own files."""
        if (size := len(json.dumps(fields["table"]))) > LONGEST:
            raise UsageError(f"the server's plan has {size:,} characters, more than {LONGEST:,}")
        with plugins.local(self._code):
            plugins.check_sent(fields["table"])
            planned = plan.resolve(fields["table"])
        if (masks := planned.learning.training.masks) is not None:
            check_digits(masks, planned.learning.rounds.count)
        return planned

    def _load(self, invitation: Message, planned: plan.Plan) -> tuple[Federation, Simulation]:
        """The examples and the simulation of an experiment; the last ones are kept as long as the file stays."""
        key = messages.digest(invitation), _signature(self._data)
        if self._last is None or self._last[0] != key:
            federation, model = self._examples(invitation, planned)
            self._last = key, federation, self._simulate(planned, federation, model)
        return self._last[1:]

    def _simulate(self, planned: plan.Plan, federation: Federation, model: Model) -> Simulation:
        """A simulation of this client alone: the same program, draws and examples as among all others."""
        learning = planned.learning
        simulation = Simulation(
            federation,
            model,
            learning.method,
            learning.training,
            seed=learning.seed,
            execution=Execution("loop", onednn=False, device=str(self._device)),
            rounds=learning.rounds.count,
        )
        if simulation.budget is not None:
            simulation.budget.lots = SecretLots()
        rows = {split: counts[0] for split, counts in simulation.clients.sizes.items()}
        labels, pool = federation.y[federation.rows["train"][0]], simulation.clients
        weights = None
        if federation.weights is not None:
            weights = {split: federation.weights[places[0].cpu()] for split, places in pool.rows.items()}
        self._policy.check_limit("epochs", passes(learning, rows["train"]))
        self._limits.check_steps(learning.method, learning.training, rows, labels, weights)
        return simulation

    def _examples(self, invitation: Message, planned: plan.Plan) -> tuple[Federation, Model]:
        """The examples of this client, and the model with the initial values that the server sent."""
        fields = invitation.fields
        data = site_examples.find(self._data, self.name, self._reading, self._limits)
        private = planned.learning.training.noise is not None
        if private and isinstance(data, SiteSeries):
            raise Withheld("series are scaled by their readings, which have no price under privacy")
        task = plan.read_task(fields["task"])
        for key in {"description", "covariates"} & fields.keys():
            read_description(fields, key)
        if "agreed" in fields:
            with understanding():
                check_task(task, fields)
        with understanding():
            shape, outputs, described = tuple(fields["shape"]), fields["outputs"], fields.get("description")
            self._policy.check_limit("parameters", planned.parameters(shape, outputs, described))
        cut = math.inf if private else float(planned.table["model"].get("cut", math.inf))  # by the site's own rows
        with understanding(), at_home(data):
            federation = data.federate(fields, task, planned.split, planned.learning.seed, cut)
        digest = federation.digest()
        if (self._folder_of(fields).description() or {}).get("examples", digest) != digest:
            raise OwnFileError(
                f"{self._data} has changed since this site joined the run, and so have its examples; put it back as it "
                "was, or start another run",
                Fault.REPLACED,
            )
        here = tuple(federation.x.shape[1:])
        if here != shape:
            raise UsageError(f"{self._data}: an example is {list(here)} here but {list(shape)} at other sites")
        if federation.outputs != outputs:
            raise UsageError(f"{self._data} needs {federation.outputs} outputs, but the server's model has {outputs}")
        model = planned.model(shape, outputs, described)
        if problem := messages.problem_with(invitation.arrays, messages.forms({"theta": model.theta})):
            raise UsageError(f"the server's model cannot be used: {problem}; install the same version of kinfed")
        model.theta = invitation.arrays["theta"]
        return federation, model

    def _folder_of(self, fields: Fields) -> ExperimentFolder:
        return ExperimentFolder(self.folder, fields["experiment"])


@contextmanager
def understanding() -> Iterator[None]:
    """Raise UsageError for what only a server of another version, or a made-up one, can have said."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError) as problem:
        raise UsageError(
            f"what the server says of the columns cannot be used ({type(problem).__name__}); install the same version"
        ) from None


def _signature(path: Path) -> list[tuple[str, int, int, int]]:
    """By which it is seen that a file, or one of a folder's, is another one now."""
    try:
        every = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        stats = [(str(file), file.stat()) for file in every]
    except OSError:
        return []
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _effective_rows(weights: Tensor | None, rows: Tensor) -> float:
    """As many of these rows as would say as much if they had equal weights."""
    return len(rows) if weights is None or not len(rows) else effective_rows(weights[rows])


def _rows_that_count(simulation: Simulation) -> dict[str, float]:
    """By split, the rows of a simulation of one client, as many as would say as much with equal weights."""
    weights = simulation.clients.pool.weight
    return {split: _effective_rows(weights, rows[0]) for split, rows in simulation.clients.rows.items()}


def _check_sums(limits: Disclosure, simulation: Simulation, round: int, received: Tree) -> None:
    """Raise Withheld for models at which a few rows decide what is uploaded."""
    if limits.step > 1 and simulation.budget is None:
        with computing():
            weights = simulation.row_weights(round, torch.tensor([0]), received)
        for row_weights in () if weights is None else weights[0]:
            limits.check_weights(row_weights, "the coefficients that the server sent")


def _check_layout(fields: Fields, simulation: Simulation) -> None:
    if fields["layout"] != messages.layout_digest(simulation.model.layout):
        raise UsageError("the server's model has other layers than this site's; install the same version of kinfed")


def _receive_evaluation(message: Message, state: SiteState) -> tuple[int, Tree]:
    """The round whose models are evaluated, and what they are made of."""
    arrays = {f"evaluate/{n.removeprefix('train/')}": t for n, t in message.arrays.items() if n.startswith("train/")}
    received = _receive(message._replace(arrays=arrays | message.arrays), "evaluate", state.forms)
    return messages.round_of(message.fields, "evaluated"), received


def _receive(message: Message, part: str, forms: Fields) -> Tree:
    """A checked part of a message, to a cohort of one; the first of its kind says what later ones must look like.

    Of what is the same for all clients there may be more or less from round to round, such as models of clusters.
    """
    arrays = {name: t for name, t in message.arrays.items() if name.startswith(f"{part}/")}
    expected: Fields = forms.setdefault(part, {name: list(form) for name, form in messages.forms(arrays).items()})
    like = {name: (dtype, tuple(shape)) for name, (dtype, shape) in expected.items()}
    if arrays.keys() == like.keys():
        for name in trees.names(messages.take(message, part), Axis.SHARED):
            dtype, shape = like[f"{part}/{name}"]
            like[f"{part}/{name}"] = dtype, (*arrays[f"{part}/{name}"].shape[:1], *shape[1:]) if shape[1:] else shape
    problem = messages.problem_with(arrays, like)
    if problem:
        raise UsageError(f"what the server sent to {part} cannot be used: {problem}")
    return trees.for_one(messages.take(message, part))
