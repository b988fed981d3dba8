"""A server that lies to its sites, and a site that lies to the others, by messages that Flower would carry.

In one process, as the messages are the same as over TLS: `flower_security.py` writes what happened to its page.
"""

import json

import numpy as np
import torch
from safetensors.torch import load_file

from kinfed.errors import RunError
from kinfed.flower.server import plan
from kinfed.flower.server.server import serve
from kinfed.flower.site.policy import Policy
from kinfed.flower.site.site import Site
from kinfed.flower.site.site_check import Here
from kinfed.flower.site.site_reading import Reading
from kinfed.flower.wire.messages import Message

NAMES = ["north", "east", "south", "west"]
ROWS, ASKED, COLUMNS = 90, 120, ("age", "stay", "pressure")
SERVER, SITE = "operator of the server, with a program of its own", "a site, with its own key"


class Twisted(Here):
    """Sites in this process, of which west changes its replies by `lies`."""

    def __init__(self, sites, lies):
        super().__init__(sites)
        self.lies, self.seen = lies, []

    def push(self, node, kind, message, seconds):
        """Bring a message to a site."""
        id = super().push(node, kind, message, seconds)
        if self.sites[node].name == "west":
            self._arrived[id] = _changed(self._arrived[id], self.lies.get(kind))
        self.seen.append((self.sites[node].name, kind, message, self._arrived[id]))
        return id


def _changed(message, change):
    if change is None:
        return message
    words = json.loads(json.dumps(message.words))
    change(words)
    return message._replace(words=words)


