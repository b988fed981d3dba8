"""Sites under privacy: secret noise, a ledger that nobody sets back, and nothing that has no price."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from kinfed.core.private.privacy import NoisedSteps, Privacy, count_epsilon, noise_for
from kinfed.core.summary import parse_summary
from kinfed.errors import RunError, UsageError
from kinfed.files import to_json
from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.drawn_rows import Withheld
from kinfed_flower.site.ledger import Ledger, seal
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire.transport import pack, unpack

pytest.importorskip("dp_accounting")
EPSILON = 8.0


def run(trial, name="fedavg", rounds=3, epsilon=EPSILON, **how):
    return trial(name, rounds=rounds, privacy={"epsilon": epsilon}, linked=False, **how)


def ledger(trial, name="d"):
    return json.loads((trial.folder / "sites" / name / f"{name}.privacy.json").read_text())


def test_sites_train_with_noise_and_send_neither_scores_nor_statistics(trial):
    begun = run(trial)
    summary = begun.serve()
    assert summary.rounds == 3
    assert all(value is None or value != value for value in summary.clients.scores["shared"])
    kept = ledger(begun)
    noise = noise_for(EPSILON, 1e-5, 8 / 17, 3 * 2 * 3)
    assert kept["runs"] == [{"run": summary.sites.experiment, "rate": 8 / 17, "noise": noise, "steps": 18}]
    assert 0.98 * EPSILON < kept["spent"] <= EPSILON
    at = summary.clients.names.index("d")
    assert summary.privacy["spent"][at] == pytest.approx(kept["spent"])
    assert summary.privacy["steps"][at] == 18
    text = to_json(summary.to_dict())
    json.loads(text, parse_constant=pytest.fail)  # NaN is no JSON, and other readers refuse it
    assert json.loads(text)["scores"]["shared"]["mean"] is None
    read = parse_summary(text, "a file")
    assert math.isnan(read.scores["shared"]["mean"])
    assert to_json(read.to_dict()) == text


@pytest.mark.parametrize(
    "claim",
    [
        5,
        None,
        {"noise": 1.0},
        {"noise": "much", "steps": 1, "spent": 1.0, "budget": 8.0},
        {"noise": 1.0, "steps": None, "spent": 1.0, "budget": 8.0},
        {"noise": 1.0, "steps": 10**400, "spent": 1.0, "budget": 8.0},
        {"noise": 1.0, "steps": 1, "spent": math.nan, "budget": 8.0},
        {"noise": 1.0, "steps": 1, "spent": 1.0, "budget": math.inf},
        {"noise": 1.0, "steps": 1, "spent": -1.0, "budget": 8.0},
        {"noise": [1.0], "steps": 1, "spent": 1.0, "budget": 8.0},
    ],
)
def test_a_made_up_ledger_ends_no_run_and_is_named(trial, claim):
    begun = run(trial, rounds=2)

    def lie(answer):
        message = unpack(answer.content)
        answer.content = pack(message._replace(fields=message.fields | {"privacy": claim}))
        return answer

    begun.grid.faults = {("b", 1): lie, ("b", 2): lie}
    summary = begun.serve()
    assert [line for line in begun.lines if line == "ignored what client b says of its ledger: it cannot be read"]
    spent = dict(zip(summary.clients.names, summary.privacy["spent"], strict=True))
    assert spent.pop("b") == 0
    assert min(spent.values()) > 0
    status = json.loads((begun.folder / "out" / "status.json").read_text(), parse_constant=pytest.fail)
    assert status["sites"]["d"]["spent"] == pytest.approx(spent["d"])


def test_without_a_budget_nothing_is_said_of_one(trial):
    begun = trial("fedavg", linked=False, rounds=1)

    def lie(answer):
        message = unpack(answer.content)
        answer.content = pack(message._replace(fields=message.fields | {"privacy": {"spent": 0.1}}))
        return answer

    begun.grid.faults = {("b", 1): lie}
    assert begun.serve().privacy is None
    assert not [line for line in begun.lines if "ledger" in line]


def asked(trial, name, kind="round"):
    """The last message of a kind that was sent to a site, and that site as it is now."""
    message = [m for client, k, m in trial.grid.sent if client == name and k == kind and "train" in m.fields][-1]
    folder = trial.folder / "sites" / name
    return message, Site(
        name,
        folder / "data.npz",
        folder,
        "cpu",
        Reading(few_rows=True),
        policy=trial.policy if hasattr(trial, "policy") else Policy(runs="any"),
    )


def ask_more(trial, name="d", round=3):
    """What a site answers when the server asks for another round than the plan has."""
    message, site = asked(trial, name)
    words = message.fields | {"round": round, "accepted": round - 1}
    return site.reply("round", message._replace(fields=words)).fields


def test_noise_is_secret_and_never_that_of_the_seed(trial):
    begun = run(trial, rounds=1)
    begun.serve()
    state = next(m for client, kind, m in begun.grid.sent if client == "d" and kind == "round")
    uploads = []
    for _ in range(2):
        _, site = asked(begun, "d")
        site.folder.joinpath(state.fields["experiment"], "state.safetensors").unlink()
        site.folder.parent.joinpath("d.privacy.json").unlink()
        site.folder.joinpath("ledger.json").unlink()
        site.folder.parent.joinpath("d.agreed.json").unlink()
        invitation = next(m for client, kind, m in begun.grid.sent if client == "d" and kind == "join")
        assert "refused" not in site.reply("join", invitation).fields
        uploads.append(site.reply("round", state).arrays["upload/theta"])
    assert float((uploads[0] - uploads[1]).norm()) > 0.1
    seeded = begun.simulate().history.models
    assert all(not torch.allclose(upload, seeded["theta"], atol=1e-3) for upload in uploads)


def test_a_round_beyond_the_budget_is_refused_before_it_is_computed(trial):
    begun = run(trial)
    begun.serve()
    before = ledger(begun)
    told = ask_more(begun)
    assert "would make it" in told["refused"]
    assert "\n" not in told["refused"]
    assert ledger(begun) == before


def refused(begun):
    """What the server is told by sites that refuse."""
    with pytest.raises(RunError, match="gave a usable reply"):
        begun.serve()
    return " ".join(begun.lines)


def test_another_run_of_the_same_rows_costs_too(trial):
    run(trial).serve()
    again = run(trial)
    (again.folder / "out").rename(again.folder / "first")
    told = refused(again)
    assert "its rows have cost epsilon 7.99 of 8" in told
    assert "its operator may allow more" in told


def test_a_larger_budget_in_the_policy_lets_it_go_on(trial):
    run(trial).serve()
    again = run(trial)
    (again.folder / "out").rename(again.folder / "first")
    (again.folder / "any.toml").write_text('runs = "any"\nepsilon = 30.0')
    summary = again.serve()
    kept = ledger(again)
    assert len(kept["runs"]) == 2
    steps = [NoisedSteps(entry["rate"], entry["noise"], entry["steps"]) for entry in kept["runs"]]
    assert kept["spent"] == pytest.approx(count_epsilon(steps, 1e-5, 1e-3), rel=1e-3)
    assert EPSILON < max(summary.privacy["spent"]) < 2 * EPSILON


@pytest.mark.parametrize("lost", ["gone", "damaged", "older", "emptied", "shortened", "another"])
def test_a_ledger_that_is_not_whole_is_a_refusal(trial, lost):
    begun = run(trial, rounds=5)
    begun.serve()
    path = begun.folder / "sites" / "d" / "d.privacy.json"
    kept = json.loads(path.read_text())
    if lost == "gone":
        path.unlink()
    elif lost == "damaged":
        path.write_text("{")
    elif lost == "older":
        path.write_text(json.dumps(seal(kept | {"count": kept["count"] - 1})))
    elif lost == "emptied":
        path.write_text(json.dumps(seal(kept | {"runs": []})))
    elif lost == "shortened":
        path.write_text(json.dumps(kept | {"runs": [kept["runs"][0] | {"steps": 1}]}))
    else:
        path.write_text(json.dumps(seal(kept | {"id": "0" * 16})))
    (begun.folder / "any.toml").write_text('runs = "any"\nepsilon = 900.0')
    begun.policy = Policy(runs="any", epsilon=900.0)
    assert "restore it from a backup" in ask_more(begun, round=5)["refused"]


def test_a_policy_wins_over_the_plan(trial, tmp_path):
    (tmp_path / "any.toml").write_text('runs = "any"\nepsilon = 2.0')
    assert "with an epsilon of at most 2" in refused(run(trial))
    assert "the plan has no [privacy]" in refused(trial("fedavg", linked=False))


def test_what_has_no_price_does_not_leave(trial):
    begun = run(trial)
    begun.serve()
    message, site = asked(begun, "d")
    told = site.reply("verdict", message._replace(fields={"experiment": message.fields["experiment"]}, arrays={}))
    assert "no price" in told.fields["refused"]
    kinds = {kind for _, kind, _ in begun.grid.sent}
    assert not kinds & {"describe", "verdict"}


def test_a_model_that_breaks_the_evaluation_says_nothing_of_rows(trial):
    begun = run(trial)
    begun.serve()
    (begun.folder / "sites" / "d" / "d.privacy.json").unlink()
    message, site = asked(begun, "d")
    words = {key: value for key, value in message.fields.items() if key not in ("train", "round")}
    words |= {"evaluate": message.fields["train"], "evaluated": 1, "accepted": 2}
    theta = torch.full_like(message.arrays["train/theta"], 1e30)
    reply = site.reply("round", message._replace(fields=words, arrays={"evaluate/theta": theta})).fields
    assert reply == {"client": "d", "evaluated": 1}


def test_a_ledger_without_a_hash_of_an_earlier_version_goes_on(tmp_path):
    book, privacy, steps = Ledger(tmp_path / "a"), Privacy(2.0), NoisedSteps(1.0, 10.0, 4)
    book.spend("run", steps, privacy, 2.0)
    kept = json.loads(book.path.read_text())
    del kept["hash"]
    book.path.write_text(json.dumps(kept))
    assert Ledger(tmp_path / "a").spend("run", steps, privacy, 2.0)["steps"] == 8
    assert "hash" in json.loads(book.path.read_text())


def test_a_ledger_counts_before_and_refuses_without_counting(tmp_path):
    book, privacy, steps = Ledger(tmp_path / "a"), Privacy(2.0), NoisedSteps(1.0, 10.0, 4)
    first = book.spend("run", steps, privacy, 2.0)["spent"]
    assert first == pytest.approx(count_epsilon([steps], 1e-5), rel=1e-6)
    second = book.spend("run", steps, privacy, 2.0)
    assert second["steps"] == 8
    assert second["spent"] == pytest.approx(count_epsilon([steps._replace(steps=8)], 1e-5), rel=1e-6)
    before = book.read()
    with pytest.raises(Withheld, match="its operator may allow more"):
        book.spend("other", steps._replace(noise=1.0), privacy, 2.0)
    assert book.read() == before
    assert Ledger(tmp_path / "b").read() == {}


def test_copies_of_a_ledger_are_seen_unless_all_of_the_state_is_copied(tmp_path):
    """As docs/privacy.md says: the notes of an older backup are as old as its ledger."""
    privacy, steps = Privacy(epsilon=EPSILON), NoisedSteps(0.5, 3.0, 2)
    state, backup = tmp_path / "state", tmp_path / "backup"
    Ledger(state / "d").spend("run", steps, privacy, EPSILON)
    shutil.copytree(state, backup)
    spent = Ledger(state / "d").spend("run", steps, privacy, EPSILON)["spent"]
    for lost in (["d.privacy.json"], ["d.privacy.json", "d.agreed.json"], ["d.privacy.json", "d/ledger.json"]):
        copied = tmp_path / "-".join(lost).replace("/", "-")
        shutil.copytree(state, copied)
        for name in lost:
            shutil.copy(backup / name, copied / name)
        with pytest.raises(RunError, match=r"an older copy; restore it from a backup"):
            Ledger(copied / "d").spend("run", steps, privacy, EPSILON)
    assert Ledger(backup / "d").spend("run", steps, privacy, EPSILON)["spent"] == spent


def test_labels_decide_no_rows_place(trial):
    assert run(trial).planned.split.stratify is False
    with pytest.raises(UsageError, match="deals rows by the labels"):
        run(trial, split={"stratify": True})


PUBLIC = {"age": [0, 100], "ward": ["a", "b"], "seen": [2000, 2030]}


def tables(folder, target="sick", **reading):
    """Three sites with the rows of invented patients, one of whom is of a ward that nobody else is in."""
    sites = []
    for i, name in enumerate(("north", "east", "south")):
        draw = np.random.default_rng(i)
        rows = []
        for k in range(60):
            age, ward = draw.normal(55, 12), "zeta" if name == "east" and k == 7 else "ab"[k % 2]
            cells = [f"{age:.1f}" if k % 9 else "", ward, f"{2010 + k % 12}-03-0{1 + k % 9}"]
            rows.append(",".join([*cells, str(int(age > 55)) if target == "sick" else f"{age / 10:.2f}"]))
        (folder / f"{name}.csv").write_text("\n".join([f"age,ward,seen,{target}", *rows]) + "\n")
        policy = Policy(runs="any", epsilon=30.0)
        sites.append(Site(name, folder / f"{name}.csv", folder, "cpu", Reading(target, **reading), policy=policy))
    return sites


def serve_tables(sites, folder, columns, **flower):
    seen = []

    class Tap(Here):
        def push(self, node, kind, message, seconds):
            seen.append((kind, message))
            id = super().push(node, kind, message, seconds)
            seen.append((kind, self._arrived[id]))
            return id

    privacy = {"epsilon": 20.0, **({"columns": columns} if columns else {})}
    raw = {"rounds": 2, "method": "kin", "model": "linear", "privacy": privacy, "flower": {"clients": 3, **flower}}
    return serve(plan.resolve(raw), Tap(sites), folder / "run", lambda line: None, 0.0), seen


def test_tables_become_inputs_by_what_is_public_of_their_columns(tmp_path):
    summary, seen = serve_tables(tables(tmp_path), tmp_path, PUBLIC)
    assert max(summary.privacy["spent"]) > 19
    assert "describe" not in {kind for kind, _ in seen}
    assert "zeta" not in str([message.fields for _, message in seen])
    scale = summary.data.scale["inputs"]
    assert (scale["age"]["mean"], scale["age"]["deviation"]) == (50.0, 25.0)
    description = json.loads(next((tmp_path / "east").glob("*/description.json")).read_text())
    assert not description["columns"].get("within")


def test_a_target_that_is_a_number_needs_its_range_too(tmp_path):
    with pytest.raises(UsageError, match="it lacks cost; give the least"):
        serve_tables(tables(tmp_path, "cost"), tmp_path, PUBLIC)
    summary, _ = serve_tables(tables(tmp_path, "cost"), tmp_path, PUBLIC | {"cost": [0, 10]})
    assert summary.data.task["mean"] == [5.0]


@pytest.mark.parametrize(
    ("columns", "flower", "why"),
    [
        ({}, {}, "it lacks age, ward, seen"),
        (PUBLIC | {"ward": [0, 1]}, {}, "ward must be its categories"),
        (PUBLIC | {"age": ["old"]}, {}, "age must be the least and the largest number"),
        (PUBLIC | {"age": [5, 5]}, {}, r"privacy\.columns\.age must be the least"),
        (PUBLIC | {"age": [0, 1e308]}, {}, r"privacy\.columns\.age must be the least"),
        (PUBLIC, {"scale": "client"}, "takes each site's own rows"),
    ],
)
def test_what_is_not_public_is_refused_in_a_line(tmp_path, columns, flower, why):
    with pytest.raises(UsageError, match=why) as problem:
        serve_tables(tables(tmp_path), tmp_path, columns, **flower)
    assert "\n" not in str(problem.value)
