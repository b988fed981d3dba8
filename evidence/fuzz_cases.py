"""What evidence/fuzz.py runs: odd and broken input of every kind, drawn anew for every case.

A case is sound or broken. A sound one may be odd (one client, two rows, a learning rate of 1e30), and most of these
train; a broken one has something changed that may be refused. A case works in the current folder.
"""

# ruff: noqa: B023 (what `one` chooses from is called at once)

import contextlib
import csv
import datetime
import inspect
import io
import itertools
import json
import math
import pickle
import random
import re
import shutil
import traceback
import zipfile
from dataclasses import fields
from pathlib import Path
from unittest import mock
from xml.sax.saxutils import quoteattr

import fuzz_modules
import numpy as np
import polars
import tomli_w
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

import kinfed
from kinfed import SGD, Adam, Federation, Participation, Split, Training, UsageError, from_csv
from kinfed.cli import main as command
from kinfed.core.tasks import Classification, Regression
from kinfed.data import graph_files
from kinfed.data.datasets.files import IMAGES
from kinfed.data.graphs import GRAPHS
from kinfed.data.partitions import PARTITIONS
from kinfed.methods import METHODS
from kinfed.models import MODELS
from kinfed.runs.config import experiment as config, parts
from kinfed.simulation.attacks import ATTACKS
from kinfed.simulation.execution import Execution
from kinfed_flower import plan
from kinfed_flower.server.server import serve
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.wire import transport
from kinfed_flower.wire.messages import Failure, Message, Node

MARK = "EXECUTED"  # the file that a pickle writes if anybody loads it
ENDLESS = ("rounds", "seeds")  # large numbers of these are asked for
NAMES = [
    "a",
    "b",
    "Ulm Hbf",
    "Köln ☃",
    "7",
    "7.5",
    "-1",
    "*",
    "a/b",
    "..",
    "nan",
    "x" * 200,
    "a,b",
    "'q\"",
    "[red]",
    "$x_{",
]
ODD = [0, -1, 1, 2, 7, 0.0, -0.5, 0.5, 1e-300, 1e30, -1e30, math.nan, math.inf, -math.inf, 2**31, 2**63, -(2**70)]
ODD += [True, False, "", " ", "x", "Köln ☃", "a\nb", "../x", "[red]", "*", "x" * 3000, datetime.date(2020, 1, 1)]
ODD += [[], [0], [1, 2], [-3], [[1.0]], ["x"], {}, {"name": "x"}, {"name": 3}, 10**300]
CELLS = ["", "nan", "inf", "x", "1e999", "1_000", "١٢", "0x10", " ", "a\nb", '"', 1e31, "2020-13-45", "=1+1", "1,5"]
INSERTED = [b"\0", b"\xff\xfe", b"\r", b'"', b"\xef\xbb\xbf", b"[" * 9999, b"9" * 400, b"\n\n", b"=", b","]
PLAIN = '"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}'
HEADERS = [  # of safetensors
    '{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,64]}}',
    f"{{{PLAIN},{PLAIN.replace('a', 'b', 1)}}}",
    f'{{"__metadata__":{{"how":"[[","done":"x","history":"3"}},{PLAIN}}}',
    f'{{"__metadata__":{{"memory":"7","words":"[]","names":"{{}}"}},{PLAIN}}}',
    '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[64,0]}}',
    "[" * 100_000,
]
BASE = Path()  # sound folders of runs, see `prepare`
PLANTED = {}  # what the case put into folders: files and the times at which they were written


class Wrong(Exception):
    """An outcome that should not be, and what was said."""


class Evil:
    def __reduce__(self):
        return open, (str(Path.cwd() / MARK), "w")


class Draw(random.Random):
    """Random numbers of a case: whether it may break anything, its number, and what there is to say of it."""

    broken, number, answer = False, 0, ""

    def breaks(self, chance):
        return self.broken and self.random() < chance

    def one(self, **choices):
        """One of the values, called if it is a function."""
        made = self.choice(list(choices.values()))
        return made() if callable(made) else made


def cli(*arguments):
    """A command in this process; raises UsageError if it is refused in one line."""
    errors, code = io.StringIO(), None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = command([str(word) for word in arguments])
        except SystemExit as end:
            code = end.code
    text = errors.getvalue()
    if re.search(r"Traceback|please report it|[A-Za-z](Error|Exception|Warning): ", text):
        raise Wrong("unexpected", text)
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("kinfed: warning: ")]
    if code:
        several = arguments[0] in ("sweep", "papers")  # they tell of each run that failed
        if not lines or (len(lines) > 1 and not several) or not all(line.startswith("kinfed: ") for line in lines):
            raise Wrong("lines", text)
        out = Path(arguments[arguments.index("--out") + 1] if arguments[0] == "run" else "nowhere")
        if (
            code == 2
            and "already holds a run" not in text
            and out.is_dir()
            and {p.name for p in out.rglob("*") if p.is_file()} <= {"config.toml", "how.json"}
        ):
            raise Wrong("left", f"{out} after {text}")
        raise UsageError(lines[-1])


