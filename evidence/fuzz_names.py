"""Names of all sorts in every command: python evidence/fuzz_names.py [--cases 320] [--seed 0] [--case NUMBER]

A case is a table whose columns, clients, classes and categories are drawn from NAMES. It goes through run, predict,
export, serve, report, compare, onboard, and a federation over Flower's messages in this process. Each step is right, or
is refused in one line; what a name comes back as is compared with what the table says. --case runs one case and shows
what is wrong with it. The result is written to docs/evidence/fuzz.md.
"""

import argparse
import contextlib
import csv
import json
import os
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime
import polars
from fuzz import PICTURES
from fuzz_cases import Draw, Post, Wrong, cli

import kinfed
from kinfed import Run, UsageError, load_model
from kinfed.cli.predict import open_predictor
from kinfed.data.tables.cells import MISSING
from kinfed.data.tables.words import name_of
from kinfed.errors import RunError
from kinfed.serving.requests import JSON, Refused, answer
from kinfed_flower import plan
from kinfed_flower.server.server import serve
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire.keys import check_name
from kinfed_papers.result_pages import put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "fuzz.md"
NAMES = [
    *("all", "NaN", "nan", "None", "null", "NA", "0", "007", "7", "1", "-1", "1.0", "1e5", "true", "False", "inf", "?"),
    *(
        "*",
        "**",
        "a/b",
        "a//b",
        "/",
        "..",
        ".",
        "../x",
        "a.b",
        "a\\b",
        "C:\\x",
        "~",
        "a:b",
        "%2F",
        "50%",
        "a%sb",
        "{x}",
    ),
    *("class", "probabilities", "prediction", "cat", "client", "method", "model", "x", "y", "file", "round", "theta"),
    *(
        "train",
        "test",
        "local",
        "fedavg",
        "mean",
        "shared",
        "embeddings",
        "whole",
        "forward",
        "self",
        "place",
        "lambda",
    ),
    *('"', "'", "a'b", 'say "hi"', "`", "a,b", "a;b", "a\tb", "a|b", "a=b", "a b", "a  b", "#a", "=1+1", "@x", "+x"),
    *("[red]", "[/red]", "[bold]x", "[", "]", "$x_{", "$a$", "a_b^c", "<b>", "</script>", "<!-- x", "&amp;", "&"),
    *("-x", "--out", "--client", "a\nb", "a\r\nb", "\x01", "a\x1b[31mb", "\x7f", "\u200b", "\u202eabc", "x\ufeff", "ﬁ"),
    *("Köln ☃", "日本", "عربى", "🙂", "é", "e\u0301", "x" * 300, "ß" * 130, "a is missing", "b is other", "P(0)"),
    *(
        "CON",
        "nul",
        "state",
        "description",
        "names",
        "owner",
        "kinfed",
        "__class__",
        "__init__",
        "import",
        "0/theta",
        "^a.*$",
    ),
]
BAD = ("wrong", "unexpected", "lines", "left")
STEPS = ("run", "predict", "export", "serve", "report", "compare", "onboard", "Flower")


class Tags(HTMLParser):
    """The texts of a page, and whether a name became a tag."""

    def __init__(self):
        super().__init__()
        self.tags = Counter()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1


def draw_names(draw, count, taken=(), cell=False):
    """Different names; of cells also different without blanks around them, and as whole numbers and truth values."""
    names, seen = [], {plain(name) for name in taken}
    while len(names) < count:
        name = draw.choice(NAMES) if draw.random() < 0.9 else draw.choice(NAMES) + draw.choice(NAMES)
        if plain(name) and plain(name) not in seen and not (cell and name.lower() == "nan"):
            names.append(name)
            seen.add(plain(name))
    return names


def is_number(word):
    with contextlib.suppress(ValueError):
        return np.isfinite(float(word)) or word.lower() == "nan"
    return plain(word) in ("True", "False") or word.lower() in MISSING


def plain(name):
    return name_of(name.strip()).strip()


