"""Who answers, and what a table gives away: python evidence/fuzz_doors.py [--estimators 100] [--tables 60] [--seed 0]

An estimator's answers to rows of known, unknown, missing and differently typed groups are compared with those of each
group's own model. Tables with a planted leak must be warned of with its column; the same tables without it must not.
The part of docs/evidence/fuzz.md on both is written.
"""

import argparse
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import torch

import kinfed
from kinfed_papers.result_pages import put, version

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "fuzz.md"
NAMES = {  # what groups are called: their names by place
    "text": lambda i: f"shop {i}",
    "numbers": lambda i: i + 1,
    "floats": lambda i: i + 1.0,
    "odd": lambda i: ["all", "mean", "None!", "a,b", "ü/x", "-1"][i],
    "dates": lambda i: np.datetime64("2024-01-01") + i,
}
ODD = {"typo": "shop 1x", "other type": 1e9, "all": "all", "missing": None, "NaN": float("nan"), "empty": ""}


def case_of_estimators(seed):
    """What an estimator did that it should not have done, and "" if nothing; with what was tried."""
    draw = np.random.default_rng(seed)
    count, rows, kind = int(draw.integers(2, 6)), int(draw.integers(30, 90)), str(draw.choice([*NAMES]))
    names = [NAMES[kind](i) for i in range(count)]
    place = np.arange(rows) % count
    X = draw.normal(size=(rows, 3))
    y = X[:, 0] * np.where(place % 2, 1, -1)
    estimator = kinfed.Classifier if draw.random() < 0.5 else kinfed.Regressor
    y = np.where(y > 0, "yes", "no") if estimator is kinfed.Classifier else y
    policy = [None, "error", "skip", "mean"][draw.integers(4)]
    where = str(draw.choice(["beside", "column", "frame"]))
    asked_place, wanted = draw.integers(0, count, 12), []
    strange = str(draw.choice(["nothing", "no groups", *ODD]))
    at = set(draw.choice(12, 2, replace=False).tolist()) if strange in ODD else set()
    for i, j in enumerate(asked_place.tolist()):
        wanted.append(ODD[strange] if i in at else names[j])
    taken = {str(name) for name in names}
    for i in [i for i in at if str(wanted[i]) in taken]:  # the odd name is one of a group
        asked_place[i] = [str(name) for name in names].index(str(wanted[i]))
        at.remove(i)
    settings = {"rounds": 1, "epochs": 1, "unknown": policy, "method": str(draw.choice(["local", "fedavg", "kin"]))}
    library = [pd.DataFrame, pl.DataFrame][draw.integers(2)]
    Z = draw.normal(size=(12, 3))

    def table(values, groups):
        frame = {f"x{i}": column for i, column in enumerate(values.T)}
        text = [None if g is None or g != g else str(g) for g in groups]
        return library(frame | {"shop": text})

    tried = f"{estimator.__name__}, groups {kind} {where}, unknown={policy}, {strange}"
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        model = estimator(**settings, groups={"beside": None, "frame": "shop", "column": 3}[where])
        try:
            if where == "beside":
                model.fit(X, y, np.array(names, None if kind != "odd" else object)[place])
                given = (Z,) if strange == "no groups" else (Z, np.array(wanted, object) if at else wanted)
            else:
                model.fit(table(X, [names[j] for j in place]), y)
                given = (table(Z, [None] * 12 if strange == "no groups" else wanted),)
            at = set(range(12)) if strange == "no groups" else at
            shown.clear()
            answers = np.stack(
                [model.run_.predictor(name)(_plain(Z, model)).select(_numbers()).to_numpy() for name in model.groups_]
            )
            answer = model.predict_proba if estimator is kinfed.Classifier else model.predict
            got = answer(*given)
        except ValueError as problem:
            if "\n" in str(problem):
                return tried, "error of several lines"
            fine = at and (
                policy in (None, "error") or (policy == "skip" and len(at) == 12) or "of several kinds" in str(problem)
            )
            return tried, "" if fine else f"refused: {problem}"
        except Exception as problem:
            return tried, f"raw {type(problem).__name__}: {problem}"
    loud = any("group" in str(w.message) or "skipped" in str(w.message) for w in shown)
    if at and policy in (None, "skip", "error") and not loud:
        return tried, "silent"
    got = got.reshape(12, -1)
    for i, j in enumerate(asked_place.tolist()):
        mean = policy == "mean" or len(at) == 12
        right = answers[:, i].mean(0) if mean else np.full(got.shape[1], np.nan)
        right = right if i in at else answers[j, i]
        if not np.allclose(got[i], right, atol=1e-4, equal_nan=True):
            return tried, f"another model's answer in row {i}"
    return tried, ""


def _numbers():
    return pl.selectors.numeric()


def _plain(values, model):
    """The same inputs as a frame without groups."""
    return pl.DataFrame({f"x{i}": column for i, column in enumerate(values.T)})


def base(draw, rows=360):
    """A table without a leak: six sites, four columns, a label that these decide in part, and a number."""
    frame = {"site": [f"s{i % 6}" for i in range(rows)]}
    a, b = draw.normal(size=(2, rows)).round(3)
    frame |= {
        "a": a,
        "b": b,
        "kind": draw.choice(["old", "new", "used"], rows).tolist(),
        "age": draw.integers(1, 90, rows),
    }
    odds = a + 0.5 * b + draw.normal(size=rows)
    return frame | {"y": np.where(odds > 0, "yes", "no").tolist()}, a + b + draw.normal(size=rows)