def hospitals(folder, said):
    """Four sites with the rows of invented patients, and what each operator is told."""
    sites = []
    for i, name in enumerate(NAMES):
        draw = np.random.default_rng(i)
        rows = np.stack([draw.normal(55 + 5 * i, 9, ROWS), draw.normal(5, 2, ROWS), draw.normal(130, 15, ROWS)], 1)
        wards = [f"ward-{k % 6}" for k in range(ROWS)]
        sick = (rows[:, 0] + draw.normal(0, 9, ROWS) > 60).astype(int)
        lines = [
            ",".join([*(f"{x:.4f}" for x in row), ward, str(s)]) for row, ward, s in zip(rows, wards, sick, strict=True)
        ]
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.csv").write_text("\n".join([",".join([*COLUMNS, "ward", "sick"]), *lines]) + "\n")
        told = said.setdefault(name, [])
        sites.append(
            Site(
                name,
                folder / f"{name}.csv",
                folder,
                "cpu",
                Reading("sick"),
                report=told.append,
                policy=Policy(runs="any"),
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
    said = {}
    site = hospitals(folder, said)[-1]
    inputs = [[name, "number"] for name in COLUMNS]
    agreed = {"targets": ["sick"], "inputs": inputs, "classes": ["0", "1"], "counts": False}
    words = [{"agreed": agreed, "split": {"stratify": False}, "seed": seed} for seed in range(ASKED)]
    words += [{**words[0], "agreed": agreed | {"classes": ["1"]}}, {**words[0], "split": {"test": 0.5}}]
    replies = [site.reply("describe", Message(one, {})).words for one in words]
    answers = [reply for reply in replies if "refused" not in reply]
    note(
        f"{ASKED} requests for descriptions of one table with as many seeds, then with other classes and another "
        "split, whose differences would give each row",
        SERVER,
        f"{len(answers)} answered, {len(replies) - len(answers)} refused, each with a line on the site's screen: "
        f"“{said['west'][-1]}”",
        len(answers) == 1 and len(said["west"]) >= len(replies) - 1,
    )


def take_a_step_on_one_row(note, folder):
    """A plan whose only step takes one row, so that its gradient is that row, or that uploads the mean of few."""
    few = {"federation": {"split": {"test": 0.8, "validation": 0.15}}}
    of_a_class = {"method": "fedpac", "model": "mlp", "federation": {"split": {"test": 0.7, "validation": 0.15}}}
    for raw in ({"training": {"batch": 1, "steps": 1}}, few, of_a_class):
        said = {}
        place = folder / next(iter(raw))
        why, carried, _ = run(hospitals(place, said), place / "run", **raw)
        uploads = [reply for _, kind, _, reply in carried.seen if kind == "round" and reply.arrays]
        note(
            f"A plan with {json.dumps(raw)}",
            "operator of the server, with kinfed's own program",
            f"{len(uploads)} uploads; {sum(len(lines) for lines in said.values())} lines on the sites' screens: "
            f"“{said['west'][0]}”",
            not uploads and all(said.values()) and isinstance(why, str),
        )


def train_without_end(note, folder):
    """One round of a run again and again, each time from another model, until a site's rows could be solved for."""
    said = {}
    sites = hospitals(folder, said)
    _, carried, _ = run(sites, folder / "run")
    joins, rounds = ([m for n, k, m, _ in carried.seen if (n, k) == ("west", kind)] for kind in ("join", "round"))
    again = {"experiment": "again"}
    sites[-1].reply("join", joins[0]._replace(words=joins[0].words | again))
    asked, uploads = rounds[0]._replace(words=rounds[0].words | again), 0
    for i in range(ASKED):
        other = {name: t + i / 100 if t.is_floating_point() else t for name, t in asked.arrays.items()}
        uploads += bool(sites[-1].reply("round", asked._replace(arrays=other)).arrays)
    note(
        f"{ASKED} times the only round of a run, each from another model, as if no upload had arrived",
        SERVER,
        f"{uploads} uploads, then “{said['west'][-1]}”",
        uploads <= 12,
    )


def read_what_newcomers_are_given(note, folder):
    """A site's model from the folder of a run that has ended."""
    found = []
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
                found += [
                    method
                    for row in rows
                    if any(row.shape == u.shape and torch.allclose(row.to(u), u) for u in uploads)
                ]
    note(
        f"Reading a site's model from the folder that newcomers are given, after a round of {', '.join(methods)}",
        "whoever is given the folder",
        f"models found: {len(found)}",
        not found,
    )


def make_up_columns(note, folder):
    """Replies that ended or bent everybody's run."""

    def many_categories(words):
        words["rows"] = 1 << 39
        words["statistics"]["ward"]["counts"] = {f"made up {i}": 1 << 33 for i in range(60)}

    lies = {
        "a mean and deviation of 1e308": lambda words: words["statistics"]["age"].update(mean=1e308, deviation=1e308),
        "2^40 - 1 rows of which none is counted, an index out of range": lambda words: words["statistics"][
            "age"
        ].update(known=(1 << 40) - 1, near=[]),
        "2^40 training rows": lambda words: words.update(rows=1 << 40),
        "60 made-up categories of 2^33 rows each": many_categories,
    }
    for i, (door, lie) in enumerate(lies.items()):
        summary, _, lines = run(hospitals(folder / str(i), {}), folder / f"{i}-run", {"describe": lie})
        named = next((line for line in lines if "west" in line and ("left" in line or "claims" in line)), "nothing")
        going = not isinstance(summary, str)
        age = summary.data.scale["inputs"]["age"]["mean"] if going else float("nan")
        columns = summary.data.columns["inputs"] if going else []
        wards = [one for column in columns if column["name"] == "ward" for one in column["categories"]]
        real = sum(one.startswith("ward-") for one in wards)
        note(
            f"Claiming {door}",
            SITE,
            f"{'the run finished' if going else summary}; mean age {age:.1f}, {real} of 6 real wards told apart; "
            f"the server's log: “{named}”",
            going and "west" in named and 50 < age < 80 and real == 6,
        )


def play(note, folder):
    """All of them."""
    lies = (ask_again_and_again, take_a_step_on_one_row, train_without_end)
    for part in (*lies, read_what_newcomers_are_given, make_up_columns):
        (folder / part.__name__).mkdir(parents=True)
        part(note, folder / part.__name__)
