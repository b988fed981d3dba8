"""Mixed models beside lme4 and statsmodels: python evidence/mixed_models.py [--tables DIR] [--named] [--write]

`mixed-model` learns from all rows of each table, and so do R's lme4 and Python's statsmodels. It needs Rscript with the
packages lme4, nlme, MASS and jsonlite; the first three have the other tables, and --tables has exam.csv and chem97.csv.
Then `mixed-model` learns from federations that are drawn from a mixed model, and the page says how many of the
intervals hold the truth. Tables of several columns, of which some have random slopes by name, come last, and with
--named alone. --write writes docs/evidence/mixed-models.md.
"""

import argparse
import json
import math
import subprocess
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import kinfed
from kinfed.methods.solved.mixed_model import MixedModel
from kinfed.models.linear import linear
from kinfed_papers.result_pages import put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "mixed-models.md"
TABLES = {  # what R reads it from, client, target, column, whether the slope differs
    "sleepstudy": ("data(sleepstudy); d <- sleepstudy", "Subject", "Reaction", "Days", True),
    "sleepstudy, intercepts": ("data(sleepstudy); d <- sleepstudy", "Subject", "Reaction", "Days", False),
    "Orthodont": ("data(Orthodont, package='nlme'); d <- data.frame(Orthodont)", "Subject", "distance", "age", True),
    "exam": ("d <- read.csv('{tables}/exam.csv')", "school", "normexam", "standLRT", True),
    "chem97": ("d <- read.csv('{tables}/chem97.csv')", "lea", "score", "gcsescore", True),
}
LABELS = {  # the same of labels and counts, after their family
    "verbal aggression": ("binomial", "data(VerbAgg); d <- VerbAgg; d$y <- d$r2 == 'Y'", "id", "y", "Anger", False),
    "bacteria": ("binomial", "d <- MASS::bacteria; d$y <- d$y == 'y'", "ID", "y", "week", False),
    "seizures": ("poisson", "d <- MASS::epil", "subject", "y", "period", True),
    "seizures, intercepts": ("poisson", "d <- MASS::epil", "subject", "y", "period", False),
    "ticks": (
        "poisson",
        "data(grouseticks); d <- grouseticks[ave(grouseticks$TICKS, grouseticks$BROOD, FUN=length) > 2, ]",
        "BROOD",
        "TICKS",
        "cHEIGHT",
        False,
    ),
}
NAMED = {  # what R reads it from, client, target, columns, those with random effects beside the intercept
    "Orthodont": (
        "data(Orthodont, package='nlme'); d <- data.frame(Orthodont); d$female <- 1 * (d$Sex == 'Female')",
        "Subject",
        "distance",
        ["female", "age"],
        ["age"],
    ),
    "exam": (
        "d <- read.csv('{tables}/exam.csv'); d$girl <- 1 * (d$sex == 'F')",
        "school",
        "normexam",
        ["standLRT", "girl", "schavg"],
        ["standLRT"],
    ),
    "exam, two slopes": (
        "d <- read.csv('{tables}/exam.csv'); d$girl <- 1 * (d$sex == 'F')",
        "school",
        "normexam",
        ["schavg", "girl", "standLRT"],
        ["girl", "standLRT"],
    ),
    "chem97": (
        "d <- read.csv('{tables}/chem97.csv'); d$girl <- 1 * (d$gender == 'F')",
        "lea",
        "score",
        ["age", "gcsescore", "girl"],
        ["gcsescore"],
    ),
}
NORMAL = 1.96  # deviations within which 95 % of a normal variable lie
SIZES = (20, 10), (50, 10), (100, 20)  # clients and rows of the drawn federations
LME4 = """
suppressMessages(library(lme4)); {read}
d <- data.frame(client=paste0('c', d${client}), x=as.numeric(d${column}), y=as.numeric(d${target}))
write.csv(d, '{place}/table.csv', row.names=FALSE)
how <- lmerControl(optimizer='bobyqa', optCtrl=list(rhoend=1e-10, maxfun=1e5))
m <- lmer(y ~ x + ({random} | client), d, REML={reml}, control=how)
e <- as.data.frame(VarCorr(m)$client)
cat(jsonlite::toJSON(list(fixed=unname(fixef(m)), errors=unname(sqrt(diag(as.matrix(vcov(m))))),
  covariance=unname(as.matrix(VarCorr(m)$client)), noise=sigma(m)^2,
  deviance=-2 * as.numeric(logLik(m)), clients=rownames(coef(m)$client),
  own=unname(as.matrix(coef(m)$client))), digits=NA))
"""
LME4_NAMED = """
suppressMessages(library(lme4)); {read}
d <- data.frame(client=paste0('c', d${client}), y=as.numeric(d${target}), d[{names}])
d <- d[ave(seq_along(d$y), d$client, FUN=length) > 3, ]
write.csv(d, '{place}/table.csv', row.names=FALSE)
how <- lmerControl(optimizer='bobyqa', optCtrl=list(rhoend=1e-10, maxfun=1e5))
m <- lmer(y ~ {columns} + ({random} | client), d, REML={reml}, control=how)
cat(jsonlite::toJSON(list(fixed=unname(fixef(m)), errors=unname(sqrt(diag(as.matrix(vcov(m))))),
  covariance=unname(as.matrix(VarCorr(m)$client)), noise=sigma(m)^2,
  deviance=-2 * as.numeric(logLik(m)), clients=rownames(coef(m)$client),
  own=unname(as.matrix(coef(m)$client[names(fixef(m))]))), digits=NA))
"""
GLMER = """
suppressMessages(library(lme4)); {read}
d <- data.frame(client=paste0('c', d${client}), x=as.numeric(d${column}), y=as.numeric(d${target}))
d$x <- (d$x - mean(d$x)) / sd(d$x)
write.csv(d, '{place}/table.csv', row.names=FALSE)
how <- glmerControl(optimizer='bobyqa', optCtrl=list(rhoend=1e-10, maxfun=1e5), tolPwrss=1e-13)
m <- glmer(y ~ x + ({random} | client), d, family={family}, control=how)
cat(jsonlite::toJSON(list(fixed=unname(fixef(m)), errors=unname(sqrt(diag(as.matrix(vcov(m))))),
  covariance=unname(as.matrix(VarCorr(m)$client)), deviance=-2 * as.numeric(logLik(m)),
  clients=rownames(coef(m)$client), own=unname(as.matrix(coef(m)$client))), digits=NA))
"""