def like(draw, default, texts):
    """A value of a setting's kind."""
    match default:
        case bool():
            return draw.random() < 0.5
        case int():
            return draw.choice([0, 1, 2, 3, 5, default])
        case float():
            return draw.choice([0.0, 1e-6, 0.1, 0.5, 0.999, 1.0, 2.0, 30.0, 1e6, default])
        case str():
            return draw.choice(texts)
        case None:
            return draw.choice([1, 2, 0.5, *texts])
    return draw.choice([[], [1], [3, 2], ["head.*"], [[1.0], [2.0]]])


def part(draw, registry, given=0, names=None, odds=0.3):
    """A part by name with some of its settings; words are those that its file has."""
    name = draw.choice(sorted(names or registry))
    texts = re.findall(r'"([a-z0-9_-]+)"', inspect.getsource(inspect.getmodule(registry[name]))) or ["x"]
    table = {"name": name}
    for key, setting in parts.settings(registry[name], given).items():
        if draw.random() < odds:
            more = {key: like(draw, setting.default, texts)}
            if not draw.breaks(0.2):  # else whatever it is
                try:
                    parts.make(registry, table | more, "", given=given)
                except UsageError:
                    continue
            table |= more
    return table


def mutate(draw, table, odds=0.5):
    """The table with entries changed, lost, added or renamed: none of them with a chance of `odds`."""
    while draw.breaks(1 - odds):
        at, key = table, None
        while isinstance(at, dict | list) and at and (key is None or draw.random() < 0.8):
            inside = at
            key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = at[key]
        odd = draw.choice(ODD)
        match draw.randrange(8) if key is not None else -1:
            case -1:
                return table
            case 0:
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[draw.choice(["nmae", "", "x.y", "clients", f"{key}s"])] = inside.pop(key)
            case 2 if isinstance(inside, dict):
                inside[draw.choice(["seed", "head", "name", "graph"])] = odd
            case _:
                inside[key] = 2 if key in ENDLESS and isinstance(odd, int) and odd > 9 else odd
    return table


def spoil(draw, data):
    """Bytes damaged."""
    at = draw.randrange(len(data) + 1)
    return draw.one(
        cut=data[:at],
        changed=data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
        flipped=bytes(b ^ (1 << draw.randrange(8)) if draw.random() < 0.02 else b for b in data[:20000]) + data[20000:],
        inserted=data[:at] + draw.choice(INSERTED) + data[at:],
        twice=data + data,
        empty=b"",
    )


def replace_file(draw, path):
    """Another thing in the place of a file of a folder from elsewhere."""
    others = [p for p in path.parent.rglob("*") if p.is_file() and p != path] or [path]
    data = path.read_bytes()
    other = draw.choice(others).read_bytes()
    header = draw.choice(HEADERS).encode()
    document = {"names": ["a"], "shape": [2], "scores": {}, "seed": 0, "outputs": 2}
    path.unlink()
    draw.one(
        spoilt=lambda: path.write_bytes(spoil(draw, data)),
        spoilt_too=lambda: path.write_bytes(spoil(draw, data)),
        folder=lambda: path.mkdir(),
        loop=lambda: path.symlink_to(path.name),
        nothing=lambda: path.symlink_to("/dev/null"),
        root=lambda: path.symlink_to("/"),
        another=lambda: path.write_bytes(other),
        pickled=lambda: path.write_bytes(pickle.dumps(Evil())),
        torch=lambda: torch.save({"a": Evil()}, path),
        hostile=lambda: path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64)),
        huge=lambda: path.write_bytes((2**62).to_bytes(8, "little") + b"{"),
        deep=lambda: path.write_text("[" * 100_000),
        deep_toml=lambda: path.write_text("x = " + "[" * 5000),
        json=lambda: path.write_text(json.dumps(mutate(draw, document, 0.1), default=str)),
        npz=lambda: npz(draw, path, {"relation": np.eye(3), "clients": np.array(["a", "b"])}),
        gone=None,
    )


