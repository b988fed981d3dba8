"""The command line as a person uses it, and what it says when the request is wrong."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.table import Table
from safetensors.torch import load_file

import kinfed
from kinfed.cli import main
from kinfed.cli.console import Literal
from kinfed.methods import FAMILIES, METHODS
from kinfed.runs.config.experiment import DEFAULT

SMALL = ["rounds=3", "federation.clients=6", "federation.partition.groups=2"]


def kinfed_run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_without_a_command_there_is_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "train one personalised model per client" in capsys.readouterr().out


def test_settings_may_stand_before_and_behind_options(tmp_path, capsys):
    words = ["run", "local", SMALL[0], "--out", str(tmp_path / "a"), *SMALL[1:], "--json", "model=linear"]
    code, out, _ = kinfed_run(capsys, *words)
    assert code == 0
    summary = json.loads(out)
    assert (summary["rounds"], summary["data"]["clients"], summary["cost"]["parameters"]) == (3, 6, 650)
    for wrong in (["--outt=x"], ["more"]):
        with pytest.raises(SystemExit):
            main([*words, *wrong])
        assert f"unrecognized arguments: {wrong[0]}" in capsys.readouterr().err


@pytest.mark.pictures
def test_run_leaves_everything_in_its_folder(tmp_path, capsys):
    code, out, err = kinfed_run(capsys, "run", "fedaghn", *SMALL, "--out", str(tmp_path / "a"), "--json")
    assert code == 0
    summary = json.loads(out)
    assert (summary["method"], summary["rounds"], summary["data"]["clients"], summary["metric"]["name"]) == (
        "fedaghn",
        3,
        6,
        "accuracy",
    )
    assert list(summary["scores"]) == ["own", "mixed"]
    assert {"mean", "std", "worst5", "best5", "round"} <= summary["scores"]["own"].keys()
    assert summary["cost"]["parameters"] == 4810
    assert summary["out"] in err
    folder = tmp_path / "a"
    table = pd.read_csv(folder / "history.csv")
    assert list(table.columns) == ["round", "client", "model", "split", "metric", "value"]
    assert len(table) == 3 * 6 * 2 * 2 * 2
    at = summary["scores"]["own"]["round"]
    rows = table.query("round == @at and model == 'own' and split == 'test' and metric == 'accuracy'")
    assert rows.value.mean() == pytest.approx(summary["scores"]["own"]["mean"], abs=1e-6)
    best = (
        table.query("model == 'own' and split == 'validation' and metric == 'accuracy'").groupby("round").value.mean()
    )
    assert best.idxmax() == at
    relations = np.load(folder / "relations.npz")
    assert relations["relation"].shape == (3, 2, 6, 6)
    assert relations["round"].tolist() == [1, 2, 3]
    assert str(relations["origin"]) == "learned"
    for picture in ("accuracy-by-round", "accuracy-by-client", "relation", "classes"):
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "checkpoint.safetensors").exists()
    assert not list(folder.glob(".*part"))


def test_a_model_that_all_share_is_written_once(tmp_path):
    assert main(["run", "fedavg", *SMALL, "--out", str(tmp_path / "a"), "--quiet"]) == 0
    written = load_file(tmp_path / "a" / "models.safetensors")
    one, other = (kinfed.load_model(tmp_path / "a", client).state_dict() for client in (0, "5"))
    assert {name.removeprefix("*/") for name in written} == set(one)
    for name, value in one.items():
        assert torch.equal(value, written[f"*/{name}"])
        assert torch.equal(value, other[name])


def test_the_saved_config_repeats_the_run_bit_for_bit_and_models_load(tmp_path, capsys):
    assert main(["run", "fedrep", *SMALL, "--out", str(tmp_path / "a"), "--quiet"]) == 0
    assert main(["run", str(tmp_path / "a" / "config.toml"), "--out", str(tmp_path / "b"), "--quiet"]) == 0
    for name in ("models.safetensors", "history.csv", "config.toml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    experiment = kinfed.runs.config.experiment.resolve(
        kinfed.runs.config.experiment.read(str(tmp_path / "a" / "config.toml"), [])
    )
    federation = experiment.federation(None, 0)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    for client in (0, "5"):
        module = kinfed.load_model(tmp_path / "a", client)
        rows = federation.rows["test"][int(client)]
        hits = (module(federation.x[rows]).argmax(1) == federation.y[rows]).float().mean()
        assert float(hits) == pytest.approx(summary["by_client"]["scores"][summary["selection"]["chosen"]][int(client)])
    with pytest.raises(kinfed.UsageError, match="there is no client at position 6; there are"):
        kinfed.load_model(tmp_path / "a", position=6)


def test_a_killed_run_is_resumed_to_the_same_bytes(tmp_path, capsys):
    asked = [
        "run",
        "fedaghn",
        "rounds=40",
        "federation.clients=8",
        "--quiet",
        "--beside",
        "none",
        "how.checkpoint_seconds=0",
    ]
    assert main([*asked, "--out", str(tmp_path / "whole")]) == 0
    broken = subprocess.Popen([sys.executable, "-m", "kinfed", *asked, "--out", str(tmp_path / "cut")])
    while not (tmp_path / "cut" / "checkpoint.safetensors").exists() and broken.poll() is None:
        time.sleep(0.01)
    broken.send_signal(signal.SIGKILL)
    broken.wait()
    assert not (tmp_path / "cut" / "summary.json").exists()
    code, out, _ = kinfed_run(capsys, "resume", str(tmp_path / "cut"), "--json", "--quiet")
    assert (code, json.loads(out)["rounds"]) == (0, 40)
    for name in ("models.safetensors", "history.csv"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_resume_of_a_finished_run_only_reports(tmp_path, capsys):
    main(["run", "local", *SMALL, "--out", str(tmp_path / "a"), "--quiet"])
    before = (tmp_path / "a" / "models.safetensors").stat().st_mtime_ns
    code, out, _ = kinfed_run(capsys, "resume", str(tmp_path / "a"), "--json", "--quiet")
    assert code == 0
    assert json.loads(out)["method"] == "local"
    assert (tmp_path / "a" / "models.safetensors").stat().st_mtime_ns == before


def test_seeds_repeat_a_run_and_tell_both_spreads(tmp_path, capsys):
    code, out, err = kinfed_run(capsys, "run", "local", *SMALL, "seeds=2", "--out", str(tmp_path / "a"), "--json")
    assert code == 0
    summary = json.loads(out)
    each = [json.loads((tmp_path / "a" / f"seed-{s}" / "summary.json").read_text()) for s in (0, 1)]
    means = [e["scores"]["own"]["mean"] for e in each]
    assert summary["seeds"] == [0, 1]
    assert summary["scores"]["own"]["mean"] == pytest.approx(np.mean(means))
    assert summary["scores"]["own"]["std_seeds"] == pytest.approx(np.std(means, ddof=1))
    ends = summary["intervals"]["own"]
    half = 12.7062 * abs(means[0] - means[1]) / 2  # Student's t with one degree of freedom, cut at 0 and 100 %
    expected = np.clip([np.mean(means) - half, np.mean(means) + half], 0, 1)
    assert (ends["over"], [ends["low"], ends["high"]]) == ("seeds", pytest.approx(expected, rel=1e-4))
    assert [one["intervals"]["own"]["over"] for one in each] == ["clients"] * 2
    assert "over seeds" in err
    assert "local on digits: 6 clients, 3 rounds, 4,810 parameters, seeds 0 to 1" in err.splitlines()
    # An interrupted repetition goes on with what is missing.
    (tmp_path / "a" / "summary.json").unlink()
    (tmp_path / "a" / "seed-1" / "summary.json").unlink()
    code, out, _ = kinfed_run(capsys, "resume", str(tmp_path / "a"), "--json", "--quiet")
    again = json.loads(out)
    assert again["scores"] == summary["scores"]


def test_compare_and_list(tmp_path, capsys):
    for method in ("local", "fedavg"):
        main(["run", method, *SMALL, "--out", str(tmp_path / method), "--quiet"])
    code, out, _ = kinfed_run(capsys, "compare", str(tmp_path / "local"), str(tmp_path / "fedavg"))
    assert code == 0
    assert "gain" in out
    code, out, _ = kinfed_run(capsys, "compare", str(tmp_path / "local"), str(tmp_path / "fedavg"), "--json")
    assert {run["method"] for run in json.loads(out)["runs"]} == {"local", "fedavg"}
    for registry in ("methods", "datasets", "partitions", "models"):
        code, out, _ = kinfed_run(capsys, "list", registry, "--json")
        entries = json.loads(out)
        assert code == 0
        assert all(entry["what"] for entry in entries.values())
    code, out, _ = kinfed_run(capsys, "list", "methods")
    assert len(out.splitlines()) < 24  # a screen
    assert max(map(len, out.splitlines())) < 100
    for family, methods in FAMILIES.items():
        (named,) = (block for block in re.split(r"\n(?! )", out) if block.startswith(f"{family}: "))
        assert set(methods) <= set(re.findall(r"[\w-]+", named))
    own = (
        "kin, hedge, attention, mixture, partial-pooling, mixed-model, private-pooling, private-kin, "
        "personal-boosting, standard"
    )
    assert " ".join(out.split()).startswith(f"kinfed's own: {own} Alone")
    code, out, _ = kinfed_run(capsys, "list", "methods", "--json")
    entries = json.loads(out)
    assert [entries["fedper"]["paper"][key] for key in ("authors", "year")] == ["Arivazhagan et al.", 2019]
    assert (entries["fedper"]["family"], entries["local"]["paper"]) == ("Parts of a model", None)
    code, out, _ = kinfed_run(capsys, "list", "methods", "fedprox")
    assert "    mu = 0.01  (a number" in out
    assert f" differs: {METHODS.differs('fedprox')} " in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert METHODS.differs("fedprox").endswith("Algorithm 2 draws them by these numbers and weights them alike.")
    assert "    grid: mu = 0.001, 0.01, 0.1, 1.0\n" in out
    _, out, _ = kinfed_run(capsys, "list", "methods", "fedprox", "--json")
    entry = json.loads(out)["fedprox"]
    assert (entry["differs"], entry["grid"]) == (METHODS.differs("fedprox"), {"mu": [0.001, 0.01, 0.1, 1.0]})
    _, out, _ = kinfed_run(capsys, "list", "citations", "fedprox")
    entries = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}$", out, re.MULTILINE | re.DOTALL))
    assert list(entries) == ["kinfed", "li2020fedprox"]
    assert "title = {{Federated Optimization in Heterogeneous Networks}}" in entries["li2020fedprox"]
    _, out, _ = kinfed_run(capsys, "list", "citations")
    titles = {one.title for methods in FAMILIES.values() for one in methods.values()} - {""}
    assert set(re.findall(r"title = \{\{(.*)\}\}", out)) == titles | {
        "kinfed: graph-guided personalised federated learning"
    }
    assert kinfed_run(capsys, "list", "methods", "partial-pooling")[0] == 0
    code, _, err = kinfed_run(capsys, "list", "methods", "fedprx")
    assert (code, err) == (2, "kinfed: list: there is no 'fedprx'; did you mean 'fedprox'?\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "fedagnh"], "did you mean 'fedaghn'?"),
        (["run", "nowhere.toml"], "cannot read nowhere.toml: No such file or directory"),
        (["run", "fedavg", "roundz=3"], "unknown key 'roundz'; did you mean 'rounds'?"),
        (["run", "fedavg", "method.mu=1"], "unknown key 'method.mu'"),
        (
            ["run", "fedprox", "method.mu=-1"],
            "method.mu must be zero or more; got -1 (pull towards the received model)",
        ),
        (["run", "fedprox", "method.mu=high"], "method.mu must be a number; got 'high'"),
        (["run", "fedavg", "rounds=two"], "rounds must be a whole number; got 'two'"),
        (["run", "fedavg", "rounds=0"], "rounds must be a whole number, at least 1"),
        (["run", "fedavg", f"training.epochs={'9' * 300}"], f"got {'9' * 40}...{'9' * 10}"),
        (["papers", "analyse", "weigths", "fedavg"], "there is no analysis 'weigths'; did you mean 'weights'?"),
        (["papers", "analyse", "defence", "cfl", "analysis=1000"], "analysis must be a table; got 1000"),
        (
            ["sweep", "pfedme", "training.optimiser=3,-0.5"],
            "training.optimiser must be 'sgd' or 'adam' or 'FILE.py",
        ),
        (["run", "fedavg", "training.epochs=true"], "training.epochs must be a whole number; got True"),
        (["run", "fedavg", "federation.dataset=digit"], "did you mean 'digits'?"),
        (["run", "fedavg", "federation.partition.name=rotation"], "did you mean 'rotations'?"),
        (["run", "fedavg", "federation.clients=5000"], "1797"),
        (["run", "fedavg", "federation.clients=1000"], "have too few examples for training, validation and test"),
        (
            ["run", "fedavg", "federation.split.test=1.5"],
            "federation.split.test must be in (0, 1); got 1.5 (share of a client's examples for the final test)",
        ),
        (
            ["run", "fedavg", "participation=0"],
            "participation.share must be in (0, 1]; got 0.0 (share of the clients that take part in a round)",
        ),
        (["run", "fedavg", "nonsense"], "write dotted.key=value"),
        (["run", "fedavg", "how.workers=0"], "how.workers must be at least 1; got 0"),
        (
            ["run", "fedavg", "how.checkpoint_seconds=-1"],
            "how.checkpoint_seconds must be zero or more; got -1",
        ),
        (
            ["sweep", "fedavg", "how.checkpoint_seconds=nan"],
            "how.checkpoint_seconds must be zero or more; got nan",
        ),
        (["run", "fedavg", "--dry-run", "how.workers=0"], "how.workers must be at least 1; got 0"),
        (
            ["run", "fedavg", "--dry-run", "how.checkpoint_seconds=-1"],
            "how.checkpoint_seconds must be zero or more; got -1",
        ),
        (["run", "fedavg", "--device", "cuda:7"], "device 'cuda:7' is not here"),
        (["run", "fedavg", "--device", "gpu"], "device must be auto, cpu, cuda or cuda:NUMBER; got 'gpu'"),
        (["resume", "."], "is not a run's folder: it has no config.toml"),
        (["compare", "nowhere"], "there is no folder nowhere"),
        (["onboard", "nowhere"], "there is no folder nowhere"),
        (["list", "methods", "kinn"], "list: there is no 'kinn'; did you mean 'kin'?"),
    ],
)
def test_wrong_requests_end_in_one_line_and_code_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = kinfed_run(capsys, *arguments)
    assert code == 2
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix not in (".toml", ".png")]


@pytest.mark.parametrize("given", ["0", "-3", "1.5", "few"])
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["compare", "a", "b"], "--top"),
        (["explain", "a", "x"], "--top"),
        (["onboard", "a"], "--rounds"),
    ],
)
def test_options_that_count_say_so_in_one_line(words, option, given, capsys):
    with pytest.raises(SystemExit) as left:
        main([*words, f"{option}={given}"])
    assert left.value.code == 2
    said = f"argument {option}: must be a whole number, at least 1; got '{given}'"
    assert capsys.readouterr().err == f"kinfed: {said}; kinfed {words[0]} --help lists the options\n"


@pytest.mark.parametrize("words", [["run"], ["runn"], ["run", "fedavg", "-z"]])
def test_options_that_nobody_knows_end_in_one_line_too(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"kinfed: .*; kinfed.* --help lists the options\n", told.err)


def test_an_optimiser_that_the_method_leaves_aside_is_told_if_somebody_set_it(capsys, tmp_path):
    said = "kinfed: warning: pfedme ignores training.optimiser; its rates are method.lr\n"
    own, small = tmp_path / "own.toml", ["rounds=1", *SMALL[1:], "--quiet", "--out"]
    own.write_text(DEFAULT.read_text())
    fast = "methods.pfedme={share = 1, steps = 1}"  # with a smaller share it says that its shared model hardly moves
    for number, (source, settings, told) in enumerate(
        (
            ("pfedme", [fast, "training.optimiser.lr=0.6"], said),
            (str(own), [fast, "method=pfedme"], said),
            ("pfedme", [fast, "training.epochs=1"], ""),
            (str(tmp_path / "0" / "config.toml"), ["rounds=1"], ""),  # written by the run before, with every setting
            ("fedavg", ["training.optimiser.lr=0.1"], ""),
        )
    ):
        assert kinfed_run(capsys, "run", source, *settings, *small, str(tmp_path / str(number))) == (0, "", told)
    grid = [fast, "training.optimiser.lr=0.1,0.2", "--method", "local,pfedme", *small, str(tmp_path / "grid")]
    _, _, told = kinfed_run(capsys, "sweep", "local", *grid)
    assert told == said.replace("method.", "methods.pfedme.")


def test_broken_config_files(capsys, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    code, _, err = kinfed_run(capsys, "run", str(broken))
    assert code == 2
    assert "is not valid TOML" in err
    broken.write_text('federation = { dataset = "digits" }')
    code, _, err = kinfed_run(capsys, "run", str(broken))
    assert code == 2
    assert "method needs a name; known: apfl, " in err


def test_warnings_that_are_to_be_errors_end_no_command(capsys, tmp_path):
    rows = [f"{site},{i % 7},{i % 2}" for site in "abc" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["site,x,y", *rows, "d,1,0", ",2,1"]) + "\n")
    words = ["run", str(tmp_path / "t.csv"), "--client", "site", "--target", "y", "--method", "local", "rounds=1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*words, "--out", str(tmp_path / "a")]) == 0
        assert warnings.filters[0][0] == "error"
    assert "kinfed: warning: " in capsys.readouterr().err


def test_divergence_names_client_and_round_and_keeps_the_last_good_checkpoint(capsys, tmp_path):
    out = str(tmp_path / "a")
    code, _, err = kinfed_run(capsys, "run", "local", *SMALL, "training.optimiser.lr=1e38", "--out", out, "--quiet")
    assert code == 1
    assert len(err.strip().splitlines()) == 1
    assert "training diverged to NaN or infinity at client" in err
    assert "round " in err
    assert not (tmp_path / "a" / "summary.json").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(capsys, tmp_path):
    main(["run", "local", *SMALL, "--out", str(tmp_path / "a"), "--quiet"])
    code, _, err = kinfed_run(capsys, "run", "fedavg", *SMALL, "--out", str(tmp_path / "a"))
    assert code == 2
    assert "already holds a run" in err


def test_a_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = kinfed_run(capsys, "run", "local", *SMALL, "--out", str(tmp_path / "file" / "run"))
    assert code == 1
    assert "cannot create the folder" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full to play a full disk")
def test_a_full_disk_is_told_and_leaves_nothing_half_written(capsys, tmp_path, monkeypatch):
    real = Path.open

    def full(self, *arguments, **how):
        return real(Path("/dev/full") if self.name.startswith(".history.csv") else self, *arguments, **how)

    monkeypatch.setattr(Path, "open", full)
    code, _, err = kinfed_run(capsys, "run", "local", *SMALL, "--out", str(tmp_path / "a"), "--quiet")
    assert code == 1
    assert "cannot write" in err
    assert "No space left on device" in err
    monkeypatch.undo()
    assert not list((tmp_path / "a").glob("*history*"))
    assert not (tmp_path / "a" / "summary.json").exists()


def test_debug_shows_the_traceback(capsys):
    code, _, err = kinfed_run(capsys, "run", "fedagnh", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_module_and_script_are_the_same():
    said = subprocess.run([sys.executable, "-m", "kinfed", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"kinfed {kinfed.__version__}\n"


def test_your_own_random_state_is_left_alone(tmp_path):
    torch.manual_seed(1)
    first = torch.rand(1)
    torch.manual_seed(1)
    main(["run", "pfedgat", *SMALL, "--out", str(tmp_path / "a"), "--quiet"])
    assert torch.equal(first, torch.rand(1))


@pytest.mark.parametrize(("command", "name"), [("run", "o[red]:o:"), ("run", "o[/x]"), ("sweep", "o[red]:o:")])
def test_a_folders_name_is_told_as_it_is(command, name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = kinfed_run(capsys, command, "local", *SMALL, "model=linear", "--out", name)
    assert code == 0
    assert err.rstrip().endswith(f" in {name}")


HEAVY = {"torch", "numpy", "scipy", "matplotlib", "sklearn"}
NEEDLESS = {"sklearn", "torch._dynamo", "torch._inductor", "polars", "flwr", "torch_geometric"}


@pytest.mark.parametrize(
    ("words", "without"),
    [
        ("--help", HEAVY | {"rich"}),
        ("--version", HEAVY | {"rich"}),
        ("list methods", HEAVY),
        ("run local rounds=1 --quiet --out run", NEEDLESS),
    ],
)
def test_a_command_imports_only_what_it_needs(words, without, tmp_path):
    program = (
        "import atexit, os, sys; from kinfed.cli import main; "
        f"sys.argv[1:] = {words!r}.split(); "
        "atexit.register(lambda: print(*sys.modules, os.environ.get('GOMP_SPINCOUNT'), sep='\\n')); main()"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    *loaded, spins = done.stdout.splitlines()
    assert "kinfed.cli.program" in loaded
    assert not without.intersection(loaded)
    assert spins == "1000"  # threads of PyTorch's that wait leave their cores to others


def test_a_log_is_told_how_far_a_run_is(tmp_path, monkeypatch, capsys):
    command = ["run", "local", "rounds=3", "--out"]
    assert main([*command, str(tmp_path / "soon")]) == 0
    assert "round 1 of 3" not in capsys.readouterr().err  # it took no minute
    monkeypatch.setattr("kinfed.cli.training.SILENCE", 0.0)
    assert main([*command, str(tmp_path / "late")]) == 0
    assert "round 1 of 3, validation accuracy 0." in capsys.readouterr().err
    assert main([*command, str(tmp_path / "quiet"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_page_that_cannot_be_opened_is_said(tmp_path, monkeypatch, capsys):
    run, opened = tmp_path / "run", []
    assert main(["run", "local", "rounds=1", "--out", str(run), "--quiet"]) == 0
    monkeypatch.setattr("kinfed.cli.report.sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for works in (None, False, True):
        if works is not None:
            monkeypatch.setenv("DISPLAY", ":0")
        monkeypatch.setattr("webbrowser.open", lambda page, works=works: opened.append(page) or works)
        assert main(["report", str(run), "--open"]) == 0
        said = capsys.readouterr().err
        why = {None: "there is no display", False: "no browser could be started"}.get(works)
        assert (f"it was not opened, as {why} here: open {run}/report.html in a browser" in said) == (not works)
    assert opened == [(run / "report.html").as_uri()] * 2


@pytest.mark.parametrize("width", [20, 40, 47, 60, 80])
def test_no_name_and_no_digit_of_a_table_is_cut_off(width):
    """A table that is too wide for the terminal goes on: 77.78 is not 77.7, and no row lacks its name."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    table.add_column("what it is for")
    for number in ("77.78", "+3.3 (-1.4 to +8.1)", "100.00"):
        table.add_column(number, justify="right", no_wrap=True)
    table.add_row("fedaghn", "words that may wrap", "77.78", "+3.3 (-1.4 to +8.1)", "100.00")
    console = Literal(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(table)
    printed = console.file.getvalue()
    assert all(printed.count(number) == 2 for number in ("77.78", "+3.3 (-1.4 to +8.1)", "100.00"))
    assert {"fedaghn", "words", "that", "may", "wrap"} <= set(printed.split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["runn", "kin"], "run"),
        (["run", "kin", "--metod", "kin"], "--method"),
        (["export", "x", "--format", "onx", "--out", "y"], "onnx"),
    ],
)
def test_what_was_meant_is_suggested(words, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_a_method_that_is_a_number_is_refused_with_a_table_too(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("shop,a,y\n" + "".join(f"s{i % 2},{i},{i}\n" for i in range(40)))
    words = ["run", str(tmp_path / "t.csv"), "--client", "shop", "--target", "y", "method=inf"]
    assert main(words) == 2
    assert "method needs a name" in capsys.readouterr().err
