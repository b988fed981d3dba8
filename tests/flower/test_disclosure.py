"""What a server that turned against its sites learns from them, and what a site that lies does to the others."""

import json

import numpy as np
import pytest
import torch
from kinds import KINDS
from safetensors.torch import load_file

from kinfed import __version__
from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire import messages
from kinfed_flower.wire.messages import Message

AGREED = {
    "targets": ["sick"],
    "inputs": [["age", "number"], ["stay", "number"]],
    "classes": ["0", "1"],
    "counts": False,
}


@pytest.fixture
def hospital(tmp_path):
    """Makes a site of so many rows, and a list of what its operator is told."""

    def make(rows=90, weights=None, **reading):
        draw, said = np.random.default_rng(1), []
        cells = zip(draw.normal(60, 9, rows), draw.normal(5, 2, rows), draw.integers(0, 2, rows), strict=True)
        lines = [f"{age:.4f},{stay:.4f},{sick}" for age, stay, sick in cells]
        heading = "age,stay,sick"
        if weights is not None:
            heading, reading = "age,stay,sick,times", {"weight": "times"} | reading
            lines = [f"{line},{weight}" for line, weight in zip(lines, weights, strict=True)]
        (tmp_path / "west.csv").write_text("\n".join([heading, *lines]) + "\n")
        site = Site(
            "west",
            tmp_path / "west.csv",
            tmp_path,
            "cpu",
            Reading("sick", **reading),
            report=said.append,
            policy=Policy(runs="any"),
        )
        return site, said

    return make


def describe(site, split=None, seed=0, **agreed):
    words = {"agreed": AGREED | agreed, "split": split or {}, "seed": seed}
    return site.reply("describe", Message(words, {})).fields


def invite(site, experiment="e", **raw):
    """The site's answer to a server that asks it to join with this plan."""
    planned = plan.resolve({"rounds": 1, "method": "fedavg", "model": "linear", **raw})
    own = {"kind": "number", "mean": 0.0, "deviation": 1.0, "median": 0.0, "missing": 0}
    inputs = [own | {"name": name} for name in ("age", "stay")]
    targets = [{"name": "sick", "classes": ["0", "1"]}]
    described = {"client": "", "inputs": inputs, "targets": targets, "clients": {}, "formats": {}, "dropped": []}
    model = planned.model((2,), 2)
    words = {
        "experiment": experiment,
        "kinfed": __version__,
        "table": {key: value for key, value in planned.table.items() if key != "flower"},
        "agreed": AGREED,
        "description": described,
        "shape": [2],
        "task": {"name": "Classification", "classes": 2},
        "outputs": 2,
        "layout": messages.layout_digest(model.layout),
        "accepted": -1,
    }
    return site.reply("join", Message(words, {"theta": model.theta})).fields


def test_a_server_cannot_compute_rows_from_the_differences_of_descriptions(hospital):
    """Each seed draws other training rows, so that as many descriptions as rows would give every cell."""
    site, said = hospital()
    replies = [describe(site, seed=seed) for seed in range(120)]
    assert "refused" not in replies[0]
    assert all("refused" in reply for reply in replies[1:])
    assert replies[1]["refused"].startswith("it answers for one split and seed of its file")
    assert "has answered for seed 0; use that in every run" in replies[1]["refused"]
    assert said[-1] == f"client west: {replies[-1]['refused']}"
    assert "split {" in describe(site, {"test": 0.3})["refused"]
    assert describe(site) == replies[0]  # the same again, as for another run of one plan


def test_neither_other_classes_nor_a_new_experiment_draw_other_rows(hospital):
    site, _ = hospital()
    assert "refused" not in describe(site)
    assert "the server leaves out classes that this site has" in describe(site, classes=["1"])["refused"]
    assert "other rows of the same" in describe(site, classes=None)["refused"]
    assert "refused" not in invite(site)
    assert "refused" not in invite(site, "another")
    assert "has answered for seed 0" in invite(site, "third", seed=1)["refused"]


def test_another_content_of_the_file_is_answered_for_anew(hospital, tmp_path):
    site, _ = hospital()
    describe(site)
    with (tmp_path / "west.csv").open("a") as file:
        file.write("50,5,1\n")
    assert "refused" not in describe(site, seed=1)
    assert "refused" in describe(site, seed=2)
    (tmp_path / "west.draws.json").write_text("[1")
    assert "west.draws.json cannot be read" in describe(site, seed=1)["refused"]


