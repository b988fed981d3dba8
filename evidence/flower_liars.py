"""A server that lies to its sites, and a site that lies to the others: python evidence/flower_liars.py

In one process, by the messages that Flower would carry over TLS. Rewrites its part of docs/evidence/flower-security.md,
as `flower_security.py` does in the end; the exit code is 1 if an attack gained more than its line says it may.
"""

import argparse
import copy
import json
import math
import resource
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.stats import binomtest

from kinfed.core.private.private_sums import find_noise
from kinfed.errors import RunError
from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.masked_round import MaskedRound
from kinfed_flower.server.server import serve
from kinfed_flower.site.agreements import REPEATED, agree
from kinfed_flower.site.masked_rounds import MaskedRounds
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire.messages import Message
from kinfed_papers.result_pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "flower-security.md"
HEADING = "## A server and a site that lie\n"
ANY = Policy(runs="any")
NAMES = ["north", "east", "south", "west"]
ROW = 100 / 3 / 16  # points that one of sixteen test rows at one of three sites is worth
SEEDS = 3
ROWS, ASKED, COLUMNS = 90, 120, ("age", "stay", "pressure")
DRAWS, UNLIKELY = 20, 0.001  # of noise, and a chance below which reading rows is none
SERVER = "operator of the server, with a program of its own"
SITE = "a site, with its own key"


class Twisted(Here):
    """Sites in this process, of which west changes its replies by `lies`."""

    def __init__(self, sites, lies):
        super().__init__(sites)
        self.lies, self.seen = lies, []

    def push(self, node, kind, message, seconds):
        """Bring a message to a site."""
        id = super().push(node, kind, message, seconds)
        if self.sites[node].name == "west":
            self._arrived[id] = change_message(self._arrived[id], self.lies.get(kind))
        self.seen.append((self.sites[node].name, kind, message, self._arrived[id]))
        return id


def change_message(message, change):
    if change is None:
        return message
    fields = json.loads(json.dumps(message.fields))
    change(fields)
    return message._replace(fields=fields)


def hospitals(folder, screens, policy=ANY, first=0):
    """Four sites with the rows of invented patients, and what each operator is told; without a policy none agrees.

    Rows are drawn by the seeds from `first` on, always of the same distribution.
    """
    sites = []
    for i, name in enumerate(NAMES):
        draw = np.random.default_rng(first + i)
        rows = np.stack([draw.normal(55 + 5 * i, 9, ROWS), draw.normal(5, 2, ROWS), draw.normal(130, 15, ROWS)], 1)
        wards = [f"ward-{k % 6}" for k in range(ROWS)]
        sick = (rows[:, 0] + draw.normal(0, 9, ROWS) > 60).astype(int)
        lines = [
            ",".join([*(f"{x:.4f}" for x in row), ward, str(s)]) for row, ward, s in zip(rows, wards, sick, strict=True)
        ]
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.csv").write_text("\n".join([",".join([*COLUMNS, "ward", "sick"]), *lines]) + "\n")
        screen = screens.setdefault(name, [])
        sites.append(
            Site(
                name,
                folder / f"{name}.csv",
                folder,
                "cpu",
                Reading("sick"),
                report=screen.append,
                policy=policy,
                masks=MaskedRounds(name),
            )
        )
    return sites


def run(sites, folder, lies=None, **raw):
    """A run with these sites: its summary or why it ended, what was sent, and the server's log."""
    raw = {"rounds": 1, "method": "fedavg", "model": "linear", **raw}
    flower = {"clients": 3, "beside": [], "patience": 20.0, "categories": 10}
    carried, lines = Twisted(sites, lies or {}), []
    try:
        summary = serve(plan.resolve(raw | {"flower": flower}), carried, folder, lines.append, 0.0)
    except RunError as problem:
        summary = str(problem)
    return summary, carried, lines


def ask_again_and_again(note, folder):
    """Rows from the differences of descriptions under many seeds."""
    screens = {}
    site = hospitals(folder, screens)[-1]
    inputs = [[name, "number"] for name in COLUMNS]
    agreed = {"targets": ["sick"], "inputs": inputs, "classes": ["0", "1"], "counts": False}
    fields = [{"agreed": agreed, "split": {"stratify": False}, "seed": seed} for seed in range(ASKED)]
    fields += [{**fields[0], "agreed": agreed | {"classes": ["1"]}}, {**fields[0], "split": {"test": 0.5}}]
    replies = [site.reply("describe", Message(entry, {})).fields for entry in fields]
    answers = [reply for reply in replies if "refused" not in reply]
    note(
        f"{ASKED} requests for descriptions of one table with as many seeds, then with other classes and another "
        "split, whose differences would give each row",
        SERVER,
        f"{len(answers)} answered, {len(replies) - len(answers)} refused, each with a line on the site's screen: "
        f"“{screens['west'][-1]}”",
        len(answers) == 1 and len(screens["west"]) >= len(replies) - 1,
    )


def take_a_step_on_one_row(note, folder):
    """A plan whose only step takes one row, so that its gradient is that row, or that uploads the mean of few."""
    few = {"federation": {"split": {"test": 0.8, "validation": 0.15}}}
    of_a_class = {"method": "fedpac", "model": "mlp", "federation": {"split": {"test": 0.7, "validation": 0.15}}}
    for raw in ({"training": {"batch": 1, "steps": 1}}, few, of_a_class):
        screens = {}
        place = folder / next(iter(raw))
        why, carried, _ = run(hospitals(place, screens), place / "run", **raw)
        uploads = [reply for _, kind, _, reply in carried.seen if kind == "round" and reply.arrays]
        note(
            f"A plan with {json.dumps(raw)}",
            "operator of the server, with kinfed's own program",
            f"{len(uploads)} uploads; {sum(len(lines) for lines in screens.values())} lines on the sites' screens: "
            f"“{screens['west'][0]}”",
            not uploads and all(screens.values()) and isinstance(why, str),
        )


