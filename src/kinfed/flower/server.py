"""serve: one run of a federation, from the first hello to the summary; taken up again where it stopped."""

import csv
import fcntl
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .. import __version__
from ..core import checkpoint, engine
from ..core.checkpoint import Progress
from ..core.graph import Origin
from ..core.history import History
from ..core.method import Method, Roster
from ..core.model import Model
from ..core.seeding import tags
from ..core.summary import Summary
from ..core.tasks import Classification, Task, selected_task
from ..core.trees import Tree
from ..data import graph_files
from ..errors import RunError, UsageError
from ..experiments import results
from ..experiments.run_folder import RunFolder
from ..files import make_folder, replacing
from . import members, messages, plan
from .broker import Carrier, Courier
from .dry_run import Rehearsal
from .fleet import FleetState, FlowerFleet
from .members import Attentive
from .messages import Message, Words
from .plan import Plan

FACTS = "federation.json"  # what the sites agreed upon before round 1
CLASSES, TIMES = 1000, 10  # a site's classes are believed up to so many, or so many times the median of the others'
MOST = 100_000  # classes that are believed however many others have: a model for more could fill the memory
WAIT = 180  # seconds for the process before to notice that its SuperLink has gone


class _Joined(Exception):
    """New clients wait at the door: the round loop is left and entered again with them."""


def serve(
    planned: Plan,
    carrier: Carrier,
    out: Path,
    log: Any = print,
    poll: float = 0.2,
    members: Callable[[], Mapping[bytes, str]] | None = None,
) -> Summary:
    """Run the federation, or go on with the one in the folder `out`, and return its summary.

    `members` tells at any time whose public keys may take part; without it whoever is online may. The folder gets what
    any run's folder holds, except models: these stay at the sites. Raises UsageError for requests that cannot work and
    RunError if too few sites take part; the checkpoint of the last round is kept.
    """
    deployed = planned.deployment
    courier = Courier(carrier, deployed.deadline, deployed.patience, log, poll, members)
    make_folder(out)
    with _alone(out, log):
        return _serve(planned, courier, out, log)


def _serve(planned: Plan, courier: Courier, out: Path, log: Any) -> Summary:
    deployed, began = planned.deployment, time.perf_counter()
    folder = RunFolder(out)
    if folder.is_finished:  # by a process that has ended meanwhile
        return folder.read_summary()
    resumed, rounds = folder.checkpoint.exists(), planned.learning.rounds
    facts = json.loads((out / FACTS).read_text()) if resumed else _agree(planned, courier)
    shape, outputs, task = tuple(facts["shape"]), facts["outputs"], plan.read_task(facts["task"])
    model = planned.model(shape, outputs)
    rehearsal = Rehearsal(planned, model, shape, outputs, task)
    fleet = FlowerFleet(courier, deployed, rehearsal, _invitation(planned, facts, model))
    history = History((), task, rounds.evaluate_every, select_by=rounds.select_by)
    fleet.verdict = lambda: _verdict(history)
    method = _attentive(planned, fleet)
    at = Progress(0, None, None, 0.0)
    if resumed:
        at = _restore(folder.checkpoint, facts, planned, model, method, fleet, history)
        courier.discover(
            lambda: sum(map(courier.is_online, fleet.names)) >= deployed.quorum * len(fleet.names),
            f"the sites of this run, to go on after round {at.done}",
        )
    else:
        fleet.join(_fitting(courier, facts), deployed.clients)
        history.names = tuple(fleet.names)
        if deployed.graph:
            facts["graph"] = graph_files.read(deployed.graph, fleet.names, strangers=True).weights.tolist()
        _write(facts, out / FACTS)
    log(f"{len(fleet.names)} clients: {', '.join(fleet.names)}; {model.layout.parameters:,} parameters")
    roster, before = _roster(facts, planned, model, fleet), at.seconds
    if at.done:
        _judge_again(planned, method, roster, fleet, history, at)

    def newcomers() -> list[str]:
        return sorted(filter(courier.is_online, set(_fitting(courier, facts)) - set(fleet.names)))

    def after(round: int, state: Tree) -> None:
        nonlocal at
        spent = at.seconds
        at = Progress(round + 1, state, fleet.save(), before + time.perf_counter() - began)
        checkpoint.save(folder.checkpoint, at, history)
        log(_progress(history, planned, int(fleet.state.replied.sum()), at.seconds - spent))
        if newcomers() and round + 1 < rounds.count:
            raise _Joined

    while True:
        try:
            engine.run(
                method,
                roster,
                fleet,
                history,
                rounds=rounds.count,
                participation=planned.learning.participation,
                server=at.server,
                begin=at.done,
                after=after,
            )
            break
        except _Joined:
            history.settle()  # the scores of the clients that there are
            asked = newcomers()
            new = fleet.join(asked)
            for client in set(asked) - set(new):
                courier.dismiss(client)
            if new:
                _read_again(facts, deployed.graph, fleet.names, log)
                _write(facts, out / FACTS)
                log(f"joined after round {at.done}: {', '.join(new)}")
                grown = replace(_roster(facts, planned, model, fleet), round=at.done)
                at = at._replace(server=method.add_clients(grown, at.server, grown.everyone[len(roster) :]))
                roster = grown
                members.lengthen(history, fleet.names)
    if not history.rounds:
        raise RunError(
            f"no round of {at.done} had enough answers that can be used, so there is no model; look after the sites "
            "and begin anew with another --out"
        )
    fleet.finish()
    summary = _summarise(planned, facts, model, method.origin_of(roster), history, fleet, at.seconds, folder)
    folder.checkpoint.unlink(missing_ok=True)
    return summary