def plant(name, frame, number, draw):
    """The same table with a leak, whose columns a warning must name, and its target."""
    rows, yes = len(frame["y"]), np.array(frame["y"]) == "yes"
    first, second = draw.normal(size=(2, rows)).round(4)
    if name == "empty":
        price = draw.uniform(5, 50, rows).round(2)
        return frame | {"price": [p if ok else None for p, ok in zip(price.tolist(), yes, strict=True)]}, ["price"], "y"
    if name == "threshold":
        return frame | {"paid": np.where(yes, 100, 20) + draw.uniform(0, 60, rows).round(2)}, ["paid"], "y"
    if name == "codes":
        return (
            frame
            | {
                "code": [
                    f"{'PQRST'[i] if ok else 'ABCDE'[i]}9" for i, ok in zip(draw.integers(0, 5, rows), yes, strict=True)
                ]
            },
            ["code"],
            "y",
        )
    if name == "two texts":
        first, second = draw.integers(0, 2, rows), draw.integers(0, 2, rows)
        text = {"sent": np.where(first, "yes", "no").tolist(), "back": np.where(second, "yes", "no").tolist()}
        return frame | text | {"y": np.where(first ^ second, "yes", "no").tolist()}, ["sent", "back"], "y"
    if name == "difference":
        return (
            frame | {"due": first, "paid": second, "y": np.where(second < first, "yes", "no").tolist()},
            ["due", "paid"],
            "y",
        )
    if name == "copies":
        again = draw.choice(rows, rows // 8, replace=False)
        return (
            {key: [*values, *(values[i] for i in again)] for key, values in frame.items()},
            ["stand in training"],
            "y",
        )
    if name == "noisy copy":
        copy = 3 * number + draw.normal(0, 0.06 * number.std(), rows)
        return frame | {"copy": copy.round(4), "z": number.round(4)}, ["copy"], "z"
    if name == "sum":
        return (
            frame | {"net": first, "tax": second, "z": (first + second + draw.normal(0, 0.005, rows)).round(4)},
            ["net", "tax"],
            "z",
        )
    if name == "product":
        price, count = draw.uniform(1, 20, rows).round(2), draw.integers(1, 40, rows)
        return frame | {"price": price, "count": count, "z": (price * count).round(2)}, ["price", "count"], "z"
    months = pl.date_range(pl.date(2016, 1, 1), pl.date(2023, 12, 1), "1mo", eager=True)
    months = months.filter(months.dt.month() != int(draw.integers(2, 12)))
    site, when = [f"s{i}" for i in range(4) for _ in months], [*months] * 4
    return {"site": site, "t": when, "z": draw.normal(size=len(site))}, ["bridge"], "z"


LEAKS = "empty", "threshold", "codes", "two texts", "difference", "copies", "noisy copy", "sum", "product", "month"


def list_warnings(frame, target):
    """What reading a table warns of."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        more = {"time": "t", "past": 6, "horizon": 2} if "t" in frame else {}
        kinfed.from_frame(pl.DataFrame(frame), client="site", target=target, **more)
    texts = [str(w.message) for w in shown]
    return [t for t in texts if "is left out with ignore" in t or "stand in training" in t or "bridge" in t]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimators", type=int, default=100)
    parser.add_argument("--tables", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    faults = []
    for i in range(args.estimators):
        tried, fault = case_of_estimators((args.seed, 1, i))
        if fault:
            faults.append(f"estimator {i} ({tried}): {fault}")
            print(faults[-1], flush=True)
    counts, false = Counter(), 0
    for i in range(args.tables):
        draw = np.random.default_rng((args.seed, 2, i))
        name = LEAKS[i % len(LEAKS)]
        frame, number = base(draw)
        if alarms := list_warnings(frame, "y"):
            false += 1
            print(f"table {i}: false alarm: {alarms}", flush=True)
        frame, wanted, target = plant(name, frame, number, draw)
        lines = list_warnings(frame, target)
        if any(all(word in line for word in wanted) for line in lines):
            counts[name] += 1
        else:
            faults.append(f"table {i} ({name}): not told")
            print(faults[-1], lines, flush=True)
    print(len(faults), "faults", false, "false alarms", dict(counts))
    rows = [f"| {name} | {len(range(k, args.tables, len(LEAKS)))} | {counts[name]} |" for k, name in enumerate(LEAKS)]
    wrong = sum("estimator" in fault for fault in faults)
    command = f"python evidence/fuzz_doors.py --estimators {args.estimators} --tables {args.tables} --seed {args.seed}"
    text = [
        f"Written by `{command}` ({version()}).",
        "",
        f"{args.estimators} estimators were wanted for rows of groups that are known, mistyped, missing or of another "
        f"type. Of these {wrong} gave an answer of another model than was wanted for, or an error that says nothing.",
        f"Of {args.tables} tables, read without a leak, {false} were warned of. With a leak:",
        "",
        "| planted leak | tables | warned of with its columns |",
        "| --- | ---: | ---: |",
        *rows,
    ]
    put(PAGE, "doors", "\n".join(text), "Odd and broken input")


if __name__ == "__main__":
    main()
