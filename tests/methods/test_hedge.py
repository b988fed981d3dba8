"""Hedge: its numbers by hand, and that it depends on no scale."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import random
from torch import nn

from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.methods import Hedge, Kin, hedge
from kinfed.methods.hedge import LIMIT, Upload, agreement
from kinfed.relations.neighbourhoods import Sketches, sketch_rows

float64 = torch.float64


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def evidence(known, home=0.5, sharpness=2.0, lessons=4.0, seed=3):
    """The state of a server that has learned something, of clients whose models are random."""
    count, logs = len(known), torch.tensor([home, sharpness], dtype=float64).log()
    lessons = torch.full((count,), lessons, dtype=float64)
    models = known.theta + random(count, known.layout.size, seed=seed + 1)
    server = Hedge().start(known)._replace(theta=models, trained=torch.full((count,), 2))
    server = server._replace(against=random(count, count, seed=seed), lessons=lessons)
    return server._replace(home=logs[0], sharpness=logs[1])


def taught(method, known, server, cohort=None, *, change, answer):
    """The server after a round in which the cohort judges its mixtures."""
    cohort = known.everyone if cohort is None else cohort
    sent = method.send(known, server, cohort).theta
    return method.aggregate(known, server, cohort, Upload(sent + change, answer))


LEARNED = ("against", "lessons", "home", "sharpness")
PLAIN = {"clip": torch.inf, "credit": 0.0}


def test_weights_by_hand(roster):
    # All moved at right angles, so that kin gives the others equal weights, and e to a client's own with tau = 1.
    known = roster(3, size=3)
    server = evidence(known)._replace(theta=known.theta + torch.eye(3, dtype=float64))
    server = server._replace(against=torch.tensor([[9, 0, 2], [1, 9, 0], [-1, 1, 9]], dtype=float64))
    weights = Hedge(tau=1.0, **PLAIN).relation(known, server, known.everyone)[0]
    # q = 2 over the root of 4 lessons: exp of minus the numbers against. p = 0.5 halves what its own has beside others.
    e = torch.tensor(1.0, dtype=float64).exp()
    own = 0.5 * e / (0.5 * e + 2)
    rows = [[own, (1 - own) * e**2 / (1 + e**2), (1 - own) / (1 + e**2)]]
    rows += [[(1 - own) / (1 + e), own, (1 - own) * e / (1 + e)]]
    close(weights[:2], torch.tensor(rows, dtype=float64))
    close(weights.sum(1), torch.ones(3, dtype=float64))


@pytest.mark.parametrize("settings", [{}, {"by_layer": False}, {"neighbours": 2}], ids=str)
def test_without_evidence_it_is_kin(roster, settings):
    known = roster(5, size=7)
    server = evidence(known, home=1.0)._replace(against=torch.zeros(5, 5, dtype=float64))
    server = server._replace(sketch=Sketches(sketch_rows(known, server.theta - known.theta), None))
    found, expected = (method(**settings).send(known, server, known.everyone).theta for method in (Hedge, Kin))
    close(found, expected)


@pytest.mark.parametrize("cohort", [[0, 1, 2, 3], [1, 3]])
def test_a_lesson_by_hand(roster, cohort):
    known, method, cohort = roster(4, size=5), Hedge(lr=0.7), torch.tensor(cohort)
    server = evidence(known)
    models = server.theta
    change, answer = random(len(cohort), 5, seed=1), random(len(cohort), 5, seed=2)
    weights = method.relation(known, server, known.everyone)[0]
    after = taught(method, known, server, cohort, change=change, answer=answer)
    harm, by_home, by_sharpness = torch.zeros(len(cohort), 4, dtype=float64), [], []
    for k, i in enumerate(cohort.tolist()):
        others = [j for j in range(4) if j != i]
        found = torch.stack([-change[k] @ models[j] for j in others])
        harm[k, others] = found - found.mean()
        s = weights[i, others] / weights[i, others].sum()
        g = torch.stack([answer[k] @ models[j] for j in others])
        z = -server.against[i, others] / 2
        by_home.append(weights[i, i] * (1 - weights[i, i]) * (answer[k] @ models[i] - s @ g))
        by_sharpness.append((1 - weights[i, i]) * (s * (z - s @ z)) @ g)
    harm = harm / (harm.square().sum() / (3 * len(cohort))).sqrt()
    close(after.against, server.against.index_add(0, cohort, harm))
    close(after.lessons, server.lessons.index_add(0, cohort, torch.ones(len(cohort), dtype=float64)))
    close(after.home, server.home - 0.7 * agreement(torch.stack(by_home)))
    close(after.sharpness, server.sharpness - 0.7 * agreement(torch.stack(by_sharpness)))


@pytest.mark.parametrize("settings", [{}, {"by_layer": False}], ids=str)
def test_slopes_are_derivatives_of_the_loss_by_log_p_and_log_q(roster, settings, monkeypatch):
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    known, method, seen = roster(5, module), Hedge(clip=torch.inf, **settings), []
    server, answer = evidence(known), random(5, known.layout.size, seed=2)
    monkeypatch.setattr(hedge, "agreement", lambda slopes: seen.append(slopes) or slopes.sum())
    taught(method, known, server, change=random(5, known.layout.size, seed=1), answer=answer)
    factors = 1.0, server.sharpness.exp()  # slopes by log q are divided by q, which agreement does not see
    for name, slopes, factor in zip(("home", "sharpness"), seen, factors, strict=True):
        step, losses = 1e-5, []
        for sign in (1, -1):
            moved = server._replace(**{name: getattr(server, name) + sign * step})
            losses.append((method.send(known, moved, known.everyone).theta * answer).sum(1))
        close(slopes * factor, (losses[0] - losses[1]) / (2 * step), atol=1e-8)


def test_it_depends_on_no_scale(roster):
    known = roster(6, size=5)
    server = evidence(known)
    change, answer = random(6, 5, seed=1), random(6, 5, seed=2)
    one = taught(Hedge(), known, server, change=change, answer=answer)
    for a, b, shift in ((1e-6, 1.0, 0.0), (1.0, 1e6, 0.0), (1.0, 1.0, 3.0)):
        there = replace(known, theta=known.theta + shift)
        other = taught(
            Hedge(), there, server._replace(theta=server.theta + shift), change=a * change, answer=b * answer
        )
        for name in LEARNED:
            close(getattr(other, name), getattr(one, name), atol=1e-9)


def test_what_helps_gets_more_weight_and_numbers_stay_bounded(bowls, executor):
    # Two groups with opposite optima: after a few rounds nearly all weight is inside one's own.
    goals = [[3.0, 0.0], [-3.0, 0.0], [3.0, 0.5], [-3.0, 0.5], [3.0, -0.5], [-3.0, -0.5]]
    trial = bowls(Hedge(feedback="train"), goals, copies=2, executor=executor)
    server = trial.run(12)
    weights = trial.history.relations[-1][0]
    group = torch.arange(6) % 2
    between = weights[group[:, None] != group].view(6, 3).sum(1)
    assert (between < 0.05).all()
    assert server.home.abs() <= LIMIT
    assert server.sharpness.abs() <= LIMIT


def test_one_client_keeps_its_model(bowls, executor):
    trial = bowls(Hedge(feedback="train"), [[1.0, 2.0]], copies=2, executor=executor)
    server = trial.run(3)
    assert torch.equal(trial.method.send(trial.roster, server, torch.tensor([0])).theta, server.theta)
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
    server = evidence(known)._replace(theta=same)
    after = taught(Hedge(), known, server, change=random(5, 50, seed=1), answer=random(5, 50, seed=2))
    for name in ("against", "home", "sharpness"):
        assert torch.equal(getattr(after, name), getattr(server, name))


def twin(method, known, cohorts, uploads):
    """All that a server has learned and mixed after rounds, from the equations on docs/methods/own.md, in NumPy.

    The model has one layer, and no movement is clipped.
    """
    first, count, sizes = known.theta.numpy(), len(known), known.sizes.numpy()
    theta, trained, lessons, against = (
        np.tile(first, (count, 1)),
        np.zeros(count),
        np.zeros(count),
        np.zeros((count, count)),
    )
    log_p, log_q = 0.0, np.log(method.sharpness)

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    def row(i):
        """[N] the weights of a client's mixture."""
        heard = [j for j in range(count) if trained[j]] or list(range(count))
        weights = np.zeros(count)
        if not trained[i]:
            weights[heard] = sizes[heard]
            return weights / weights.sum()
        c = {j: cosine(theta[i] - first, theta[j] - first) for j in heard}
        nearest = max([0, *(c[j] for j in heard if j != i)])
        again = (trained[i] - 1) * sizes[i]
        c[i] = nearest + (1 - nearest) * again / (again + method.credit)
        for j in heard:
            weights[j] = sizes[j] * np.exp(c[j] / method.tau)
        own = weights[i] / weights.sum()
        own = own * np.exp(log_p) / (1 - own + own * np.exp(log_p))
        weights *= np.exp(-np.exp(log_q) * against[i] / np.sqrt(max(1, lessons[i])))
        weights[i] = 0
        weights *= (1 - own) / weights.sum()
        weights[i] = own
        return weights

    def agreement(x):
        if not np.any(x):
            return 0.0
        r = np.mean(x) / np.sqrt(np.mean(np.square(x)))
        return r * max(0, 1 - 1 / (len(x) * r**2)) if r else 0.0

    for cohort, (models, grads) in zip(cohorts, uploads, strict=True):
        rows = np.array([row(i) for i in range(count)])
        sent, heard = rows @ theta, [j for j in range(count) if trained[j]]
        z, a, b = np.zeros((count, count)), [], []
        for i in cohort:
            others = [j for j in heard if j != i]
            if not others:
                continue
            harm = np.array([-(models[i] - sent[i]) @ theta[j] for j in others])
            z[i, others] = harm - harm.mean()
            own, s = rows[i, i] * (trained[i] > 0), rows[i, others] / rows[i, others].sum()
            g = np.array([grads[i] @ theta[j] for j in others])
            evidence = -against[i, others] / np.sqrt(max(1, lessons[i]))
            a.append((trained[i] > 0) * own * (1 - own) * (grads[i] @ theta[i] - s @ g))
            b.append((trained[i] > 0) * (1 - own) * (s @ ((evidence - s @ evidence) * g)))
        if heard:
            pairs = sum(len([j for j in heard if j != i]) for i in cohort)
            z /= np.sqrt((z**2).sum() / pairs)
            log_p, log_q = log_p - method.lr * agreement(a), log_q - method.lr * agreement(b)
            log_p, log_q = np.clip([log_p, log_q], -7, 7)
            against += z
            lessons[cohort] += 1
        absent = [j for j in range(count) if trained[j] and j not in cohort]
        theta[cohort] = models[cohort]
        trained[cohort] += 1
        moved = theta.copy()
        for j in absent:
            e = np.array(
                [sizes[k] * np.exp((cosine(theta[j] - first, theta[k] - first) - 1) / method.tau) for k in cohort]
            )
            moved[j] += e / (e.sum() + sizes[j] * len(cohort) / count) @ (models[cohort] - sent[cohort])
        theta = moved
    return against, lessons, log_p, log_q, np.array([row(i) for i in range(count)]) @ theta


@pytest.mark.parametrize("settings", [{}, {"sharpness": 3.0, "lr": 0.4}], ids=str)
@pytest.mark.parametrize("cohorts", [[[0, 1, 2, 3, 4]] * 4, [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [0, 2], [1]]], ids=str)
def test_the_equations_once_more(roster, settings, cohorts):
    known, method = roster(5, size=6), Hedge(clip=torch.inf, **settings)
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
    close(method.relation(known, server, known.everyone).sum(-1), torch.ones(1, 4, dtype=float64))
