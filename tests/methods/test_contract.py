"""What every method owes: the same questions for each entry of METHODS, on six small unequal clients."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from kinfed import load_model
from kinfed.core import checkpoint, trees
from kinfed.core.checkpoint import Progress
from kinfed.core.engine import Participation, latecomers, run
from kinfed.core.graph import Graph
from kinfed.core.history import History, Recorder
from kinfed.core.mixins import Advises, Extends, Predicts, model_for, reduce_uploads
from kinfed.core.optimiser import SGD
from kinfed.core.seeding import tags
from kinfed.core.summary import score_models
from kinfed.core.tasks import Classification
from kinfed.core.training import Training
from kinfed.core.trees import Axis
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.methods import METHODS
from kinfed.methods.parts.graph_hypernetwork import GCN
from kinfed.methods.parts.heads import FullHeads
from kinfed.methods.solved import KNOWN
from kinfed.models.trees import trees as boosted
from kinfed.runs.fit import fit
from kinfed.runs.results import save
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

SIZES = (3, 9, 8, 17, 4, 12)  # the batch is 8: short batches, one full batch, a client smaller than a batch
ORDER = tuple(range(len(SIZES)))
LINKS = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 4], [1, 4]])  # of clients; the last has none
ROUNDS = 4
LONGER = {"personal-boosting": 8}  # rounds: its first ones only count
NO_STATISTICS = {"pfedbayes"}  # methods that take no running statistics: they get LayerNorm in place of BatchNorm
LATE = Participation(0.6, late=0.3, joins=2)  # two of the six
SETTINGS = {
    "cfl": {"begin": 2, "eps1": 10.0, "eps2": 0.0, "min_size": 2},
    "ifca": {"clusters": 2},
    "private-clusters": {"clusters": 2, "length": 1},
    "fedsem": {"clusters": 2},
    "fedcedar": {"clusters": 2},
    "fedamp": {"alpha": 0.1, "sigma": 1.0, "pull": 0.1},
    "pfedgat": {"heads": 2, "width": 3, "lr": 1.0},
    "attention": {"heads": 2, "width": 3, "lr": 0.001, "steps": 2},
    "pfedhn": {"hidden": 7},
    "knn-per": {"neighbours": 3},
    "pfedla": {"embedding": 3, "hidden": 5, "optimiser": SGD(0.5)},
    "panacea": {
        "embedding": 4,
        "encoder": GCN(hidden=7),
        "decoder": FullHeads(hidden=7),
        "steps": 3,
        "optimiser": SGD(0.5),
    },
    "per-fedavg": {"alpha": 0.05, "beta": 0.1},
    "fedaghn": {"sharpness": 3.0, "lr": 0.1},
    "personal-boosting": {"least": 1.0, "rate": 0.5, "rows": 0.8, "columns": 0.7},
}


NAMES = (*METHODS, "personal-boosting")


def federation(order=ORDER):
    """Six clients named a to f; `order` lists them differently without changing what they hold."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(sum(SIZES) + 4 * len(SIZES), 6, generator=draw, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, generator=draw, dtype=torch.float64)).argmax(1)
    ends = torch.tensor([n + 4 for n in SIZES]).cumsum(0)
    rows = {"train": [], "validation": [], "test": []}
    for i in order:
        mine = torch.arange(int(ends[i]) - SIZES[i] - 4, int(ends[i]))
        rows["test"].append(mine[:2])
        rows["validation"].append(mine[2:4])
        rows["train"].append(mine[4:])
    links = torch.zeros(len(SIZES), len(SIZES)).index_put((LINKS[:, 0], LINKS[:, 1]), torch.tensor(1.0))
    graph = Graph((links + links.T)[list(order)][:, list(order)], "given")
    return Federation(x, y, rows, Classification(3), names=[("abcdef")[i] for i in order], graph=graph)


def module(kind="plain", name=""):
    if name == "personal-boosting":
        return boosted((6,), 3, trees=2, depth=1).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        norm = nn.LayerNorm(5) if name in NO_STATISTICS else nn.BatchNorm1d(5)
        middle = [norm, nn.Tanh(), nn.Dropout(0.3)] if kind == "norm" else [nn.Tanh()]
        return nn.Sequential(nn.Linear(6, 5), *middle, nn.Linear(5, 3)).double()


def make(name):
    return KNOWN[name](**SETTINGS.get(name, {}))


