"""Training under privacy: what a row can move, the noise around it, the batches, and the ledger."""

import copy
import re
from pathlib import Path

import pytest
import torch

import kinfed
from kinfed.core.batches import Batch, Draw
from kinfed.core.client import Trainers
from kinfed.core.model import Model
from kinfed.core.private.private_client import PrivateClient, StepCounter
from kinfed.core.private.private_training import SecretLots, SeededLots, sample_batches, sum_clipped
from kinfed.methods import METHODS
from kinfed.methods.parts.graph_hypernetwork import MLP
from kinfed.methods.solved import SOLVED
from kinfed.simulation.simulation import Simulation

pytest.importorskip("dp_accounting")
PRIVACY = kinfed.Privacy(epsilon=8.0)
SIZES = (70, 41, 41, 23)
PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
ABLE, REFUSED = (
    {*re.findall(r"`([\w-]+)`", line)} for line in PAGE.splitlines() if line.startswith(("| run |", "| refused, as"))
)


def federation(sizes=SIZES, seed=0):
    draw = torch.Generator().manual_seed(seed)
    client = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x = torch.randn(len(client), 4, generator=draw)
    return kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)


def module():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2))


def training(**settings):
    return kinfed.Training(**{"epochs": 1, "batch": 8, "privacy": PRIVACY, **settings})


def train(method=None, executor="loop", data=None, net=None, rounds=3, **how):
    how.setdefault("training", training())
    return kinfed.fit(
        method or kinfed.methods.FedRep(head_epochs=1),
        data or federation(),
        copy.deepcopy(net or module()),
        rounds=rounds,
        execution=kinfed.Execution(executor=executor),
        **how,
    )


def one_client(net, x, batch=8, **settings):
    """A simulation of one client whose every row is for training, and that client."""
    rows = {"train": [torch.arange(len(x))], "validation": [torch.arange(1)], "test": [torch.arange(1)]}
    data = kinfed.Federation(x, torch.zeros(len(x)), rows, kinfed.Regression(), ["a"])
    fleet = Simulation(
        data, Model(net), kinfed.FedAvg(), training(batch=batch, **settings), execution=kinfed.Execution("loop")
    )
    client = fleet.clients.get_client(0, 0, fleet.model, fleet.training, Trainers(general=StepCounter()), None)
    return fleet, PrivateClient(client, "a method", StepCounter())


def test_no_row_moves_the_sum_by_more_than_the_clip():
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [9.0, 9.0], [torch.inf, 0.0], [torch.nan, 1.0], [2e25, 0.0]])
    batch = Batch(rows, rows, weight, None, torch.tensor(0))
    assert torch.allclose(sum_clipped([rows], batch, 1.0), torch.tensor([0.9, 1.2]))
    assert torch.allclose(sum_clipped([rows[:, :1], rows[:, 1:]], batch, 10.0), torch.tensor([3.3, 4.4]))
    twice = batch._replace(importance=torch.full((6,), 2.0))  # multiplied inside the clip
    assert torch.allclose(sum_clipped([rows], twice, 1.0), torch.tensor([0.6 + 0.6, 0.8 + 0.8]))


def test_a_step_is_the_clipped_sum_over_the_expected_size_and_noise():
    """By hand: a model w x without noise, squared error, all rows in the batch; gradients 2 w x^2 clipped to 1."""
    net = torch.nn.Linear(1, 1, bias=False)
    net.weight.data.fill_(0.5)
    x = torch.tensor([[0.1], [0.5], [4.0], [100.0]])
    fleet, _ = one_client(net, x, batch=4, optimiser=kinfed.SGD(0.2))
    fleet.budget.lots = lots = SeededLots()
    lots.draw_normal = lambda key, like: torch.full_like(like, 3.0)
    _, upload = fleet.train(
        0, torch.tensor([0]), fleet.method.send(fleet.roster(), fleet.method.start(fleet.roster()), torch.tensor([0]))
    )
    noise = float(fleet.clients.noise[0])
    expected = 0.5 - 0.2 * (0.01 + 0.25 + 1 + 1 + 3 * noise) / 4
    assert float(upload.theta[0, 0]) == pytest.approx(expected, rel=1e-5)


