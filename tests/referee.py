"""A referee of verdicts: what scikit-learn and NumPy say, of the same rows. Nothing here is kinfed's."""

import numpy as np
from scipy import sparse, stats
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

STRENGTHS = (0.03, 0.3, 3.0)  # C, chosen by the log loss of validation rows


def baselines(x, y, rows, by):
    """Standard models of labels y: [n], inputs x: [n, d]: by name whether they pool, validation and test scores: [N].

    rows: by split the positions of each client's rows; by: "loss" or "accuracy", the score of validation rows.
    """
    classes, clients = int(y.max()) + 1, len(rows["train"])
    shares = np.array([np.bincount(y[at], minlength=classes) for at in rows["train"]], float)
    every = shares.sum(0) / shares.sum()

    def smooth(pseudo):  # [N, C] with so many rows of all clients added
        return (shares + pseudo * every) / (shares.sum(1, keepdims=True) + pseudo)

    def spread(model, inputs):
        p = np.full((inputs.shape[0], classes), 1e-6)
        p[:, model.classes_] = np.maximum(model.predict_proba(inputs), 1e-6)
        return p

    def own(strength):
        models = [
            LogisticRegression(C=strength, max_iter=50).fit(x[at], y[at]) if len(np.unique(y[at])) > 1 else None
            for at in rows["train"]
        ]
        return lambda at, i: np.tile(smooth(0.1)[i], (len(at), 1)) if models[i] is None else spread(models[i], x[at])

    def wide(at, i):
        flags = np.zeros((len(at), clients))
        flags[:, i] = 1
        return sparse.csr_matrix(np.hstack([x[at], flags]))

    def encoded(at, i):
        return np.hstack([x[at], np.tile(smooth(5.0)[i], (len(at), 1))])

    def together(form):
        stack = sparse.vstack if form is wide else np.vstack
        return stack([form(at, i) for i, at in enumerate(rows["train"])]), y[np.concatenate(rows["train"])]

    def plain(at, i):
        return x[at]

    def pooled(option):
        strength, form = option
        model = LogisticRegression(C=strength, max_iter=100).fit(*together(form))
        return lambda at, i: spread(model, form(at, i))

    def boosted():
        model = HistGradientBoostingClassifier(
            random_state=0, early_stopping=classes * 10 <= sum(map(len, rows["train"]))
        )
        model.fit(*together(encoded))
        return lambda at, i: spread(model, encoded(at, i))

    def losses(model, split):  # by client, [n] the log loss of each row
        losses_of_clients = []
        for i, at in enumerate(rows[split]):
            p = model(at, i) if len(at) else np.ones((0, classes))
            losses_of_clients.append(-np.log(p / p.sum(1, keepdims=True))[np.arange(len(at)), y[at]])
        return losses_of_clients

    def best(make, options=STRENGTHS):
        models = [make(option) for option in options]
        return min(models, key=lambda model: np.concatenate(losses(model, "validation")).mean())

    def right(model, split):
        return np.array([(model(at, i).argmax(1) == y[at]).mean() for i, at in enumerate(rows[split])])

    models = {
        "the client's commonest label": (False, lambda at, i: np.tile(smooth(0.1)[i], (len(at), 1))),
        "a logistic regression for each client": (False, best(own)),
        "a logistic regression of all rows": (
            True,
            best(pooled, [(c, form) for c in STRENGTHS for form in (plain, wide)]),
        ),
        "boosting of all rows": (True, boosted()),
    }
    result = {}
    for name, (pools, model) in models.items():
        validation = (
            right(model, "validation")
            if by == "accuracy"
            else [losses_of_client.mean() for losses_of_client in losses(model, "validation")]
        )
        result[name] = pools, np.array(validation), right(model, "test")
    return result


def student(values, rivals=1):
    """The mean of values: [n] and its 95 % interval, whose upper bound holds for so many rivals together."""
    mean, error = values.mean(), values.std(ddof=1) / len(values) ** 0.5
    return (
        mean,
        mean - stats.t.ppf(0.975, len(values) - 1) * error,
        mean + stats.t.ppf(1 - 0.025 / rivals, len(values) - 1) * error,
    )


def judge(mine, standard, by):
    """Of test scores mine: [N] the gain over the best baseline of each kind: its name, the mean and the interval.

    known: as `baselines` gives them. Validation rules out those that are clearly behind its best; then tests choose.
    """
    sign, result = (1 if by == "accuracy" else -1), {}
    for pools in (False, True):
        named = {name: scores for name, (kind, *scores) in standard.items() if kind == pools}
        if not named:
            continue
        leader = max(named, key=lambda name: sign * named[name][0].mean())
        behind = {name: sign * (named[leader][0] - validation) for name, (validation, _) in named.items()}
        left = [
            leader,
            *(name for name, gap in behind.items() if name != leader and (not gap.any() or student(gap)[1] <= 0)),
        ]
        name = max(left, key=lambda name: named[name][1].mean())
        result[pools] = name, *student(mine - named[name][1], len(left))
    return result