@contextmanager
def _alone(out: Path, log: Any) -> Iterator[None]:
    """Two servers would undo each other's work; one that is about to end, as its SuperLink has, is waited for."""
    with (out / ".lock").open("w") as lock:
        for second in range(WAIT):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not second:
                    log(f"waiting for the process that works in {out} to end")
                time.sleep(1)
        else:
            raise UsageError(f"another process works in {out}; end that run first: flwr stop, or kinfed flower down")
        yield


def _read_again(facts: Words, path: str, names: Sequence[str], log: Any) -> None:
    """The relation with those who came later, if the file tells of them."""
    if path:
        try:
            facts["graph"] = graph_files.read(path, names, strangers=True).weights.tolist()
        except UsageError as problem:
            log(f"who came later has no links: {problem}")


def _agree(planned: Plan, courier: Courier) -> Words:
    """What most of the sites say of their examples, once enough of them say the same."""
    wanted = planned.deployment.clients

    def overclaimed() -> dict[str, str]:
        return {} if planned.deployment.classes else _overclaimed(courier.found)

    def most() -> tuple[Any, int]:
        left = courier.found.keys() - overclaimed().keys()
        counted = Counter(_kind(courier.found[client]) for client in left)
        return max(counted.items(), key=lambda item: item[1]) if counted else (None, 0)

    courier.discover(lambda: most()[1] >= wanted, f"{wanted} site{'s' if wanted > 1 else ''}")
    for client, why in overclaimed().items():
        courier.dismiss(client, why)
    kind = most()[0]
    alike = {client: words for client, words in courier.found.items() if _kind(words) == kind}
    first = next(iter(alike.values()))
    facts = {"experiment": secrets.token_hex(8), **{key: first[key] for key in ("shape", "task", "columns")}}
    if first["task"]["name"] == "Classification":
        classes = planned.deployment.classes or max(words["task"]["classes"] for words in alike.values())
        # Whether more classes than two are uneven is not known here: labels stay at the sites.
        asked = planned.deployment.by_class
        task: Task = Classification(classes, by_class=classes < 3 if asked is None else asked)
        facts["outputs"] = classes
    else:
        task, facts["outputs"] = plan.read_task(first["task"]), first["outputs"]
    if by := planned.learning.rounds.select_by:
        task = selected_task(task, by)
    return facts | {"task": plan.describe_task(task)}


