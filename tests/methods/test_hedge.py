"""Hedge: its numbers by hand, and that it depends on no scale."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import random

from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.methods import Hedge
from kinfed.methods.hedge import LIMIT, Upload, agreed

float64 = torch.float64


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def evidence(known, home=0.5, sharpness=2.0, lessons=4.0, seed=3):
    """The state of a server that has learned something, of clients that have never taken part."""
    count, logs = len(known), torch.tensor([home, sharpness], dtype=float64).log()
    lessons = torch.full((count,), lessons, dtype=float64)
    server = Hedge().start(known)._replace(against=random(count, count, seed=seed), lessons=lessons)
    return server._replace(home=logs[0], sharpness=logs[1])


def taught(method, known, server, models, cohort=None, *, change, answer):
    """The server after a round in which the cohort judges mixtures of everybody's models: [N, d]."""
    everyone, still = known.everyone, torch.zeros_like(models)
    server = method.aggregate(known, server, everyone, Upload(models, still))
    cohort = everyone if cohort is None else cohort
    upload = Upload(server.theta[cohort] + change, answer)
    return method.aggregate(replace(known, round=1), server, cohort, upload)


LEARNED = ("against", "lessons", "home", "sharpness")


def test_weights_by_hand(roster):
    known = roster(3)
    server = evidence(known)
    server = server._replace(against=torch.tensor([[9, 0, 2], [1, 9, 0], [-1, 1, 9]], dtype=float64))
    weights = Hedge().weights(server, known.everyone)
    # q = 2 over the root of 4 lessons: exp of minus the numbers against, and p = 0.5 beside their softmax.
    e = torch.tensor(1.0, dtype=float64).exp()
    rows = [[0.5, e**2 / (1 + e**2), 1 / (1 + e**2)], [1 / (1 + e), 0.5, e / (1 + e)]]
    close(weights[:2], torch.tensor(rows, dtype=float64) / 1.5)
    close(weights.sum(1), torch.ones(3, dtype=float64))
    pair = Hedge().weights(server, torch.tensor([0, 2]))
    close(pair, torch.tensor([[1, 2], [2, 1]], dtype=float64) / 3)  # one other has all that is not p's
    close(Hedge().weights(server, torch.tensor([1])), torch.ones(1, 1, dtype=float64))


def test_it_begins_uniform_over_the_others(roster):
    known = roster(4)
    weights = Hedge(home=0.3).weights(Hedge().start(known), known.everyone)
    expected = torch.full((4, 4), 1 / 3.9, dtype=float64).fill_diagonal_(0.3 / 1.3)
    close(weights, expected, atol=1e-7)


@pytest.mark.parametrize("cohort", [[0, 1, 2, 3], [1, 3]])
def test_a_lesson_by_hand(roster, cohort):
    known, method, cohort = roster(4, size=5), Hedge(lr=0.7), torch.tensor(cohort)
    server, models = evidence(known), random(4, 5)
    change, answer = random(len(cohort), 5, seed=1), random(len(cohort), 5, seed=2)
    after = taught(method, known, server, models, cohort, change=change, answer=answer)
    weights = Hedge().weights(server, known.everyone)
    harm, by_home, by_sharpness = torch.zeros(len(cohort), 4, dtype=float64), [], []
    for k, i in enumerate(cohort.tolist()):
        others = [j for j in range(4) if j != i]
        found = torch.stack([-change[k] @ models[j] for j in others])
        harm[k, others] = found - found.mean()
        s = weights[i, others] / weights[i, others].sum()
        g = torch.stack([answer[k] @ models[j] for j in others])
        z = -server.against[i, others] / 2
        by_home.append(answer[k] @ models[i] - s @ g)
        by_sharpness.append((s * (z - s @ z)) @ g)
    harm = harm / (harm.square().sum() / (3 * len(cohort))).sqrt()
    close(after.against, server.against.index_add(0, cohort, harm))
    close(after.lessons, server.lessons.index_add(0, cohort, torch.ones(len(cohort), dtype=float64)))
    close(after.home, server.home - 0.7 * agreed(torch.stack(by_home)))
    close(after.sharpness, server.sharpness - 0.7 * agreed(torch.stack(by_sharpness)))