def test_the_noise_is_as_strong_as_the_budget_asks():
    x = torch.zeros(40, 3000)  # rows without a gradient
    fleet, _ = one_client(torch.nn.Linear(3000, 1, bias=False), x, optimiser=kinfed.SGD(1.0))
    roster = fleet.roster()
    sent = fleet.method.send(roster, fleet.method.start(roster), torch.tensor([0]))
    _, upload = fleet.train(0, torch.tensor([0]), sent)
    moved = (upload.theta[0] - fleet.model.theta) * 8  # times the expected size; five steps
    assert float(moved.std()) == pytest.approx(float(fleet.clients.noise[0]) * 5**0.5, rel=0.05)
    assert abs(float(moved.mean())) < 0.1 * float(moved.std())


def test_every_row_has_the_same_chance_in_every_step():
    x = torch.arange(40.0)[:, None]
    _, client = one_client(torch.nn.Linear(1, 1), x)
    counts, sizes = torch.zeros(40), []
    for batch in sample_batches(client, Draw(0, 1, 2000, 8), SeededLots()):
        chosen = batch.x[batch.weight > 0, 0].long()
        counts[chosen] += 1
        sizes.append(len(chosen))
        assert len(chosen.unique()) == len(chosen)
    assert ((counts / 2000 - 0.2).abs() < 4.5 * (0.2 * 0.8 / 2000) ** 0.5).all()
    sizes = torch.tensor(sizes, dtype=torch.float64)
    assert float(sizes.mean()) == pytest.approx(8, abs=0.25)
    assert float(sizes.var()) == pytest.approx(40 * 0.2 * 0.8, rel=0.1)


def test_a_batch_above_the_rows_takes_all_of_them():
    _, client = one_client(torch.nn.Linear(1, 1), torch.arange(5.0)[:, None])
    for batch in sample_batches(client, Draw(0, 3, None, 8), SeededLots()):
        assert batch.weight.sum() == 5


def test_executors_agree_and_a_seed_fixes_every_draw():
    loop, vmap = train(), train(executor="vmap")
    for name, values in loop.history.models.items():
        torch.testing.assert_close(values, vmap.history.models[name], rtol=1e-4, atol=1e-5)
    again, other = train(), train(seed=1)
    assert torch.equal(loop.history.models["theta"], again.history.models["theta"])
    assert not torch.equal(loop.history.models["theta"], other.history.models["theta"])
    assert loop.privacy == vmap.privacy


def test_changing_a_row_moves_a_step_by_no_more_than_two_clips():
    data, other = federation(), federation()
    for part in (data, other):
        row = int(part.rows["train"][0][0])
    other.x[row] = 1e4
    settings = training(steps=1, epochs=1, batch=70, optimiser=kinfed.SGD(1.0))
    before, after = (train(kinfed.FedAvg(), "loop", part, rounds=1, training=settings) for part in (data, other))
    sizes = data.sizes.double()
    bound = 2 * PRIVACY.clip / float(sizes[0]) * float(sizes[0] / sizes.sum())  # in the mean by size of all
    moved = before.history.models["theta"][0] - after.history.models["theta"][0]
    assert 0 < float(moved.norm()) <= bound * (1 + 1e-4)


def test_a_run_that_was_paused_goes_on_with_its_noise_and_its_ledger(tmp_path):
    straight = train(rounds=4)
    train(rounds=kinfed.Rounds(4, until=2), folder=tmp_path)
    resumed = train(rounds=4, folder=tmp_path)
    assert torch.equal(straight.history.models["theta"], resumed.history.models["theta"])
    assert straight.privacy == resumed.privacy
    assert resumed.history.cost.taken == [4] * len(SIZES)


def test_another_budget_is_another_run(tmp_path):
    train(rounds=kinfed.Rounds(4, until=2), folder=tmp_path)
    with pytest.raises(kinfed.UsageError, match="began with privacy="):
        train(rounds=4, folder=tmp_path, training=training(privacy=kinfed.Privacy(80.0)))
    with pytest.raises(kinfed.UsageError, match="began with privacy="):
        train(rounds=8, folder=tmp_path)


