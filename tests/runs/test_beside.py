"""Local and FedAvg beside a run, and the verdict that the run ends with."""

import json
import shutil

import numpy as np
import pytest
import torch

import kinfed
from kinfed.cli import main
from kinfed.errors import RunError, UsageError
from kinfed.report.tables.compare import compare
from kinfed.runs import baselines, launch, reference_runs
from kinfed.runs.config import experiment as config
from kinfed.runs.run import Run, make_baseline
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.tested_examples import Tested
from kinfed.simulation.execution import Execution

SMALL = ["rounds=3", "federation.clients=4", "federation.partition.groups=2", "model=linear"]
SAME = ("models.safetensors", "tested.safetensors", "history.csv", "config.toml")


@pytest.fixture
def shops(tmp_path):
    """Four shops in two groups, whose customers do the opposite: the words of a command that trains on them."""
    draw = np.random.default_rng(0)
    price, bought = draw.normal(size=(4, 40)), []
    for i, of_shop in enumerate(price):
        bought += [int((p > 0) == (i < 2)) for p in of_shop]
    rows = zip(np.repeat(list("abcd"), 40), price.ravel(), bought, strict=True)
    path = tmp_path / "shops.csv"
    path.write_text("\n".join(["shop,price,buys", *(f"{shop},{p:.3f},{buys}" for shop, p, buys in rows)]) + "\n")
    settings = {"name": "csv", "path": path, "client": "shop", "target": "buys"}
    return ["rounds=3", "model.name=linear", *(f"federation.dataset.{key}={value}" for key, value in settings.items())]


def said(capsys):
    """What was said on standard error, in one line."""
    return " ".join(capsys.readouterr().err.split())


