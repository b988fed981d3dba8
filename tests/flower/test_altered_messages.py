"""Whatever a server sends, or a site replies, of series, and through a gateway: a line, and nothing raw or silent."""

import copy
import json
import math
import random
import re

import numpy as np
import pytest
from altered_messages import Noting, alter, refusals

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.agreements import REPEATED, agree
from kinfed_flower.site.gateway import Gateway, split_by_client
from kinfed_flower.site.masked_rounds import MaskedRounds
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading

ANY = Policy(runs="any", experiments=10_000)
ROUNDS = 2
RAW = {"rounds": ROUNDS, "method": "fedavg", "model": "linear", "training": {"epochs": 1, "batch": 16}}
FLOWER = {"clients": 2, "beside": ["local"], "patience": 2.0}
KINDS = ("series", "gateway")


def meters(name, folder, tell, policy, at):
    """A site with a series of one meter, a covariate of each kind beside it."""
    path, draw = folder / f"{name}.csv", np.random.default_rng(len(name))
    lines = [
        f"2024-01-{1 + i // 24:02d} {i % 24:02d}:00,{10 + 3 * math.sin(i / 4) + draw.normal():.5f},"
        f"{draw.normal(15, 4):.5f},{'open' if i % 7 else 'shut'},flat"
        for i in range(600)
    ]
    path.write_text("\n".join(["when,load,warm,shop,roof", *lines]) + "\n")
    reading = Reading("load", time="when", past=6, horizon=3, future=["shop"], static=["roof"])
    return Site(name, path, folder / at, "cpu", reading, report=tell, policy=policy, masks=MaskedRounds(name))


def wards(name, folder, tell, policy, at):
    """A gateway with the rows of three wards."""
    path, draw = folder / f"{name}.csv", np.random.default_rng(len(name))
    lines = [f"{draw.normal(60, 9):.5f},kind-{draw.integers(3)},{'abc'[i % 3]},{draw.integers(2)}" for i in range(180)]
    path.write_text("\n".join(["age,kind,ward,sick", *lines]) + "\n")
    files = split_by_client(path, "ward", name, folder / "parts")
    return Gateway(name, files, folder / at, "cpu", Reading("sick", client="ward"), (), tell, policy)


def make(kind, *site):
    return {"series": meters, "gateway": wards}[kind](*site)


def folders(site):
    return [client.folder for client in site.sites.values()] if isinstance(site, Gateway) else [site.folder]


def planned(kind, **flower):
    flower = FLOWER | flower | ({"horizons": [1]} if kind == "series" else {})
    return plan.resolve(json.loads(json.dumps(RAW | {"flower": flower})))


def honest(kind, tmp_path):
    """The messages of an honest run to west, by kind."""
    sites = [make(kind, name, tmp_path, lambda line: None, ANY, "honest") for name in ("west", "eastern")]
    transport = Noting(sites)
    serve(planned(kind), transport, tmp_path / "run", lambda line: None, 0.0)
    return transport.sent_to("west")


@pytest.mark.parametrize("policy", [None, ANY], ids=["agreed", "any"])
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_altered_messages_end_in_a_line_and_within_what_was_agreed(kind, policy, tmp_path, capsys):
    """At every stage of a run, in any order; a message that comes again is answered, or refused, as before."""
    sent, draw, said = honest(kind, tmp_path), random.Random(f"{kind} {policy}"), []
    kinds = ("hello", "describe", "join", "round", "verdict")
    cells = re.findall(r"\d+\.\d{5}", (tmp_path / "west.csv").read_text())
    for stage in range(5):
        site = make(kind, "west", tmp_path, said.append, policy, f"stage {stage}")
        for folder in () if policy else folders(site):
            agree([planned(kind)], folder)
        for before in kinds[:stage]:
            for message in sent[before]:
                assert not refusals(site.reply(before, copy.deepcopy(message)))
        uploads = 0
        for i in range(25):
            asked = draw.choice(kinds)
            message, done = alter(draw, draw.choice(sent[asked]), draw.randint(1, 2))
            said.clear()
            why = refusals(reply := site.reply(asked, message))
            uploads += sum(name.endswith("upload/theta") for name in reply.arrays)
            text, where = json.dumps([reply.fields, *said]), (stage, i, asked, done, reply.fields, [*said])
            assert "unexpected" not in text, where
            assert not any(word in text for word in ("Error:", "Errno", "Traceback")), where
            assert all(line.isprintable() for line in (*said, *why)), where
            assert said or not why or asked == "hello", where
            assert not any(cell in line for line in why for cell in cells), where
        if policy is None:
            assert uploads <= (ROUNDS + REPEATED) * len(folders(site))
    assert "Traceback" not in capsys.readouterr().err


def put(*way):
    """A change of what the server says was agreed on: the last of these at the place that the others name."""
    *place, last, value = way

    def change(agreed):
        for key in place:
            agreed = agreed[key]
        agreed[last] = value

    return change