def test_who_takes_part_less_spends_less():
    run = train(kinfed.FedAvg(), rounds=6, participation=0.5)
    taken, spent = run.history.cost.taken, run.privacy["spent"]
    assert sum(taken) == 12
    assert len({*taken}) > 1
    for i, count in enumerate(taken):
        assert run.privacy["steps"][i] == count * -(-int(run.federation.sizes[i]) // 8)
        assert (spent[i] < PRIVACY.epsilon) if count < 6 else spent[i] == pytest.approx(PRIVACY.epsilon, rel=0.01)
    assert spent[taken.index(min(taken))] < max(spent)


def test_what_uploads_nothing_needs_no_noise():
    private, plain = train(kinfed.Local()), train(kinfed.Local(), training=training(privacy=None))
    assert private.privacy["spent"] == [0.0] * len(SIZES)
    last = plain.history.scores[-1]["own", "test", "accuracy"]
    assert torch.equal(private.history.scores[-1]["own", "test", "accuracy"], last)
    assert private.history.select("own") == 2  # scores select no round


def test_the_page_lists_every_method():
    assert {*METHODS} == (ABLE | REFUSED) - {*SOLVED}
    assert not ABLE & REFUSED


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_trains_by_noised_steps_or_says_what_it_reads(name):
    method = METHODS[name](**({"encoder": MLP()} if name == "panacea" else {}))
    if name in ABLE:
        run = train(method, rounds=2)
        most = max(run.privacy["spent"])
        assert most == 0 if name == "local" else 0.98 * PRIVACY.epsilon < most <= PRIVACY.epsilon
        assert run.history.chosen == run.history.headline
        return
    with pytest.raises(kinfed.UsageError, match="privacy") as problem:
        train(method, rounds=1)
    assert "\n" not in str(problem.value)


class Reads(kinfed.FedAvg):
    """Reads rows outside of `descend`."""

    def train(self, client, state, received):
        client.data  # noqa: B018
        return super().train(client, state, received)


class Varies(kinfed.FedAvg):
    """Takes more steps in later rounds."""

    def train(self, client, state, received):
        for _ in range(client.round + 1):
            received = kinfed.Params(client.descend(received.theta))
        return (), kinfed.methods.AveragedParams(received.theta)


def test_code_of_ones_own_is_held_to_it():
    with pytest.raises(kinfed.UsageError, match=r"Reads reads rows by client\.data"):
        train(Reads())
    with pytest.raises(kinfed.RunError, match="round 2: Varies takes other steps"):
        train(Varies())


class Centred(torch.nn.Module):
    """Takes the mean of a batch away in training."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


@pytest.mark.parametrize(
    ("layer", "why"),
    [(torch.nn.BatchNorm1d(6), "keeps statistics"), (Centred(), "mixes"), (torch.nn.RReLU(), "draws")],
)
def test_models_that_mix_rows_are_refused(layer, why):
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), layer, torch.nn.Linear(6, 2))
    with pytest.raises(kinfed.UsageError, match=why):
        train(kinfed.FedAvg(), net=net)
    train(kinfed.FedAvg(), net=torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2)))


def test_what_goes_by_scores_is_refused():
    with pytest.raises(kinfed.UsageError, match="give a number of rounds"):
        train(kinfed.FedAvg(), rounds="auto")
    with pytest.raises(kinfed.UsageError, match="covers one run"):
        kinfed.choose(federation(), training=training())


def test_secret_numbers_are_normal_and_never_the_same():
    lots, key = SecretLots(), torch.tensor(5)
    numbers = lots.draw_normal(key, torch.zeros(20000))
    assert abs(float(numbers.mean())) < 0.05
    assert float(numbers.std()) == pytest.approx(1, abs=0.03)
    assert float((numbers.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.01)
    assert not torch.equal(numbers, lots.draw_normal(key, torch.zeros(20000)))
    flat = lots.draw_uniform(key, 20000)
    assert float(flat.mean()) == pytest.approx(0.5, abs=0.02)
    assert 0 <= float(flat.min()) < float(flat.max()) < 1


def test_a_summary_says_what_was_spent(tmp_path):
    from kinfed.core.summary import describe_privacy, parse_summary

    kinfed.save(train(rounds=2), tmp_path / "run")
    summary = parse_summary((tmp_path / "run" / "summary.json").read_text(), "it")
    assert summary.privacy["epsilon"] == 8
    assert len(summary.privacy["spent"]) == len(SIZES)
    assert describe_privacy(summary).startswith(f"{max(summary.privacy['spent']):.2f} spent of epsilon 8 at delta")