def start(name, executor="loop", order=ORDER, kind="plain", fleet=Simulation, workers=1, lr=0.2):
    method = make(name)
    data = federation(order)
    training = Training(epochs=2, batch=8, optimiser=SGD(lr))
    fleet = fleet(
        data,
        model_for(method, module(kind, name)),
        method,
        training,
        seed=11,
        execution=Execution(executor, workers, chunk=4),
    )
    return fleet.method, fleet, fleet.roster(data.graph), History(tuple(data.names), data.task)


def outcome(name, participation=0.5, **how):
    method, fleet, roster, history = start(name, **how)
    server = run(method, roster, fleet, Recorder(history), rounds=LONGER.get(name, ROUNDS), participation=participation)
    return server, fleet, history


@functools.cache
def unbroken(name, participation=0.5, kind="plain"):
    """The outcome in the loop, with which several tests compare; none changes it."""
    return outcome(name, participation, kind=kind)


def same(a, b, exact=False):
    a, b = trees.pack(a), trees.pack(b)
    assert a.keys() == b.keys()
    for key in a:
        # A score that a client does not have, such as the balanced one of a single class, is NaN in both.
        bounds = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-10}
        torch.testing.assert_close(a[key], b[key], **bounds, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}")


# Those of a method by one worker, which makes what is `unbroken` once.
@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(f"contract {name}")) for name in NAMES])
def name(request):
    return request.param


@pytest.mark.parametrize(("kind", "participation", "executor"), [("plain", 0.5, "fused"), ("norm", LATE, "vmap")])
def test_executors_agree(name, kind, participation, executor):
    if executor == "fused" and (name in LONGER or issubclass(KNOWN[name], Extends)):
        with pytest.raises(UsageError, match=r"this model cannot run under executor 'fused' \(.* has no fused form\)"):
            outcome(name, participation, executor=executor, kind=kind)
        return
    loop, other = unbroken(name, participation, kind), outcome(name, participation, executor=executor, kind=kind)
    same(loop[0], other[0])
    same(loop[1].state, other[1].state)
    same(loop[2].models, other[2].models)
    for a, b in zip(loop[2].scores, other[2].scores, strict=True):
        same({"/".join(k): v for k, v in a.items()}, {"/".join(k): v for k, v in b.items()})


def test_any_number_of_workers_gives_the_same_bits(name):
    one, three = unbroken(name, LATE, "norm"), outcome(name, LATE, kind="norm", workers=3)
    same(one[0], three[0], exact=True)
    same(one[1].state, three[1].state, exact=True)
    same(one[2].models, three[2].models, exact=True)
    for a, b in zip(one[2].scores, three[2].scores, strict=True):
        same({"/".join(k): v for k, v in a.items()}, {"/".join(k): v for k, v in b.items()}, exact=True)


class Wired(Simulation):
    """A fleet whose every message is taken apart into named arrays and put together again."""

    def train(self, round, cohort, sent):
        cohort, uploads = super().train(round, cohort, rewired(sent))
        return cohort, rewired(uploads)

    def evaluate(self, round, cohort, sent):
        return super().evaluate(round, cohort, rewired(sent))


def rewired(tree):
    arrays = {key: t.contiguous().clone() for key, t in trees.pack(tree).items()}
    return trees.unpack(arrays, tree)


def test_messages_are_named_arrays(name):
    direct, wired = unbroken(name), outcome(name, fleet=Wired)
    same(direct[0], wired[0], exact=True)
    same(direct[2].models, wired[2].models, exact=True)


def test_send_only_reads(name):
    method, fleet, roster, history = start(name)
    server = run(method, roster, fleet, Recorder(history), rounds=2, participation=0.5)
    before = copy.deepcopy(trees.pack(server))
    roster = replace(roster, round=2)
    cohort = torch.tensor([0, 3, 4])
    first = method.send(roster, server, cohort)
    same(first, method.send(roster, server, cohort), exact=True)
    same(before, trees.pack(server), exact=True)
    few = trees.pack(method.send(roster, server, cohort[:1]))
    for key, axis in trees.pack(trees.axes(first)).items():
        sizes = [list(t[key].shape) for t in (trees.pack(first), few)]
        if axis is Axis.PER_CLIENT:
            assert (sizes[0][0], sizes[1][0]) == (3, 1), key
        else:
            assert axis is Axis.SHARED, f"{key}: a message has one axis of clients, its first, or none"
            assert sizes[0] == sizes[1], key