USED, OTHER = "of the columns", "the server asks for other"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("targets", ["warm"]), f"{OTHER} targets"),
        (put("targets", 7), f"{OTHER} targets"),
        (put("past", 1), f"{OTHER} past"),
        (put("past", "6"), f"{OTHER} past"),
        (put("horizon", True), f"{OTHER} horizon"),
        (put("dated", float("nan")), f"{OTHER} dated"),
        (put("future", []), f"{OTHER} future"),
        (put("future", 0, ["shop"]), f"{OTHER} future"),
        (put("static", "roof"), f"{OTHER} static"),
        (put("inputs", ""), USED),
        (put("calendar", ["clock", "clock"]), USED),
        (put("calendar", "clock"), USED),
        (put("calendar", ["\x1b[2J"]), USED),
        (put("horizons", [1, 1]), USED),
        (put("horizons", [-1]), USED),
        (put("horizons", 3), USED),
        (put("cuts", [9]), USED),
        (put("cuts", "ab"), USED),
        (put("cuts", [9, 3]), USED),
        (put("cuts", [0.5, 3]), USED),
        (put("cuts", [1, 2, 3]), USED),
    ],
)
def test_what_a_server_makes_up_of_series_is_refused_in_a_line(change, why, tmp_path, series):
    """By a site that describes its rows and by one that joins; the honest messages are answered after it."""
    sent, said = series, []
    site = meters("west", tmp_path, said.append, ANY, "site")
    for kind in ("describe", "join"):
        message = copy.deepcopy(sent[kind][-1])
        message = message._replace(fields=json.loads(json.dumps(message.fields)))
        change(message.fields["agreed"])
        said.clear()
        assert why in site.reply(kind, message).fields["refused"]
        assert len(said) == 1
        assert not refusals(site.reply(kind, sent[kind][-1]))


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """The messages of an honest run to a site with a series, by kind."""
    return honest("series", tmp_path_factory.mktemp("series"))


@pytest.mark.parametrize(
    "task",
    [
        {"name": "Regression"},
        {"name": "Classification", "classes": 3},
        {"name": "Counts"},
        {"name": "Forecasting", "horizons": [2]},
    ],
)
def test_a_task_that_is_not_that_of_the_columns_is_refused(task, tmp_path, series):
    site = meters("west", tmp_path, lambda line: None, ANY, "site")
    invitation = copy.deepcopy(series["join"][0])
    invitation.fields["task"] = task
    assert "is not that of the columns that it describes" in site.reply("join", invitation).fields["refused"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"selected": {"shared": [0]}}, "the server's shared must be a round"),
        ({"selected": {"shared": "\n"}}, "the server's shared must be a round"),
        ({"chosen": "\x1b[2J"}, "the server's chosen must be one of its selected"),
        (
            {"chosen": "other", "selected": {"other": 0}},
            "the server chooses the model 'other', and this site has shared",
        ),
        ({"judged": -2}, "the server's judged must be a round"),
    ],
)
def test_a_selection_that_selects_nothing_is_refused(fields, why, tmp_path, series):
    """And does not keep the first kind of model, of the last round, without a word."""
    site = meters("west", tmp_path, lambda line: None, ANY, "site")
    for kind in ("describe", "join"):
        for message in series[kind]:
            site.reply(kind, message)
    first, *_, last = series["round"]
    site.reply("round", first)
    for message in series["round"][1:-1]:
        assert not refusals(site.reply("round", message))
    assert why in site.reply("round", last._replace(fields=last.fields | fields)).fields["refused"]
    assert not refusals(site.reply("round", last))


class Lying(Here):
    """Sites in this process, of which eve alters one reply."""

    def __init__(self, sites, draw, kind):
        super().__init__(sites)
        self.draw, self.kind, self.done = draw, kind, None

    def push(self, number, kind, message, seconds):
        id = super().push(number, kind, message, seconds)
        if self.sites[number].name == "eve" and kind == self.kind and self.done is None and self.draw.random() < 0.6:
            self._arrived[id], self.done = alter(self.draw, self._arrived[id], self.draw.randint(1, 2))
        return id


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
@pytest.mark.parametrize("kind", KINDS)
def test_altered_replies_end_no_run_and_are_told_in_lines(kind, part, tmp_path, monkeypatch):
    """Of a series, or of the clients of a gateway, beside three honest sites, whose scores are numbers."""
    for name in ("broker.LOOK", "broker.RETRY", "nodes.RETRY", "nodes.LATER"):
        monkeypatch.setattr(f"kinfed_flower.server.{name}", 0.0)
    draw, names = random.Random(part), ("ann", "bobby", "cem")
    for asked in draw.sample(["hello", "describe", "join", "round", "verdict"], 2):
        tell = lambda line: None  # noqa: E731
        at = tmp_path / asked
        at.mkdir()
        if kind == "series":
            sites = [meters(name, at, tell, ANY, "site") for name in names]
        else:
            files = wards("all", at, tell, ANY, "site").sites.values()
            sites = [
                Site(name, client._data, at, "cpu", Reading("sick", ignore=["ward"]), policy=ANY)
                for name, client in zip(names, files, strict=True)
            ]
        transport = Lying([*sites, make(kind, "eve", at, tell, ANY, "site")], draw, asked)
        lines = []
        summary = serve(planned(kind, clients=3, patience=20.0), transport, at / "run", lines.append, 0.0)
        where = asked, transport.done, lines
        assert {*names} <= {*summary.clients.names}, where
        scores = dict(zip(summary.clients.names, summary.clients.scores[summary.selection.chosen], strict=True))
        assert all(math.isfinite(scores[name]) for name in names), where
        assert all(line.isprintable() for line in lines), where
        assert not any(word in line for line in lines for word in ("unexpected", "Error:", "Traceback")), where