def train_without_end(note, folder):
    """One round of a run again and again, each time from another model, until a site's rows could be solved for."""
    screens = {}
    sites = hospitals(folder, screens)
    _, carried, _ = run(sites, folder / "run")
    joins, rounds = ([m for n, k, m, _ in carried.seen if (n, k) == ("west", kind)] for kind in ("join", "round"))
    again = {"experiment": "again"}
    sites[-1].reply("join", joins[0]._replace(fields=joins[0].fields | again))
    message, uploads = rounds[0]._replace(fields=rounds[0].fields | again), 0
    for i in range(ASKED):
        other = {name: t + i / 100 if t.is_floating_point() else t for name, t in message.arrays.items()}
        uploads += bool(sites[-1].reply("round", message._replace(arrays=other)).arrays)
    note(
        f"{ASKED} times the only round of a run, each from another model, as if no upload had arrived",
        SERVER,
        f"{uploads} uploads, then “{screens['west'][-1]}”",
        uploads <= 12,
    )


def read_what_newcomers_are_given(note, folder):
    """A site's model from the folder of a run that has ended."""
    rows_read = []
    methods = ("fedamp", "heurfedamp", "pfedla", "pfedgraph", "fedaghn", "sfl", "cfl", "ifca", "pfedhn", "fedavg")
    for method in methods:
        uploads = []
        place = folder / f"{method}-run"
        raw = {"method": method, "training": {"epochs": 1, "batch": 8}, "federation": {"split": {"validation": 0.2}}}
        _, carried, _ = run(hospitals(folder / method, {}), place, **raw)
        for _, kind, _, reply in carried.seen:
            uploads += [t.flatten() for key, t in reply.arrays.items() if kind == "round" and t.numel() > 10]
        for path in place.rglob("*.safetensors"):
            for values in load_file(path).values():
                rows = [
                    row
                    for u in uploads
                    if values.numel() >= u.numel()
                    for row in values.flatten().unfold(0, len(u), len(u))
                ]
                for row in rows:
                    if any(row.shape == u.shape and torch.allclose(row.to(u), u) for u in uploads):
                        rows_read.append(method)
    note(
        f"Reading a site's model from the folder that newcomers are given, after a round of {', '.join(methods)}",
        "whoever is given the folder",
        f"models found: {len(rows_read)}",
        not rows_read,
    )


def make_up_columns(note, folder):
    """Replies that ended or bent everybody's run."""

    def many_categories(fields):
        fields["rows"] = 1 << 39
        fields["statistics"]["ward"]["counts"] = {f"made up {i}": 1 << 33 for i in range(60)}

    lies = {
        "a mean and deviation of 1e308": lambda fields: fields["statistics"]["age"].update(mean=1e308, deviation=1e308),
        "2^40 - 1 rows of which none is counted, an index out of range": lambda fields: fields["statistics"][
            "age"
        ].update(present=(1 << 40) - 1, near=[]),
        "2^40 training rows": lambda fields: fields.update(rows=1 << 40),
        "60 made-up categories of 2^33 rows each": many_categories,
    }
    for i, (door, lie) in enumerate(lies.items()):
        summary, _, lines = run(hospitals(folder / str(i), {}), folder / f"{i}-run", {"describe": lie})
        named = next((line for line in lines if "west" in line and ("left" in line or "claims" in line)), "nothing")
        going = not isinstance(summary, str)
        age = summary.data.scale["inputs"]["age"]["mean"] if going else float("nan")
        columns = summary.data.columns["inputs"] if going else []
        wards = [entry for column in columns if column["name"] == "ward" for entry in column["categories"]]
        real = sum(entry.startswith("ward-") for entry in wards)
        note(
            f"Claiming {door}",
            SITE,
            f"{'the run finished' if going else summary}; mean age {age:.1f}, {real} of 6 real wards told apart; "
            f"the server's log: “{named}”",
            going and "west" in named and 50 < age < 80 and real == 6,
        )


class Recorded(Exception):
    """Enough is recorded."""


class First(Twisted):
    """Sites that are asked up to the first round of west."""

    def push(self, node, kind, message, seconds):
        """Bring a message to a site."""
        id = super().push(node, kind, copy.deepcopy(message), seconds)
        if kind == "round" and self.sites[node].name == "west":
            raise Recorded
        return id


def record_rows(folder, raw):
    """The plan, and an honest server's messages to west, all of whose operators have agreed."""
    sites, planned = hospitals(folder, {}, None), plan.resolve(json.loads(json.dumps(raw)))
    for site in sites:
        agree([planned], site.folder)
    carried = First(sites, {})
    with suppress(Recorded):
        serve(planned, carried, folder / "run", lambda line: None, 0.0)
    return planned, {
        kind: [m for n, k, m, _ in carried.seen if (n, k) == ("west", kind)] for _, kind, _, _ in carried.seen
    }


def victim(folder, planned, sent, agrees=True):
    """West, with another folder, once it has joined; what its operator is told, and its last reply."""
    screens = {}
    site = hospitals(folder, screens, None)[-1]
    if agrees:
        agree([planned], site.folder)
    screens["west"].clear()
    for kind in ("hello", "describe", "join"):
        if kind in sent:  # under an epsilon no site describes its rows
            reply = site.reply(kind, sent[kind][0])
    return site, screens["west"], reply