def test_every_tensor_of_the_server_says_which_of_its_axes_count_clients(name):
    """By the sizes that change with the number of clients, which is what a wrong or missing declaration gets wrong."""
    method, fleet, roster, _ = start(name)

    def sizes(listed, ids):
        server = method.start(listed)
        _, uploads = fleet.train(0, ids, method.send(listed, server, listed.everyone))
        uploads = reduce_uploads(method, listed, listed.everyone, uploads)
        return trees.pack(method.aggregate(listed, server, listed.everyone, uploads))

    few = torch.tensor([0, 2, 3, 5])
    all_six, four = sizes(roster, roster.everyone), sizes(roster.part(few), few)
    declared = trees.pack(trees.axes(method.start(roster)))
    assert declared.keys() == all_six.keys() == four.keys()
    for key, axis in declared.items():
        six, less = list(all_six[key].shape), list(four[key].shape)
        counting = {Axis.PER_CLIENT: [0], Axis.PAIRWISE: [len(six) - 2, len(six) - 1], Axis.SHARED: []}[axis]
        for i, (wide, narrow) in enumerate(zip(six, less, strict=True)):
            assert ((wide, narrow) == (6, 4)) == (i in counting), f"{key}: {six} and {less} are declared {axis}"


def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    """Broken off before late clients join; test_sharing breaks it off after."""
    whole = unbroken(name, LATE)
    method, fleet, roster, history = start(name)
    server = run(method, roster, fleet, Recorder(history), rounds=2, participation=LATE)
    checkpoint.save(tmp_path / "c", Progress(2, server, fleet.state, 1.5), history)
    method, fleet, roster, history = start(name)
    at = checkpoint.load(tmp_path / "c", method.start(roster), fleet.state, history)
    fleet.state = at.state
    server = run(
        method,
        roster,
        fleet,
        Recorder(history),
        rounds=LONGER.get(name, ROUNDS),
        participation=LATE,
        server=at.server,
        begin=at.done,
    )
    same(whole[0], server, exact=True)
    same(whole[1].state, fleet.state, exact=True)
    same(whole[2].models, history.models, exact=True)
    assert score_models(whole[2]) == score_models(history)
    for one, other in zip(whole[2].diagnostics, history.diagnostics, strict=True):
        assert one.keys() == other.keys()
        torch.testing.assert_close(list(one.values()), list(other.values()), rtol=0, atol=0, equal_nan=True)
    assert (whole[2].cost, whole[2].rounds) == (history.cost, history.rounds)


def test_reordering_clients_only_reorders_results(name):
    order = [4, 2, 0, 5, 1, 3]
    plain, moved = unbroken(name, LATE), outcome(name, LATE, order=order)
    for key, table in plain[2].models.items():
        torch.testing.assert_close(table[order], moved[2].models[key], rtol=1e-8, atol=1e-9)
    for a, b in zip(plain[2].relations, moved[2].relations, strict=True):
        torch.testing.assert_close(a[..., order, :][..., :, order], b, rtol=1e-5, atol=1e-6)


def test_before_they_join_nothing_knows_of_late_clients(name):
    """Up to then it is the run of a federation that they are no part of, bit for bit."""
    late = latecomers(11, tags("abcdef"), LATE.late)
    early = [i for i in ORDER if i not in late.tolist()]
    assert len(late) == 2
    method, fleet, roster, history = start(name)
    server = run(method, roster, fleet, Recorder(history), rounds=LATE.joins, participation=LATE)
    method, alone, roster, alone_history = start(name, order=early)
    same(
        server,
        run(method, roster, alone, Recorder(alone_history), rounds=LATE.joins, participation=LATE.share),
        exact=True,
    )
    for key, table in trees.pack(fleet.state).items():
        assert torch.equal(table[early], trees.pack(alone.state)[key]), key
    for a, b in zip(history.scores, alone_history.scores, strict=True):
        same({key: a[key][early] for key in b}, b, exact=True)
    for a, b in zip(history.relations, alone_history.relations, strict=True):
        assert torch.equal(a[..., early, :][..., early], b)
        assert (a[..., early, :][..., late] == 0).all()


