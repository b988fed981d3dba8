"""One run of a federation, from the first greeting to the summary; a run that stopped is resumed."""

import fcntl
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kinfed import __version__
from kinfed.core import checkpoint, engine
from kinfed.core.checkpoint import Progress
from kinfed.core.history import History, Recorder
from kinfed.core.layout import Layout
from kinfed.core.method import Method, Roster
from kinfed.core.mixins import Explains
from kinfed.core.model import Model
from kinfed.core.seeding import tags
from kinfed.core.sharing import Sharing, divide
from kinfed.core.summary import Summary
from kinfed.core.trees import Tree
from kinfed.data import graph_files
from kinfed.errors import RunError, UsageError, several
from kinfed.files import read_json, write_json
from kinfed.runs.config import experiment, plugins
from kinfed.runs.config.experiment import Table
from kinfed.runs.final_state import FinalState, holds_members
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.trackers import track_run
from kinfed.verdict.verdict import Verdict

from .. import plan
from ..masking.upload_numbers import check_digits
from ..plan import Plan
from ..wire import audit_file, messages
from ..wire.audit import AuditedTransport, AuditLog
from ..wire.messages import Fields, Message, Transport
from . import schema_negotiation, site_references as beside
from .agreed_plan import agree, fitting
from .broker import Broker
from .federation_results import count_bytes, summarise
from .flower_fleet import FleetState, FlowerFleet
from .masked_round import MaskedRound
from .monitoring import Watch
from .node_traffic import Traffic
from .nodes import Nodes
from .shape_inference import DryRun
from .staleness import StalenessWrapper
from .validation import bound_claims

FACTS = "federation.json"  # what the sites agreed on before round 1
BEGUN = "experiment.json"  # the name by which sites know the run, from the first greeting on
WAIT = 180  # seconds for a previous process to notice that its SuperLink is gone

Log = Callable[[str], Any]


class _NewClients(Exception):
    """New clients are waiting: the round loop is left, and entered again with them."""


def serve(
    planned: Plan,
    transport: Transport,
    out: Path,
    log: Log = print,
    poll: float = 0.2,
    members: Callable[[], Mapping[bytes, str]] | None = None,
    track: Sequence[str] = (),
) -> Summary:
    """Run the federation, or resume the one in the folder `out`, and return its summary.

    `members` gives at any time the public keys that may take part; without it anyone online may. `track` names what
    follows the run, as for `kinfed run`. The folder receives
    what any run's folder holds, except models and private states: these stay at the sites. Raises UsageError for
    requests that cannot work and RunError if too few sites take part; the checkpoint of the last round is kept.
    """
    deployment, privacy = planned.deployment, planned.learning.training.masks
    if privacy is not None:
        check_digits(privacy, planned.learning.rounds.count)
    (folder := RunFolder(out)).create()
    with only_process(out, log):
        if folder.is_finished:  # by a process that has ended meanwhile
            return folder.read_summary()
        audited = AuditedTransport(transport, AuditLog(out / audit_file.FILE))
        plans = [planned, *([beside.fedavg_of(planned, 1)] if "fedavg" in beside.list_baselines(planned) else [])]
        greeting = {"experiment": _experiment(out), "plans": [_for_sites(served) for served in plans]}
        nodes = Nodes(log, members, deployment.sites, greeting)
        traffic = Traffic(audited, nodes, deployment.patience)
        broker = Broker(nodes, traffic, deployment.deadline, log, poll)
        unknown = [] if members is None else [*{*deployment.sites} - {*members().values()}]
        if unknown:
            log(f"flower.sites names {', '.join(sorted(unknown))}, whose key is not in sites/ of the server's keys")
        watch = Watch(out, planned.learning.rounds.count, broker)
        try:

            def serve_beside(other: Plan, folder: Path, report: Log) -> Summary:
                return serve(other, transport, folder, report, poll, members)

            summary = _Run(planned, broker, out, log, watch).run(serve_beside, track)
        except Exception as problem:
            watch.write("failed", messages.plain(problem))
            raise
        watch.write("finished")
        return summary


@contextmanager
def only_process(out: Path, log: Log) -> Iterator[None]:
    """Hold a run's folder alone, as two servers would undo each other's work; waits for one that is about to end."""
    with (out / ".lock").open("w") as lock:
        for second in range(WAIT):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not second:
                    log(f"waiting for another process that works in {out} to end")
                time.sleep(1)
        else:
            raise UsageError(f"another process works in {out}; stop it first: kinfed flower down")
        yield