class Traps:
    """Models whose first layer has a neuron for each thin slice of each ward: a slice with one row gives that row."""

    def __init__(self, planned, invitation, width):
        fields = invitation.fields
        self.layout = planned.model(tuple(fields["shape"]), fields["outputs"], fields["description"]).layout
        self.inputs, self.width = fields["description"]["inputs"], width
        names = [part for entry in self.inputs for part in entry.get("categories", [entry["name"]])]
        self.numbers = [i for i, name in enumerate(names) if name in COLUMNS]
        self.wards = [i for i, name in enumerate(names) if name.startswith("ward")]
        self.ward_names = [names[i] for i in self.wards]
        self.scales = [(entry["mean"], entry["deviation"]) for entry in self.inputs if entry["name"] in COLUMNS]
        self.columns = [entry["name"] for entry in self.inputs if entry["name"] in COLUMNS]
        self.draw = np.random.default_rng(0)

    def model(self):
        """theta: [d] of such a model."""
        per = self.width // len(self.wards)
        weight = torch.zeros(self.width, len(self.layout_of("fc1.weight")[0]))
        bias = None
        bias = torch.zeros(self.width)
        for i, ward in enumerate(self.wards):
            place_of = slice(i * per, (i + 1) * per)
            way = self.draw.normal(size=len(self.numbers))
            way = torch.tensor(way / np.linalg.norm(way), dtype=torch.float32)
            weight[place_of, ward] = 50.0
            weight[place_of, self.numbers] = way
            bias[place_of] = -50.0 - torch.linspace(-4.0, 4.0, per)
        head = torch.ones(2, self.width) * torch.tensor([[1e-3], [-1e-3]])
        parts = {"fc1.weight": weight * 1e-3, "fc1.bias": bias * 1e-3, "head.weight": head, "head.bias": torch.zeros(2)}
        return torch.cat([parts[e.name].flatten() for e in self.layout.entries])

    def learn(self, before, after):
        """Change the next model by a sum that was opened; these models are the same in every round."""

    def layout_of(self, name):
        """A tensor of zeros of the layout."""
        return next(torch.zeros(e.shape) for e in self.layout.entries if e.name == name)

    def rows(self, before, after):
        """Rows that follow from a model before and after a step on all rows: values of columns, and the label."""
        change = {e.name: (after - before)[e.at].reshape(e.shape).double().numpy() for e in self.layout.entries}
        per, rows_read = self.width // len(self.wards), []
        for i in range(len(self.wards)):
            place_of = slice(i * per, (i + 1) * per)
            bias = change["fc1.bias"][place_of]
            weight = change["fc1.weight"][place_of][:, self.numbers]
            least = np.append(bias[:-1] - bias[1:], bias[-1])
            more = np.vstack([weight[:-1] - weight[1:], weight[-1:]])
            for j in np.flatnonzero(abs(least) > 3e-7):
                values = more[j] / least[j]
                raw = [value * deviation + mean for value, (mean, deviation) in zip(values, self.scales, strict=True)]
                rows_read.append((i, raw, int(least[j] < 0)))
        return rows_read


def read_rows(traps, rows_read, path, trained, wards=True):
    """Which of the rows of a file that were trained on are among those found, with their label and all columns.

    Without `wards` their ward may be another, so that more are found by chance.
    """
    lines = [
        dict(zip([*COLUMNS, "ward", "sick"], line.split(","), strict=True)) for line in path.read_text().split()[1:]
    ]
    near = {"age": 0.3, "stay": 0.1, "pressure": 0.5}

    def is_same(row, ward, raw, label):
        values = zip(traps.columns, raw, strict=True)
        same = str(label) == row["sick"] and (not wards or traps.ward_names[ward] == row["ward"])
        return same and all(abs(float(row[name]) - value) < near[name] for name, value in values)

    return {i for i in trained for row in rows_read if is_same(lines[i], *row)}


def find_trained(site):
    """The places in its file of the rows that a site has trained on, once a run is over."""
    return site._last[1].rows["train"][0].tolist()


def count_read(traps, rows_read, sites, folder, change=lambda path: path, wards=True):
    """How many training rows of sites are among those found, or as many rows of the files that `change` names."""
    paths = {change(folder / f"{site.name}.csv"): find_trained(site) for site in sites}
    return sum(len(read_rows(traps, rows_read, path, trained, wards)) for path, trained in paths.items())


WIDE = {
    "rounds": 1,
    "method": "fedavg",
    "model": {"name": "mlp", "hidden": [4098]},
    "training": {"epochs": 1, "batch": 1024, "optimiser": {"name": "sgd", "lr": 1.0}},
    "flower": {"clients": 4, "beside": [], "patience": 20.0},
}
MASKS = {"masked": True, "members": 4}
PUBLIC = {"age": [0, 120], "stay": [-5, 15], "pressure": [50, 220], "ward": [f"ward-{k}" for k in range(6)]}
ABOUT_MASKS: dict[str, dict[str, Any]] = {
    "masks": MASKS,
    "masks and an epsilon of 8 for clients": MASKS
    | {"epsilon": 8.0, "unit": "client", "columns": PUBLIC | {"sick": ["0", "1"]}},
}
USUAL = WIDE | {"rounds": 20, "model": {"name": "mlp", "hidden": [64]}, "method": "kin"}
USUAL |= {"training": {"epochs": 5, "batch": 16, "optimiser": {"name": "sgd", "lr": 0.1}}}


def ask_without_agreement(note, folder):
    """Each message of a plan that reads a site's rows, to a site whose operator has not agreed to it."""
    planned, sent = record_rows(folder / "honest", WIDE)
    site, screens, reply = victim(folder / "west", planned, sent, agrees=False)
    reply = site.reply("round", sent["round"][0])
    fields = {*site.reply("hello", sent["hello"][0]).fields} | {*reply.fields}
    note(
        "A plan that would read rows, with a first layer of 4,098, of which its operator knows nothing",
        SERVER,
        f"the site gave {', '.join(sorted(fields))}, and no tensor; it told its operator: “{screens[0]}”",
        "shut" if fields <= {"client", "kinfed", "refused", "waits", "join"} and not reply.arrays else "OPEN",
    )


