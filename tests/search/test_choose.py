"""kinfed.choose: the same choice whatever happens on the way, and test examples at the end only."""

import json

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from kinfed import (
    SGD,
    Execution,
    FedAvg,
    Federation,
    Forecasting,
    Quantiles,
    Regression,
    Split,
    Training,
    UsageError,
    choose,
    fit,
)
from kinfed.core.engine import Rounds
from kinfed.data.federation import take_fold
from kinfed.errors import explain
from kinfed.methods import FedAGHN, FedRep
from kinfed.methods.solved.partial_pooling import PartialPooling
from kinfed.runs.config.experiment import default_model
from kinfed.search import choose as choose_module
from kinfed.search.arena import Arena
from kinfed.search.choose import candidate_models, standard_forms

METHODS = ("fedrep", "cfl")


def federation(split=None, noise=0.0, seed=0):
    """Six clients in two groups with opposite answers."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(240, 3, generator=draw)
    client = torch.arange(240) % 6
    y = ((x @ torch.tensor([1.0, -1.0, 0.5])) * (1 - 2 * (client % 2)) > 0).long()
    flipped = torch.rand(240, generator=draw) < noise
    return Federation.from_arrays(x, torch.where(flipped, 1 - y, y), client, split=split)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def chosen(data=None, module=None, **how):
    how = {"rounds": 8, "methods": METHODS, "budget": 80} | how
    return choose(data or federation(), module or network(), **how)


def test_it_finds_a_method_that_beats_one_model_for_all():
    choice = chosen()
    assert choice.winner.candidate.method_name != "fedavg"
    kin, shared = (run.history.test(run.history.chosen).mean() for run in (choice.run, choice.runs["fedavg"]))
    assert kin >= shared + 0.2
    assert choice.trained <= choice.budget == 80
    assert set(choice.answers) == {"0", "1", "2", "3", "4", "5"}
    model = choice.load_model("3")
    kept = {"kin": choice.run, "local": choice.runs["local"], "fedavg": choice.runs["fedavg"]}[choice.answers["3"]]
    x = torch.randn(5, 3)
    assert torch.equal(model(x), kept.model("3")(x))


def test_the_same_request_gives_the_same_choice_to_the_bit():
    one, two = chosen(), chosen()
    assert one.to_dict() == two.to_dict()
    assert torch.equal(one.run.history.models["theta"], two.run.history.models["theta"])


def test_test_examples_do_not_matter_to_the_race():
    data = federation()
    other = federation()
    for rows in other.rows["test"]:
        other.y[rows] = 1 - other.y[rows]
    one, two = chosen(data), chosen(other)
    assert [row for row in one.ranking()] == [row for row in two.ranking()]
    assert one.verdict != two.verdict


def test_an_interrupted_choice_goes_on_to_the_same_end(tmp_path):
    rounds = []

    def stop(history, count):
        rounds.append(history.cost.done)
        if len(rounds) == 30:
            raise KeyboardInterrupt

    whole = chosen(folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        chosen(folder=tmp_path / "part", execution=Execution(progress=stop))
    before = len(rounds)
    again = chosen(folder=tmp_path / "part", execution=Execution(progress=lambda *_: rounds.append(0)))
    assert len(rounds) - before == whole.trained - 30  # what had been trained was kept
    assert again.to_dict() == whole.to_dict()
    assert torch.equal(again.run.history.models["theta"], whole.run.history.models["theta"])


def test_a_folder_goes_on_with_its_own_request_only(tmp_path):
    chosen(folder=tmp_path)
    with pytest.raises(UsageError, match="was begun with another 'budget'; repeat that request"):
        chosen(folder=tmp_path, budget=72)
    for other in (
        {"methods": ("fedrep",)},
        {"training": Training(epochs=1)},
        {"methods": (FedRep(head_epochs=2), "cfl")},
    ):
        with pytest.raises(UsageError, match="was begun with another 'candidates'"):
            chosen(folder=tmp_path, **other)
    with pytest.raises(UsageError, match="was begun with another 'data'"):
        chosen(federation(seed=1), folder=tmp_path)


def test_a_time_becomes_a_number_of_rounds_once(tmp_path):
    first = chosen(folder=tmp_path, budget="10s")
    kept = json.loads((tmp_path / "budget.json").read_text())
    assert kept["terms"]["budget"] == "10s"
    assert kept["budget"] == first.budget >= first.trained
    kept["budget"] = first.budget  # whatever another machine would have measured
    assert chosen(folder=tmp_path, budget="10s").to_dict() == first.to_dict()


def test_several_seeds_validate_on_other_examples_and_test_on_the_same(tmp_path):
    choice = chosen(seeds=2, budget=160, folder=tmp_path)
    assert choice.winner.values.shape == (2, 6)
    assert (tmp_path / "fedrep,lr=0.1" / "fold-1" / "checkpoint.safetensors").exists()
    data = federation()
    for fold in range(4):
        folded = take_fold(data, fold)
        for split in ("train", "validation", "test"):
            assert all(len(a) == len(b) for a, b in zip(folded.rows[split], data.rows[split], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(folded.rows["test"], data.rows["test"], strict=True))
        if fold:
            both = zip(folded.rows["validation"], data.rows["validation"], strict=True)
            assert not any(torch.isin(a, b).any() for a, b in both)


def test_a_method_with_settings_of_ones_own_is_a_candidate_and_so_are_its_rates():
    choice = chosen(methods=[FedAGHN(sharpness=1.0), FedAGHN()], training=Training(optimiser=SGD(0.2)))
    names = {one.candidate.name for one in choice.standings}
    known = {"fedaghn,lr=0.2", "fedaghn,sharpness=1.0,lr=0.2", "fedaghn,lr=0.6", "local,lr=0.0666667", "fedavg,lr=0.2"}
    assert known <= names


def test_a_candidate_that_diverges_is_out_and_named():
    rows = {row["candidate"]: row for row in chosen(methods=(Broken(),)).ranking()}
    assert "round 2: the server's state holds NaN" in rows["broken,lr=0.1"]["problem"]
    assert rows["local,lr=0.1"]["rounds"] == 8


def test_a_solved_model_is_the_same_whatever_the_rounds_and_the_budget_of_a_race():
    """No round of a solver is selected on validation, so a short race with few candidates has the same answer."""
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(90, 3, generator=draw), torch.arange(90) % 9
    data = Federation.from_arrays(x, x[:, 0] + client / 9 + torch.randn(90, generator=draw), client)
    thetas, rounds = [], set()
    for count, budget in ((2, 12), (20, 400)):
        choice = choose(data, rounds=count, budget=budget, methods=["kin"], refit=True)
        standing = next(row for row in choice.standings if row.candidate.name == "partial-pooling,linear")
        arena_run = fit(PartialPooling(), data, default_model(data, "linear"), rounds=20)
        rounds.add(standing.trained)
        thetas.append(arena_run.theta(position=0))
        assert arena_run.history.cost.done == standing.trained < 20  # it has converged
    assert torch.equal(*thetas)
    assert len(rounds) == 1


def test_trees_are_chosen_where_targets_jump_and_leave_early_where_they_do_not(monkeypatch):
    """Targets rise in one corner alone, which is no sum of curves; a line needs no tree."""
    monkeypatch.setattr("kinfed.search.choose.GROWING", Rounds(107, evaluate_every=10, patience=0.5))
    draw = torch.Generator().manual_seed(0)
    x, client = torch.rand(600, 2, generator=draw), torch.arange(600) % 6
    noise = 0.1 * torch.randn(600, generator=draw)
    corner = 2.0 * (x > 0.5).all(1) + client / 6 + noise
    how = {"budget": 600, "methods": ["fedavg-ft"], "rounds": 4, "training": Training(batch=50)}
    jumps = choose(Federation.from_arrays(x, corner, client), refit=True, **how)
    name = "personal-boosting,trees"
    assert jumps.winner.candidate.name == name
    trees = jumps.winner.trained
    assert trees > 60  # it went on after it had been compared
    assert jumps.refits["kin"].history.cost.done == jumps.run.history.select("mixed") + 1  # as many as validation chose
    line = choose(Federation.from_arrays(x, x.sum(1) + client / 6 + noise, client), **how)
    assert line.winner.candidate.method_name == "partial-pooling"
    assert next(row for row in line.standings if row.candidate.name == name).trained < trees


def test_trees_stay_out_where_examples_are_no_rows_or_too_many_for_a_moment(monkeypatch):
    x, client = torch.randn(60, 3), torch.arange(60) % 3
    rows = Federation.from_arrays(x, x[:, 0], client)
    assert "trees" in candidate_models(rows)
    assert "trees" not in candidate_models(Federation.from_arrays(x[:, None], x[:, 0], client))
    monkeypatch.setattr("kinfed.search.choose.ROWS", 20)
    assert "trees" not in candidate_models(rows)


@pytest.mark.parametrize("failing", ["cfl", "fedavg", "local"])
def test_whatever_a_candidate_raises_is_its_own_failure(failing, monkeypatch, caplog):
    def train(arena, candidate, fold, until, whole=Arena.train):
        if candidate.method_name == failing:
            raise ValueError("the matrix\nis not finite")
        return whole(arena, candidate, fold, until)

    monkeypatch.setattr(Arena, "train", train)
    with caplog.at_level("DEBUG", "kinfed"):
        choice = chosen()
    rows = {row["candidate"]: row for row in choice.ranking()}
    assert {name.partition(",")[0] for name, row in rows.items() if "unexpected" in row.get("problem", "")} == {failing}
    assert "in train" in caplog.text  # the log says where, for --debug
    assert choice.winner.candidate.method_name != failing
    missing = [] if failing == "cfl" else [failing]
    assert [name for name in ("local", "fedavg") if name not in choice.runs] == missing
    assert choice.verdict.over.keys() == {"alone", "pooled"}  # standard models remain, whatever fails
    assert [problem.partition(":")[0] for problem in choice.problems] == [
        f"{one} failed at every rate" for one in missing
    ]
    assert len(choice.answers) == 6
    choice.load_model("3")


def test_a_winner_that_fails_at_the_end_makes_room_for_the_next(monkeypatch):
    first = chosen().winner.candidate

    def train(arena, candidate, fold, until, whole=Arena.train):
        if candidate == first and not until:
            raise ValueError("it cannot be scored")
        return whole(arena, candidate, fold, until)

    monkeypatch.setattr(Arena, "train", train)
    choice = chosen()
    assert choice.winner.candidate != first
    assert "it cannot be scored" in next(one.problem for one in choice.standings if one.candidate == first)


def test_scores_that_cannot_be_compared_leave_the_choice_without_a_verdict(monkeypatch):
    monkeypatch.setattr(choose_module, "verdict", lambda *_, **__: 1 / 0)
    choice = chosen()
    assert choice.verdict is None
    assert choice.problems == [f"there is no verdict: {explain(ZeroDivisionError('division by zero'))[1]}"]
    json.dumps(choice.to_dict())


class Broken(FedAvg):
    """Ends in its second round."""

    def aggregate(self, roster, server, cohort, uploads):
        return tree_map(lambda t: t / (1 - roster.round), super().aggregate(roster, server, cohort, uploads))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budget": 10}, "a budget of 10 is too short .*: it takes 24 training rounds"),
        ({"budget": "soon"}, "a time such as 90s, 5m or 1h; got 'soon'"),
        ({"methods": ("fedagnh",)}, "there is no method 'fedagnh'; did you mean 'fedaghn'"),
        ({"methods": (FedAGHN(feedback="test"),)}, "fedaghn cannot be chosen fairly"),
        ({"methods": "fedavg"}, "methods is a list of names"),
        ({"methods": []}, "methods is a list of names"),
        ({"seeds": 0}, "seeds counts how often .* from 1; got 0"),
        ({"round": 3}, "choose takes no 'round'; did you mean 'rounds'"),
        ({"data": federation(split=Split(0.2, 0.0))}, "no client has any; set federation.split.validation"),
    ],
)
def test_a_request_that_cannot_work_is_one_line(wrong, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        chosen(folder=tmp_path / "out", **wrong)
    assert not (tmp_path / "out" / "budget.json").exists()


class Ordered(Regression):
    """Scored by what a single example has no score of."""

    metric = "spread"

    def score(self, outputs, y, weight):
        scores = super().score(outputs, y, weight)
        return scores | {"spread": scores["mse"] / (weight.sum() - 1)}


def test_clients_are_compared_where_examples_have_no_scores():
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(240, 3, generator=draw), torch.arange(240) % 6
    y = (x @ torch.tensor([1.0, -1.0, 0.5])) * (1 - 2 * (client % 2))
    choice = chosen(Federation.from_arrays(x, y, client, task=Ordered()), module=nn.Linear(3, 1))
    assert set(choice.answers.values()) == {"kin"}
    means = [run.history.test(run.history.chosen).double().mean() for run in (choice.run, choice.runs["local"])]
    assert choice.verdict.over["alone"].mean == pytest.approx(float(means[1] - means[0]))
    assert len(choice.verdict.undecided) == 6


def test_a_race_goes_on_with_the_model_that_it_began_with(tmp_path):
    chosen(folder=tmp_path)
    other = nn.Sequential(*network()[:1], nn.Tanh(), *network()[2:])  # as large, with the same initial values
    for module in (other, nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))):
        with pytest.raises(UsageError, match="was begun with another 'model'"):
            chosen(folder=tmp_path, module=module)


def test_solved_models_are_compared_on_more_draws_where_one_of_them_is_ahead():
    """Lines with slopes that differ a little: partial pooling wins."""
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(240, 3, generator=draw), torch.arange(240) % 8
    slopes = torch.tensor([1.0, -1.0, 0.5]) + 0.3 * torch.randn(8, 3, generator=draw)
    y = (x * slopes[client]).sum(1, keepdim=True) + 0.5 * torch.randn(240, 1, generator=draw)
    choice = choose(Federation.from_arrays(x, y, client), rounds=8, methods=["kin"], budget=300)
    assert choice.winner.candidate.is_solved
    assert choice.trained > sum(row["rounds"] for row in choice.ranking())


def test_a_ridge_of_each_clients_own_is_kept_where_nothing_is_shown_to_be_better(tmp_path):
    """Lines of 200 rows that have nothing in common: pooling them is as good, and not needed."""
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(1600, 3, generator=draw), torch.arange(1600) % 8
    slopes = 3 * torch.randn(8, 3, generator=draw)
    y = (x * slopes[client]).sum(1, keepdim=True) + 0.5 * torch.randn(1600, 1, generator=draw)
    how = {"rounds": 4, "methods": ["kin"], "budget": 100, "refit": True}
    choice = choose(Federation.from_arrays(x, y, client), folder=tmp_path, **how)
    assert choice.winner.candidate.title == "a ridge for each client"
    assert choice.verdict.baselines["alone"] == choice.winner.candidate.title
    assert abs(choice.verdict.over["alone"].mean) < 1e-5
    assert choice.verdict.sentence.startswith("Learning from others is not worth it here: no way was clearly better ")
    bar = next(row for row in choice.standings if row.candidate.is_solved and not row.candidate.is_standard)
    assert not choice.winner.is_clearly_above(bar)
    assert choice.winner.is_close_to(bar, choose_module.CLOSE)
    assert torch.equal(choice.load_model("3")(x), choice.refits["kin"].model("3")(x))
    again = choose(Federation.from_arrays(x, y, client), folder=tmp_path, **how)
    assert again.to_dict() == choice.to_dict()


def test_pooling_is_kept_where_clients_are_alike_and_a_standard_model_that_fails_is_said(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(480, 3, generator=draw), torch.arange(480) % 8
    y = x.sum(1, keepdim=True) + torch.randn(480, 1, generator=draw)
    how = {"rounds": 4, "methods": ["kin"], "budget": 100}
    assert not choose(Federation.from_arrays(x, y, client), **how).winner.candidate.is_standard

    def train(arena, candidate, fold, until, whole=Arena.train):
        if candidate.is_standard:
            raise ValueError("the matrix\nis singular")
        return whole(arena, candidate, fold, until)

    monkeypatch.setattr(Arena, "train", train)
    monkeypatch.setattr(choose_module, "CLOSE", 1.0)  # so that any of them is preferred
    choice = choose(Federation.from_arrays(x, y, client), **how)
    assert not choice.winner.candidate.is_standard
    (row,) = [row for row in choice.ranking() if row["candidate"].startswith("standard,")]
    assert row["problem"].startswith("unexpected ValueError: the matrix")
    json.dumps(choice.to_dict())


def test_a_ridge_of_each_series_is_what_is_kept_where_nobody_can_learn_from_others():
    draw = torch.Generator().manual_seed(0)
    slopes, client = torch.randn(6, 4, generator=draw), torch.arange(1200) % 6
    x = torch.randn(1200, 4, 1, generator=draw)
    y = (x[..., 0] * slopes[client]).sum(1, keepdim=True) + 0.3 * torch.randn(1200, 1, generator=draw)
    data = Federation.from_arrays(x, y, client, task=Forecasting())
    choice = choose(data, rounds=2, methods=["kin"], budget=60)
    ridge = next(item for item in choice.standard if item.name == "a ridge for each client")
    assert choice.winner.candidate.is_standard
    assert choice.run.by_client.means == pytest.approx(ridge.tested.means, rel=1e-4)
    assert choice.verdict.sentence.startswith("Learning from others is not worth it here")


@pytest.mark.parametrize(("season", "baseline"), [(3, "the last season"), (1, "the last value")])
def test_the_naive_forecast_is_what_is_kept_where_nothing_is_better(season, baseline):
    """A step differs from that of a season before by chance alone, so nothing can be learned."""
    draw = torch.Generator().manual_seed(1)
    client, x = torch.arange(1800) % 6, torch.randn(1800, 4, 1, generator=draw)
    repeated = torch.stack([x[:, 4 - season + step % season, 0] for step in range(2)], 1)  # [n, 2]
    data = Federation.from_arrays(x, repeated + 0.3 * torch.randn(1800, 2, generator=draw), client, task=Forecasting())
    choice = choose(data, rounds=2, methods=["kin"], budget=60, refit=True)
    assert choice.winner.candidate.name == f"standard,repeat,season={season}"
    assert choice.winner.candidate.title == baseline
    naive = next(item for item in choice.standard if item.name == baseline)
    assert choice.run.by_client.means == pytest.approx(naive.tested.means, rel=1e-5)
    torch.testing.assert_close(choice.load_model("3")(x), repeated)
    assert choice.verdict.baselines["alone"] == baseline
    assert choice.verdict.sentence.endswith("the standard models are saved.")


def test_forms_of_standard_models_suit_the_task_and_are_not_too_large(monkeypatch):
    x, client = torch.randn(60, 3), torch.arange(60) % 3
    number, labels = x[:, :1], torch.arange(60) % 3
    assert standard_forms(Federation.from_arrays(x, number, client)) == ("linear", "trees,trees=50,depth=8")
    assert standard_forms(Federation.from_arrays(x, labels, client)) == ("linear", "trees,trees=150,depth=8")
    assert standard_forms(Federation.from_arrays(x, labels % 2, client)) == ("linear", "trees,trees=50,depth=8")
    assert standard_forms(Federation.from_arrays(x[:, None], number, client)) == ()
    windows, steps = x[..., None], x[:, :2]
    naive, smooth = ([f"{kind},season={season}" for season in (1, 2, 3)] for kind in ("repeat", "holt-winters"))
    assert standard_forms(Federation.from_arrays(windows, steps, client, task=Forecasting())) == (
        "linear",
        "changes",
        *naive,
        *smooth,
    )
    dated = torch.cat([windows, (torch.arange(60) % 4).float().view(60, 1, 1).expand(60, 3, 1)], 2)
    data = Federation.from_arrays(dated, steps, client, task=Forecasting())
    assert standard_forms(data)[-2:] == ("holt-winters,season=3", "calendar-means,times=4")
    monkeypatch.setattr(choose_module, "LEAVES", 3 * 4 * 2 - 1)  # clients, times and steps
    assert standard_forms(data)[-1] == "holt-winters,season=3"
    assert standard_forms(Federation.from_arrays(windows, steps, client, task=Quantiles())) == ()
    monkeypatch.setattr(choose_module, "LEAVES", 1000)
    assert standard_forms(Federation.from_arrays(x, number, client)) == ("linear",)