class _Run:
    """A run in progress: what it consists of, and how far it has got."""

    def __init__(self, planned: Plan, broker: Broker, out: Path, log: Log, watch: Watch) -> None:
        self.watch = watch
        self.planned, self.broker, self.out, self.log = planned, broker, out, log
        self.folder, self.rounds = RunFolder(out), planned.learning.rounds
        self.began = time.perf_counter()
        self.resumed = self.folder.checkpoint.exists()
        self.facts = json.loads((out / FACTS).read_text()) if self.resumed else agree(planned, broker)
        shape = tuple(self.facts["shape"])
        outputs = self.facts["outputs"]
        task = plan.read_task(self.facts["task"])
        initial = planned.model(shape, outputs, self.facts.get("description"))
        self.task = task
        inner, self.model = divide(planned.learning.method, initial)
        dry_run = DryRun(planned, self.model, shape, outputs, task)
        invitation = _invitation(planned, self.facts, initial, self.model.layout)
        self.fleet = FlowerFleet(
            broker,
            planned,
            dry_run,
            invitation,
            lambda: _selection(self.history),
            additions=lambda client: schema_negotiation.for_one(self.facts, client),
            masks=_masks(planned),
        )
        self.history = History((), task)
        self.recorder = Recorder(self.history)
        self.method = self._wrap(inner)
        self.at = Progress(0, None, None, 0.0)  # after the last complete round

    def run(self, serve: beside.Serve, track: Sequence[str]) -> Summary:
        """Run all rounds that are left, have the sites compare, and write the results; `serve` runs what is beside."""
        if self.resumed:
            self._restore()
        else:
            self._gather()
        names, parameters = self.fleet.names, self.model.layout.parameters
        self.log(f"{several(len(names), 'client')}: {', '.join(names)}; {several(parameters, 'parameter')}")
        sharing = Sharing.from_method(self.planned.learning.method, self.model.layout)
        self.log(f"tensors: {sharing.plan}")
        if self.fleet.masks is not None:
            least = self.fleet.masks.privacy.members
            self.log(f"masks: uploads are seen in sums of {least} sites or more, so flower.norm_bound bounds nothing")
        self.watch.begin(self.fleet, self.history, self.at.seconds)
        self.seconds_before = self.at.seconds
        if self.at.done:
            self._evaluate_again()
        self.history.origin = Explains.from_method(self.method).origin_of(self.roster)
        with track_run(track, self.folder, self.rounds.count, sharing.layers) as self.follow:
            self._train()
            if not self.history.rounds:
                raise RunError(
                    f"no round of {self.at.done} had enough usable replies, so there is no model; check the sites and "
                    "start again with another --out"
                )
            self.fleet.finish()
            self._count()
        verdict = self._compare(serve)
        self._leave()
        summary = summarise(
            self.planned,
            self.facts,
            self.roster,
            self.history,
            self.fleet,
            self.at.seconds,
            self.folder,
            verdict,
        )
        self.folder.checkpoint.unlink(missing_ok=True)
        return summary

    def _train(self) -> None:
        """Run all rounds that are left."""
        while True:
            try:
                engine.run(
                    self.method,
                    self.roster,
                    self.fleet,
                    self.recorder,
                    rounds=self.rounds,
                    participation=self.planned.learning.participation,
                    server=self.at.server,
                    begin=self.at.done,
                    after=self._end_round,
                )
                return
            except _NewClients:
                self.recorder.settle()  # the scores of the clients so far
                self._add_clients()

    def _leave(self) -> None:
        """Write what a newcomer joins by: what the server remembers, unless that is single sites' models."""
        server = self.at.server.inner if isinstance(self.method, StalenessWrapper) else self.at.server
        if holds_members(server):
            self.log(
                f"wrote no {self.folder.state.name}, with which newcomers join later: it would hold single sites' "
                "models; for newcomers, train fedavg beside (--beside local,fedavg)"
            )
        else:
            end = self.at._replace(server=server, state=(), how={})
            initial = self.fleet.invitation.arrays["theta"]  # with what is frozen, which no file here holds besides
            roster = replace(self.roster, theta=initial)
            FinalState(end, roster, tuple(self.fleet.names)).write(self.history, self.folder.state)
        if not self.folder.is_begun:
            experiment.write(plugins.absolute(self.planned.table), self.folder.config)

    def _compare(self, serve: beside.Serve) -> Verdict | None:
        """What learning from others was worth: each site compares on its own examples, the server by mean scores."""
        wanted, names = beside.list_baselines(self.planned), self.fleet.names
        if not wanted:
            return None
        here = [name for name in names if self.broker.nodes.is_online(name)]
        fedavg = beside.train(self.planned, here, self.out, serve, self.log) if "fedavg" in wanted else {}
        self.log("each site compares its model with what it could do without others")
        baselines = beside.ask(self.broker, names, self.facts["experiment"], fedavg, self.history)
        return beside.judge(self.planned, self.history, baselines, fedavg)

    def _wrap(self, inner: Method) -> Method:
        """The method, and around it what ignores stale clients if the config says so."""
        deployment = self.planned.deployment
        if deployment.stale == "keep":
            return inner
        decay = 0.0 if deployment.stale == "drop" else deployment.decay
        wrapper = StalenessWrapper(inner, decay, lambda: self.fleet.state.missed)
        self.fleet.stale = lambda: wrapper.last_stale
        return wrapper

    def _gather(self) -> None:
        """Have the first sites join."""
        deployment = self.planned.deployment
        self.fleet.join(fitting(self.broker, self.facts), deployment.clients)
        self.history.names = tuple(self.fleet.names)
        if deployment.graph:
            self._read_graph()
        write_json(self.out / FACTS, self.facts)
        (self.out / BEGUN).unlink(missing_ok=True)
        self.roster = self._roster()

    def _restore(self) -> None:
        """Take up a run after its last complete round, once enough of its sites are connected."""
        fleet, path, empty = self.fleet, self.folder.checkpoint, torch.zeros(0)
        like = FleetState(
            sizes=empty,
            accepted=empty,
            missed=empty,
            replied=empty,
            client_statistics=fleet.dry_run.client_statistics,
            notes=empty,
        )
        fleet.restore(checkpoint.load(path, (), like, self.history).state)
        self.history.names = tuple(fleet.names)
        self.roster = self._roster()
        self.at = checkpoint.load(path, self.method.start(self.roster), like, self.history)
        needed = self.planned.deployment.quorum * len(fleet.names)
        self.broker.discover(
            lambda: sum(map(self.broker.nodes.is_online, fleet.names)) >= needed,
            f"the sites of this run, to continue after round {self.at.done}",
        )

    def _evaluate_again(self) -> None:
        """Request the evaluation that was under way when the server stopped."""
        last = self.at.done - 1
        if not self.rounds.is_due(last) or last in self.history.rounds:
            return
        roster = replace(self.roster, round=last)
        cohort = self.fleet.state.replied.nonzero().squeeze(1)
        sent = self.method.send(roster, self.at.server, roster.everyone)
        evaluation = self.fleet.evaluate(last, roster.everyone, sent)
        self.recorder.keep(last, evaluation, self.method.relation(roster, self.at.server, cohort))

    def _end_round(self, round: int, state: Tree) -> None:
        """Save and log a complete round; raises _NewClients if some are waiting."""
        seconds = self.seconds_before + time.perf_counter() - self.began
        rounds = self.rounds.count
        spent = seconds - self.at.seconds
        self.at = Progress(round + 1, state, self.fleet.save(), seconds)
        self.history.cost.clock(round, seconds)
        checkpoint.save(self.folder.checkpoint, self.at, self.history)
        self._count()
        self.follow(self.history)
        self.log(_progress(self.history, rounds, int(self.fleet.state.replied.sum()), spent))
        if self._waiting_clients() and round + 1 < rounds:
            raise _NewClients

    def _count(self) -> None:
        """Note the bytes of all messages beside each evaluated round; so far it has those of models alone."""
        count_bytes(self.history, {name: self.broker.traffic.bytes[name] for name in self.fleet.names})

    def _waiting_clients(self) -> list[str]:
        new = set(fitting(self.broker, self.facts)) - set(self.fleet.names)
        return sorted(filter(self.broker.nodes.is_online, new))

    def _add_clients(self) -> None:
        """Have waiting clients join, by the method's own rule for newcomers."""
        waiting = self._waiting_clients()
        new = self.fleet.join(schema_negotiation.Describing(self.planned, self.broker, self.facts).add(waiting))
        for client in set(waiting) - set(new):
            self.broker.dismiss(client)
        if not new:
            return
        if self.planned.deployment.graph:
            try:
                self._read_graph()
            except UsageError as problem:
                self.log(f"clients that joined have no links: {problem}")
        write_json(self.out / FACTS, self.facts)
        self.log(f"joined after round {self.at.done}: {', '.join(new)}")
        roster = replace(self._roster(), round=self.at.done)
        newcomers = roster.everyone[len(self.roster) :]
        self.at = self.at._replace(server=self.method.add_clients(roster, self.at.server, newcomers))
        self.roster = roster
        self.history.add_clients(self.fleet.names)

    def _read_graph(self) -> None:
        graph = graph_files.read(self.planned.deployment.graph, self.fleet.names, strangers=True)
        self.facts["graph"] = graph.weights.tolist()

    def _roster(self) -> Roster:
        """What the server knows of its clients; a size or weight that is far above others' counts less than claimed."""
        fleet = self.fleet
        bound = self.planned.deployment.size_bound if fleet.masks is None else 0.0  # with masks each weighs itself
        claimed = dict(zip(fleet.names, fleet.state.sizes.tolist(), strict=True))
        sizes = bound_claims(claimed, bound, self.log, "to have {:,} training examples", "it counts as if it had {:,}")
        weights = None
        if fleet.notes.weights:
            claims = {name: fleet.notes.weights.get(name, float(size)) for name, size in claimed.items()}
            effect = "that its examples count as {:,.4g}", "they count as {:,.4g}"
            counted = bound_claims(claims, bound, self.log, *effect)
            weights = torch.tensor([*counted.values()], dtype=torch.get_default_dtype())
        return Roster(
            theta=self.model.theta,
            layout=self.model.layout,
            sizes=torch.tensor([*sizes.values()]),
            training=self.planned.learning.training,
            seed=self.planned.learning.seed,
            tags=tags(self.fleet.names),
            graph=plan.graph_of(self.facts.get("graph"), len(self.fleet.names)),
            client_statistics=self.fleet.state.client_statistics,
            task=self.task,
            example_weights=weights,
            columns=self.planned.columns(self.facts.get("description")),
        )