def _overclaimed(found: dict[str, Words]) -> dict[str, str]:
    """Sites that say they have so many classes that the model for these could be too large, and why they are left out.

    More than CLASSES are believed if others of the same kind have nearly as many, whose median a few liars cannot move;
    where liars are most, as two of three sites, up to MOST.
    """
    left_out = {}
    for client, words in found.items():
        classes = words["task"].get("classes", 0)
        if classes <= CLASSES:
            continue
        others = [w["task"].get("classes", 0) for c, w in found.items() if c != client and _kind(w) == _kind(words)]
        if classes > MOST:
            left_out[client] = (
                f"its labels show {classes:,} classes, more than {MOST:,}; if that is right, set flower.classes"
            )
        elif not others or classes > TIMES * median(others):
            left_out[client] = (
                f"its labels show {classes:,} classes, more than {CLASSES:,} and than {TIMES} times the median of the "
                f"others' ({median(others) if others else 'there are none'}); if that is right, set flower.classes"
            )
    return left_out


def _kind(words: Words) -> str:
    """What must be the same at all sites; how many classes its labels show may differ."""
    task = words.get("task", {})
    outputs = None if task.get("name") == "Classification" else words.get("outputs")
    return json.dumps([words.get("shape"), task.get("name"), outputs, words.get("columns")])


def _fitting(courier: Courier, facts: Words) -> list[str]:
    """Sites with examples of the agreed kind; others are named, and asked again later."""
    fitting, agreed = [], _kind(facts)
    for client, words in sorted(courier.found.items()):
        classes = words["task"].get("classes", 0)
        if _kind(words) == agreed and classes <= facts["task"].get("classes", 0):
            fitting.append(client)
        else:
            why = (
                f"its examples are {words.get('shape')} with {words.get('task')}, those of the federation "
                f"{facts['shape']} with {facts['task']}"
            )
            if other := set(words["columns"]) ^ set(facts["columns"]):
                why = f"only it or only the federation has the columns {', '.join(sorted(other))}"
            courier.dismiss(client, why)
    return fitting


def _invitation(planned: Plan, facts: Words, model: Model) -> Message:
    table = {key: value for key, value in planned.table.items() if key != "flower"}
    said = {key: facts[key] for key in ("experiment", "shape", "task", "outputs")}
    words = {"kinfed": __version__, "table": table, "layout": messages.layout_digest(model.layout), "accepted": -1}
    return Message({**said, **words}, {"theta": model.theta})


def _attentive(planned: Plan, fleet: FlowerFleet) -> Method:
    """The method, and around it what leaves silent clients out if that is asked for."""
    inner, deployed = planned.learning.method, planned.deployment
    if deployed.stale == "keep":
        return inner
    method = Attentive(inner, 0.0 if deployed.stale == "drop" else deployed.decay, lambda: fleet.state.missed)
    fleet.silent = lambda: method.out
    return method


def _roster(facts: Words, planned: Plan, model: Model, fleet: FlowerFleet) -> Roster:
    state = fleet.state
    return Roster(
        model.theta,
        model.layout,
        fleet.sizes(),
        planned.learning.training,
        planned.learning.seed,
        tags(fleet.names),
        plan.graph_of(facts.get("graph"), len(fleet.names)),
        state.client_statistics,
    )


def _verdict(history: History) -> Words:
    if not history.rounds:
        return {"judged": -1, "selected": {}, "chosen": ""}
    selected = {name: history.select(name) for name in history.named_models}
    return {"judged": history.rounds[-1], "selected": selected, "chosen": history.chosen}