class Case:
    """A table, and what it says."""

    def __init__(self, draw):
        self.draw = draw
        self.client, self.target, self.a, self.b, self.text = self.columns = draw_names(draw, 5)
        self.clients = draw_names(draw, 4)
        self.classes = draw_names(draw, draw.choice([2, 3]), cell=True)
        self.words = draw_names(draw, 3)
        while sum(is_number(word) for word in self.words) > 1:  # else their column may be one of numbers
            self.words = draw_names(draw, 3)
        self.numbers = draw.random() < 0.25  # a target that is a number
        self.kind = draw.choice(["csv", "csv", "parquet"])
        self.path = Path(f"t.{self.kind}")
        self.frame = self.write(self.path, self.clients, 24)

    def write(self, path, clients, rows_each, lacking=()):
        rng, rows = np.random.default_rng(self.draw.randrange(1000)), []
        for i in range(rows_each * len(clients)):
            a, word = rng.normal(), rng.integers(3)
            y = 3 * a + word + rng.normal() if self.numbers else self.classes[i // len(clients) % len(self.classes)]
            rows.append([clients[i % len(clients)], y, a, rng.normal(), self.words[word]])
        frame = polars.DataFrame(rows, schema=list(self.columns), orient="row", strict=False)
        frame = polars.DataFrame([column for column in frame if column.name not in lacking])
        if path.suffix == ".parquet":
            frame.write_parquet(path)
        else:  # polars does not double the quotation marks of a heading
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([frame.columns, *frame.rows()])
        return frame

    def run(self):
        model = self.draw.choice(["mlp", "linear", "embedded"])
        method = self.draw.choice(["local", "fedavg", "fedamp", "fedrep" if model == "mlp" else "local"])
        more = ["rounds=1", f"model={model}", f"--method={method}", "--beside=none", "--quiet", "how.executor=loop"]
        if not self.numbers:
            more.append("federation.dataset.labels=true")
        cli("run", self.path, f"--client={self.client}", f"--target={self.target}", *more, "--out", "r")
        summary = json.loads(Path("r/summary.json").read_text())
        check("clients", sorted(summary["by_client"]["names"]), sorted(plain(name) for name in self.clients))
        if not self.numbers:
            check("classes", sorted(summary["data"]["classes"]), sorted(plain(name) for name in self.classes))
        cli("run", "r/config.toml", "--quiet", "how.executor=loop", "--beside=none", "--out", "again")
        check("again", Path("again/history.csv").read_text(), Path("r/history.csv").read_text())

    def answers(self, path):
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    def predict(self):
        cli("predict", "r", self.path, "-o", "p.csv")
        head, *rows = self.answers(Path("p.csv"))
        check("owners", [row[0] for row in rows], [plain(name) for name in self.clients] * 24)
        if not self.numbers:
            check("answers", {row[3] for row in rows} <= {plain(name) for name in self.classes}, True)
            check("chances", len(head), 4 + len(self.classes))
        name = self.draw.choice(self.clients)
        cli("predict", "r", self.path, f"--client={name}", "-o", "one.csv")
        check("one owner", {row[0] for row in self.answers(Path("one.csv"))[1:]}, {plain(name)})
        load_model("r", name)

    def export(self):
        kind = self.draw.choice(["onnx", "onnx", "safetensors"])
        name = self.draw.choice(self.clients)
        cli("export", "r", f"--client={name}", f"--format={kind}", "--out", "x")
        check("files", len(list(Path("x").glob(f"*.{kind}"))), 1)
        if kind == "onnx":
            (path,) = Path("x").glob("*.onnx")
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            check("exported", session.get_modelmeta().custom_metadata_map["client"], plain(name))

    def serve(self):
        predictor, _ = open_predictor(Path("r"))
        try:
            answers, *_ = answer(predictor, json.dumps({"rows": self.frame.head(8).to_dicts()}).encode(), JSON)
        except Refused as problem:
            raise Wrong("wrong", f"serve refuses the rows of training: {problem}") from None
        check("served", answers["client"].to_list(), [plain(name) for name in self.clients] * 2)

    def report(self):
        cli("report", "r", "again", "--out", "report.html")
        tags = Tags()
        tags.feed(Path("report.html").read_text(encoding="utf-8"))
        check("tags", {"red", "x"} & tags.tags.keys(), set())

    def compare(self):
        cli("compare", "r", "again")
        if not self.numbers:
            cli("compare", "r", "--confusion", f"--client={self.draw.choice(self.clients)}")

    def onboard(self):
        if Run.open("r").summary.method == "local":  # which nobody can join
            return
        new = draw_names(self.draw, 2, self.clients)
        self.write(Path("new.csv"), new, 12)
        cli("onboard", "r", "--data", "new.csv", "--shots", "0,5", "--rounds", "1", "--out", "joined")
        check("newcomers", sorted(Run.open("joined").names), sorted(map(plain, new)))

    def flower(self):
        sites, names = [], []
        while len(names) < 3:  # a site's name is one of a folder, or is refused when it is given
            [name] = draw_names(self.draw, 1, names)
            try:
                check_name(name)
            except UsageError as problem:
                check("a refusal's lines", len(str(problem).splitlines()), 1)
                name = f"site-{len(names)}"
            names.append(name)
        for name in names:
            data = Path(f"site-{len(sites)}.csv")
            self.write(data, ["one"], 30, [self.client])
            sites.append(Site(name, data, Path("state"), "cpu", Reading(self.target), policy=Policy(runs="any")))
        table = {"rounds": 1, "method": "fedavg", "model": self.draw.choice(["linear", "embedded"])}
        table["flower"] = {"clients": 3, "deadline": 1.0, "patience": 5.0}
        at_once = mock.patch.multiple("kinfed_flower.server.nodes", RETRY=0.05, LATER=0.05)
        with at_once, mock.patch.multiple("kinfed_flower.server.broker", LOOK=0.0, RETRY=0.05):
            serve(plan.resolve(table), Post(self.draw, sites, ""), Path("f"), lambda text: None, 0.001)
        check("sites", sorted(json.loads(Path("f/summary.json").read_text())["by_client"]["names"]), sorted(names))


def check(what, actual, wanted):
    """Raise Wrong unless two things are equal."""
    if actual != wanted:
        raise Wrong("wrong", f"{what}: {actual!r:.300} is not {wanted!r:.300}")


def judge(number, seed, here):
    """Carry out a case in a folder; what each step ended in, and what was said."""
    here.mkdir(parents=True)
    os.chdir(here)
    draw, ends = Draw(f"{seed} names {number}"), []
    case, pictured = Case(draw), number % 5 == 0
    for step in STEPS:
        outcome, text = "ok", ""
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                for module, names in {} if pictured else PICTURES.items():  # pictures take seconds
                    stack.enter_context(mock.patch.multiple(module, **{name: lambda *_, **__: None for name in names}))
                getattr(case, step.lower())()
        except (UsageError, RunError) as problem:
            outcome = "lines" if re.search(r"[\r\n]", str(problem)) else "refused"
            text = str(problem)
        except Wrong as problem:
            outcome, text = problem.args
        except Exception:
            outcome, text = "unexpected", traceback.format_exc()
        ends.append((step, outcome, text))
        if step == "run" and outcome != "ok":
            break
    return ends, case.columns, case.clients, case.classes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    numbers = range(args.cases) if args.case is None else [args.case]
    counts, begin = {step: Counter() for step in STEPS}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kinfed-names-") as folder:
        for number in numbers:
            ends, *names = judge(number, args.seed, Path(folder) / str(number))
            for step, outcome, complaint in ends:
                counts[step][outcome] += 1
                if outcome in BAD or outcome == "refused":
                    complaint = complaint.strip() if args.case is not None else repr(complaint.strip()[-300:])
                    print(f"{number} {step}: {outcome}: {complaint}", flush=True)
            if args.case is not None:
                print(*names, sep="\n")
    total = sum(counts.values(), Counter())
    shown = ["ok", "refused", *(outcome for outcome in BAD if total[outcome])]
    lines = [f"| step | cases | {' | '.join(shown)} |", "| --- | ---: |" + " ---: |" * len(shown)]
    for step, outcomes in counts.items():
        lines.append(f"| {step} | {outcomes.total()} | {' | '.join(str(outcomes[outcome]) for outcome in shown)} |")
    text = [
        "## Names",
        "",
        f"Written by `python evidence/fuzz_names.py --cases {args.cases} --seed {args.seed}` with kinfed "
        f"{kinfed.__version__}:",
        f"{args.cases} cases in {(time.monotonic() - begin) / 60:.0f} minutes. Columns, clients, classes, categories, "
        f"newcomers and sites are called by {len(NAMES)} names or two",
        "of them together. Names are words of the commands and of ONNX, truth values, numbers, slashes, quotes,",
        "line breaks, control characters, mark-up, options, emoji, 300 letters. A step is right if every name",
        "comes back as the table has it, and its answers are those of the run.",
        *("", *lines, ""),
    ]
    print("\n".join(lines))
    if args.case is None and args.cases >= 300:
        put(PAGE, "names", "\n".join(text), "Odd and broken input")


if __name__ == "__main__":
    main()