@pytest.mark.parametrize(
    ("raw", "rows", "why"),
    [
        ({"training": {"batch": 1, "steps": 1}}, 90, "a step of training takes 1 row"),
        ({"training": {"batch": 7}}, 90, "a step of training takes 7 rows"),
        ({"federation": {"split": {"test": 0.8, "validation": 0.15}}}, 90, "it has 4 training rows"),
        ({"method": {"name": "fedaghn", "feedback": "held-out"}}, 60, "the method takes feedback from"),
        ({"method": {"name": "per-fedavg", "batch": 2}}, 90, "a step of training takes 2 rows"),
        ({"method": "fedpac", "model": "mlp"}, 20, "one has fewer than 8 training rows, which such a mean reveals"),
        ({"method": "partial-pooling", "model": "linear"}, 20, "one has fewer than 8 training rows"),
    ],
)
def test_gradients_of_few_rows_leave_only_if_the_operator_says_so(hospital, raw, rows, why):
    site, said = hospital(rows)
    refused = invite(site, **raw)["refused"]
    assert why in refused
    assert refused.count("\n") == 0
    assert said == [f"client west: {refused}"]
    willing, _ = hospital(rows, few_rows=True)
    assert "refused" not in invite(willing, **raw)


@pytest.mark.parametrize(
    ("weights", "raw", "why"),
    [
        ([1] * 90, {}, ""),
        ([1, 2] * 45, {"training": {"batch": 16}}, ""),
        ([1, 2] * 45, {}, "by the column of weights 7.4 rows may decide a step of 8 rows"),  # (2 + 7)^2 / (4 + 7)
        ([500] * 2 + [1] * 88, {"training": {"batch": 64}}, "by the column of weights"),
        ([500] * 2 + [1] * 88, {"training": {"batch": 64}, "method": "partial-pooling"}, "by the column of weights"),
        ([1, 2] * 45, {"method": "partial-pooling"}, ""),  # sums over all rows
    ],
)
def test_a_few_rows_of_large_weight_decide_nothing_that_leaves(hospital, weights, raw, why):
    reply = invite(hospital(weights=weights)[0], **raw)
    assert reply.get("refused", "").startswith(why) or why in reply.get("refused", "")
    assert bool(reply.get("refused")) == bool(why)
    allowed = invite(hospital(weights=weights, few_rows=True)[0], experiment="f", **raw)
    assert "refused" not in allowed
    assert allowed["weight"] > 0
    assert "refused" in reply or abs(reply["weight"] - allowed["weight"]) <= allowed["weight"] / allowed["size"]


@pytest.mark.parametrize("name", KINDS)
def test_no_sites_model_lies_in_the_folder_that_newcomers_are_given(trial, name, tmp_path, monkeypatch):
    """Nothing in any file of the run's folder is what a site uploaded in the last round."""
    made, uploads, finish = trial(name, rounds=2), [], Site.finish

    def watched(self, work, outcome):
        reply = finish(self, work, outcome)
        if reply.fields.get("round") == 1:
            uploads.extend(t.flatten() for key, t in reply.arrays.items() if t.numel() > 10)
        return reply

    monkeypatch.setattr(Site, "finish", watched)
    made.serve()
    assert uploads or name == "local"
    for path in (tmp_path / "out").rglob("*.safetensors"):
        for key, values in load_file(path).items():
            flat = values.flatten()
            for upload in uploads:
                rows = flat.unfold(0, len(upload), len(upload)) if len(flat) >= len(upload) else []
                assert not any(torch.allclose(row.to(upload), upload, atol=1e-5) for row in rows), key
    if name in ("fedamp", "pfedla", "pfedgraph", "fedaghn", "cfl", "pfedhn"):
        assert not (tmp_path / "out" / "state.safetensors").exists()
        assert any("wrote no state.safetensors" in line for line in made.lines)


HEAD, LIAR = "age,stay,ward,sick", "eve"


class Told(Here):
    """Sites in this process, of which one lies: `lie` changes its replies."""

    def __init__(self, sites, lie):
        super().__init__(sites)
        self.lie = lie

    def push(self, node, kind, message, seconds):
        id = super().push(node, kind, message, seconds)
        reply = self._arrived[id]
        if self.sites[node].name == LIAR and kind in self.lie:
            words = json.loads(json.dumps(reply.fields))
            self.lie[kind](words)
            self._arrived[id] = reply._replace(fields=words)
        return id