def _restore(
    path: Path, facts: Words, planned: Plan, model: Model, method: Method, fleet: FlowerFleet, history: History
) -> Progress:
    none = torch.zeros(0)
    like = FleetState(none, none, none, none, fleet.rehearsal.introduction, none)
    fleet.restore(checkpoint.load(path, (), like, history).state)
    history.names = tuple(fleet.names)
    first = method.start(_roster(facts, planned, model, fleet))
    return checkpoint.load(path, first, like, history)


def _judge_again(
    planned: Plan, method: Method, roster: Roster, fleet: FlowerFleet, history: History, at: Progress
) -> None:
    """Ask again for the evaluation that was on its way when the server stopped."""
    last = at.done - 1
    if not history.is_due(last, planned.learning.rounds.count) or last in history.rounds:
        return
    roster = replace(roster, round=last)
    cohort = fleet.state.replied.nonzero().squeeze(1)
    found = fleet.evaluate(last, roster.everyone, method.send(roster, at.server, roster.everyone))
    history.expect(last, found, method.relation(roster, at.server, cohort))


def _progress(history: History, planned: Plan, replied: int, seconds: float) -> str:
    said = f"round {history.done} of {planned.learning.rounds.count}: {replied} clients, {seconds:.1f} s"
    if history.rounds:
        metric, name = history.selects, history.headline
        split = "validation" if (name, "validation", metric) in history.scores[-1] else "test"
        score = float(history.scores[-1][name, split, metric].nanmean())
        said += f"; {split} {metric} {score:.3f} after round {history.rounds[-1] + 1}"
    return said


def _summarise(
    planned: Plan,
    facts: Words,
    model: Model,
    origin: Origin,
    history: History,
    fleet: FlowerFleet,
    seconds: float,
    out: RunFolder,
) -> Summary:
    relation = None
    if history.relations:
        relation = history.relations[history.rounds.index(history.select(history.chosen))]
    layers, caution = [layer.name for layer in model.layout.layers], planned.learning.method.caution
    results.write_history(history, relation, origin, layers, out, caution=caution)
    travelled = {name: fleet.courier.travelled[name] for name in fleet.names}
    _write_bytes(travelled, fleet.counted, out.path / "bytes.csv")
    totals = {name: [sum(way) for way in zip(*rounds.values(), strict=True)] for name, rounds in travelled.items()}
    down, up = (sum(both[i] for both in totals.values()) for i in (0, 1))
    task = history.task
    each = {"down": round(down / len(totals) / history.done), "up": round(up / len(totals) / history.done)}
    summary = Summary.of(
        history,
        method=planned.learning.method_name,
        dataset="sites",
        federation=planned.table["federation"],
        seed=planned.learning.seed,
        parameters=model.layout.parameters,
        relation={"origin": origin} if relation is not None else None,
        **(history.by_class([str(c) for c in range(task.classes)]) if isinstance(task, Classification) else {}),
        executor="flower",
        seconds=round(seconds, 3),
        bytes_up=up,
        bytes_down=down,
        bytes_by_client={name: {"down": d, "up": u} for name, (d, u) in totals.items()},
        bytes_per_client_and_round=each,
        leaking=bool(caution),
        caution=caution,
        shape=facts["shape"],
        outputs=facts["outputs"],
        bounded={name: {"said": said, "counted": size} for name, (said, size) in fleet.bounded.items()},
        classes=task.classes if isinstance(task, Classification) else None,
        experiment=facts["experiment"],
        out=str(out),
    )
    results.draw_recall(summary, out)
    out.write_summary(summary)
    return summary


def _write_bytes(travelled: dict[str, dict[int, list[int]]], counted: dict[str, list[int]], path: Path) -> None:
    """One tidy table: client, round, down, up, and 1 if its upload was used; what travels before round 1 is round 0."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["client", "round", "down", "up", "counted"])
        for client, rounds in travelled.items():
            for round, both in sorted(rounds.items()):
                table.writerow([client, round, *both, int(round in counted.get(client, []))])


def _write(values: dict[str, Any], path: Path) -> None:
    make_folder(path.parent)
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=1) + "\n")