def read_training_rows(note, folder):
    """The same plan, agreed to: its only round, and as often again as a site answers."""
    planned, sent = record_rows(folder / "honest", WIDE)
    site, screens, joined = victim(folder / "west", planned, sent)
    traps, read, uploads, counts = Traps(planned, sent["join"][0], 4098), set(), 0, []
    for i in range(20):
        theta = traps.model()
        message = copy.deepcopy(sent["round"][0])
        message.fields.update(accepted=i - 1, round=i)
        message.arrays.update({n: theta for n, t in message.arrays.items() if t.shape == theta.shape})
        reply = site.reply("round", message)
        if "refused" in reply.fields:
            break
        uploads += 1
        rows = traps.rows(theta, reply.arrays["upload/theta"])
        read |= read_rows(traps, rows, folder / "west" / "west.csv", find_trained(site))
        counts.append(len(read))
    note(
        "The same plan, agreed to: thresholds as bins in the first layer, one step on all rows",
        SERVER,
        f"**{counts[0]} of its {joined.fields['size']} training rows whole, with label, from the first upload**, "
        f"{counts[-1]} from {uploads}, each on its operator's screen; then “{site_said(screens)}”",
        "possible" if uploads <= 1 + REPEATED else "OPEN",
    )


class Crafted(MaskedRound):
    """A masked round of a server that sends all members the model of traps, and keeps what it sent and opened."""

    traps: ClassVar[Any]
    opened: ClassVar[list]

    def open_sum(self, round, invitation, requests, sent, like, ask):
        """The mean of what members upload, trained from that model."""
        theta = self.traps.model()
        for request in requests.values():
            request.arrays["train/theta"] = theta
        opened = super().open_sum(round, invitation, requests, sent._replace(theta=theta), like, ask)
        self.opened.append((theta, opened.uploads.tree.theta))
        self.traps.learn(*self.opened[-1])
        return opened


def open_wide(folder, privacy, first=0):
    """One round of the wide plan under masks: its sites, and the rows that a server makes out of their sum."""
    planned = plan.resolve(copy.deepcopy(WIDE | {"privacy": privacy}))
    sites = hospitals(folder, {}, first=first)
    carried = Twisted(sites, {})
    with mock.patch("kinfed_flower.server.server.MaskedRound", Crafted):
        Crafted.opened, Crafted.traps = [], None
        carried.push = partial(aim_traps, carried.push, partial(Traps, planned, width=4098))
        serve(planned, carried, folder / "run", lambda line: None, 0.0)
    before, after = Crafted.opened[0]
    return sites, Crafted.traps.rows(before, len(sites) * after - (len(sites) - 1) * before)


def read_rows_of_a_sum(note, folder):
    """The same plan with masks: bins of the sum of all sites' gradients."""
    sites, rows = open_wide(folder / "masks", MASKS)
    read = count_read(Crafted.traps, rows, sites, folder / "masks")
    by_chance = count_read(Crafted.traps, rows, sites, folder / "masks", swap_ages)
    note(
        "The same plan with masks: bins of the sum of four sites",
        SERVER,
        f"{read} of the sites' {4 * 63} training rows whole, with label, and not whose they are, among "
        f"{len(rows):,} candidates; of invented rows {by_chance} are among these",
        "possible",
    )


def read_rows_under_noise(note, folder):
    """The same with an epsilon, draw by draw of the noise, beside rows of the same distribution that no site holds.

    Two sets of files take turns at the sites. So each row is once at a site, and once it is not.
    """
    what, privacy = list(ABOUT_MASKS.items())[1]
    counts = []  # of each draw: rows read at sites and elsewhere, with their ward, and the same whatever their ward
    for first in (0, len(NAMES)):
        hospitals(folder / f"rows-{first}", {}, first=first)
    for draw in range(DRAWS):
        first = len(NAMES) * (draw % 2)
        sites, rows = open_wide(folder / f"draw-{draw}", privacy, first)
        places = [folder / f"rows-{other}" for other in (first, len(NAMES) - first)]
        kinds = [(place, wards) for wards in (True, False) for place in places]
        counts.append([count_read(Crafted.traps, rows, sites, place, wards=wards) for place, wards in kinds])
    read, absent, loosely, by_chance = np.sum(counts, axis=0).tolist()
    learning = plan.resolve(copy.deepcopy(WIDE | {"privacy": privacy})).learning
    noise, tried = find_noise(learning.training.noise, learning.rounds.count), DRAWS * 4 * 63
    likely = binomtest(loosely, max(loosely + by_chance, 1), alternative="greater").pvalue
    allowed = min(1.0, math.exp(privacy["epsilon"]) * binomtest(absent, tried).proportion_ci().high)
    note(
        f"The same plan with {what}: bins of the sum of four sites, in {DRAWS} draws of the noise",
        SERVER,
        f"{read} of {DRAWS} times the sites' {4 * 63} training rows whole, with label, and {absent} of as many rows of "
        f"the same distribution that no site holds; but for the ward, {loosely} ({max(np.array(counts)[:, 2])} at most "
        f"in a draw) and {by_chance} ({max(np.array(counts)[:, 3])}). If a site's rows change nothing, the first of "
        f"these two is as large or larger with a chance of {likely:.2f}. Each number of a sum has noise of {noise:.2f} "
        f"times all that a site may change. The epsilon by itself allows up to {100 * allowed:.0f} % of rows",
        likely > UNLIKELY,
    )