def test_it_depends_on_no_scale(roster):
    known, models = roster(6, size=5), random(6, 5)
    server = evidence(known)
    change, answer = random(6, 5, seed=1), random(6, 5, seed=2)
    one = taught(Hedge(), known, server, models, change=change, answer=answer)
    for a, b, shift in ((1e-6, 1.0, 0.0), (1.0, 1e6, 0.0), (1.0, 1.0, 3.0)):
        other = taught(Hedge(), known, server, models + shift, change=a * change, answer=b * answer)
        for name in LEARNED:
            close(getattr(other, name), getattr(one, name), atol=1e-9)


def test_what_helps_gets_more_weight_and_numbers_stay_bounded(bowls, executor):
    # Two groups with opposite optima: after a few rounds nearly all weight is inside one's own.
    goals = [[3.0, 0.0], [-3.0, 0.0], [3.0, 0.5], [-3.0, 0.5], [3.0, -0.5], [-3.0, -0.5]]
    trial = bowls(Hedge(feedback="train"), goals, copies=2, executor=executor)
    server = trial.run(12)
    weights = trial.history.relations[-1]
    group = torch.arange(6) % 2
    between = weights[group[:, None] != group].view(6, 3).sum(1)
    assert (between < 0.05).all()
    assert server.home.abs() <= LIMIT
    assert server.sharpness.abs() <= LIMIT


def test_one_client_keeps_its_model(bowls, executor):
    trial = bowls(Hedge(feedback="train"), [[1.0, 2.0]], copies=2, executor=executor)
    server = trial.run(3)
    assert torch.equal(server.theta, server.uploads)
    assert (server.lessons == 0).all()


def test_newcomers_begin_without_evidence(roster):
    known, method = roster(5, size=5), Hedge()
    before = evidence(known.part(torch.arange(4)))
    wide = method.add_clients(known, before, torch.tensor([4]))
    close(wide.against[:4, :4], before.against)
    assert (wide.against[4] == 0).all()
    assert (wide.against[:, 4] == 0).all()
    assert wide.lessons.tolist() == [4, 4, 4, 4, 0]
    assert torch.equal(wide.home, before.home)


def test_training_does_not_count_running_statistics(examples, noisy, perceptron):
    x, y = noisy(4, 2)
    trial = examples(
        perceptron(norm=True), x, y, Hedge(feedback="train"), training=Training(1, 4, SGD(0.1)), executor="loop"
    )
    server = trial.run(1)
    known, everyone = trial.roster, trial.roster.everyone
    change, statistics = random(4, server.theta.shape[1], seed=5), ~known.layout.trainable
    noise = change.clone()
    noise[:, statistics] = 100.0 * random(4, int(statistics.sum()), seed=6)
    one, other = (
        trial.method.aggregate(known, server, everyone, Upload(server.theta + c, change * ~statistics))
        for c in (change, noise)
    )
    close(other.against, one.against)


def test_equal_models_teach_nothing(roster):
    known, same = roster(5, size=50), random(1, 50).expand(5, 50).clone()
    server = evidence(known)
    after = taught(Hedge(), known, server, same, change=random(5, 50, seed=1), answer=random(5, 50, seed=2))
    for name in ("against", "home", "sharpness"):
        assert torch.equal(getattr(after, name), getattr(server, name))