def npz(draw, path, arrays, odds=0.5):
    """A .npz whose arrays may be changed, pickled, cut short, compressed to nothing or lie about their size."""
    while arrays and draw.breaks(1 - odds):
        name = draw.choice(sorted(arrays))
        a = np.asarray(arrays.pop(name))
        kind = draw.choice(["f2", "f8", ">f4", "i1", "u8", "c8", "U9", "?", "V4", "M8[s]"])
        with contextlib.suppress(ValueError, TypeError), np.errstate(all="ignore"):
            arrays[name] = draw.one(
                half=a[: len(a) // 2] if a.ndim else a,
                deeper=a[..., None],
                number=np.float64(7),
                kind=lambda: a.astype(kind),
                scaled=lambda: a.astype(np.float64) * draw.choice([np.nan, 1e30, 0, -1]),
                pickled=np.array([Evil()] * (len(a) if a.ndim else 1), dtype=object),
                empty=np.zeros(draw.choice([0, (0, 3), (3, 0, 2)])),
                fortran=np.asfortranarray(a),
                bomb=np.zeros(30_000_000, np.uint8),
            )
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
    if draw.breaks(0.15):  # a header that claims more than there is
        with zipfile.ZipFile(path, "a") as archive:
            shape = draw.choice(["(99999999999,)", "(-5,)", "(4294967296, 4294967296)", "(3", "__import__('os')"])
            header_text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            archive.writestr(
                f"{draw.choice([*arrays, 'x', '../x'])}.npy", b"\x93NUMPY\1\0v\0" + header_text.encode() + bytes(64)
            )
    if draw.breaks(0.2):
        path.write_bytes(spoil(draw, path.read_bytes()))


def learning(draw, registry=METHODS):
    """The tables of a config that say how to learn, with little work."""
    optimiser = draw.one(
        sgd={"name": "sgd", "lr": draw.choice([1e-12, 0.01, 0.1, 0.2, 1.0, 1e3, 1e30])},
        momentum={"name": "sgd", "lr": 0.1, "momentum": draw.choice([0.9, 0.999, 1.0]), "weight_decay": 0.1},
        adam={"name": "adam", "lr": draw.choice([0.001, 0.1, 1e10]), "eps": draw.choice([1e-8, 0.0])},
    )
    batch = draw.choice([1, 2, 4, 8, 1000, 10**6])
    steps = draw.choice([{}, {}, {"steps": 1}, {"steps": 3}])
    return {
        "rounds": draw.choice([1, 1, 2, 3]),
        "seed": draw.choice([0, 1, 2**62 - 1]),
        "participation": draw.choice([1.0, 1.0, 1, 0.5, 1e-9]),
        "evaluate_every": draw.choice([1, 1, 2, 50]),
        "training": {"epochs": draw.choice([1, 2]), "batch": batch, "optimiser": optimiser, **steps},
        "method": part(draw, registry),
    }


def experiment(draw):
    """A config, and its data as files of this folder if they are not built in; a sound one has clients."""
    for _ in range(10):
        table = learning(draw)
        split = {"test": draw.choice([0.2, 0.3, 0.01, 0.5]), "validation": draw.choice([0.1, 0.0, 0.2])}
        kind = draw.choice(["digits", "digits", "synthetic", "csv", "csv", "series", "image", "traffic"])
        federation = {"clients": 0, "partition": "natural", "split": split}
        model = part(draw, MODELS, 2, ["linear", "mlp", "mlp"])
        if kind in ("digits", "image"):
            split["examples"] = draw.choice([4, 8, 30])
            federation |= {"dataset": "digits", "clients": draw.choice([1, 2, 5, 10, 60])}
            federation["partition"] = part(draw, PARTITIONS, names=set(PARTITIONS) - {"natural"})
        if kind == "image":
            federation |= {"dataset": draw.choice(["mnist", "cifar10"]), "clients": draw.choice([1, 2, 4])}
            images(draw, federation["dataset"])
            model = part(draw, MODELS, 2) if draw.random() < 0.3 else model
        if kind == "synthetic":
            many = {"clients": draw.choice([1, 2, 5, 40]), "per_class": draw.choice([2, 3, 9]), "mode": "printed"}
            federation["dataset"] = {"name": "synthetic", **many}
        if kind in ("csv", "series"):
            federation["dataset"] = tabulate(draw, kind == "series")
        if kind == "traffic":
            federation["dataset"] = {"name": "metr_la_week", "past": 3, "horizon": draw.choice([1, 2])}
            sensors(draw, "metr_la_week")
        if kind in ("series", "traffic"):
            model = part(draw, MODELS, 2, ["linear", "mlp", "rnn", "gru"])
        if table["method"]["name"] in ("sfl", "panacea") or draw.random() < 0.2:
            federation["graph"] = part(draw, GRAPHS, 2)
        if draw.random() < 0.1:
            federation[draw.choice(["auc", "reweighted"])] = True
        if draw.random() < 0.1:
            table["attack"] = part(draw, ATTACKS)
        if draw.random() < 0.1:
            table["participation"] = draw.choice([{"share": 0.5, "late": 0.3, "joins": 1}, {"by_group": 1}])
        table |= {"federation": federation, "model": model}
        if draw.broken:
            break
        with contextlib.suppress(UsageError):
            config.resolve(json.loads(json.dumps(table))).federation(Path(), table["seed"])
            break
    return table


def run(draw, source, *overrides):
    """`kinfed run`, in one of the ways to run."""
    executor = draw.choices(["loop", "auto", "fused", "vmap"], [30, 10, 3, 1])[0]
    how = [f"how.executor={executor}", *draw.choice([[], [], [], [], ["how.precision=bf16"], ["how.workers=2"]])]
    options = [] if draw.random() < 0.2 else ["--quiet"]
    cli(
        "run",
        source,
        *overrides,
        "--out",
        "out",
        "--data-dir",
        ".",
        f"how.checkpoint_seconds={draw.choice([0, 10])}",
        *how,
        *options,
    )


def configs(draw):
    table = mutate(draw, experiment(draw))
    text = tomli_w.dumps(table).encode()
    Path("c.toml").write_bytes(spoil(draw, text) if draw.breaks(0.15) else text)
    if draw.random() < 0.03:
        return cli("list", "c.toml", "--data-dir", ".")
    run(draw, "c.toml")
    if draw.random() < 0.2:
        folder = Path("out") if table.get("seeds", 1) == 1 else next(Path("out").glob("seed-*"))
        kinfed.load_model(folder, json.loads((folder / "summary.json").read_text())["by_client"]["names"][-1])
        cli("compare", "out", "out")


def leaves(table, prefix=""):
    for key, value in table.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def overrides(draw):
    table = mutate(draw, experiment(draw))
    name = table.get("method", {}).get("name", "local") if isinstance(table.get("method", {}), dict) else "local"
    name = "local" if str(name).startswith("-") else name
    overrides_given = []
    for key, value in leaves(table):
        with contextlib.suppress(TypeError):
            value = value if isinstance(value, str) else tomli_w.dumps({"v": [value]}).partition("=")[2].strip()[1:-1]
            overrides_given.append(f"{key}={value.strip().rstrip(',')}")
    draw.shuffle(overrides_given)
    if draw.breaks(0.3):
        overrides_given += draw.choice(
            [["=1"], ["rounds"], ["a.b.c=1"], ["method=3"], ["rounds.x=2"], ["[x]=1"], ["seed='"]]
        )
    small = ["rounds=1", "federation.clients=4", "federation.split.examples=9"]
    if draw.breaks(0.7):
        small += [f"{draw.choice(overrides_given).partition('=')[0]}={draw.choice(ODD)}"]
    how = ["--quiet", "how.executor=loop"]
    overrides_given, small = (
        [word for word in overrides_of if not word.startswith("-")] for overrides_of in (overrides_given, small)
    )
    match draw.randrange(14):
        case 0:
            cli("sweep", name, *small, "training.batch=2,8", "--out", "swept", *how)
        case 1:
            analysis = draw.choice(["weights", "curves", "controls", "map", "layers"])
            cli("papers", "analyse", analysis, name, *small, "--out", "seen", *how)
        case 2:
            many = f"clients={draw.choice(ODD) if draw.broken else 3}"
            cli("list", "datasets", draw.choice(["digits", "synthetic", "mnist", "csv"]), many, "--data-dir", ".")
        case 3:
            with mock.patch("kinfed.cli.estimate.SECONDS", 0.01):
                cli("run", name, *small, "--dry-run", *how)
        case _:
            run(draw, name, *overrides_given)


FORMATS = (  # in which a table is said to be written
    *({"decimal": ","}, {"thousands": ","}, {"decimal": ",", "thousands": "."}, {"units": ["%", "€"]}),
    *({"dates": "%d.%m.%Y"}, {"dates": ["%Y-%m-%d %H:%M:%S"]}, {"dates": "?"}, {"text": ["a"]}, {"text": ["none"]}),
)


def cells(draw, series):
    """Rows of a table: dicts with client, y, when and inputs a, b."""
    names = draw.sample(NAMES, draw.choice([1, 2, 3, 5])) if draw.random() < 0.7 else range(draw.choice([2, 8, 60]))
    kind = draw.choice(["labels", "text", "number", "huge", "tiny", "truth", "constant"])
    value = {
        "labels": lambda: draw.randrange(3),
        "text": lambda: draw.choice(["yes", "no", "nan ", "Ü"]),
        "number": lambda: draw.gauss(5, 2),
        "constant": lambda: 4.5,
        "huge": lambda: draw.choice([1e29, -1e29, 1e25]) * draw.random(),
        "tiny": lambda: draw.random() * 1e-38,
        "truth": lambda: draw.choice(["true", "False"]),
    }[draw.choice(["number", "number", "constant", "huge", "tiny"]) if series else kind]
    same = draw.choice([draw.random, draw.random, lambda: 1.0, lambda: 1e29, lambda: 1e9 + draw.random() / 1e6])
    rows, begin = [], datetime.datetime(2020, 1, 1)
    for name, i in itertools.product(
        names, range(draw.choice([4, 9, 20, 40]) if not series else draw.choice([30, 60]))
    ):
        when = str(begin + i * datetime.timedelta(minutes=5))
        rows.append({"client": name, "when": when, "y": value(), "a": same(), "b": draw.gauss(0, 1)})
    rows += rows[: len(rows) // 2] if draw.random() < 0.1 and not series else []
    if draw.random() < 0.5:
        draw.shuffle(rows)
    if draw.random() < 0.01:
        per = draw.choice([1, 6])
        rows = [{"client": i // per, "when": i, "y": i % 2, "a": i, "b": 0} for i in range(10_000)]
    while draw.breaks(0.4):
        draw.choice(rows)[draw.choice(["client", "when", "y", "a", "b"])] = draw.choice(CELLS)
    return rows


def tabulate(draw, series):
    """A table in a file of this folder, and the settings to read it with."""
    rows, kind = cells(draw, series), draw.choice(["csv", "csv", "csv", "parquet"])
    path = Path(f"t {draw.choice('aü')}.{kind}")
    if kind == "csv":
        with path.open("w", newline="", encoding=draw.choice(["utf-8", "utf-8-sig"])) as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter=draw.choice(";\t") if draw.breaks(0.05) else ",")
            table.writeheader()
            table.writerows(rows)
    else:
        frame = polars.DataFrame([{k: str(v) for k, v in row.items()} for row in rows])
        for column, types in (("y", "Float32 Int8 Categorical"), ("a", "Float64 Float32 Binary"), ("b", "Float64")):
            cast = polars.col(column).cast(getattr(polars, draw.choice(types.split())), strict=False)
            frame = frame.with_columns(cast) if draw.random() < 0.7 else frame
        frame.write_parquet(path)
    if draw.breaks(0.1):
        path.write_bytes(spoil(draw, path.read_bytes()))
    settings = {"name": kind, "path": str(path), "client": "client", "target": "y"}
    settings |= {"time": "when", "past": draw.choice([1, 3, 9]), "horizon": draw.choice([1, 2])} if series else {}
    settings |= {} if series else {"features": ["a", "b"]}
    settings |= draw.choice([{}, {}, {"drop_missing": True}, {"least": 3}])
    settings |= draw.choice([{}, {}, {}, *FORMATS])
    if draw.random() < 0.2:
        settings["edges"] = links(draw, list(dict.fromkeys(str(row["client"]) for row in rows))[:300])
    return settings


def tables(draw):
    for _ in range(10):
        settings = mutate(draw, tabulate(draw, draw.random() < 0.4))
        table = learning(draw) | {"model": "linear", "federation": {"dataset": settings, "partition": "natural"}}
        table["federation"] |= {"graph": "complete"} if table["method"]["name"] in ("sfl", "panacea") else {}
        with contextlib.suppress(UsageError):
            draw.broken or config.resolve(json.loads(json.dumps(table))).federation(Path(), 0)
            break
    if draw.random() < 0.3 and {"path", "client", "target"} <= settings.keys():
        parameters = {"path", *inspect.signature(kinfed.data.tables.table_reader.TableReader).parameters}
        federation = from_csv(**{key: value for key, value in settings.items() if key in parameters})
        net = nn.Sequential(nn.Flatten(), nn.Linear(federation.x[0].numel(), federation.outputs))
        return keep(kinfed.fit(METHODS["fedavg"](), federation, net, rounds=1, execution=Execution("loop")), net)
    Path("c.toml").write_text(tomli_w.dumps(table))
    run(draw, "c.toml")


def links(draw, names):
    """A graph's file in this folder."""
    path = Path(f"edges.{draw.choice(['csv', 'csv', 'graphml', 'npz', 'npy'])}")
    pairs = {tuple(sorted(draw.choices(names, k=2))): draw.choice([1, 0, 0.5, 3]) for _ in range(2 * len(names))}
    table = np.random.default_rng(draw.randrange(99)).random((len(names), len(names)))
    if path.suffix == ".csv":
        value = draw.choice(["wieght", "note"]) if draw.breaks(0.3) else draw.choice(["weight", "distance"])
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("from", "to", value), *((a, b, w) for (a, b), w in pairs.items())])
    elif path.suffix == ".graphml":
        lines = [f"<node id={quoteattr(name)}/>" for name in names]
        lines += [f"<edge source={quoteattr(a)} target={quoteattr(b)}/>" for a, b in pairs]
        start = '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected">'
        if draw.breaks(0.3):  # each entity is a hundred of the one before
            entities = "".join(f'<!ENTITY {c} "{f"&{b};" * 99}">' for b, c in itertools.pairwise("abcdef"))
            start = f'<!DOCTYPE g [<!ENTITY a "{"x" * 99}">{entities}]>{start}'
            lines = [*lines, "&f;"]
        path.write_text(f"{start}{''.join(lines)}</graph></graphml>")
    elif path.suffix == ".npz":
        npz(draw, path, {"adjacency": table, "names": np.array(names)})
    else:
        np.save(path, table)
    if draw.breaks(0.3):
        path.write_bytes(spoil(draw, path.read_bytes()))
    return str(path)


def edges(draw):
    names = draw.sample(NAMES, draw.choice([2, 5, 9]))
    settings = {"directed": draw.random() < 0.3, "sigma": draw.choice([None, 1.0, 1e-300, 1e300])}
    if draw.broken:
        settings |= {"sigma": draw.choice([0.0, -1.0, math.nan]), "threshold": draw.choice([0.1, 0, 1, 2, math.nan])}
    file = links(draw, [*names, *(["stranger"] if draw.breaks(0.2) else [])])
    weights = graph_files.read(file, names, strangers=draw.random() < 0.5, **settings).weights
    x, client = torch.randn(9 * len(names), 2), torch.arange(9 * len(names)) % len(names)
    federation = Federation.from_arrays(x, x[:, 0] > 0, client, graph=weights)
    method = draw.choice(["sfl", "panacea", "fedavg"])
    net = nn.Linear(2, 2)
    keep(kinfed.fit(METHODS[method](), federation, net, rounds=2, execution=Execution("loop")), net)


def images(draw, name):
    form, rng, arrays = IMAGES[name], np.random.default_rng(draw.randrange(99)), {}
    for split, count in (("train", draw.choice([30, 60])), ("test", draw.choice([4, 20]))):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, *form.shape), np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % form.classes
    npz(draw, Path(f"{name}.npz"), arrays)


