"""Privacy of whole clients: what one can move of a sum, the noise around it, its price, and who is refused."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kinfed
from kinfed.cli import main
from kinfed.core.method import AveragedParams, SharedParams
from kinfed.core.model import Model
from kinfed.core.private import private_sums
from kinfed.core.private.private_sums import find_noise, sum_privately
from kinfed.methods import METHODS
from kinfed.methods.fedem import Server, Upload
from kinfed.methods.parts.graph_hypernetwork import MLP
from kinfed.simulation.attacks.poison import Poison
from kinfed.simulation.simulation import Simulation
from kinfed_flower import plan

accounting = pytest.importorskip("dp_accounting")
PRIVACY = kinfed.Privacy(epsilon=8.0, unit="client")
PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
ABLE = {*re.findall(r"`([\w-]+)`", next(line for line in PAGE.splitlines() if line.startswith("| run with clients |")))}
EVERYONE = torch.arange(4)


def federation(clients=4, rows=20, shift=0.0):
    """The first client's rows are moved by a shift."""
    draw = torch.Generator().manual_seed(0)
    client = torch.arange(clients * rows) % clients
    x = torch.randn(len(client), 5, generator=draw)
    y = (x[:, 0] > 0).long()
    x[client == 0] += shift
    return kinfed.Federation.from_arrays(x, y, client)


def module(*layers):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), *layers, torch.nn.ReLU(), torch.nn.Linear(4, 2))


def train(method=None, data=None, net=None, rounds=3, privacy=PRIVACY, executor="loop", **how):
    training = kinfed.Training(epochs=1, privacy=privacy)
    return kinfed.fit(
        method or kinfed.FedAvg(),
        data or federation(),
        copy.deepcopy(net or module()),
        rounds=rounds,
        training=training,
        execution=kinfed.Execution(executor=executor),
        **how,
    )


def roster(clip=1.0):
    """Of four clients, and a model of two numbers."""
    training = kinfed.Training(privacy=kinfed.Privacy(8.0, unit="client", clip=clip))
    net, data = torch.nn.Linear(5, 1, bias=False), federation()
    fleet = Simulation(data, Model(net), kinfed.FedAvg(), training)
    return replace(fleet.roster(), rounds=3)


@pytest.fixture
def quiet(monkeypatch):
    """Sums without their noise."""
    monkeypatch.setattr(private_sums, "normal", lambda draw, like: torch.zeros_like(like))


def test_a_mean_is_what_was_sent_and_the_clipped_changes(quiet):
    """By hand: changes of length 5, 0.5, NaN and 1e30 from (1, 1) are (0.6, 0.8), (0.3, 0.4), 0 and 0."""
    changes = torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.nan, 1.0], [1e30, 0.0]])
    sent = SharedParams(torch.ones(2))
    given = sum_privately(kinfed.FedAvg(), roster(), EVERYONE, sent, AveragedParams(1 + changes))
    assert torch.allclose(given.theta, 1 + torch.tensor([0.9, 1.2]) / 4)


def test_all_that_a_client_sends_is_clipped_as_one(quiet):
    """By hand: (3, 4) of one tensor and (12,) of another are 13 long together."""
    theta, others = torch.zeros(4, 2), torch.zeros(4, 1, 1)
    theta[0], others[0] = torch.tensor([3.0, 4.0]), 12.0
    given = sum_privately(
        METHODS["fedem"](), roster(), EVERYONE, Server(torch.zeros(2), torch.zeros(1, 1)), Upload(theta, others)
    )
    assert torch.allclose(given.theta, torch.tensor([3.0, 4.0]) / 13 / 4)
    assert torch.allclose(given.others, torch.tensor([[12.0]]) / 13 / 4)


def test_the_noise_is_as_strong_as_the_budget_asks():
    known, sent = roster(clip=0.5), SharedParams(torch.zeros(20_000))
    given = sum_privately(kinfed.FedAvg(), known, EVERYONE, sent, AveragedParams(torch.zeros(4, 20_000)))
    deviation = find_noise(known.training.privacy, 3) * 0.5 / 4
    assert float(given.theta.std()) == pytest.approx(deviation, rel=0.03)
    assert abs(float(given.theta.mean())) < 4 * deviation / 20_000**0.5
    other = sum_privately(
        kinfed.FedAvg(), replace(known, round=1), EVERYONE, sent, AveragedParams(torch.zeros(4, 20_000))
    )
    assert abs(float(torch.corrcoef(torch.stack([given.theta, other.theta]))[0, 1])) < 0.03


def test_no_client_moves_the_shared_model_by_more_than_two_clips():
    for executor in ("loop", "vmap"):
        models = [train(data=federation(shift=shift), rounds=1, executor=executor) for shift in (0.0, 1e4)]
        first, second = (run.history.models["theta"][0] for run in models)
        assert 0 < float((first - second).norm()) <= 2 * PRIVACY.clip / 4 * (1 + 1e-4)


def test_an_attacker_moves_it_by_no_more_either():
    honest = train(rounds=1)
    attacked = train(rounds=1, attack=Poison(share=0.25, factor=1e6))
    first, second = (run.history.models["theta"][0] for run in (honest, attacked))
    assert float((first - second).norm()) <= 2 * PRIVACY.clip / 4 * (1 + 1e-4)