def federation_of(frame, task=None):
    """Clients with the rows of a frame, all for training."""
    client = frame["client"].to_numpy()
    x = frame[["x"]].to_numpy(float)
    y = frame["y"].to_numpy(float)
    y = y.astype(int) if isinstance(task, kinfed.Classification) else y
    kind = {"task": task} if isinstance(task, kinfed.Counts) else {}
    federation = kinfed.Federation.from_arrays(x, y, client, split=kinfed.Split(validation=0), **kind)
    rows = [torch.from_numpy(np.flatnonzero(client == name)) for name in federation.names]
    return replace(federation, rows={**federation.rows, "train": rows})


def solve(frame, slopes, estimate):
    """The estimates of `mixed-model` in the table's own units, the intercept first, as lme4 prints them."""
    mean, deviation = frame[["x", "y"]].mean(), frame[["x", "y"]].std()
    scaled = frame.assign(x=(frame["x"] - mean["x"]) / deviation["x"], y=(frame["y"] - mean["y"]) / deviation["y"])
    method = MixedModel(random="all" if slopes else "intercept", estimate=estimate)
    run = kinfed.fit(method, federation_of(scaled), linear((1,), 1).double(), rounds=100)
    server = run.final.progress.server
    slope = deviation["y"] / deviation["x"]
    units = np.array([[deviation["y"], -slope * mean["x"]], [0, slope]])  # of intercept and slope
    turned = [1, 0] if slopes else [0]
    inner = units[: len(turned), : len(turned)]
    rows, lost = len(frame), 2 if estimate == "reml" else 0
    deviance = float(server.deviance) + (rows - lost) * math.log(2 * math.pi) + 2 * rows * math.log(deviation["y"])
    if lost:
        deviance -= 2 * np.linalg.slogdet(units)[1]
    origin = np.array([mean["y"], 0])
    coefficients = [units @ run.theta(name).double().numpy()[::-1] + origin for name in run.names]
    covariances = [run.personal(name).covariance.double().numpy()[::-1, ::-1] for name in run.names]
    spread = np.einsum("ai,aj,ak,al,ijkl->a", *[inner] * 4, server.spread.numpy()[np.ix_(*[turned] * 4)])
    return {
        "fixed": units @ server.fixed.numpy()[::-1] + origin,
        "errors": np.sqrt(np.diagonal(units @ server.uncertainty.numpy()[::-1, ::-1] @ units.T)),
        "covariance": inner @ server.covariance.numpy()[turned][:, turned] @ inner.T,
        "spread": np.sqrt(spread),
        "noise": float(server.noise) * deviation["y"] ** 2,
        "spread of noise": math.sqrt(float(server.spread_of_noise)) * deviation["y"] ** 2,
        "deviance": deviance,
        "own": dict(zip(run.names, coefficients, strict=True)),
        "own errors": [np.sqrt(np.diagonal(units @ covariance @ units.T)) for covariance in covariances],
        "rounds": run.history.cost.done,
    }