def _masks(planned: Plan) -> MaskedRound | None:
    """How uploads are summed that the server does not see; None if it sees each."""
    privacy = planned.learning.training.masks
    if privacy is None:
        return None
    return MaskedRound(privacy, planned.learning.rounds.count, planned.deployment.quorum)


def _experiment(out: Path) -> str:
    """The name of the experiment of a run's folder, which sites have agreed to: made up when it begins."""
    for path in (out / FACTS, out / BEGUN):
        if name := read_json(path).get("experiment"):
            return str(name)
    name = secrets.token_hex(8)
    write_json(out / BEGUN, {"experiment": name})
    return name


def _for_sites(planned: Plan) -> Table:
    """The plan as sites are sent it, and as they agree to it."""
    return dict(plugins.for_sites({key: value for key, value in planned.table.items() if key != "flower"}))


def _invitation(planned: Plan, facts: Fields, initial: Model, layout: Layout) -> Message:
    agreed = {key: facts[key] for key in ("experiment", "shape", "task", "outputs")}
    fields = {
        "kinfed": __version__,
        "table": _for_sites(planned),
        "layout": messages.layout_digest(layout),
        "accepted": -1,
    }
    return Message({**agreed, **fields}, {"theta": initial.theta})


def _selection(history: History) -> Fields:
    """Which round of each kind of model is best so far, and which kind."""
    if not history.rounds:
        return {"judged": -1, "selected": {}, "chosen": ""}
    selected = {name: history.select(name) for name in history.named_models}
    return {"judged": history.rounds[-1], "selected": selected, "chosen": history.chosen}


def _progress(history: History, rounds: int, replied: int, seconds: float) -> str:
    line = f"round {history.cost.done} of {rounds}: {several(replied, 'client')}, {seconds:.1f} s"
    if history.rounds:
        split, metric, mean = history.tell_last()
        if math.isfinite(mean):  # under privacy it stays at the sites
            line += f"; {split} {metric} {mean:.3f} after round {history.rounds[-1] + 1}"
    return line
