"""What a method gets of uploads that are declared as means or sums: these, and no single one."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import kinfed
from kinfed.core.method import AveragedParams, Params
from kinfed.core.mixins import reduce_uploads
from kinfed.core.trees import Averaged, ModelOf, PerClient, Reduction, Summed, read_reductions
from kinfed.methods import Averages, Averaging, FedAvg, FedRep, Scaffold
from kinfed.simulation.execution import Execution

THREE = torch.tensor([0, 1, 2])


class Parts(NamedTuple):
    """Of several kinds, nested."""

    mean: tuple[Averaged, dict[str, Averaged]]
    total: Summed
    single: PerClient
    plain: torch.Tensor


class Two(NamedTuple):
    """Two answers for one field."""

    theta: tuple[Averaged, Summed]


def parts():
    table = torch.arange(12.0).view(3, 2, 2)
    return Parts((table, {"a": table[:, 0]}), table, table, table)


def test_only_what_is_declared_is_reduced(roster):
    known = roster(3, sizes=[1, 1, 2], size=4)
    given = reduce_uploads(FedAvg(), known, THREE, parts())
    table = parts().single
    mean = (table[0] + table[1] + 2 * table[2]) / 4
    assert torch.equal(given.mean[0], mean.to(table.dtype))
    assert torch.equal(given.mean[1]["a"], mean[0])
    assert torch.equal(given.total, table.sum(0))
    assert torch.equal(given.single, table)
    assert torch.equal(given.plain, table)
    kinds = read_reductions(parts())
    assert kinds == Parts((Reduction.MEAN, {"a": Reduction.MEAN}), Reduction.SUM, Reduction.NONE, Reduction.NONE)
    untouched = Params(table)
    assert reduce_uploads(FedAvg(), known, THREE, untouched) is untouched


def test_a_field_is_a_mean_or_a_sum():
    with pytest.raises(kinfed.UsageError, match=r"Two\.theta declares several"):
        read_reductions(Two((torch.zeros(2), torch.zeros(2))))


def test_weights_are_the_methods_own(roster):
    known, theta = roster(3, sizes=[1, 1, 2], size=4), torch.tensor([[0.0], [4.0], [6.0]])
    for method, mean in ((FedAvg(), 4.0), (FedAvg(uniform=True), 10 / 3), (Scaffold(), 10 / 3)):
        assert float(reduce_uploads(method, known, THREE, AveragedParams(theta)).theta) == pytest.approx(mean)


@dataclass(frozen=True)
class Spy(Averaging):
    """Keeps the shapes of all that reaches its server."""

    def train(self, client, state, received):
        return (), AveragedParams(client.descend(received.theta))

    def personalise(self, client, state, received):
        return {"shared": received}

    def aggregate(self, roster, server, cohort, uploads):
        SEEN.append(uploads)
        return super().aggregate(roster, server, cohort, uploads)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        SEEN.append(uploads)
        return super().diagnostics(roster, server, cohort, sent, uploads)


SEEN = []


def federation():
    torch.manual_seed(0)
    x, client = torch.randn(120, 5), torch.arange(120) % 4
    return kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)


@pytest.mark.parametrize("settings", [{}, {"personal": ("bias",)}])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_no_upload_reaches_a_method_that_declares_a_mean(settings, executor):
    SEEN.clear()
    run = kinfed.fit(Spy(**settings), federation(), torch.nn.Linear(5, 2), rounds=2, execution=Execution(executor))
    assert len(SEEN) == 4
    assert all(uploads.theta.ndim == 1 for uploads in SEEN)
    updates = run.history.diagnostics[0]["update"]  # noted by who looks on
    assert updates.shape == (4,)
    assert (updates > 0).all()


def test_lengths_of_updates_are_those_of_what_travels():
    """As a method that gets each upload would say."""

    class Open(FedRep):
        def aggregate(self, roster, server, cohort, uploads):
            return super().aggregate(roster, server, cohort, reduce_uploads(self, roster, cohort, Closed(*uploads)))

        def train(self, client, state, received):
            state, upload = super().train(client, state, received)
            return state, Params(upload.theta)

    class Closed(NamedTuple):
        theta: ModelOf[Averaged]

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    both = [kinfed.fit(method(), federation(), module, rounds=2) for method in (FedRep, Open)]
    first, second = (run.history.diagnostics[0]["update"] for run in both)
    assert torch.equal(first, second)
    assert torch.equal(both[0].history.models["theta"], both[1].history.models["theta"])


class Undeclared(FedAvg):
    """Uploads as before means were declared."""

    def train(self, client, state, received):
        return (), Params(client.descend(received.theta))


class Weighty(kinfed.methods.Local):
    """Has weights that nothing asks for."""

    def train(self, client, state, received):
        return state, AveragedParams(client.descend(state.theta))

    def weights(self, roster, cohort):
        return roster.sizes[cohort]


def test_what_is_missing_is_said():
    with pytest.raises(kinfed.UsageError, match=r"Undeclared uses the mean .*: kinfed.methods.AveragedParams\(theta\)"):
        kinfed.fit(Undeclared(), federation(), torch.nn.Linear(5, 2), rounds=1)
    with pytest.raises(kinfed.UsageError, match=r"Weighty has 'weights', .* kinfed\.methods\.Averages only"):
        kinfed.fit(Weighty(), federation(), torch.nn.Linear(5, 2), rounds=1)
    assert issubclass(Averaging, Averages)