class Spikes(Traps):
    """Models of 64 neurons, each for rows of one ward that lie far out in a direction; one row alone gives itself."""

    def aim(self):
        """[width, numbers] directions of length 1, and [width] how far out rows must lie."""
        return self.draw_ways(), self.draw.uniform(1.2, 2.6, self.width)

    def draw_ways(self):
        """[width, numbers] directions at random."""
        ways = self.draw.normal(size=(self.width, len(self.numbers)))
        return ways / np.linalg.norm(ways, axis=1, keepdims=True)

    def model(self):
        """theta: [d] of such a model."""
        weight = torch.zeros(self.width, self.layout_of("fc1.weight").shape[1])
        ways, far = (torch.tensor(part, dtype=torch.float32) for part in self.aim())
        weight[:, self.numbers] = ways
        weight[torch.arange(self.width), [self.wards[j % len(self.wards)] for j in range(self.width)]] = 50.0
        bias = -50.0 - far
        head = 0.05 * torch.ones(2, self.width) * torch.tensor([[1.0], [-1.0]])
        parts = {"fc1.weight": weight, "fc1.bias": bias, "head.weight": head, "head.bias": torch.zeros(2)}
        return torch.cat([parts[e.name].flatten() for e in self.layout.entries])

    def rows(self, before, after):
        """The row of each neuron that moved: values of columns, and the label."""
        change = {e.name: (after - before)[e.at].reshape(e.shape).double().numpy() for e in self.layout.entries}
        bias, weight = change["fc1.bias"], change["fc1.weight"][:, self.numbers]
        rows_read = []
        for j in np.flatnonzero(abs(bias) > 1e-6):
            values = zip(weight[j] / bias[j], self.scales, strict=True)
            raw = [value * deviation + mean for value, (mean, deviation) in values]
            rows_read.append((j % len(self.wards), raw, int(bias[j] < 0)))
        return rows_read


class Bisecting(Spikes):
    """Spikes that adapt: a neuron's threshold is halved down to where its last row lies, by whether it moved.

    Then its next direction begins beyond all rows of its ward that were read, so that only a new one can move it.
    """

    def __init__(self, planned, invitation, width):
        super().__init__(planned, invitation, width)
        privacy, rounds = planned.learning.training.noise, planned.learning.rounds.count
        noise = 0.0 if privacy is None else privacy.clip * find_noise(privacy, rounds) / len(NAMES)
        self.tolerance = max(1e-6, noise)  # a smaller change of a bias is none
        self.read = [np.zeros((0, len(self.numbers))) for _ in self.wards]  # in deviations
        self.ways, self.low, self.high, self.far, self.last = self.draw_ways(), *np.zeros((3, width)), [None] * width
        for j in range(width):
            self.begin(j, self.ways[j])

    def begin(self, j, way):
        """Turn a neuron to a new direction."""
        beyond = self.read[j % len(self.wards)] @ way
        self.ways[j], self.last[j] = way, None
        self.low[j], self.high[j] = (beyond.max() + 0.05, 4.0) if len(beyond) else (0.0, 4.0)
        self.far[j] = self.low[j] if len(beyond) else 2.0

    def aim(self):
        """The directions, and how far out rows must lie in this round."""
        return self.ways, self.far

    def learn(self, before, after):
        """Halve what is left of each direction, and leave those in which a row was read, or in which there is none."""
        change = {e.name: (after - before)[e.at].reshape(e.shape).double().numpy() for e in self.layout.entries}
        bias, weight, ways = change["fc1.bias"], change["fc1.weight"][:, self.numbers], self.draw_ways()
        for j in range(self.width):
            if abs(bias[j]) > self.tolerance:
                self.low[j], self.last[j] = self.far[j], weight[j] / bias[j]
            else:
                self.high[j] = self.far[j]
            if self.high[j] - self.low[j] < 0.1:
                if self.last[j] is not None:
                    self.read[j % len(self.wards)] = np.vstack([self.read[j % len(self.wards)], self.last[j]])
                self.begin(j, ways[j])
            else:
                self.far[j] = (self.low[j] + self.high[j]) / 2


ADAPTING = {  # how a server chooses its neurons, and what it does, in words
    Spikes: "64 neurons a round for rows that lie far out",
    Bisecting: "64 neurons whose thresholds are halved by the sums of earlier rounds",
}


def read_rows_in_the_usual_plan(note, folder):
    """The values of the models of docs/deploy.md's plan alone are crafted, in all of its 20 rounds."""
    for kind, does in ADAPTING.items():
        for what, privacy in ABOUT_MASKS.items():
            read_rows_by_spikes(note, folder / kind.__name__ / what.replace(" ", "-"), kind, does, what, privacy)


def read_rows_by_spikes(note, place, kind, does, what, privacy):
    """How many rows neurons of one kind read, under masks alone or with an epsilon."""
    planned = plan.resolve(copy.deepcopy(USUAL | {"method": "fedavg", "privacy": privacy}))
    place.mkdir(parents=True)
    sites, rows, counts = hospitals(place, {}), [], []
    carried = Twisted(sites, {})
    Crafted.opened, Crafted.traps = [], None
    carried.push = partial(aim_traps, carried.push, partial(kind, planned, width=64))
    with mock.patch("kinfed_flower.server.server.MaskedRound", Crafted):
        serve(planned, carried, place / "run", lambda line: None, 0.0)
    for before, after in Crafted.opened:
        rows += Crafted.traps.rows(before, after)
        counts.append(count_read(Crafted.traps, rows, sites, place))
    by_chance = count_read(Crafted.traps, rows, sites, place, swap_ages)
    note(
        f"docs/deploy.md's plan with FedAvg and {what}, agreed to: {does}",
        SERVER,
        f"{counts[0]}, {counts[9]} and {counts[19]} of the sites' {4 * 63} training rows whole, with label, and "
        f"not whose they are, after 1, 10 and 20 rounds, among {len(rows):,} candidates; of invented rows "
        f"{by_chance} are among these",
        counts[-1] <= by_chance + 3 if privacy.get("epsilon") else "possible",
    )


def swap_ages(path):
    """A file of the same rows, each with the age of the one before."""
    head, *lines = [line.split(",") for line in path.read_text().splitlines()]
    swapped = [[before[0], *line[1:]] for before, line in zip([lines[-1], *lines], lines, strict=False)]
    other = path.with_name(f"{path.stem}-swapped.csv")
    other.write_text("\n".join(map(",".join, [head, *swapped])) + "\n")
    return other


def aim_traps(push, make, node, kind, message, seconds):
    """Push a message, from whose description traps are made once it is the first invitation."""
    if kind == "join" and Crafted.traps is None:
        Crafted.traps = make(invitation=message)
    return push(node, kind, message, seconds)