def read(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.beside
def test_a_run_ends_with_its_verdict(shops, tmp_path, capsys, monkeypatch):
    assert main(["run", "cfl", *shops, "--out", str(tmp_path / "a")]) == 0
    found = read(tmp_path / "a")["verdict"]
    shown = said(capsys)
    assert shown.endswith(" ".join([found["sentence"], *found["notes"]]))
    for label, name in (("learning alone", "local"), ("one model for all", "fedavg")):  # in the table of scores
        other = read(tmp_path / "a/beside" / name)
        assert f"{label} {100 * other['scores'][other['selection']['chosen']]['mean']:.2f} " in shown
    monkeypatch.setenv("COLUMNS", "40")  # no digit is cut off
    assert main(["resume", str(tmp_path / "a"), "--beside", "local,fedavg"]) == 0
    assert shown.partition("* chosen")[0].partition("test")[2] in said(capsys)
    assert found["over"].keys() == {"alone", "pooled"}
    mine = read(tmp_path / "a")
    means = {one["name"]: one["mean"] for one in mine["baselines"]}
    for name in ("local", "fedavg"):
        other = read(tmp_path / "a/beside" / name)
        assert other["method"] == name
        assert "verdict" not in other
        means[baselines.NAMES[name]] = other["scores"][other["selection"]["chosen"]]["mean"]
    for kind, name in found["baselines"].items():
        mean = mine["scores"][mine["selection"]["chosen"]]["mean"] - means[name]
        assert found["over"][kind]["mean"] == pytest.approx(mean, abs=1e-6)
    assert sorted(found["gain"] + found["lose"] + found["undecided"]) == list("abcd")

    assert main(["run", "cfl", *shops, "--out", str(tmp_path / "b"), "--beside", "none"]) == 0
    assert said(capsys).endswith(f" everything is in {tmp_path}/b")
    assert not (tmp_path / "b/beside").exists()
    assert "verdict" not in read(tmp_path / "b")

    assert main(["resume", str(tmp_path / "b"), "--beside", "local,fedavg"]) == 0
    assert said(capsys).endswith(" ".join([found["sentence"], *found["notes"]]))
    assert read(tmp_path / "b")["verdict"] == found

    assert main(["compare", str(tmp_path / "a"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["verdict"] == found
    assert (row["helped"], row["hurt"]) == (len(found["gain"]), len(found["lose"]))


def test_where_it_is_not_cheap_the_last_line_says_how(shops, tmp_path, capsys):
    assert main(["run", "cfl", *shops, "--out", str(tmp_path / "a")]) == 0
    assert said(capsys).endswith(f"; to do so: kinfed resume {tmp_path}/a --beside local,fedavg")
    assert not (tmp_path / "a/beside").exists()
    assert main(["run", "local", *shops, "--out", str(tmp_path / "b")]) == 0
    assert said(capsys).endswith(f" everything is in {tmp_path}/b")
    assert main(["run", "cfl", *shops, "--out", str(tmp_path / "c"), "--beside", "fedavg"]) == 2
    assert capsys.readouterr().err == "kinfed: --beside is local,fedavg, local, none or auto; got 'fedavg'\n"
    assert not (tmp_path / "c").exists()


@pytest.mark.beside
@pytest.mark.parametrize(
    ("method", "others"), [("local", set()), ("fedavg", {"local"}), ("fedavg-ft", {"local", "fedavg"})]
)
def test_what_is_trained_beside_what(method, others, tmp_path):
    launch.launch(config.resolve(config.read(method, SMALL)), tmp_path / "a", beside="auto")
    assert set(reference_runs.folders(RunFolder(tmp_path / "a"))) == others
    assert ("verdict" in read(tmp_path / "a")) == bool(others)
    assert method == "local" or read(tmp_path / "a")["verdict"]["over"].keys() == {"alone", "pooled"}


def test_the_same_training_but_for_the_method():
    settings = ["method.frozen=['weight']", "training.epochs=3", "participation=0.5", "seed=4", "attack.name=poison"]
    experiment = config.resolve(config.read("cfl", [*SMALL, *settings]))
    for name, other in reference_runs.companions(experiment).items():
        assert other.method_name == name
        assert other.method.frozen == ("weight",)
        assert {k: v for k, v in other.table.items() if k != "method"} == {
            k: v for k, v in experiment.table.items() if k != "method"
        }


@pytest.mark.parametrize(("seeds", "at"), [(1, 1), (1, 4), (2, 7)])
def test_an_interrupted_run_goes_on_to_the_same_bytes(seeds, at, tmp_path):
    """Of three rounds with each seed: in the run itself, in Local, and in FedAvg."""
    few = ["training.batch=50", "method.epochs=1", f"seeds={seeds}"]
    experiment = config.resolve(config.read("fedavg-ft", [*SMALL, *few]))
    calls = []

    def stop(history, rounds):
        calls.append(rounds)
        if len(calls) == at * seeds + 1:
            raise KeyboardInterrupt

    execution = Execution("loop", checkpoint_seconds=0)
    launch.launch(experiment, tmp_path / "whole", execution, beside=("local", "fedavg"))
    broken = Execution("loop", checkpoint_seconds=0, progress=stop)
    with pytest.raises(KeyboardInterrupt, match=f"resume with: kinfed resume {tmp_path}/broken$"):
        launch.launch(experiment, tmp_path / "broken", broken, beside=("local", "fedavg"))
    assert not (tmp_path / "broken/summary.json").exists()
    launch.resume(tmp_path / "broken")
    files = [path.relative_to(tmp_path / "whole") for name in SAME for path in (tmp_path / "whole").rglob(name)]
    assert len(files) == (12 if seeds == 1 else 6 * 4 + 3)
    for path in files:
        assert (tmp_path / "whole" / path).read_bytes() == (tmp_path / "broken" / path).read_bytes(), path
    assert read(tmp_path / "broken")["verdict"] == read(tmp_path / "whole")["verdict"]
    assert not [*(tmp_path / "broken").rglob("how.json"), *(tmp_path / "broken").rglob("checkpoint.safetensors")]


@pytest.mark.beside
def test_what_cannot_be_trained_beside_it_takes_no_results_away(tmp_path, monkeypatch):
    real, raised = launch.fit, {}

    def fit(method, *args, **more):
        if type(method).__name__ in raised:
            raise raised[type(method).__name__]
        return real(method, *args, **more)

    monkeypatch.setattr(launch, "fit", fit)
    cases = (
        ("FedAvg", {"alone", "pooled"}, RunError("it diverged"), "it diverged"),
        (
            "Local",
            None,
            LookupError("no row"),
            "unexpected LookupError: no row (--debug shows where; please report it)",
        ),
    )
    for failing, over, problem, said in cases:
        raised = {failing: problem}
        launch.launch(config.resolve(config.read("cfl", SMALL)), tmp_path / failing, beside="auto")
        found = read(tmp_path / failing)
        assert found["warnings"] == [f"{failing.lower()}, which was trained beside it, failed: {said}"]
        assert found.get("verdict", {}).get("over", {}).keys() == (over or set())


@pytest.mark.beside
def test_a_seed_that_fails_takes_no_other_seed_away(tmp_path, monkeypatch, capsys):
    real, failing = launch.fit, {("CFL", 1): ValueError("not finite"), ("Local", 3): RunError("it diverged")}

    def fit(method, *args, seed, **more):
        if problem := failing.get((type(method).__name__, seed)):
            raise problem
        return real(method, *args, seed=seed, **more)

    monkeypatch.setattr(launch, "fit", fit)
    assert main(["run", "cfl", *SMALL, "seeds=4", "--out", str(tmp_path / "a")]) == 0
    shown = said(capsys)
    assert "seeds 0, 2, 3" in shown
    assert "! seed 1 failed: unexpected ValueError: not finite (--debug" in shown
    summary, each = read(tmp_path / "a"), {seed: read(tmp_path / f"a/seed-{seed}") for seed in (0, 2, 3)}
    assert summary["seeds"] == [0, 2, 3]
    means = [one["scores"][summary["selection"]["chosen"]]["mean"] for one in each.values()]
    assert summary["scores"][summary["selection"]["chosen"]]["mean"] == pytest.approx(np.mean(means))
    name, gains = summary["verdict"]["baselines"]["alone"], []
    for seed in (0, 2):
        own = RunFolder(tmp_path / f"a/seed-{seed}")
        known = [
            make_baseline(Run(RunFolder(tmp_path / f"a/beside/local/seed-{seed}")), False),
            *baselines.read(own),
        ]
        (other,) = (one.tested.means for one in known if one.name == name)
        gains.append(np.mean(list(Tested.read(own).means.values())) - np.mean(list(other.values())))
    assert summary["verdict"]["over"]["alone"]["mean"] == pytest.approx(np.mean(gains), abs=1e-6)
    (row,) = compare([tmp_path / "a"]).sets[0]
    assert row.seeds == (0, 2, 3)
    assert main(["report", str(tmp_path / "a")]) == 0
    failing.clear()
    before = (tmp_path / "a/summary.json").read_bytes()
    assert main(["resume", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a/summary.json").read_bytes() == before
    with pytest.raises(RunError, match=r"seed 1 failed: .*; delete .*/a to try again"):
        launch.run_job(launch.Job("a", config.of_run(tmp_path / "a/config.toml"), tmp_path / "a"))


def test_a_run_of_which_every_seed_fails_has_failed(tmp_path):
    experiment = config.resolve(config.read("cfl", [*SMALL, "seeds=2", "training.optimiser.lr=1e38"]))
    with pytest.raises(RunError, match="round 1: training diverged"):
        launch.launch(experiment, tmp_path / "a")
    assert not (tmp_path / "a/summary.json").exists()


@pytest.mark.beside
def test_a_verdict_that_cannot_be_worked_out_takes_no_results_away(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "verdict", lambda *_, **__: 1 / 0)
    for seeds in ("1", "2"):
        launch.launch(config.resolve(config.read("cfl", [*SMALL, f"seeds={seeds}"])), tmp_path / seeds, beside="auto")
        found = read(tmp_path / seeds)
        assert "verdict" not in found
        assert found["warnings"][-1].startswith("there is no verdict: unexpected ZeroDivisionError: division by zero")


@pytest.mark.beside
def test_a_verdict_over_seeds_that_chose_differently_says_so(tmp_path):
    words = ["run", "fedaghn", "method.sharpness=10", "method.home=0.3", "seeds=3", "federation.clients=8"]
    words += ["--quiet", "--beside", "local"]
    said = set()
    for rounds in (2, 4):
        out = tmp_path / str(rounds)
        assert main([*words, f"rounds={rounds}", "--out", str(out)]) == 0
        chosen = [read(out / f"seed-{seed}")["selection"]["chosen"] for seed in range(3)]
        differ = set(chosen) != {read(out)["selection"]["chosen"]}
        each = ", ".join(f"'{model}'" for model in chosen)
        told = f"the verdict is on the model that each seed chose ({each}), the starred row on one for all"
        assert (told in read(out)["warnings"]) == differ
        said.add(differ)
    assert said == {True, False}


@pytest.mark.beside
def test_a_run_that_is_refused_leaves_nothing_of_what_was_to_be_trained_beside_it(tmp_path):
    refused = config.resolve(config.read("cfl", [*SMALL, "method.personal=['nowhere.*']"]))
    with pytest.raises(UsageError, match="nowhere"):
        launch.launch(refused, tmp_path / "a", beside="auto")
    assert not (tmp_path / "a").exists()


@pytest.mark.beside
def test_a_verdict_is_on_honest_clients_and_marked_where_scores_leak(tmp_path):
    attacked = ["attack.name=poison", "attack.share=0.25", "seeds=2"]
    launch.launch(config.resolve(config.read("cfl", [*SMALL, *attacked])), tmp_path / "a", beside="auto")
    found = read(tmp_path / "a")["verdict"]
    attackers = [set(read(tmp_path / f"a/seed-{seed}")["attack"]["attackers"]) for seed in (0, 1)]
    assert len(found["gain"] + found["lose"] + found["undecided"]) == 4 - len(attackers[0] & attackers[1])
    launch.launch(
        config.resolve(config.read("fedaghn", [*SMALL, "method.feedback=test"])), tmp_path / "b", beside="auto"
    )
    assert read(tmp_path / "b")["verdict"]["notes"][-1] == baselines.LEAKING


@pytest.mark.beside
def test_the_rule_counts_what_is_trained_and_a_dry_run_tells_it(capsys, monkeypatch):
    experiment = config.resolve(config.read("cfl", [*SMALL, "training.epochs=4", "participation=0.5", "seeds=2"]))
    federation = experiment.federation(None, 0)
    examples = int(federation.sizes.sum())
    assert (
        reference_runs.work(experiment, federation) == 0.5 * examples * 4 * 3 * 2 * 5000
    )  # 650 parameters count as 5000
    steps = ["training.steps=6", "training.batch=10", "model.name=mlp", "model.hidden=[100]"]
    larger = config.resolve(config.read("cfl", [*SMALL[:3], *steps]))
    assert reference_runs.work(larger, federation) == 4 * 60 * 3 * (65 * 100 + 101 * 10)
    assert main(["run", "cfl", *SMALL, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "local and fedavg will be trained beside it, as that is cheap: " in told
    assert "fedavg, beside it" in told
    monkeypatch.setattr(reference_runs, "CHEAP", 1e3)
    assert main(["run", "cfl", *SMALL, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["runs"]) == ["cfl"]
    assert "will be trained beside it only with --beside local,fedavg: " in found["beside"]
    assert main(["run", "cfl", *SMALL, "--dry-run", "--json", "--beside", "local"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"]) == ["cfl", "local, beside it"]


@pytest.mark.beside
def test_compare_takes_local_from_the_compared_runs_or_from_beside(tmp_path):
    for method in ("cfl", "fedaghn"):
        launch.launch(config.resolve(config.read(method, SMALL)), tmp_path / method, beside="auto")
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "cfl/beside", moved)
    (rows,) = compare([tmp_path / "cfl", tmp_path / "fedaghn"]).sets
    has = {row.method: row.verdict for row in rows}
    assert has == {name: read(tmp_path / name)["verdict"] for name in ("cfl", "fedaghn")}  # cfl's: its own at its end
    assert None not in has.values()
    assert not compare([tmp_path / "cfl"]).warnings
    found = compare([tmp_path / "cfl", moved / "local", moved / "fedavg"])
    verdicts = {row.method: row.verdict for row in found.sets[0]}
    assert verdicts["cfl"] == read(tmp_path / "cfl")["verdict"]
    assert verdicts["local"] is None
    assert verdicts["fedavg"]["over"].keys() == {"alone", "pooled"}
    assert not found.warnings
    for folder in (tmp_path / "cfl", moved / "local"):  # as runs of former versions, which counted by clients' means
        (folder / "tested.safetensors").unlink()
    (row,) = (row for row in compare([tmp_path / "cfl", moved / "local"]).sets[0] if row.method == "cfl")
    assert row.verdict["over"]["alone"]["mean"] == pytest.approx(has["cfl"]["over"]["alone"]["mean"], abs=1e-6)
    assert len(row.verdict["undecided"]) == 4
    assert not row.counts.paired
    (tmp_path / "fedaghn/tested.safetensors").write_bytes(b"broken")
    with pytest.raises(UsageError, match=r"tested\.safetensors cannot be read"):
        Tested.read(RunFolder(tmp_path / "fedaghn"))


def test_runs_beside_a_run_have_no_pictures(tmp_path):
    folder = RunFolder(tmp_path / "a")
    references = [folder.reference("local"), folder.reference("fedavg"), folder.reference("local").of_seed(1)]
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(30, 4, generator=draw), torch.arange(30) % 3
    federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    run = kinfed.fit(kinfed.Local(), federation, torch.nn.Linear(4, 2), rounds=1)
    folders = [folder, folder.of_seed(1), *references]
    for one in folders:
        kinfed.save(run, one.path)
    assert [len(list(one.path.glob("*.png"))) for one in folders] == [5, 5, 0, 0, 0]
    assert references[0].history.read_bytes() == folder.history.read_bytes()


@pytest.mark.beside
def test_attackers_are_left_out_of_the_verdict_and_it_says_so(shops, tmp_path, capsys):
    asked = [*shops, "attack={name='label_flip', share=0.3}", "--beside", "local,fedavg", "--out", str(tmp_path / "a")]
    assert main(["run", "cfl", *asked]) == 0
    note = "1 client attacks and is left out; standard models were fitted without the attack"
    assert note in read(tmp_path / "a")["verdict"]["notes"]
    assert note in said(capsys)


@pytest.mark.beside
def test_a_seed_whose_scores_are_gone_is_named(shops, tmp_path, capsys):
    assert main(["run", "cfl", *shops, "seeds=2", "--beside", "local", "--quiet", "--out", str(tmp_path / "a")]) == 0
    (tmp_path / "a" / "seed-1" / "summary.json").unlink()
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a")]) == 0
    out, err = capsys.readouterr()
    assert "a: seed 1 without scores: left out; run again" in " ".join((out + err).split())