def twin(method, known, cohorts, uploads):
    """All that a server has learned and mixed after rounds, from the equations on docs/methods/own.md, in NumPy."""
    first, count = known.theta.numpy(), len(known)
    theta, mixed = np.tile(first, (count, 1)), np.tile(first, (count, 1))
    against, lessons, log_p, log_q = (
        np.zeros((count, count)),
        np.zeros(count),
        np.log(method.home),
        np.log(method.sharpness),
    )
    former, seen = [], set()

    def shares(i, among):
        others = [j for j in among if j != i]
        weight = np.exp([-np.exp(log_q) * against[i, j] / np.sqrt(max(1, lessons[i])) for j in others])
        return others, weight / weight.sum()

    def agreement(x):
        if not np.any(x):
            return 0.0
        r = np.mean(x) / np.sqrt(np.mean(np.square(x)))
        return r * max(0, 1 - 1 / (len(x) * r**2)) if r else 0.0

    for cohort, (models, grads) in zip(cohorts, uploads, strict=True):
        mean = np.mean([mixed[i] for i in seen], 0) if seen else first
        judges = [i for i in cohort if i in former]
        z, a, b = np.zeros((len(judges), count)), [], []
        for k, i in enumerate(judges):
            others, s = shares(i, former)
            harm = np.array([-(models[i] - mixed[i]) @ theta[j] for j in others])
            z[k, others] = harm - harm.mean()
            g = np.array([grads[i] @ theta[j] for j in others])
            evidence = -against[i, others] / np.sqrt(max(1, lessons[i]))
            a.append(grads[i] @ theta[i] - s @ g)
            b.append(s @ ((evidence - s @ evidence) * g))
        if judges:
            z /= np.sqrt((z**2).sum() / (len(judges) * (len(former) - 1)))
            log_p, log_q = log_p - method.lr * agreement(a), log_q - method.lr * agreement(b)
            log_p, log_q = np.clip([log_p, log_q], -7, 7)
            against[judges] += z
            lessons[judges] += 1
        for i in cohort:
            theta[i] = models[i]
        for i in cohort:
            others, s = shares(i, cohort)
            p = np.exp(log_p)
            mixed[i] = (p * theta[i] + s @ theta[others]) / (1 + p)
        former, seen = cohort, seen | set(cohort)
    mean = np.mean([mixed[i] for i in sorted(seen)], 0)
    sent = np.array([mixed[i] if i in seen else mean for i in range(count)])
    return against, lessons, log_p, log_q, sent


@pytest.mark.parametrize("settings", [{}, {"home": 1.0, "sharpness": 3.0, "lr": 0.4}], ids=str)
@pytest.mark.parametrize("cohorts", [[[0, 1, 2, 3, 4]] * 4, [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [0, 2]]], ids=str)
def test_the_equations_once_more(roster, settings, cohorts):
    known, method = roster(5, size=6), Hedge(**settings)
    server, uploads = method.start(known), []
    for t, cohort in enumerate(cohorts):
        ids = torch.tensor(cohort)
        models, grads = 1.0 + random(5, 6, seed=2 * t), random(5, 6, seed=2 * t + 1)
        uploads.append((models.numpy(), grads.numpy()))
        server = method.aggregate(replace(known, round=t), server, ids, Upload(models[ids], grads[ids]))
    against, lessons, log_p, log_q, sent = twin(method, known, cohorts, uploads)
    close(server.against, torch.from_numpy(against))
    close(server.lessons, torch.from_numpy(lessons))
    close(server.home, torch.tensor(log_p, dtype=float64), atol=1e-7)
    close(server.sharpness, torch.tensor(log_q, dtype=float64), atol=1e-7)
    close(method.send(known, server, known.everyone).theta, torch.from_numpy(sent), atol=1e-7)


def test_nobody_moved_and_nobody_is_sent_a_nan(roster):
    known, method = roster(4, size=5), Hedge()
    server = method.start(known)
    for t in range(3):
        sent = method.send(known, server, known.everyone).theta
        close(sent, known.copies(), atol=1e-12)
        upload = Upload(sent, torch.zeros_like(sent))
        server = method.aggregate(replace(known, round=t), server, known.everyone, upload)
    close(method.relation(known, server, known.everyone).sum(1), torch.ones(4, dtype=float64))
