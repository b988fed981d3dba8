"""One client at its own place: its examples, its private state, its personalised model.

A site replies to five kinds of messages. "hello": the server asks who it is and what its examples look like.
"describe": the server says what columns all sites have, and a site replies with counts and sums of its training rows.
"join": the server invites it to an experiment, with the description of all sites' training rows. "round": evaluate the
models of the previous round, and train for this one. "verdict": the run is over, and the site finds what learning
from others was worth to it.
Everything that a round changes is in one file, which is replaced as a whole; so a site that was killed replies again as
if nothing had happened, and never trains the same round twice.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch.utils._pytree import tree_map

from ... import __version__
from ...core import trees
from ...core.model import Model
from ...core.sharing import Sharing
from ...core.trees import Axis, Tree
from ...data.federation import Federation
from ...data.split import Split
from ...errors import Fault, RunError, UsageError
from ...runs.config import parts, plugins
from ...simulation.devices import pick_device
from ...simulation.execution import Execution
from ...simulation.simulation import Simulation
from ..server import plan
from ..wire import messages
from ..wire.messages import Message, Words
from . import site_examples, site_verdict
from .drawn_rows import Disclosure
from .model_store import ModelStore
from .policy import Policy
from .site_cohort import Outcome, Part, compute
from .site_examples import OwnFileError, at_home
from .site_files import ExperimentFolder, SiteState
from .site_predictor import model_of
from .site_reading import Reading

T = TypeVar("T")
REPEATED = 10  # rounds that a run may repeat, besides each once


class Work(NamedTuple):
    """A round of a site's, begun: all but what must be computed."""

    words: Words  # the message's
    folder: ExperimentFolder
    models: ModelStore
    state: SiteState
    part: Part


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
    ) -> None:
        """`report` is told what the site's operator should know; of a table, more than the server is told."""
        self.name, self.folder = name, folder / name
        self._data, self._device, self._code = data, pick_device(device), code
        self._reading, self._report = reading or Reading(), report
        rules = self._policy = policy or Policy(runs="any")
        rows = (1, 1) if self._reading.few_rows else (rules.training_rows, rules.step_rows)
        self._limits = Disclosure(folder / f"{name}.draws.json", *rows)
        self._last: tuple[Any, Federation, Simulation] | None = None  # see `_held`

    def reply(self, kind: str, message: Message) -> Message:
        """The reply to a message. What cannot be done is refused in words: {"refused": why}."""
        actions = {one: getattr(self, f"_{one}") for one in ("hello", *messages.NEEDED)}  # and nothing else is called
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            reply = self.answering(lambda: actions[kind](message))
        for one in told if kind == "describe" else []:  # once, not with every round
            self._report(f"{self._data.name}: {str(one.message).removeprefix(f'{self._data}: ')}")
        return reply

    def answering(self, do: Callable[[], T]) -> T | Message:
        """What `do` gives, or the refusal that the server is told of when it raises; more is told to the operator."""
        try:
            return do()
        except (UsageError, RunError, OSError) as problem:
            self._report(f"client {self.name}: {problem}")
            why = problem.public if isinstance(problem, OwnFileError) else str(problem)
        except Exception as problem:
            traceback.print_exc()
            self._report(f"client {self.name}: {type(problem).__name__}: {problem}")
            why = f"unexpected {type(problem).__name__}"  # what it says may be of the site's examples
        kept = (self.folder.parent, self._data.parent, *(path.parent for path in self._code))
        for folder in sorted({f"{way}/" for one in kept for way in (one, one.resolve())}, key=len, reverse=True):
            why = why.replace(folder, "")  # where a site keeps its files is not the server's affair
        return messages.refusal(self.name, why)

    def _hello(self, message: Message) -> Message:
        data = site_examples.find(self._data, self.name, self._reading)
        with at_home(data):
            return Message({"client": self.name, "kinfed": __version__, **data.hello()}, {})

    def _describe(self, message: Message) -> Message:
        words = message.words
        messages.check("describe", words)
        split = parts.call(Split, words["split"], "federation.split")[0]
        self._policy.check_description(words["split"], words["seed"], self.folder)
        data = site_examples.find(self._data, self.name, self._reading, self._limits)
        with understanding(), at_home(data):
            said = data.describe(words["agreed"], split, words["seed"])
        return Message({"client": self.name, **self._policy.coarser(said)}, {})

    def _join(self, invitation: Message) -> Message:
        words = invitation.words
        if words.get("kinfed") != __version__:
            raise UsageError(
                f"this site runs kinfed {__version__}, the server {words.get('kinfed')}; install the same version"
            )
        messages.check("join", words)
        planned = self._allowed(invitation)
        federation, model = self._examples(invitation, planned)
        simulation = self._simulate(planned, federation, model)
        problem = messages.problem_with(invitation.arrays, messages.forms({"theta": model.theta}))
        if problem:
            raise UsageError(f"the server's model cannot be used: {problem}")
        _check_layout(words, simulation)
        self._report(f"tensors: {Sharing.of(planned.learning.method, simulation.model.layout).plan}")
        folder, accepted = self._at(words), messages.round_of(words, "accepted")
        data = site_examples.find(self._data, self.name, self._reading)
        code = [str(path.resolve()) for path in self._code]
        with understanding(), at_home(data), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told when the columns were described
            folder.save_description({"code": code, "examples": federation.digest(), **data.kept(words)})
        folder.save_invitation(invitation)
        reply = Message({"client": self.name, "size": int(simulation.sizes[0])}, {})
        messages.put(tree_map(lambda t: t[0], simulation.client_statistics()), reply, "client_statistics")
        if folder.state() is None:
            state = tree_map(lambda t: t[0].clone(), simulation.state)
            folder.save_state(SiteState(state, state, accepted, accepted, "", Message({}, {}), {}))
        return reply

    def _round(self, message: Message) -> Message:
        begun = self.begin(message)
        return begun if isinstance(begun, Message) else self.finish(begun, compute([begun.part]))

    def begin(self, message: Message) -> "Message | Work":
        """A round up to what must be computed for it; a reply if it needs nothing."""
        messages.check("round", message.words)
        folder = self._at(message.words)
        invitation = folder.invitation()
        if invitation is None:
            return Message({"client": self.name, "join": True}, {})
        planned = self._allowed(invitation)  # before the state is read, whose types its method may define
        state = folder.state()
        if state is None:
            return Message({"client": self.name, "join": True}, {})
        digest = messages.digest(message)
        if state.digest == digest:
            return state.reply
        federation, simulation = self._held(invitation, planned)
        _check_layout(message.words, simulation)
        accepted = messages.round_of(message.words, "accepted")
        base = self._base(state, accepted)
        round = messages.round_of(message.words, "round") if "train" in message.words else None
        if round is not None and round <= accepted:
            raise UsageError(f"round {round + 1} is over: the server accepted this client's round {accepted + 1}")
        if round is not None and state.times >= (most := 2 * planned.learning.rounds.count + REPEATED):
            raise UsageError(f"it has trained {most} times, which a run of this plan never needs, and trains no more")
        state = state._replace(
            base=base,
            state=base,
            accepted=accepted,
            trained=accepted,
            digest=digest,
            reply=Message({"client": self.name}, {}),
            forms={**state.forms},
        )
        models = ModelStore(folder.path, simulation.model)
        models.select(message.words)
        evaluate = self._to_evaluate(message, state) if "evaluate" in message.words else None
        train = None if round is None else (round, _receive(message, "train", state.forms))
        return Work(message.words, folder, models, state, Part(federation, simulation, base, evaluate, train))

    def finish(self, work: "Work", outcome: Outcome) -> Message:
        """The reply of a round, once what was computed is saved."""
        state = work.state
        if work.part.evaluate is not None:
            assert outcome.evaluation is not None
            round, evaluation = work.part.evaluate[0], outcome.evaluation
            work.models.save(round, {name: trees.pick(model, 0) for name, model in evaluation.models.items()})
            scores = [[*key, float(value)] for key, value in evaluation.scores.items() if self._policy.lets_out(key[2])]
            state.reply.words["scores"] = scores
            state.reply.words["evaluated"] = round
            work.models.select(work.words)
        if work.part.train is not None:
            messages.put(tree_map(lambda t: t[0], outcome.upload), state.reply, "upload")
            state.reply.words["round"] = work.part.train[0]
            own = tree_map(lambda t: t[0].clone(), outcome.state)
            state = state._replace(state=own, trained=work.part.train[0], times=state.times + 1)
        work.folder.save_state(state)
        return state.reply

    def _to_evaluate(self, message: Message, state: SiteState) -> tuple[int, Tree]:
        """The round whose models are evaluated, and what they are made of."""
        arrays = {
            f"evaluate/{n.removeprefix('train/')}": t for n, t in message.arrays.items() if n.startswith("train/")
        }
        received = _receive(message._replace(arrays=arrays | message.arrays), "evaluate", state.forms)
        return messages.round_of(message.words, "evaluated"), received

    def _verdict(self, message: Message) -> Message:
        """Compare the site's model with one that it learns alone, and perhaps with FedAvg's; the operator is told."""
        words = message.words
        messages.check("verdict", words)
        folder, kept = self._at(words), {}
        named = {"own": words["experiment"]} | ({"fedavg": words["fedavg"]} if "fedavg" in words else {})
        for name, experiment in named.items():
            place = self._at(words | {"experiment": experiment})
            invitation = place.invitation()
            if invitation is None or not (place.path / "model.safetensors").exists():
                raise UsageError(f"this site has no model of the experiment {experiment}, so it cannot compare")
            kept[name] = model_of(place.path, self._plan(invitation.words), invitation.words)[0]
        joined = folder.invitation()
        assert joined is not None
        planned = self._allowed(joined)
        federation, model = self._examples(joined, planned)
        self._policy.check_score(federation.task.metric)
        beside = str(words.get("fedavg", ""))
        verdict, baselines = site_verdict.compare(
            planned, federation, model, kept, folder.path, str(self._device), beside
        )
        self._report(verdict.sentence)
        return Message({"client": self.name, "baselines": baselines}, {})

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

    def _allowed(self, invitation: Message) -> plan.Plan:
        """The plan of an experiment; raises Withheld unless the site's rules allow it, as they are now."""
        words, sent = invitation.words, invitation.arrays.get("theta")
        planned, count = self._plan(words), 0 if sent is None else sent.numel()
        self._policy.check(planned, words["table"], count, self.folder, str(words["experiment"]))
        self._policy.check_disk(self.folder)
        return planned

    def _plan(self, words: Words) -> plan.Plan:
        """The server's config, made of kinfed's parts and of those in this site's own files."""
        with plugins.local(self._code):
            plugins.check_sent(words["table"])
            return plan.resolve(words["table"])

    def _held(self, invitation: Message, planned: plan.Plan) -> tuple[Federation, Simulation]:
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
        )
        rows = {split: counts[0] for split, counts in simulation.clients.sizes.items()}
        labels = federation.y[federation.rows["train"][0]]
        self._limits.check_steps(learning.method, learning.training.batch, rows, labels)
        return simulation

    def _examples(self, invitation: Message, planned: plan.Plan) -> tuple[Federation, Model]:
        """The examples of this client, and the model with the initial values that the server sent."""
        words = invitation.words
        data = site_examples.find(self._data, self.name, self._reading, self._limits)
        task = plan.read_task(words["task"])
        with understanding(), at_home(data):
            federation = data.federate(words, task, planned.split, planned.learning.seed)
        digest = federation.digest()
        if (self._at(words).description() or {}).get("examples", digest) != digest:
            raise OwnFileError(
                f"{self._data} has changed since this site joined the run, and so have its examples; put it back as it "
                "was, or start another run",
                Fault.REPLACED,
            )
        if list(federation.x.shape[1:]) != list(words["shape"]):
            raise UsageError(
                f"{self._data}: an example is {list(federation.x.shape[1:])} here but {words['shape']} at other sites"
            )
        if federation.outputs != words["outputs"]:
            raise UsageError(
                f"{self._data} needs {federation.outputs} outputs, but the server's model has {words['outputs']}"
            )
        model = planned.model(tuple(words["shape"]), words["outputs"], words.get("description"))
        if "theta" not in invitation.arrays:
            raise UsageError("the server's message lacks the model")
        theta = invitation.arrays["theta"]
        if theta.shape != model.theta.shape:
            raise UsageError(
                f"the server's model has {theta.numel():,} numbers, but this site's has {model.theta.numel():,}; "
                "install the same version of kinfed"
            )
        model.theta = theta
        return federation, model

    def _at(self, words: Words) -> ExperimentFolder:
        return ExperimentFolder(self.folder, words["experiment"])


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
        every = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        stats = [(str(one), one.stat()) for one in every]
    except OSError:
        return []
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _check_layout(words: Words, simulation: Simulation) -> None:
    if words["layout"] != messages.layout_digest(simulation.model.layout):
        raise UsageError("the server's model has other layers than this site's; install the same version of kinfed")


def _receive(message: Message, part: str, forms: Words) -> Tree:
    """A checked part of a message, to a cohort of one; the first of its kind says what later ones must look like.

    Of what is the same for all clients there may be more or less from round to round, such as models of clusters.
    """
    arrays = {name: t for name, t in message.arrays.items() if name.startswith(f"{part}/")}
    known: Words = forms.setdefault(part, {name: list(form) for name, form in messages.forms(arrays).items()})
    like = {name: (dtype, tuple(shape)) for name, (dtype, shape) in known.items()}
    if arrays.keys() == like.keys():
        for name in trees.names(messages.take(message, part), Axis.SHARED):
            dtype, shape = like[f"{part}/{name}"]
            like[f"{part}/{name}"] = dtype, (*arrays[f"{part}/{name}"].shape[:1], *shape[1:]) if shape[1:] else shape
    problem = messages.problem_with(arrays, like)
    if problem:
        raise UsageError(f"what the server sent to {part} cannot be used: {problem}")
    return trees.for_one(messages.take(message, part))