@pytest.fixture
def federation(tmp_path):
    """Runs a round of FedAvg with three honest hospitals and one that lies; returns the summary and the log."""

    def make(**lie):
        sites = []
        for i, name in enumerate(["ann", "bob", "cem", LIAR]):
            draw, lines = np.random.default_rng(i), []
            for k in range(90):
                lines.append(f"{draw.normal(60, 9):.3f},{draw.normal(5, 2):.3f},ward-{k % 6},{draw.integers(0, 2)}")
            (tmp_path / f"{name}.csv").write_text("\n".join([HEAD, *lines]) + "\n")
            sites.append(
                Site(name, tmp_path / f"{name}.csv", tmp_path, "cpu", Reading("sick"), policy=Policy(runs="any"))
            )
        raw = {"rounds": 1, "method": "fedavg", "model": "linear"}
        flower = {"clients": 3, "beside": [], "patience": 20.0, "categories": 10}
        lines = []
        summary = serve(plan.resolve(raw | {"flower": flower}), Told(sites, lie), tmp_path / "run", lines.append, 0.0)
        return summary, lines

    return make


def numbers_of(words, **changes):
    words["statistics"]["age"] |= changes


@pytest.mark.parametrize(
    "lie",
    [
        lambda words: numbers_of(words, mean=1e308, deviation=1e308),
        lambda words: numbers_of(words, mean=-3e38, near=[[1e39, 63]], present=63),
        lambda words: numbers_of(words, present=(1 << 40) - 1, near=[]),
        lambda words: words.update(rows=1 << 40),
        lambda words: words.update(rows=3),
        lambda words: words.update(rows="many"),
        lambda words: words.update(statistics=[]),
        lambda words: words["statistics"]["ward"].update(counts={"x": -1}),
    ],
)
def test_what_a_site_makes_up_of_its_columns_ends_no_run_and_names_it(federation, lie):
    summary, lines = federation(describe=lie)
    assert summary.clients.names == ["ann", "bob", "cem"]
    assert any(line.startswith(f"left client {LIAR} out: it") for line in lines)
    assert summary.data.scale["inputs"]["age"]["mean"] == pytest.approx(60, abs=3)


def test_a_site_that_claims_many_rows_decides_neither_scales_nor_categories(federation):
    def lie(words):
        words["rows"] = 1 << 39
        numbers_of(words, mean=80_000.0, deviation=1.0, present=1 << 39, near=[[80_000.0, 1 << 39]])
        words["statistics"]["ward"]["counts"] = {f"made up {i}": 1 << 33 for i in range(60)}

    summary, lines = federation(describe=lie)
    wards = next(one for one in summary.data.columns["inputs"] if one["name"] == "ward")["categories"]
    assert {f"ward-{i}" for i in range(6)} <= {*wards}
    assert len(wards) <= 10
    assert f"client {LIAR} claims to have 549,755,813,888 training rows, more than 10 times the median" in "".join(
        lines
    )
    assert f"client {LIAR}: 56 of its categories of 'ward' are at no other site" in "".join(lines)
    age = summary.data.scale["inputs"]["age"]["mean"]
    assert age < 0.8 * 80_000  # its ten shares of thirteen


def test_windows_at_steps_that_are_not_there_are_not_believed(tmp_path):
    sites = []
    for i, name in enumerate(["ann", "bob", "cem", LIAR]):
        lines = [f"{300 * k},{(k * (i + 3)) % 17}" for k in range(120)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["t,y", *lines]) + "\n")
        sites.append(
            Site(
                name,
                tmp_path / f"{name}.csv",
                tmp_path,
                "cpu",
                Reading("y", time="t", past=4, horizon=2),
                policy=Policy(runs="any"),
            )
        )

    def lie(words):
        if "begins" in words:
            words["begins"] = [[1e30, 0.0, 1]]

    raw = {"rounds": 1, "method": "fedavg", "model": "linear", "flower": {"clients": 3, "beside": []}}
    lines = []
    serve(plan.resolve(raw), Told(sites, {"describe": lie}), tmp_path / "run", lines.append, 0.0)
    assert f"left client {LIAR} out: it has windows at steps that are not there" in lines