@pytest.mark.parametrize(("epsilon", "rounds"), [(8.0, 3), (1.0, 10)])
def test_the_price_is_that_of_the_gaussian_mechanism_once_a_round(epsilon, rounds):
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    run = train(privacy=kinfed.Privacy(epsilon, unit="client"), rounds=rounds)
    ledger = PLDAccountant(value_discretization_interval=min(1e-3, 1e-3 * epsilon))
    event = accounting.GaussianDpEvent(run.privacy["noise"][0])
    ledger.compose(accounting.SelfComposedDpEvent(event, rounds))
    assert run.privacy["spent"] == [pytest.approx(ledger.get_epsilon(1e-5), rel=1e-6)] * 4
    assert 0.98 * epsilon < run.privacy["spent"][0] <= epsilon
    assert run.privacy["steps"] == [rounds] * 4


def test_who_takes_part_less_spends_less_and_a_draw_makes_no_round_cheaper():
    run = train(rounds=6, participation=0.5)
    assert run.privacy["noise"][0] == train(rounds=6).privacy["noise"][0]
    spent = dict(zip(run.history.cost.taken, run.privacy["spent"], strict=True))
    assert sorted(spent.values()) == [spent[count] for count in sorted(spent)]
    assert max(spent.values()) <= 8.0


def test_executors_agree_and_a_seed_fixes_every_draw(tmp_path):
    loop, vmap, again = train(), train(executor="vmap"), train()
    torch.testing.assert_close(loop.history.models["theta"], vmap.history.models["theta"], rtol=1e-4, atol=1e-5)
    assert torch.equal(loop.history.models["theta"], again.history.models["theta"])
    assert not torch.equal(loop.history.models["theta"], train(seed=1).history.models["theta"])
    train(rounds=kinfed.Rounds(3, until=1), folder=tmp_path)
    resumed = train(folder=tmp_path)
    assert torch.equal(loop.history.models["theta"], resumed.history.models["theta"])
    assert resumed.privacy == loop.privacy


def test_nothing_of_single_uploads_is_recorded():
    assert "update" in train(privacy=None).history.diagnostics[0]
    assert not train().history.diagnostics[0]


def test_clients_weigh_the_same():
    data = kinfed.Federation.from_arrays(
        torch.randn(60, 5), torch.arange(60) % 2, torch.arange(60) // 20 * (torch.arange(60) % 3 > 0)
    )
    relation = train(data=data).history.relations[0]
    assert torch.equal(relation, torch.full_like(relation, 1 / len(data.names)))


def test_the_page_lists_every_method_that_runs():
    assert {*METHODS} >= ABLE - {"private-pooling", "private-kin"}  # for tables, with tests of their own


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_runs_or_says_what_of_each_upload_it_uses(name):
    method = METHODS[name](**({"encoder": MLP()} if name == "panacea" else {}))
    if name in ABLE:
        run = train(method, rounds=2)
        most = max(run.privacy["spent"])
        assert most == 0 if name == "local" else 0.98 * PRIVACY.epsilon < most <= PRIVACY.epsilon
        assert run.history.chosen == run.history.headline
        return
    data = federation()
    if name in ("partial-pooling", "personal-boosting"):
        data = kinfed.Federation.from_arrays(data.x, data.x[:, :1].clone(), torch.arange(80) % 4)
    with pytest.raises(kinfed.UsageError) as problem:
        train(method, data=data, rounds=1)
    assert "\n" not in str(problem.value)


def test_running_statistics_stay_at_home_or_are_refused():
    with pytest.raises(kinfed.UsageError, match=r"running statistics, .* method\.bn"):
        train(net=module(torch.nn.BatchNorm1d(4)))
    train(kinfed.FedAvg(bn="local"), net=module(torch.nn.BatchNorm1d(4)))
    train(kinfed.FedAvg(bn="personal"), net=module(torch.nn.BatchNorm1d(4)))


class Reports(kinfed.FedAvg):
    """Has clients report before the first round."""

    def client_statistics(self, client):
        return client.data.x.mean(0)


class BySize(kinfed.FedAvg):
    """Weighs by sizes, whatever the roster says of weights."""

    def weights(self, roster, cohort):
        return roster.sizes[cohort] + cohort


def test_what_has_no_price_is_refused_in_a_line():
    for method, message in (
        (Reports(), "Reports has each client report"),
        (BySize(), "BySize weights clients unequally"),
    ):
        with pytest.raises(kinfed.UsageError, match=message):
            train(method)
    with pytest.raises(kinfed.UsageError, match=r"privacy\.delta must be below 1 / clients"):
        train(privacy=kinfed.Privacy(8.0, unit="client", delta=0.3))
    with pytest.raises(kinfed.UsageError, match="so small that noise"):
        train(privacy=kinfed.Privacy(1e-5, unit="client"))
    with pytest.raises(kinfed.UsageError, match=r"unit must be one of 'row', 'client'"):
        kinfed.Privacy(8.0, unit="site")
    with pytest.raises(kinfed.UsageError, match=r"privacy\.unit='client' .* a server of sites"):
        plan.resolve({"method": "fedavg", "model": "linear", "privacy": {"epsilon": 8.0, "unit": "client"}})


def test_a_run_says_what_clients_have_spent(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{name},{i},{i % 7}" for name in "abcdef" for i in range(30)]
    Path("table.csv").write_text("\n".join(["who,x,y", *lines]) + "\n")
    arguments = ["table.csv", "--client", "who", "--target", "y", "method=fedavg", "rounds=2"]
    assert main(["run", *arguments, "privacy.epsilon=4", "privacy.unit=client", "--out", "run"]) == 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "spent of epsilon 4 at delta 1e-05 for each client" in shown