def solve_labels(frame, family, slopes):
    """The estimates of `mixed-model` for labels or counts, the intercept first."""
    counts = family == "poisson"
    task = kinfed.Counts(mean=float(frame["y"].mean())) if counts else kinfed.Classification(2)
    method = MixedModel(random="all" if slopes else "intercept")
    module = linear((1,), 1 if counts else 2).double()
    run = kinfed.fit(method, federation_of(frame, task), module, rounds=100)
    server = run.final.progress.server
    estimates = method.generalise().estimate(server)
    origin = np.array([math.log(task.mean) if counts else 0.0, 0.0])
    theta = {name: run.theta(name).double().numpy() for name in run.names}
    solved = {name: t[::-1] if counts else [t[3] - t[2], t[1] - t[0]] for name, t in theta.items()}
    return {
        "fixed": estimates.fixed.numpy()[::-1] + origin,
        "errors": estimates.uncertainty.diagonal().sqrt().numpy()[::-1],
        "covariance": estimates.covariance.numpy()[::-1, ::-1],
        "deviance": float(server.deviance),
        "own": {name: np.array(coefficients) + origin for name, coefficients in solved.items()},
        "rounds": run.history.cost.done,
    }


def compare_labels(tables):
    """A line of differences from glmer for each table."""
    lines = []
    for name, (family, *rest) in LABELS.items():
        with tempfile.TemporaryDirectory() as place:
            frame, theirs = ask_lme4(rest, tables, place, GLMER, family=family)
        mine = solve_labels(frame, family, rest[-1])
        parts = [measure_difference(mine[key], theirs[key]) for key in ("fixed", "errors", "covariance")]
        parts.append(measure_difference([mine["own"][client] for client in theirs["own"]], [*theirs["own"].values()]))
        size = f"{frame['client'].nunique()} x {round(len(frame) / frame['client'].nunique())}"
        cells = [name, size, family, str(mine["rounds"]), *(f"{value:.0e}" for value in parts)]
        cells.append(f"{mine['deviance'] - theirs['deviance']:.0e}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def ask_lme4(table, tables, place, program, **parts):
    """The frame that lme4 has read, and its estimates by a program in R."""
    read, client, target, column, slopes = table
    parts = {"random": "1 + x" if slopes else "1", "column": column} | parts
    parts |= {"read": read.format(tables=tables), "client": client, "target": target, "place": place}
    script = Path(place) / "lme4.R"
    script.write_text("".join(line.format(**parts) + "\n" for line in program.strip().splitlines()))
    answer = subprocess.run(["Rscript", str(script)], capture_output=True, text=True, check=True)
    values = json.loads(answer.stdout)
    values = {key: np.array(value) for key, value in values.items()}
    values["own"] = dict(zip(values.pop("clients").tolist(), values["own"], strict=True))
    return pd.read_csv(Path(place) / "table.csv"), {**values, "deviance": float(values["deviance"][0])}


def ask_statsmodels(frame, slopes, estimate):
    """The fixed effects of statsmodels' MixedLM, or None if it is not installed."""
    try:
        from statsmodels.regression.mixed_linear_model import MixedLM
    except ImportError:
        return None
    inputs = np.stack([np.ones(len(frame)), frame["x"]], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MixedLM(frame["y"], inputs, frame["client"], inputs if slopes else inputs[:, :1])
        fitted = model.fit(reml=estimate == "reml", method=["bfgs", "powell"])
    return {"fixed": np.array(fitted.fe_params), "noise": fitted.scale, "deviance": -2 * fitted.llf}


def measure_difference(mine, theirs):
    """The largest difference, relative to the largest of the values."""
    return float(np.abs(np.asarray(mine) - np.asarray(theirs)).max() / np.abs(np.asarray(theirs)).max())


def compare(tables):
    """A line of differences for each table and estimate."""
    lines = []
    for name in TABLES:
        for estimate in ("reml", "ml"):
            with tempfile.TemporaryDirectory() as place:
                reml = "TRUE" if estimate == "reml" else "FALSE"
                frame, theirs = ask_lme4(TABLES[name], tables, place, LME4, reml=reml)
            mine = solve(frame, TABLES[name][-1], estimate)
            parts = [measure_difference(mine[key], theirs[key]) for key in ("fixed", "errors", "covariance", "noise")]
            coefficients = [mine["own"][client] for client in theirs["own"]]
            parts += [
                measure_difference(coefficients, list(theirs["own"].values())),
                abs(mine["deviance"] - theirs["deviance"]),
            ]
            other = ask_statsmodels(frame, TABLES[name][-1], estimate)
            parts.append(math.nan if other is None else measure_difference(mine["fixed"], other["fixed"]))
            parts.append(math.nan if other is None else mine["deviance"] - other["deviance"])
            size = f"{frame['client'].nunique()} x {round(len(frame) / frame['client'].nunique())}"
            cells = [name, size, estimate, str(mine["rounds"]), *(f"{value:.0e}" for value in parts)]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def solve_named(frame, columns, random, estimate):
    """The estimates with random effects by name in the table's own units, the intercept first."""
    federation = kinfed.from_frame(frame, client="client", target="y")
    rows = zip(*(federation.rows[part] for part in ("train", "validation", "test")), strict=True)
    federation = replace(federation, rows={**federation.rows, "train": [torch.cat(parts) for parts in rows]})
    method = MixedModel(random=("intercept", *random), estimate=estimate)
    run = kinfed.fit(method, federation, linear((len(columns),), 1).double(), rounds=100)
    server, scale = run.final.progress.server, federation.columns.scale()
    deviation = scale["targets"]["y"]["deviation"]
    order = [-1, *(list(scale["inputs"]).index(name) for name in columns)]
    means, deviations = (np.array([scale["inputs"][name][what] for name in columns]) for what in ("mean", "deviation"))
    units = np.diag([1.0, *(1 / deviations)])  # of the intercept and the columns
    units[0, 1:] = -means / deviations
    units *= deviation
    origin = np.array([scale["targets"]["y"]["mean"]] + [0.0] * len(columns))
    shown = [0, *(1 + columns.index(name) for name in random)]
    at = server.at.tolist()
    turned = [at.index(order[place] % len(order)) for place in shown]
    inner = units[np.ix_(shown, shown)]
    lost = len(order) if estimate == "reml" else 0
    deviance = float(server.deviance) + (len(frame) - lost) * math.log(2 * math.pi)
    deviance += 2 * len(frame) * math.log(deviation) - (2 * np.linalg.slogdet(units)[1] if lost else 0.0)
    return {
        "fixed": units @ server.fixed.numpy()[order] + origin,
        "errors": np.sqrt(np.diagonal(units @ server.uncertainty.numpy()[np.ix_(order, order)] @ units.T)),
        "covariance": inner @ server.covariance.numpy()[np.ix_(turned, turned)] @ inner.T,
        "noise": float(server.noise) * deviation**2,
        "deviance": deviance,
        "own": {name: units @ run.theta(name).double().numpy()[order] + origin for name in run.names},
        "rounds": run.history.cost.done,
    }


def compare_named(tables):
    """A line of differences from lme4 for each table and estimate."""
    lines = []
    for name, (read, client, target, columns, random) in NAMED.items():
        for estimate in ("reml", "ml"):
            parts = {"names": f"c({', '.join(map(repr, columns))})", "columns": " + ".join(columns)}
            parts |= {"reml": "TRUE" if estimate == "reml" else "FALSE", "random": " + ".join(["1", *random])}
            with tempfile.TemporaryDirectory() as place:
                frame, theirs = ask_lme4((read, client, target, "", False), tables, place, LME4_NAMED, **parts)
            mine = solve_named(frame, columns, random, estimate)
            cells = [name, f"{', '.join(columns)}", f"intercept, {', '.join(random)}", estimate, str(mine["rounds"])]
            values = [measure_difference(mine[key], theirs[key]) for key in ("fixed", "errors", "covariance", "noise")]
            values.append(measure_difference([mine["own"][who] for who in theirs["own"]], [*theirs["own"].values()]))
            values.append(mine["deviance"] - theirs["deviance"])
            lines.append(f"| {' | '.join([*cells, *(f'{value:.0e}' for value in values)])} |")
            print(lines[-1], flush=True)
    return lines


def cover(clients, rows, variances, federations=500):
    """Per cent of intervals of 95 % that hold the truth: of fixed effects, variances, noise, clients' coefficients."""
    draw, truth, inside = np.random.default_rng(0), np.array([1.0, 0.5]), []
    for _ in range(federations):
        coefficients = truth + draw.normal(size=(clients, 2)) * np.sqrt(variances)
        x = draw.normal(size=(clients, rows))
        y = coefficients[:, :1] + coefficients[:, 1:] * x + draw.normal(size=(clients, rows))
        names = np.repeat([f"c{i:03}" for i in range(clients)], rows)
        estimates = solve(pd.DataFrame({"client": names, "x": x.ravel(), "y": y.ravel()}), True, "reml")
        spread = np.append(np.diagonal(estimates["covariance"]), estimates["noise"])
        factors = np.exp(NORMAL * np.append(estimates["spread"], estimates["spread of noise"]) / spread)
        held = (spread / factors < [*variances, 1.0]) & ([*variances, 1.0] < spread * factors)
        fixed = np.abs(estimates["fixed"] - truth) < NORMAL * estimates["errors"]
        off = np.abs(np.stack([*estimates["own"].values()]) - coefficients)
        mine = off < NORMAL * np.stack(estimates["own errors"])
        inside.append([fixed.mean(), held[:2].mean(), held[2], mine.mean()])
    return 100 * np.mean(inside, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", type=Path, default=Path("."))
    parser.add_argument("--federations", type=int, default=500)
    parser.add_argument("--named", action="store_true", help="only the last table")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if not args.named:
        measure_all(args)
    heads = ["table", "columns", "random effects", "estimate", "rounds", "fixed effects", "their errors", "covariance"]
    heads += ["noise", "clients' coefficients", "-2 log-likelihood less its"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- | --- | --- |{' ---: |' * (len(heads) - 4)}"]
    lines += compare_named(args.tables.resolve())
    if args.write:
        text = "\n".join(["`python evidence/mixed_models.py --tables DIR --named`.", "", *lines])
        put(PAGE, "named columns", text, "Mixed models")


def measure_all(args):
    """The tables of one column, those of labels and counts, and how many intervals hold the truth."""
    heads = ["table", "clients x rows", "estimate", "rounds", "fixed effects", "their errors", "covariance", "noise"]
    heads += ["clients' coefficients", "-2 log-likelihood", "statsmodels: fixed effects", "-2 log-likelihood less its"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- | --- |{' ---: |' * (len(heads) - 3)}"]
    lines += compare(args.tables.resolve())
    heads = ["table", "clients x rows", "family", "rounds", "fixed effects", "their errors", "covariance"]
    heads += ["clients' coefficients", "-2 log-likelihood less its"]
    lines += ["", f"| {' | '.join(heads)} |", f"| --- | --- | --- |{' ---: |' * (len(heads) - 3)}"]
    lines += compare_labels(args.tables.resolve())
    heads = ["clients x rows", "fixed effects", "variances", "noise", "clients' coefficients"]
    lines += ["", f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for clients, rows in SIZES:
        values = cover(clients, rows, np.array([0.5, 0.2]), args.federations)
        lines.append(f"| {clients} x {rows} | {' | '.join(f'{value:.1f}' for value in values)} |")
        print(lines[-1], flush=True)
    if args.write:
        put(
            PAGE,
            "mixed models",
            "\n".join(["`python evidence/mixed_models.py --tables DIR`.", "", *lines]),
            "Mixed models",
        )


if __name__ == "__main__":
    main()