def sensors(draw, name):
    rng = np.random.default_rng(draw.randrange(99))
    count = draw.choice([1, 3, 6])
    length = draw.choice([60, 90])
    values = rng.normal(50, 9, (length, count)).astype(draw.choice(["f4", "f8"]))
    values[rng.random(values.shape) < draw.choice([0, 0.2, 0.6])] = draw.choice([0, np.nan])
    start = draw.choice(["x", "NaT", ""]) if draw.breaks(0.1) else "2020-01-01"
    arrays = {"values": values, "adjacency": np.ones((count, count)), "start": np.array(start)}
    if draw.random() < 0.3:
        arrays["minutes_from_start"] = np.cumsum(rng.choice([5] * 20 + [50], length))
    npz(draw, Path(f"{name}.npz"), arrays)


def archives(draw):
    name = draw.choice(["mnist", "svhn", "metr_la_week", "pems_bay_subset", "dg15", "tpt48"])
    rng = np.random.default_rng(draw.randrange(99))
    if name in IMAGES:
        images(draw, name)
    elif name == "dg15":
        owned = {"x": rng.random((120, 2)), "y": np.arange(120) % 2, "client": np.arange(120) // 2 % 15}
        npz(draw, Path("dg15.npz"), owned | {"adjacency": np.ones((15, 15))})
    elif name == "tpt48":
        series = {"values": rng.random((90, 4)), "sensor_ids": np.array(["a", "b", "ü", "*"])}
        npz(draw, Path("tpt48.npz"), series | {"adjacency": np.ones((4, 4))})
    else:
        sensors(draw, name)
    if draw.random() < 0.05:
        return cli("list", name, "--data-dir", ".")
    dataset = {"name": name} | ({"past": 2, "horizon": 2} if name not in (*IMAGES, "dg15") else {})
    dealt = {"clients": 2, "partition": "iid"} if name in IMAGES else {"partition": "natural"}
    table = learning(draw) | {"model": "linear", "federation": {"dataset": dataset, "graph": "complete", **dealt}}
    Path("c.toml").write_text(tomli_w.dumps(table))
    run(draw, "c.toml")


def plant(folder):
    PLANTED.update({path: path.stat().st_mtime_ns for path in Path(folder).absolute().rglob("*") if path.is_file()})


def folders(draw):
    """A run's folder from elsewhere: finished, stopped, or of several seeds."""
    kind = draw.choice(["finished", "finished", "stopped", "stopped", "seeds"])
    shutil.copytree(BASE / kind, "r")
    for _ in range(draw.broken or draw.random() < 0.5):
        path = draw.choice(sorted(p for p in Path("r").rglob("*") if p.is_file() and p.suffix != ".png"))
        draw.broken = True
        if path.name == "checkpoint.safetensors" and draw.random() < 0.6:  # well formed, but of other content
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = {
                k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in mutate(draw, metadata).items()
            }
            path.write_bytes(save(tamper_tensors(draw, arrays), metadata))
        elif path.suffix == ".json" and draw.random() < 0.6:
            path.write_text(json.dumps(mutate(draw, json.loads(path.read_text()), 0.3), default=str))
        else:
            replace_file(draw, path)
    plant("r")
    how = [f"how.executor={draw.choice(['loop', 'auto'])}", "--quiet"]
    match draw.randrange(2, 6) if kind != "stopped" and draw.random() < 0.6 else draw.randrange(9):
        case 0:
            cli("compare", "r", *draw.choice([[], ["r"], [BASE / "finished"]]))
        case 1:
            cli("run", "local", "rounds=1", "federation.clients=4", "--out", "r", *how)
        case 2 | 3 | 4 | 5 if kind != "stopped":
            folder, client, module = "r/seed-1" if kind == "seeds" else "r", "1", None
            if draw.breaks(0.3):
                client = draw.choice([0, -1, 99, "x", "Köln ☃", None, 1.5, True])
            if draw.breaks(0.3):
                module = draw.choice([nn.Linear(64, 10), nn.Linear(3, 2), nn.Flatten(), "net"])
            if draw.breaks(0.3):
                folder = draw.choice([Path("r"), "nowhere", "r/summary.json"])
            kinfed.load_model(folder, client, module)
        case _:
            cli("resume", "r", *how)
            cli("compare", "r")


def tamper_tensors(draw, arrays, odds=0.5):
    """Named tensors, some of them other than they should be."""
    while arrays and draw.breaks(1 - odds):
        name = draw.choice(sorted(arrays))
        t = arrays.pop(name)
        with contextlib.suppress(RuntimeError, TypeError, IndexError):
            arrays[draw.choice([name] * 9 + ["x", "train/theta", "theta.x", ""])] = draw.one(
                nan=lambda: t * math.nan,
                infinite=lambda: t / 0,
                large=lambda: t * 1e20,
                short=lambda: t[:-1].clone(),
                kind=lambda: t.to(draw.choice([torch.float64, torch.int32, torch.bool])),
                number=torch.zeros(()),
                empty=torch.zeros(0),
                deep=lambda: t[None].clone(),
                negative=lambda: -t,
            )
    return arrays


class Post:
    """Carries messages to sites in this process; `way` says which of them are changed: order, answer or none."""

    def __init__(self, draw, sites, way):
        self.draw, self.sites, self.way, self.answers, self.count = draw, sites, way, {}, itertools.count(1)

    def nodes(self):
        return {i: Node("first", site.name) for i, site in enumerate(self.sites)}

    def push(self, node, kind, message, seconds):
        number = str(next(self.count))
        message = Message(json.loads(json.dumps(message.fields)), dict(message.arrays))
        try:
            answer = self.sites[node].reply(kind, self.change(message) if self.way == "order" else message)
        except (Exception, SystemExit):
            raise Wrong("unexpected", f"the site's answer to {kind}: {traceback.format_exc()}") from None
        self.answers[number] = answer
        return number

    def change(self, message):
        if self.draw.random() < 0.8:
            return message
        fields_sent = mutate(self.draw, message.fields, 0.3)
        if self.draw.random() < 0.3:
            named = [
                "kinfed.__main__:main",
                "os:system",
                "kinfed.core.method:Params",
                "kinfed.cli:main",
                "tuple",
                "kinfed:x",
            ]
            fields_sent[self.draw.choice(["train", "evaluate", "upload", "client_statistics"])] = [
                self.draw.choice(named),
                None,
            ]
        return Message(
            json.loads(json.dumps(fields_sent, default=str)), tamper_tensors(self.draw, dict(message.arrays))
        )

    def pull(self, ids):
        return {id: self.read(self.answers.pop(id)) for id in list(ids) if id in self.answers}

    def read(self, answer):
        if self.way != "answer":
            return answer
        content = transport.pack(self.change(answer))
        for array in content["arrays"].values():
            array.data = spoil(self.draw, array.data) if self.draw.random() < 0.1 else array.data
        try:
            return transport.unpack(content)
        except Exception as problem:  # as kinfed_flower.wire.transport.GridTransport does
            return Failure(repr(problem), False)


def sites(draw):
    """A federation over Flower's messages, one side of which says odd things or comes from elsewhere."""
    rng = np.random.default_rng(draw.randrange(99))
    made = []
    classes = draw.choice([1, 2, 3])
    for name in ("ann", "bob", "eve")[: draw.choice([1, 2, 3])]:
        count = draw.choice([1, 3]) if draw.breaks(0.2) else draw.choice([5, 8, 20])
        x, y = rng.normal(size=(count, 4)).astype("f4"), np.arange(count) % classes
        path = Path(f"{name}.{'csv' if draw.breaks(0.2) else 'npz'}")
        if path.suffix == ".csv":
            path.write_text("a,b,c,d,y\n" + "\n".join(",".join(map(str, [*a, b])) for a, b in zip(x, y, strict=True)))
        else:
            npz(draw, path, {"x": x, "y": y}, 0.8)
        made.append(Site(name, path, Path("state"), "cpu", policy=Policy(runs="any")))
    many = {"clients": len(made), "deadline": 0.05, "patience": 2.0, "quorum": draw.choice([0.3, 1.0])}
    many |= draw.choice([{}, {"classes": 3}, {"stale": "decay"}, {"norm_bound": 0.0}])
    if draw.random() < 0.5:
        many["graph"] = "links.csv"
        Path("links.csv").write_text("from,to\nann,bob\nbob,eve\n")
    table = learning(draw) | {"model": "linear", "flower": many}
    table["federation"] = {"split": {"validation": draw.choice([0.1, 0.0])}}
    way = draw.choice(["order", "answer", "answer", "files"]) if draw.broken else ""
    planned = plan.resolve(mutate(draw, table, 0.9))
    at_once = mock.patch.multiple("kinfed_flower.server.nodes", RETRY=0.05, LATER=0.05)
    with at_once, mock.patch.multiple("kinfed_flower.server.broker", LOOK=0.0, RETRY=0.05):
        serve(planned, Post(draw, made, way), Path("out"), lambda text: None, 0.001)
        if way == "files":  # a site's folder from elsewhere: the next run's experiment has that name
            for path in sorted(p for p in Path("state").rglob("*") if p.is_file() and draw.random() < 0.5):
                replace_file(draw, path)
            plant("state")
            experiment = next(Path("state").glob("*/*")).name
            with mock.patch("secrets.token_hex", return_value=experiment):
                serve(planned, Post(draw, made, ""), Path("again"), lambda text: None, 0.001)


class Lines(nn.Module):
    """A module of which much may be odd."""

    def __init__(self, draw, inputs, outputs):
        super().__init__()
        self.kind = (
            draw.choice(["nan", "tuple", "raises", "flat"]) if draw.breaks(0.3) else draw.choice(["", "", "wide"])
        )
        middle = [nn.ReLU(), nn.Tanh(), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.LayerNorm(5), nn.Identity()]
        outputs += self.kind == "wide" and outputs > 1
        self.net = nn.Sequential(nn.Linear(inputs, 5), draw.choice(middle), nn.Linear(5, outputs))
        if draw.random() < 0.1:
            self.again = self.net[0]
        self.requires_grad_(not draw.breaks(0.1))

    def forward(self, x):
        if self.kind == "raises" and len(x) > 1:
            raise RuntimeError("no\nmore")
        y = self.net(x.flatten(1))
        return {"nan": y * math.nan, "tuple": (y, y), "flat": y.sum(-1)}.get(self.kind, y)


def arrays(draw):
    """A federation from odd arrays."""
    n, shape = draw.choice([24, 60, 90]), draw.choice([(2,), (2,), (3, 2), (1, 4, 4)])
    if draw.breaks(0.3):
        n, shape = draw.choice([1, 6]), draw.choice([(), (0,)])
    rng = np.random.default_rng(draw.randrange(99))
    x = (rng.normal(size=(n, *shape)) * draw.choice([1, 1, 1, 1e30, 1e-30, 0])).astype(
        draw.choice(["f4", "f4", "f8", "i8"])
    )
    y = draw.choice([np.arange(n) // 3 % 3, np.zeros(n, int), rng.normal(size=(n, 2)), rng.normal(size=(n, 1))])
    client = draw.choice([np.arange(n) % 3, np.zeros(n), np.arange(n) % 6, np.array(["a", "ü"] * n)[:n]])
    held = {
        "x": x,
        "y": y,
        "client": client,
        "split": draw.choice([None, Split(0.5, 0.0), Split(0.3, 0.3, examples=7)]),
    }
    if draw.random() < 0.1:
        held["time"] = draw.choice([np.arange(n), np.arange(n).astype("M8[D]")])
    if draw.random() < 0.6:
        k = len(np.unique(client))
        held["graph"] = draw.choice([np.ones((k, k)), np.ones((k, k)), rng.random((k, k)), np.eye(k)])
    while draw.breaks(0.3):
        strange = [None, [], "x", 3, [1, [2]], {}, np.array(["a"] * n), np.array([None] * n), -np.eye(3), [[math.nan]]]
        strange += [
            np.zeros(n, int),
            rng.random(n),
            Regression(),
            Classification(2),
            torch.ones(n, dtype=torch.complex64),
        ]
        held[draw.choice([*held, "task", "seed"])] = draw.choice(strange)
    federation = Federation.from_arrays(held.pop("x"), held.pop("y"), held.pop("client"), **held)
    return federation, federation.digest(), repr(federation)


def fits(draw):
    """`kinfed.fit`, `kinfed.save` and `kinfed.load_model` from Python."""
    federation, *_ = arrays(draw)
    module = Lines(draw, federation.x[0].numel(), federation.outputs).to(federation.x.dtype)
    settings = part(draw, METHODS, odds=0.1)
    made = parts.make(METHODS, settings, "method")[0] if not draw.breaks(0.05) else METHODS[settings["name"]]
    optimiser = draw.choice([SGD(0.1), SGD(1e4), SGD(1e30), SGD(0.1, momentum=0.999), Adam(), Adam(eps=0.0)])
    arguments = {
        "rounds": draw.choice([1, 2, 3]),
        "training": Training(1, draw.choice([1, 4, 10**6]), optimiser),
        "participation": draw.choice([1.0, 0.5, 1e-9, Participation(0.5), Participation(1.0, late=0.3, joins=1)]),
        "seed": draw.choice([0, 3, 2**62 - 1]),
        "execution": Execution(draw.choices(["loop", "auto", "vmap"], [20, 6, 1])[0]),
    }
    if draw.breaks(0.6):
        key = draw.choice([name for name in inspect.signature(kinfed.fit).parameters if name != "folder"])
        given = {"method": made, "federation": federation, "module": module, key: draw.choice(ODD)}
        arguments |= {key: given.pop(key)} if key not in ("method", "federation", "module") else {}
        made, federation, module = (given[name] for name in ("method", "federation", "module"))
        if draw.breaks(0.5):
            arguments["execution"] = Execution(**{draw.choice([f.name for f in fields(Execution)]): draw.choice(ODD)})
        arguments["rounds"] = (
            2 if isinstance(arguments["rounds"], int) and arguments["rounds"] > 9 else arguments["rounds"]
        )
    run_made = kinfed.fit(made, federation, module, **arguments)
    repr(run_made), run_made.summary, run_made.model(position=0)
    keep(run_made, module)


def modules(draw):
    """A module of some family, trained by every executor and in a plain PyTorch loop."""
    try:
        draw.answer = ": ".join(fuzz_modules.check(draw.number, draw))
    except fuzz_modules.Differs as problem:
        raise Wrong("differs", str(problem)) from None


def keep(run_made, module):
    """Save a run, and load models."""
    kinfed.save(run_made, "saved")
    for name in run_made.federation.names[:3]:
        kinfed.load_model("saved", name, module)


KINDS = {  # name: what runs a case, how many of them, what they are
    "config": (configs, 1200, "config files: every method, partition, graph, model and attack"),
    "override": (overrides, 600, "the same as overrides; also sweep, papers analyse, list, --dry-run"),
    "table": (tables, 800, "CSV and Parquet files"),
    "npz": (archives, 500, "image sets, traffic, climate and domains in a data directory"),
    "edges": (edges, 500, "graphs in CSV, GraphML, npz and npy, and training along them"),
    "folder": (folders, 700, "runs' folders from elsewhere: loaded, resumed, compared, run into"),
    "site": (sites, 500, "messages between server and sites; sites' folders and examples"),
    "arrays": (arrays, 250, "`Federation.from_arrays`"),
    "fit": (fits, 550, "`kinfed.fit`, `kinfed.save` and `kinfed.load_model`"),
    "module": (modules, 6 * len(fuzz_modules.FAMILIES), "modules, by every executor and in a plain PyTorch loop"),
}


def prepare(base):
    """Sound folders of runs: finished, stopped after a round, and of two seeds."""
    small = ["rounds=2", "federation.clients=4", "federation.split.examples=20", "--quiet", "how.executor=loop"]
    for name, more in (("finished", []), ("stopped", []), ("seeds", ["seeds=2"])):
        with contextlib.ExitStack() as stack:
            if name == "stopped":
                stack.enter_context(mock.patch("kinfed.runs.launch.write_run", side_effect=KeyboardInterrupt))
                stack.enter_context(contextlib.suppress(UsageError))
            cli("run", "fedaghn", *small, *more, "how.checkpoint_seconds=0", "--out", base / name)
