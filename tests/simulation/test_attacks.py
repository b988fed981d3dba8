"""What attackers do, to the number; and what a run says of them."""

import json
import warnings
from dataclasses import replace

import pandas as pd
import pytest
import torch
from kinds import KINDS
from torch import nn
from torch.utils._pytree import tree_map

from kinfed import SGD, Federation, Graph, Training, UsageError, fit
from kinfed.cli import main
from kinfed.core.model import Model
from kinfed.core.summary import list_attackers, score_models
from kinfed.core.tasks import Classification, Regression
from kinfed.methods import METHODS, SFL, FedAMP, FedAvg, FedRep, Local
from kinfed.simulation.attacks import ATTACKS, Backdoor, LabelFlip, Noise, Poison
from kinfed.simulation.attacks.attack import Attack
from kinfed.simulation.attacks.attacked_fleet import AttackedFleet
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

COUNT, SIZE, FOUR = 6, 30, Classification(4)
SEVERAL_MODELS = ("ifca", "private-clusters", "fedfomo", "dpfl")  # methods that send a client more than one


def federation(task=FOUR, order=range(COUNT), seed=0):
    """Six clients named a to f with images [1, 3, 3]."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(COUNT * SIZE, 1, 3, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(4, (COUNT * SIZE,), generator=draw)
    y = y if isinstance(task, Classification) else x.flatten(1).mean(1)
    parts = [torch.arange(i * SIZE, (i + 1) * SIZE).split([20, 4, 6]) for i in order]
    rows = {split: [p[k] for p in parts] for k, split in enumerate(("train", "validation", "test"))}
    return Federation(x, y, rows, task, ["abcdef"[i] for i in order])


def module(norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        middle = [nn.BatchNorm1d(5)] if norm else []
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), *middle, nn.Tanh(), nn.Linear(5, 4)).double()


def fleets(method, attack, norm=False, data=None, seed=3):
    """A fleet of honest clients, the one around it, and what a server needs to know."""
    data = data or federation()
    fleet = Simulation(
        data, Model(module(norm)), method, Training(1, 8, SGD(0.1)), seed=seed, execution=Execution("loop")
    )
    roster = fleet.roster(data.graph)
    attackers = attack.attackers(data.names, seed)
    return fleet, AttackedFleet(fleet, attack, attackers, roster.layout, seed), roster, attackers


def test_attackers_hang_on_names_alone_and_fewer_are_among_more():
    names = [f"client {i}" for i in range(40)]
    few, many = (Attack(share).attackers(names, 5) for share in (0.1, 0.3))
    assert (int(few.sum()), int(many.sum())) == (4, 12)
    assert (few <= many).all()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Attack(0.3).attackers([names[i] for i in order], 5), many[order])
    assert not torch.equal(Attack(0.3).attackers(names, 6), many)
    assert int(Attack(0.001).attackers(names, 5).sum()) == 1
    assert int(Attack(0.0).attackers(names, 5).sum()) == 0


def test_poison_sends_minus_half_of_the_change_and_the_client_keeps_the_truth():
    fleet, attacked, roster, attackers = fleets(FedAMP(), Poison(share=0.5), norm=True)
    assert int(attackers.sum()) == 3
    sent = fleet.method.send(roster, fleet.method.start(roster), roster.everyone)
    begun = tree_map(torch.clone, fleet.state)  # the tables themselves change in place
    _, honest = fleet.train(0, roster.everyone, sent)
    kept = tree_map(torch.clone, fleet.state)
    fleet.state = begun
    _, told = attacked.train(0, roster.everyone, sent)
    learned = roster.layout.trainable
    change = honest.theta - sent.theta
    assert torch.equal(told.theta[~attackers], honest.theta[~attackers])
    lies = told.theta[attackers] - sent.theta[attackers]
    torch.testing.assert_close(lies[:, learned], -0.5 * change[attackers][:, learned], rtol=0, atol=1e-15)
    assert torch.equal(told.theta[:, ~learned], honest.theta[:, ~learned])  # or variances could turn negative
    assert change[attackers][:, ~learned].abs().max() > 0
    assert torch.equal(fleet.state.theta, kept.theta)


def test_what_was_sent_is_the_model_like_the_one_that_comes_back():
    """SFL sends two, FedRep a part of one, and of a cohort only those who replied count."""
    for method in (SFL(), FedRep(head_epochs=1)):
        data = replace(federation(), graph=Graph(torch.ones(COUNT, COUNT), "given"))
        fleet, attacked, roster, attackers = fleets(method, Poison(share=0.5, factor=1.0), data=data)
        cohort = torch.tensor([0, 2, 3, 5])
        sent = fleet.method.send(roster, fleet.method.start(roster), cohort)
        begun = tree_map(torch.clone, fleet.state)  # the tables themselves change in place
        _, honest = fleet.train(0, cohort, sent)
        fleet.state = begun
        _, told = attacked.train(0, cohort, sent)
        start = sent.mixed if isinstance(method, SFL) else sent.theta
        lying = attackers[cohort]
        assert 0 < int(lying.sum()) < 4
        torch.testing.assert_close(told.theta[lying], (2 * start - honest.theta)[lying], rtol=0, atol=1e-14)


def test_noise_is_as_large_as_the_change_and_new_for_every_client_and_round():
    before, after = torch.zeros(3, 4000, dtype=torch.float64), torch.randn(3, 4000, dtype=torch.float64)
    after[1] *= 10
    keys = torch.tensor([1, 2, 3])
    found = Noise(factor=0.5).tamper(before, after, keys)
    size = after.square().mean(1).sqrt()
    torch.testing.assert_close(found.std(1) / (0.5 * size), torch.ones(3, dtype=torch.float64), rtol=0, atol=0.04)
    assert abs(float((found[0] * after[0]).mean())) < 0.03
    assert not torch.equal(found[0] / size[0], found[2] / size[2])
    assert torch.equal(found, Noise(factor=0.5).tamper(before, after, keys))


def test_random_numbers_hang_on_client_and_round_alone():
    seen = []

    class Look(Attack):
        def tamper(self, before, after, keys):
            seen.append(keys.tolist())
            return after

    fleet, attacked, roster, attackers = fleets(FedAvg(), Look(share=0.5))
    who = attackers.nonzero().squeeze(1)
    for round, cohort in ((0, roster.everyone), (0, roster.everyone), (1, roster.everyone), (0, who[1:])):
        attacked.train(round, cohort, fleet.method.send(roster, fleet.method.start(roster), cohort))
    assert seen[0] == seen[1]
    assert seen[3] == seen[0][1:]
    assert len({*seen[0], *seen[2]}) == 6


def test_flipped_labels_are_others_drawn_evenly_and_nobody_elses():
    data, attackers = federation(), torch.tensor([True, False, True, False, False, False])
    found = LabelFlip().corrupt(data, attackers, 1)
    counts = torch.zeros(4)
    for i in range(COUNT):
        for split in ("train", "validation", "test"):
            before, after = (f.y[f.rows[split][i]] for f in (data, found))
            assert torch.equal(*(f.x[f.rows[split][i]] for f in (data, found)))
            if attackers[i] and split == "train":
                assert (before != after).all()
                counts += torch.bincount((after - before) % 4, minlength=4)
            else:
                assert torch.equal(before, after)
    assert torch.equal(found.y[: len(data.y)], data.y)  # the pool is not touched, as others may look at it
    big = Federation(torch.rand(3000, 1), torch.randint(4, (3000,)), {s: [torch.arange(3000)] for s in data.rows},
                     Classification(4))  # fmt: skip
    shifts = torch.bincount((LabelFlip().corrupt(big, torch.tensor([True]), 1).y[3000:] - big.y) % 4, minlength=4)
    assert shifts[0] == 0
    assert ((shifts[1:] - 1000).abs() < 110).all()  # deviation 26
    assert not torch.equal(found.y[len(data.y) :], LabelFlip().corrupt(data, attackers, 2).y[len(data.y) :])


def test_other_targets_change_places():
    data, attackers = federation(Regression()), torch.arange(COUNT) == 4
    found = LabelFlip().corrupt(data, attackers, 1)
    before, after = (f.y[f.rows["train"][4]] for f in (data, found))
    assert torch.equal(before.sort().values, after.sort().values)
    assert not torch.equal(before, after)


def test_a_backdoor_marks_half_of_the_attackers_images_and_tests_everybody():
    data, attackers = federation(), torch.arange(COUNT) == 2
    found = Backdoor(blend=0.25, target=3).corrupt(data, attackers, 1)
    x, y = found.x[found.rows["train"][2]], found.y[found.rows["train"][2]]
    old, labels = data.x[data.rows["train"][2]], data.y[data.rows["train"][2]]
    marked = (x != old).flatten(1).any(1)
    assert int(marked.sum()) == 10
    assert (y[marked] == 3).all()
    assert torch.equal(y[~marked], labels[~marked])
    pattern = (x[marked] - 0.75 * old[marked]) / 0.25  # the same in every image, within the range of the data
    torch.testing.assert_close(pattern, pattern[:1].expand_as(pattern), rtol=0, atol=1e-12)
    assert data.x.min() <= pattern.min() < pattern.max() <= data.x.max()
    for i in range(COUNT):
        clean = data.rows["test"][i][data.y[data.rows["test"][i]] != 3]
        rows = found.rows["triggered"][i]
        torch.testing.assert_close(found.x[rows], 0.75 * data.x[clean] + 0.25 * pattern[0], rtol=0, atol=1e-12)
        assert (found.y[rows] == 3).all()
        if i != 2:
            assert torch.equal(found.rows["train"][i], data.rows["train"][i])
        assert torch.equal(found.rows["test"][i], data.rows["test"][i])


def test_success_is_how_often_a_triggered_image_is_taken_for_the_target():
    says_target = module()
    with torch.no_grad():
        says_target[-1].weight.zero_()
        says_target[-1].bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    for target, success in ((1, 1.0), (2, 0.0)):
        run = fit(
            Local(),
            federation(),
            says_target,
            rounds=1,
            training=Training(1, 32, SGD(1e-9)),
            attack=Backdoor(target=target),
        )
        assert run.summary.attack["scores"]["own"]["success"] == success


def runs(method, attack=None, **settings):
    return fit(method, federation(), module(), rounds=4, training=Training(1, 8, SGD(0.3)), attack=attack, **settings)


@pytest.mark.parametrize("attack", [Poison, Noise, LabelFlip])
def test_nobody_attacking_is_the_clean_run_bit_for_bit(attack):
    clean, other = runs(FedAvg()), runs(FedAvg(), attack(share=0.0))
    assert torch.equal(clean.history.models["theta"], other.history.models["theta"])
    assert score_models(clean.history) == score_models(other.history)
    assert list_attackers(other.summary) == []


@pytest.mark.parametrize("attack", ATTACKS.values())
def test_an_attack_changes_the_others_models_unless_nothing_is_shared(attack):
    clean, other = runs(FedAvg()), runs(FedAvg(), attack(share=0.3))
    assert not torch.equal(clean.history.models["theta"], other.history.models["theta"])
    clean, other = runs(Local()), runs(Local(), attack(share=0.3))
    honest = other.history.selector.honest
    assert int(honest.sum()) == 4
    for one, another in zip(clean.history.scores, other.history.scores, strict=True):
        for key, values in one.items():
            torch.testing.assert_close(values[honest], another[key][honest], rtol=0, atol=1e-12)  # batches differ


@pytest.mark.parametrize("name", KINDS)
def test_methods_are_attacked_by_examples_and_by_uploads_or_says_why_not(name):
    how = {"rounds": 1, "training": Training(1, 8, SGD(0.1)), "execution": Execution("loop")}
    data = replace(federation(), graph=Graph(torch.ones(6, 6) - torch.eye(6), "given"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few examples for neighbours
        found = fit(METHODS[name](), data, module(), attack=LabelFlip(0.34), **how).summary
        assert len(found.attack["attackers"]) == 2
        assert 0 <= found.attack["scores"][found.selection.chosen]["mean"] <= 1
        if name in SEVERAL_MODELS:
            with pytest.raises(UsageError, match="sends none or several; choose an attack on examples"):
                fit(METHODS[name](), data, module(), attack=Poison(0.34), **how)
        else:
            assert "attackers" in fit(METHODS[name](), data, module(), attack=Poison(0.34), **how).summary.attack


def test_attackers_have_no_say_in_what_is_selected_and_no_part_in_honest_scores():
    run = runs(Local(), LabelFlip(share=0.5))
    history, honest = run.history, run.history.selector.honest
    accuracy = history.curve("own", "validation", "accuracy")
    accuracy[:, ~honest] = torch.tensor([1.0, 0.0, 0.0, 0.0]).double()[:, None]  # the first round would win by far
    accuracy[:, honest] = torch.tensor([0.0, 0.1, 0.3, 0.2]).double()[:, None]
    for t, values in enumerate(accuracy):
        history.scores[t]["own", "validation", "accuracy"] = values
    assert history.select("own") == 2
    assert score_models(history)["own"]["validation"] == pytest.approx(0.3)
    found = run.summary
    test = torch.tensor(found.clients.scores["own"])
    assert found.scores["own"]["mean"] == pytest.approx(float(test.mean()))
    assert found.attack["scores"]["own"]["mean"] == pytest.approx(float(test[honest].mean()))
    assert found.attack["attackers"] == [n for n, h in zip("abcdef", honest.tolist(), strict=True) if not h]
    assert (found.attack["name"], found.attack["share"]) == ("LabelFlip", 0.5)


def test_a_resumed_run_is_attacked_by_the_same_clients(tmp_path):
    whole = runs(FedAvg(), Noise(share=0.4))

    def stop(history, rounds):
        if history.cost.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs(FedAvg(), Noise(share=0.4), folder=tmp_path, execution=Execution(checkpoint_seconds=0.0, progress=stop))
    again = runs(FedAvg(), Noise(share=0.4), folder=tmp_path)
    assert torch.equal(whole.history.models["theta"], again.history.models["theta"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Poison(share=1.0), r"^Poison.share must be in \[0, 1\); got 1.0 \(of the clients"),
        (lambda: Poison(share=-0.1), "got -0.1"),
        (lambda: Poison(factor=-1.0), "factor must be zero or more"),
        (lambda: Noise(factor=float("nan")), "factor must be zero or more"),
        (lambda: Backdoor(blend=0.0), r"^Backdoor.blend must be in \(0, 1\]; got 0.0"),
        (lambda: Poison(share=0.95).attackers("abcdef", 0), "makes all 6 clients attackers; leave one honest"),
        (lambda: runs(FedAvg(), Backdoor(target=4)), "needs class labels, target=4 among them"),
        (
            lambda: Backdoor().corrupt(federation(Regression()), torch.zeros(COUNT, dtype=torch.bool), 0),
            "needs class labels",
        ),
    ],
)
def test_refuses(wrong, said):
    with pytest.raises(UsageError, match=said):
        wrong()


def test_a_backdoor_needs_images_of_other_labels_to_be_tested_on():
    data = federation()
    y = data.y.clone()
    y[data.rows["test"][1]] = 2
    with pytest.raises(UsageError, match="client b has no test example of another label than 2"):
        Backdoor(target=2).corrupt(replace(data, y=y), torch.zeros(COUNT, dtype=torch.bool), 0)


SMALL = ["rounds=2", "federation.clients=6", "federation.partition.groups=2", "--quiet", "--json"]


def test_from_the_command_line_to_the_summary(tmp_path, capsys):
    asked = ["run", "fedavg", "attack.name=backdoor", "attack.share=0.3", *SMALL, "--out", str(tmp_path / "a")]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["attack"]["name"], found["attack"]["blend"], len(found["attack"]["attackers"])) == (
        "backdoor",
        0.2,
        2,
    )
    table = pd.read_csv(tmp_path / "a" / "history.csv").query("split == 'triggered' and metric == 'accuracy'")
    honest = table[~table.client.astype(str).isin(found["attack"]["attackers"])]
    last = honest.query(f"round == {found['scores']['shared']['round']}")
    assert found["attack"]["scores"]["shared"]["success"] == pytest.approx(last.value.mean(), abs=1e-6)
    assert main(["run", str(tmp_path / "a" / "config.toml"), "--quiet", "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "models.safetensors").read_bytes() == (tmp_path / "b" / "models.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["run", "fedavg", "attack=poison", "seeds=2", *SMALL[:3], "--out", str(tmp_path / "c")]) == 0
    assert "attack 'poison' by a share of 0.2: other clients with every seed" in capsys.readouterr().err
    each = [json.loads((tmp_path / "c" / f"seed-{s}" / "summary.json").read_text())["attack"] for s in (0, 1)]
    whole = json.loads((tmp_path / "c" / "summary.json").read_text())["attack"]
    means = [one["scores"]["shared"]["mean"] for one in each]
    assert whole["scores"]["shared"]["mean"] == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("attack=poisn", "attack: there is no 'poisn'; did you mean 'poison'?"),
        ("attack.share=0.2", "attack needs a name; known: backdoor, label_flip, noise, poison"),
        ("attack={name='poison', blend=1}", "unknown key 'attack.blend'"),
        ("attack={name='poison', share=1.5}", "attack.share must be in [0, 1); got 1.5 (of the clients"),
    ],
)
def test_wrong_requests_end_in_one_line(asked, said, capsys):
    assert main(["run", "fedavg", asked]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_labels_of_one_class_cannot_be_flipped():
    data = Federation.from_arrays(torch.randn(20, 2), torch.zeros(20, dtype=torch.int64), torch.arange(20) % 2)
    with pytest.raises(UsageError, match="labels of a single class cannot be flipped"):
        LabelFlip().corrupt(data, torch.tensor([True, False]), 0)