def read_by_scores(note, folder):
    """Models whose loss is a sum over the rows beyond a threshold, until the site answers no more."""
    for what, privacy in ({"": {}} | ABOUT_MASKS).items():
        place = folder / (what or "plain").replace(" ", "-")
        place.mkdir()
        changes = {"method": "fedavg", "privacy": privacy} if privacy else {}
        planned, sent = record_rows(place / "honest", USUAL | changes)
        site, screens, _ = victim(place / "west", planned, sent)
        answered, digits = 0, {0}
        for i in range(400):
            message = copy.deepcopy(sent["round"][0])
            fields = {n: v for n, v in message.fields.items() if n not in ("train", "round", "boxes")}
            fields |= {"evaluate": message.fields["train"], "evaluated": i, "accepted": -1}
            arrays = {
                n.replace("train/", "evaluate/"): t * (1 + i / 10) if t.is_floating_point() else t
                for n, t in message.arrays.items()
            }
            reply = site.reply("round", Message(fields, arrays))
            if "refused" in reply.fields:
                break
            answered += 1
            digits |= {
                float(value).as_integer_ratio()[0].bit_length()
                for _, _, _, value in reply.fields.get("scores", ())
                if value == value
            }
        scores = (
            f"{max(digits)} binary digits a score at most" if max(digits) else "no score, as these stay at the site"
        )
        outcome = "bounded" if max(digits) else "shut"
        also = f" with FedAvg and {what}" if what else ""
        note(
            f"400 evaluations of crafted models under docs/deploy.md's plan{also}, agreed to; 385 read all 27 held-out "
            "rows when they were not counted",
            SERVER,
            f"{answered} answered, each shown, with {scores}; then “{site_said(screens)}”",
            "OPEN" if answered > 20 + REPEATED else outcome,
        )


def change_the_description(note, folder):
    """A description with other deviations than the run began with."""
    planned, sent = record_rows(folder / "honest", USUAL)
    site, _, _ = victim(folder / "west", planned, sent)
    invitation = copy.deepcopy(sent["join"][0])
    for entry in invitation.fields["description"]["inputs"]:
        entry.update({"deviation": entry["deviation"] * 4} if "deviation" in entry else {})
    reply = site.reply("join", invitation)
    note(
        "Another description in the midst of a run, with deviations four times as large, so that no input is cut",
        SERVER,
        f"“{reply.fields.get('refused', 'accepted')}”",
        "shut" if "refused" in reply.fields else "OPEN",
    )


def single_out_a_class(note, folder):
    """Weights at which the rows of a rare class decide the gradient."""
    raw = USUAL | {"rounds": 1, "training": {"epochs": 1, "batch": 1024, "class_weights": [1e-12, 1.0]}}
    screens = {}
    sites = hospitals(folder, screens)
    path = folder / "west.csv"
    lines = path.read_text().split()
    path.write_text("\n".join([lines[0], *(f"{line[:-1]}{int(i < 3)}" for i, line in enumerate(lines[1:]))]) + "\n")
    carried = Twisted(sites, {})
    serve(
        plan.resolve(raw | {"flower": WIDE["flower"] | {"clients": 3}}), carried, folder / "run", lambda line: None, 0.0
    )
    uploads = [r for n, k, _, r in carried.seen if n == "west" and k == "round" and r.arrays]
    note(
        "class_weights = [1e-12, 1], by which the mean of a class's two rows would be uploaded",
        SERVER,
        f"{len(uploads)} uploads: “{next(line for line in screens['west'] if 'class_weights' in line)}”",
        "OPEN" if uploads else "shut",
    )


def single_out_a_row(note, folder):
    """Coefficients of a linear model at which one row has all the weight."""
    raw = WIDE | {"rounds": 20, "method": "partial-pooling", "model": "linear"}
    planned, sent = record_rows(folder / "honest", raw)
    site, screens, _ = victim(folder / "west", planned, sent)
    draw, sums = np.random.default_rng(0), 0
    for i in range(50):
        message = copy.deepcopy(sent["round"][0])
        message.fields.update(round=i, accepted=i - 1)
        for name, t in message.arrays.items():
            if t.is_floating_point() and t.numel() > 2:
                message.arrays[name] = torch.tensor(draw.normal(0, 300, t.shape), dtype=t.dtype)
        sums += "upload/curvature" in site.reply("round", message).arrays
    why = next((line for line in screens if "decide what it would upload" in line), "nothing")
    note(
        "50 rounds of `partial-pooling` with steep coefficients at random, at which few rows have all the weight",
        SERVER,
        f"{sums} times its sums; otherwise “{why}”. Differences of two sums are not looked at",
        "bounded" if sums <= 20 + REPEATED else "OPEN",
    )


def fill_the_memory(note, folder):
    """A model of 160 GB under a limit of a thousand parameters."""
    _, sent = record_rows(folder / "honest", USUAL)
    screens = {}
    site = hospitals(folder / "west", screens, Policy(runs="any", parameters=1000))[-1]
    invitation = copy.deepcopy(sent["join"][0])
    invitation.fields["table"]["model"]["hidden"] = [200_000, 200_000]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = site.reply("join", invitation)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    note(
        "hidden = [200000, 200000] under a policy with parameters = 1000",
        SERVER,
        f"“{reply.fields.get('refused', 'accepted')}”; {more:.0f} MiB more at most",
        "shut" if "refused" in reply.fields and more < 100 else "OPEN",
    )


def site_said(screens):
    """The last line that an operator was told."""
    return screens[-1].removeprefix("client west: ")


def put(*place):
    """A lie: the last of these in the fields of a message, at the place that the others name."""
    *way, last, value = place

    def change(fields):
        for key in way:
            fields = fields[key]
        fields[last] = value

    return change