def test_newcomers_are_dealt_with_as_if_they_had_been_there_and_never_taken_part(name):
    method, fleet, roster, _ = start(name)
    known, newcomers = torch.tensor([0, 2, 3, 5]), torch.tensor([1, 4])
    few = roster.part(known)
    ends = []
    for listed, cohort in ((few, few.everyone), (roster, known)):
        method, fleet, _, _ = start(name)
        server = method.start(listed)
        _, uploads = fleet.train(0, known, method.send(listed, server, cohort))
        uploads = reduce_uploads(method, listed, cohort, uploads)
        ends.append(method.aggregate(listed, server, cohort, uploads))
    before, there = ends
    kept = copy.deepcopy(trees.pack(before))
    joined = method.add_clients(roster, before, newcomers)
    same(kept, trees.pack(before), exact=True)
    sent = method.send(roster, joined, roster.everyone)
    assert all(torch.isfinite(t).all() for t in trees.pack(sent).values() if t.is_floating_point())
    same(joined, method.add_clients(roster, before, newcomers), exact=True)
    if name in ("pfedhn", "panacea"):  # they have better than random embeddings for newcomers
        return
    if name == "fedsem":  # it has better than the largest cluster's model for newcomers; for the others nothing changes
        relations = [method.relation(roster, one, known)[known] for one in (there, joined)]
        same(relations[0], relations[1])
        same(method.send(roster, there, known), method.send(roster, joined, known))
        return
    same(method.send(roster, there, roster.everyone), sent)
    same(method.relation(roster, there, known), method.relation(roster, joined, known))
    if name != "scaffold":  # its control variate is a mean over everybody
        same(method.send(few, before, few.everyone), method.send(roster, joined, known))


def test_methods_with_rates_of_their_own_are_those_that_leave_the_optimiser_aside(name):
    one, other = unbroken(name)[2], outcome(name, lr=0.01)[2]
    alike = all(torch.equal(value, other.models[key]) for key, value in one.models.items())
    assert alike == bool(Advises.from_method(make(name)).rates)


def test_nobody_joins(name):
    method, fleet, roster, history = start(name)
    server = run(method, roster, fleet, Recorder(history), rounds=2, participation=0.5)
    same(server, method.add_clients(roster, server, torch.zeros(0, dtype=torch.int64)), exact=True)


def test_relations_are_rows_that_sum_to_one(name):
    _, fleet, history = unbroken(name)
    for relation in history.relations:
        assert relation.shape[-2:] == (6, 6)
        torch.testing.assert_close(relation.sum(-1), torch.ones_like(relation[..., 0]))
    assert len(history.relations) in (0, LONGER.get(name, ROUNDS))
    assert fleet.method.origin in ("given", "learned", "oracle", "fixed")


def test_one_client_alone_and_one_that_never_took_part(name):
    method = make(name)
    data = federation()
    rows = {split: parts[3:4] for split, parts in data.rows.items()}
    alone = Federation(data.x, data.y, rows, data.task, graph=Graph(torch.zeros(1, 1), "given"))
    training = Training(epochs=1, batch=2, optimiser=SGD(lr=0.1))
    fleet = Simulation(alone, model_for(method, module("plain", name)), method, training, execution=Execution("loop"))
    history = History(("0",), alone.task)
    run(fleet.method, fleet.roster(alone.graph), fleet, Recorder(history), rounds=3)
    assert torch.isfinite(history.models["theta"]).all()
    _, _, history = outcome(name, participation=1 / 6)  # four cohorts of one: at least two clients never train
    for scores in history.scores:  # scores by class are not defined for a client that is tested on one class
        assert all(v.isfinite().all() for (_, _, metric), v in scores.items() if metric in ("accuracy", "loss"))


def test_the_loaded_model_is_the_one_that_was_scored(name, tmp_path):
    """From the run and from its folder, for the model and round that validation prefers."""
    training = Training(epochs=1, batch=8, optimiser=SGD(lr=0.2))
    plain = module("norm", name)
    found = fit(make(name), federation(), plain, rounds=2, training=training, seed=11, execution=Execution("loop"))
    save(found, tmp_path / "run")
    data, history = found.federation, found.history
    scored = history.scores[history.rounds.index(history.select(history.chosen))][history.chosen, "test", "loss"]
    for i in (0, 4):
        x, y = data.x[data.rows["test"][i]], data.y[data.rows["test"][i]]
        for loaded in (
            found.model(position=i),
            load_model(tmp_path / "run", module=plain, method=make(name), position=i),
        ):
            assert not loaded.training
            torch.testing.assert_close(data.task.loss(loaded(x), y).mean(), scored[i], rtol=1e-12, atol=1e-12)


def test_who_predicts_in_a_way_of_its_own_exports_what_does_so():
    class Sharp(METHODS["local"]):
        def predict(self, client, personal, x):
            return 2 * client.model(personal.theta, x)

    with pytest.raises(UsageError, match=r"Sharp has 'predict', which counts in .* kinfed.methods.Predicts only"):
        model_for(Sharp(), module())

    class Half(Sharp, Predicts):
        pass

    with pytest.raises(TypeError, match=r"abstract method '?export"):
        Half()