INPUTS = "description", "inputs"
MADE_UP = {  # what a server says of the columns, by what is made up
    "columns": {
        "describe": [
            put("agreed", "inputs", 0, ["sick", "number"]),
            put("agreed", "inputs", 0, [["age"], "number"]),
            put("agreed", "inputs", [["age", "number"]] * 2),
            put("agreed", "inputs", "ab"),
            put("agreed", "targets", ["age"]),
        ],
        "join": [
            lambda fields: fields["description"]["inputs"].reverse(),
            put(*INPUTS, []),
            put("description", "dropped", ["age"]),
        ],
    },
    "classes": {
        "describe": [put("agreed", "classes", classes) for classes in (["1"], ["0", "1", "1"], [], [None, "1"], "01")],
        "join": [
            put("agreed", "classes", ["0"]),
            put("description", "targets", 0, "classes", ["1", "0"]),
            put("task", {"name": "Classification", "classes": 3}),
            put("task", {"name": "Regression"}),
        ],
    },
    "scales": {
        "join": [
            put(*INPUTS, 0, key, value)
            for key in ("mean", "deviation", "median")
            for value in (float("nan"), float("inf"), -1e300, "1", [])
        ]
        + [put(*INPUTS, 0, "deviation", value) for value in (0.0, -1.0)]
        + [put("description", "within", {"age": [60, 61]})]
        + [put("description", "clients", {"west": {"age": {"mean": 0, "deviation": 0, "median": 0}}})],
    },
    "selections": {
        "round": [put("selected", {"own": []}), put("chosen", "nothing"), put("judged", -5), put("round", 2**70)],
    },
}


def make_up_descriptions(note, folder):
    """What a server makes up of columns, classes, scales and models, to a site that has agreed to its plan."""
    planned, sent = record_rows(folder / "honest", USUAL)
    for what, lies in MADE_UP.items():
        refused, lines, after = list[str](), [], []
        for kind, changes in lies.items():
            before = [earlier for earlier in ("hello", "describe", "join", "round") if earlier in sent]
            for i, change in enumerate(changes):
                first = {earlier: sent[earlier] for earlier in before[: before.index(kind)]}
                site, screens, _ = victim(folder / f"{what}-{kind}-{i}", planned, first)
                message = copy.deepcopy(sent[kind][0])
                change(message.fields)
                screens.clear()
                reply = site.reply(kind, message)
                refused += [reply.fields["refused"]] if "refused" in reply.fields and not reply.arrays else []
                lines.append(screens[-1] if screens else "nothing")
                after.append("refused" not in site.reply(kind, sent[kind][0]).fields)
        note(
            f"{len(lines)} messages with made-up {what}, to a site whose operator has agreed to docs/deploy.md's plan",
            SERVER,
            f"{len(refused)} refused, in a line each, such as “{refused[0]}”; the honest message was answered after "
            f"{sum(after)} of them",
            len(refused) == len(lines) and all(after) and all(line.isprintable() for line in lines),
        )


def refuse_a_site_that_joined(note, folder):
    """A site that has joined, and whose next invitation is a lie: what it keeps, and whether the run goes on."""
    planned, sent = record_rows(folder / "honest", USUAL)
    site, _, _ = victim(folder / "west", planned, sent)
    state = site.folder / sent["join"][0].fields["experiment"] / "state.safetensors"
    before, refused = state.read_bytes(), []
    lies = [change for kinds in MADE_UP.values() for change in kinds.get("join", ())]
    for change in lies:
        invitation = copy.deepcopy(sent["join"][0])
        change(invitation.fields)
        refused.append("refused" in site.reply("join", invitation).fields)
    same = state.read_bytes() == before
    goes_on = "refused" not in site.reply("round", sent["round"][0]).fields
    note(
        f"{len(lies)} other invitations to a site that has joined already",
        SERVER,
        f"{sum(refused)} refused; the site's state {'stayed as it was' if same else 'changed'}, and the honest round "
        f"was {'answered' if goes_on else 'not answered'} after them",
        all(refused) and same and goes_on,
    )


def set_a_ledger_back(note, folder):
    """Files by which rows would have cost less than they did, and the next round under each."""
    raw = {"rounds": 9, "method": "fedavg", "model": "linear", "training": {"epochs": 1, "batch": 16}}
    raw |= {"privacy": {"epsilon": 8.0, "columns": PUBLIC}}
    planned, sent = record_rows(folder / "honest", raw)
    site, _, _ = victim(folder / "west", planned, sent)
    path, first = site.folder.parent / "west.privacy.json", sent["round"][0]
    site.reply("round", first)
    older = path.read_bytes()  # rounds that are refused below count as answered, and five may be repeated
    second = copy.deepcopy(first)
    second.fields.update(round=1, accepted=0)
    spent = site.reply("round", second).fields["privacy"]["spent"]
    kept = json.loads(path.read_text())
    fewer = kept | {"runs": [entry | {"steps": 1} for entry in kept["runs"]]}
    none = kept | {"runs": []}
    other = kept | {"id": "0" * 16}
    cases = {
        "gone": None,
        "the copy of a round before": older,
        "with fewer steps": json.dumps(fewer).encode(),
        "without runs": json.dumps(none).encode(),
        "of another site": json.dumps(other).encode(),
        "cut off": path.read_bytes()[:-9],
    }
    third, answered, why = copy.deepcopy(first), [], ""
    third.fields.update(round=2, accepted=1)
    for case, content in cases.items():
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        why = site.reply("round", third).fields.get("refused", "")
        answered += [] if "restore it from a backup" in why else [case]
        path.write_text(json.dumps(kept))
    goes_on = site.reply("round", third).fields.get("privacy", {}).get("spent", 0.0) > spent
    note(
        f"A ledger of privacy that is {', '.join(cases)}",
        "someone with a site's files, or a restored backup",
        f"answered after {len(answered)} of {len(cases)}; otherwise “{why}”. With the ledger as it was the next round "
        f"was {'answered, and counted' if goes_on else 'refused'}. A backup of all of --state is not noticed",
        "bounded" if not answered and goes_on else "OPEN",
    )


class Drawing(Twisted):
    """Sites of which west says what draws on a terminal, in place of all text of its own."""

    def push(self, node, kind, message, seconds):
        id = super().push(node, kind, message, seconds)
        if self.sites[node].name == "west" and kind == self.lies["kind"]:
            reply = self._arrived[id]
            assert isinstance(reply, Message)
            refused = {"refused": DRAWN} if kind != "hello" else {"columns": [DRAWN], "client": DRAWN}
            self._arrived[id] = reply._replace(fields=reply.fields | refused)
        return id


DRAWN = "\x1b[2J\x1b]0;owned\x07\nkinfed: done\r"


def draw_on_terminals(note, folder):
    """Control characters in whatever a site, or a server, may name."""
    lines, drawn = [], 0
    for kind in ("hello", "describe", "join", "round"):
        place = folder / kind
        carried = Drawing(hospitals(place, {}), {"kind": kind})
        flower = {"clients": 3, "beside": [], "patience": 20.0}
        raw = {"rounds": 1, "method": "fedavg", "model": "linear", "flower": flower}
        serve(plan.resolve(raw), carried, place / "run", lines.append, 0.0)
    drawn = sum(not line.isprintable() for line in lines)
    note(
        "Control characters that clear a screen and write a line of their own, as a site's name, columns and reasons",
        SITE,
        f"{drawn} of {len(lines)} lines of the server's log were other than printable; all four runs finished",
        not drawn,
    )
    planned, sent = record_rows(folder / "honest", USUAL)
    texts = []
    for kind, place in (
        ("hello", ("experiment",)),
        ("describe", ("agreed", "inputs", 0)),
        ("join", ("table", "method", "name")),
        ("join", ("experiment",)),
        ("round", ("layout",)),
        ("round", ("chosen",)),
    ):
        site, screens, _ = victim(folder / "-".join(map(str, (kind, *place))), planned, sent)
        message = copy.deepcopy(sent[kind][0])
        put(*place, DRAWN)(message.fields)
        screens.clear()
        texts += [*map(str, site.reply(kind, message).fields.values()), *screens]
    drawn = sum(not line.isprintable() for line in texts)
    note(
        "The same as names of a run, a column, a method and a model",
        SERVER,
        f"{drawn} of {len(texts)} lines of the site were other than printable",
        not drawn,
    )


def set_all_scales(note, folder):
    """A site whose numbers are of quite another size: what the others' models are worth."""

    def far(fields):
        fields["statistics"]["age"].update(
            mean=1e30, deviation=0.0, present=5, missing=fields["rows"] - 5, near=[[1e30, 5]]
        )

    def times(fields):
        for column in fields["statistics"].values():
            if column["kind"] == "number":
                column.update(mean=column["mean"] * 1000, deviation=column["deviation"] * 1000)
                column["near"] = [[value * 1000, count] for value, count in column["near"]]
                column["distinct"] = [value * 1000 for value in column["distinct"]]

    raw = USUAL | {"method": "fedavg"}
    raw.pop("flower")
    means = {}
    for name, lie in {"none": None, "a mean of 1e30 of five rows": far, "numbers times 1000": times}.items():
        scores, screen = [], "nothing"
        for seed in range(SEEDS):
            place = folder / f"{name}-{seed}"
            lies = {"describe": lie} if lie else {}
            summary, _, lines = run(hospitals(place, {}), folder / f"{place.name}-run", lies, **raw, seed=seed)
            of_seed = summary.to_dict()["by_client"]["scores"][summary.selection.chosen]
            by_name = dict(zip(summary.clients.names, of_seed, strict=True))
            scores += [by_name[hospital] for hospital in NAMES[:3]]
            screen = next((line for line in lines if "does not count for the scale" in line), screen)
        means[name] = 100 * float(np.mean(scores))
        if lie:
            note(
                f"Claiming {name}, under FedAvg",
                SITE,
                f"mean test accuracy of the others {means[name]:.1f} %, and {means['none']:.1f} without the lie, over "
                f"{SEEDS} seeds; the server's log: “{screen}”",
                "shut" if means[name] > means["none"] - 1.5 * ROW and screen != "nothing" else "OPEN",
            )


def play(note, folder):
    """All of them."""
    lies = (ask_again_and_again, take_a_step_on_one_row, train_without_end)
    legal = (ask_without_agreement, read_training_rows, read_rows_of_a_sum, read_rows_under_noise)
    legal += (read_rows_in_the_usual_plan, read_by_scores, change_the_description)
    limits = (single_out_a_class, single_out_a_row, fill_the_memory)
    made_up = (make_up_descriptions, refuse_a_site_that_joined, set_a_ledger_back, draw_on_terminals)
    for part in (*legal, *limits, *made_up, *lies, read_what_newcomers_are_given, make_up_columns, set_all_scales):
        (folder / part.__name__).mkdir(parents=True)
        part(note, folder / part.__name__)


def main():
    """Play, and rewrite the last part of the page; True if something was open."""
    rows = []

    def note(door, who, happened, outcome):
        rows.append((door, who, happened, {True: "shut", False: "OPEN"}.get(outcome, outcome)))
        print(f"{rows[-1][3]}: {door} ({who}): {happened}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        play(note, Path(folder))
    clean = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    table = "\n".join(f"| {' | '.join(row[:3])} | {row[3] if row[3] == 'shut' else f'**{row[3]}**'} |" for row in clean)
    before = PAGE.read_text().partition(HEADING)[0]
    write_page(
        PAGE,
        f"{before}{HEADING}\nWritten by `python evidence/flower_liars.py`, and by the command above in the end. "
        "Four hospitals of 90 invented rows run in one process. *Possible* is what a site gives within a plan "
        "that its operator agreed to without `[privacy]`. With an epsilon such an attack reads no row "
        "([measured](privacy-cost.md)). *Bounded* is possible as often as the line says.\n\n"
        "| attack | who | what happened | |\n| --- | --- | --- | --- |\n"
        f"{table}\n",
    )
    return any(row[3] == "OPEN" for row in rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone
    sys.exit(main())
