import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape

from kinfed.cli import main
from kinfed.errors import UsageError
from kinfed.methods import METHODS
from kinfed.report.page import page_data as contents_module
from kinfed.report.page.gather import gather
from kinfed.report.page.html_page import page
from kinfed.report.page.page_data import contents, read_comparison
from kinfed.report.page.page_settings import settings
from kinfed.runs.run_folder import RunFolder

WEIGHTS = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.8, 0.05, 0.05], [0.0, 0.25, 0.75, 0.0], [0.4, 0.3, 0.2, 0.1]])
FACTS = {"train": [8, 7, 6, 5], "validation": [1] * 4, "test": [10] * 4, "groups": [0, 1, 0, 1]}
FACTS |= {"classes": ["cat", "dog"], "counts": [[9, 1], [5, 5], [0, 10], [4, 6]]}


@pytest.fixture
def pair(tmp_path, run_of):
    """A run of FedAGHN and one of Local on the same clients: [0.5, 0.6, 0.7, 0.9] against [0.4, 0.6, 0.8, 0.4]."""
    mine = run_of(
        tmp_path / "mine",
        [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.9]],
        [np.full((4, 4), 0.25), WEIGHTS],
        facts=FACTS,
    )
    run_of(mine / "beside" / "local", [[0.1] * 4, [0.4, 0.6, 0.8, 0.4]], [np.eye(4)] * 2, method="local")
    return mine


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))


def unpacked(frame, key, kind):
    return np.frombuffer(base64.b64decode(frame[key]), kind)


def whole(frame, count):
    """A frame as the table [N, N] that it was made from."""
    starts, to = unpacked(frame, "starts", "<u4"), unpacked(frame, "to", "<u2")
    table = np.diag(unpacked(frame, "own", "<f4")).copy()
    table[np.repeat(np.arange(count), np.diff(starts.astype(int))), to] = unpacked(frame, "weights", "<f4")
    return table


def test_scores_gains_and_examples_are_those_of_the_files(pair):
    data = contents(gather([pair]))[0]
    mine, local = (next(m for m in data["methods"] if m["method"] == name) for name in ("fedaghn", "local"))
    assert mine["scores"] == [0.5, 0.6, 0.7, 0.9]
    assert local["scores"] == [0.4, 0.6, 0.8, 0.4]
    assert mine["gain"]["alone"] == pytest.approx([0.1, 0.0, -0.1, 0.5])
    assert [one[:3] for one in mine["examples"]["alone"]] == [[1, 0, 9], [0, 0, 10], [0, 1, 9], [5, 0, 5]]
    assert mine["examples"]["alone"][3][3] == pytest.approx(2 * 0.5**5)  # five signs alike, two-sided
    text = (pair / "history.csv").read_text()
    for t, row in enumerate(mine["curves"]["accuracy"]["clients"]):
        for name, value in zip(data["clients"]["names"], row, strict=True):
            assert f"{t + 1},{name},own,test,accuracy,{value:.7g}\n" in text
    assert mine["curves"]["accuracy"]["mean"] == pytest.approx([0.25, 0.675])
    assert mine["curves"]["loss"]["mean"] == pytest.approx([0.75, 0.325])


def test_the_graph_is_the_one_in_the_folder(pair):
    data = contents(gather([pair]))[0]
    mine = data["methods"][data["main"]]
    assert mine["at"] == {"rounds": [1, 2], "selected": 1}
    np.testing.assert_array_equal(whole(mine["frames"][1][0], 4), WEIGHTS.astype(np.float32))
    assert data["clients"]["groups"] == FACTS["groups"]
    assert [FACTS["groups"][i] for i in data["order"]] == [0, 0, 1, 1]


def test_of_many_clients_the_strongest_links_are_kept(tmp_path, run_of):
    rng = np.random.default_rng(0)
    weights = rng.random((1, 207, 207)).astype(np.float32)
    weights[0, 0] = 0.5  # all alike: twenty of them are kept
    data, notes = contents(gather([run_of(tmp_path / "many", rng.random((1, 207)), weights)]))
    frame = data["methods"][0]["frames"][0][0]
    assert np.diff(unpacked(frame, "starts", "<u4").astype(int)).tolist() == [20] * 207
    kept, others = whole(frame, 207)[7], weights[0, 7].copy()
    others[7] = 0
    np.testing.assert_array_equal(np.sort(np.delete(kept, 7))[-20:], np.sort(others)[-20:])
    assert any("20 strongest" in note for note in notes)


def test_very_many_clients_are_shown_in_parts(tmp_path, run_of, monkeypatch):
    monkeypatch.setattr("kinfed.report.page.page_data.MANY", 3)
    mine = run_of(tmp_path / "mine", [[0.5, 0.6, 0.7, 0.9]], [WEIGHTS], facts=FACTS)
    data, notes = contents(gather([mine]))
    one = data["methods"][0]
    assert data["clients"]["names"] == ["group 0 (2 clients)", "group 1 (2 clients)"]
    assert one["scores"] == pytest.approx([0.6, 0.75])
    assert data["clients"]["train"] == [14, 12]
    among = whole(one["frames"][0][0], 2)  # what a client of a part gives those of another, all together
    np.testing.assert_allclose(among, [[0.725, 0.275], [0.375, 0.625]], atol=1e-6)
    assert "too many to show one by one" in " ".join(notes)


def test_the_verdict_comes_first_and_cautions_are_said(pair, tmp_path, run_of):
    text = page([pair])
    sentence = text[text.index("<h1>") : text.index("</header>")]
    assert "Cannot tell whether learning from others helps" in sentence
    assert "Accuracy +12.5 points against the best baseline without others, Local" in sentence
    assert "0 gain" not in sentence  # in the largest type beside "helps" it would read as a failure
    assert "<b>No Local</b>" not in text
    for name in ("fedaghn", "local"):
        assert str(escape(f"{METHODS.summary(name)} Differs: {METHODS.differs(name)}")) in text
    lone = run_of(tmp_path / "lone", [[0.5, 0.6, 0.7, 0.9]], caution="tested on what it trained on")
    text = page([lone])
    assert "<h1>Local is not among these runs</h1>" in text
    assert "tested on what it trained on" in text
    assert "keeps no graph of who learns from whom" in data_of(text)["methods"][0]["instead"]


def test_what_sites_found_by_themselves_is_the_verdict_where_local_is_not_there(tmp_path, run_of, capsys):
    nothing = {"mean": 0.1, "low": -0.1, "high": 0.3}
    judged = {"sentence": "cannot tell: accuracy 10 points higher than alone", "over": {"local": nothing}}
    judged |= {"gain": [], "lose": [], "undecided": ["c0", "c1"], "candidates": 1}
    out = run_of(tmp_path / "sites", [[0.5, 0.7]], [np.eye(2)], experiment="e", verdict=judged)
    text = page([out])
    assert "<h1>Cannot tell</h1>" in text
    assert "the verdict is the run&#39;s own" in text
    assert main(["compare", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "fedaghn: cannot tell: accuracy 10 points higher than alone" in shown
    assert "Local is not among" not in shown


def test_among_several_methods_the_verdict_knows_of_the_choice(pair, tmp_path, run_of):
    other = run_of(tmp_path / "other", [[0.5, 0.5, 0.5, 0.5]], [WEIGHTS], method="pfedgat")
    data = data_of(text := page([pair, other]))
    assert data["methods"][data["main"]]["method"] == "fedaghn"
    assert re.search(r"<h1>[^<(]+</h1>", text)
    assert "fedaghn is judged: its validation score is the best" in text
    assert "is judged" not in page([pair])


@pytest.mark.parametrize(("clusters", "shown"), [([0, 1, 0, 1], True), ([0, 1, 2, 3], False)])
def test_clusters_are_colours_where_they_say_something(tmp_path, run_of, clusters, shown):
    out = run_of(tmp_path / "a", [[0.5, 0.6, 0.7, 0.9]], [WEIGHTS])
    lines = "".join(f"1,c{i},cluster,{label}\n" for i, label in enumerate(clusters))
    (out / "diagnostics.csv").write_text("round,client,note,value\n" + lines)
    assert ("clusters" in data_of(page([out]))["methods"][0]) is shown


def test_nothing_in_a_folder_becomes_code(tmp_path, run_of):
    evil = "</script><img src=x onerror=alert(1)>"
    names = [evil, "<b>1</b>", "\u2028", '"]}']
    folder = run_of(tmp_path / "a", [[0.5, 0.6, 0.7, 0.9]], [WEIGHTS], names=names, caution=evil)
    text = page([folder])
    assert evil not in text
    assert "<b>1</b>" not in text
    assert data_of(text)["clients"]["names"] == names
    assert text.count("</script>") == 2
    assert "innerHTML" not in text
    assert "http://" not in text.replace("http://www.w3.org/", "")


def test_runs_of_different_data_are_refused_with_what_differs(pair, tmp_path, run_of):
    other = run_of(tmp_path / "other", [[0.5, 0.6]], dataset="mnist")
    with pytest.raises(UsageError, match=r"differ in federation\.dataset\.name: .*other"):
        gather([pair, other])


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_be_read_is_not_called_broken(pair, monkeypatch, capsys):
    opened = Path.open

    def closed(path, *args, **kwargs):
        if path.name == "history.csv":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", closed)
    assert main(["report", str(pair)]) == 1
    assert capsys.readouterr().err == f"kinfed: {pair}/beside/local/history.csv: Permission denied\n"


def test_of_a_sweep_the_best_setting_of_each_method_is_shown(tmp_path, run_of):
    for lr, score in (("0.1", 0.5), ("0.2", 0.7)):
        run_of(tmp_path / "runs" / "fedaghn" / f"lr={lr}", [[score, score - 0.1]])
    run_of(tmp_path / "runs" / "local" / "lr=0.1", [[0.4, 0.3]], method="local")
    gathered = gather([tmp_path])
    assert [row.folder.path.name for row in gathered.rows] == ["lr=0.2", "lr=0.1"]
    assert "best of 2 settings" in gathered.notes[0]


def test_seeds_are_averaged_and_their_range_is_the_band(tmp_path, run_of):
    for seed, scores in ((0, [0.4, 0.6]), (1, [0.6, 0.8])):
        run_of(tmp_path / "a" / f"seed-{seed}", [scores], seed=seed)
    one = contents(gather([tmp_path / "a"]))[0]["methods"][0]
    assert one["scores"] == pytest.approx([0.5, 0.7])
    curve = one["curves"]["accuracy"]
    assert [curve[key][0] for key in ("low", "mean", "high")] == pytest.approx([0.5, 0.6, 0.7])


def test_learning_alone_is_not_compared_with_itself(tmp_path, run_of):
    nothing = {"mean": 0.0, "low": 0.0, "high": 0.0}
    judged = {"sentence": "keep your own models", "over": {"alone": nothing, "pooled": {**nothing, "mean": 0.25}}}
    judged |= {"baselines": {"alone": "Local", "pooled": "FedAvg"}}
    judged |= {"gain": [], "lose": [], "undecided": ["c0", "c1"], "candidates": 3}
    alone = run_of(tmp_path / "a", [[0.5, 0.7]], [np.eye(2)], method="local", verdict=judged)
    choice = {"verdict": judged, "ranking": [{"candidate": "local", "chosen": True, "rounds": 3, "validation": 0.6}]}
    (alone / "choice.json").write_text(json.dumps(choice | {"out": str(alone), "training_rounds": 9}))
    run_of(alone / "beside" / "fedavg", [[0.3, 0.4]], method="fedavg")
    text = page([alone])
    assert "points over the best pooled baseline, FedAvg" in text
    assert "points over the best baseline without others" not in text
    assert "0 gain" not in text
    mine = next(one for one in data_of(text)["methods"] if one["method"] == "local")
    assert "side" not in mine
    assert "why" not in mine


def test_every_setting_has_its_sentence(pair):
    found = {one.key: one for one in settings(RunFolder(pair))}
    assert found["participation.share"].use == "share of the clients that take part in a round"
    assert found["method"].value == "fedaghn"
    assert all(one.use for one in found.values())


def test_the_commands_that_repeat_runs_write_to_different_folders(pair):
    shown = re.findall(r"<code>kinfed run (\S+) --out (\S+)</code>", re.sub("</?span>", "", page([pair])))
    local = pair / "beside" / "local"
    assert shown == [(f"{pair}/config.toml", "mine-again"), (f"{local}/config.toml", "local-again")]


def test_the_command_writes_the_page_into_the_runs_folder(pair, capsys):
    assert main(["report", str(pair)]) == 0
    assert "Cannot tell" in (pair / "report.html").read_text()
    assert main(["report", str(pair), "-o", str(pair)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_files_of_different_runs_in_one_folder_are_refused_in_one_line(pair, tmp_path, run_of, capsys):
    other = run_of(tmp_path / "other", [[0.5, 0.6]], names=["ann", "bob"])
    for name in ("summary.json", "history.csv", "tested.safetensors"):
        mixed = shutil.copytree(pair, tmp_path / f"mixed-{name}")
        shutil.copy(other / name, mixed / name)
        assert main(["report", str(mixed)]) == 2
        err = capsys.readouterr().err
        assert "its files do not belong together: " in err
        assert err.count("\n") == 1
        assert not (mixed / "report.html").exists()


def test_a_weight_stands_beside_what_the_method_made_it_of(tmp_path):
    out = tmp_path / "run"
    assert main(["run", "fedamp", "rounds=1", "federation.clients=4", "--quiet", "--out", str(out)]) == 0
    one = data_of(page([out]))["methods"][0]
    told, after = read_comparison(RunFolder(out))
    assert one["compared"]["what"] == "Squared distance of models"
    np.testing.assert_allclose(unpacked(one["compared"], "values", "<f4").reshape(4, 4), told.values, atol=1e-6)
    assert one["why"].startswith("Compared: the squared distance of models, ")
    assert one["why"].endswith(f" after round {after}.")
    (out / "state.safetensors").unlink()
    one = data_of(page([out]))["methods"][0]
    assert "compared" not in one
    assert "kept nothing of what fedamp compared" in one["why"]


def test_where_nothing_is_compared_a_sentence_says_how_weights_come_about(tmp_path):
    out = tmp_path / "run"
    small = ["rounds=1", "federation.clients=4", "model=mlp", "model.hidden=[4]", "training.epochs=1", "--quiet"]
    assert main(["run", "fedpac", *small, "--beside", "local,fedavg", "--out", str(out)]) == 0
    told = {one["method"]: one for one in data_of(page([out]))["methods"]}
    assert not [name for name, one in told.items() if "compared" in one]
    assert told["fedpac"]["why"].startswith("Whose heads are combined follows from moments of the clients' features")
    assert "why" not in told["local"]
    assert told["fedavg"]["why"] == "All clients are sent the same mean, whatever they have in common."


def test_no_code_of_ones_own_is_loaded_for_a_page(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("from kinfed.methods import FedAMP\nclass Mine(FedAMP):\n    pass\n")
    out = tmp_path / "run"
    assert main(["run", f"{mine}:Mine", "rounds=1", "federation.clients=4", "--quiet", "--out", str(out)]) == 0
    mine.write_text("raise SystemExit('loaded')\n")
    assert "kept nothing of what Mine compared" in data_of(page([out]))["methods"][0]["why"]


@pytest.mark.parametrize("lost", ["_curves", "_show_relation", "_compare"])
def test_what_cannot_be_shown_is_said_and_the_rest_is_shown(lost, pair, monkeypatch):
    whole = data_of(page([pair]))["methods"]
    monkeypatch.setattr(contents_module, lost, lambda *_: {}["key"])
    text = page([pair])
    what = {"_curves": "curves", "_show_relation": "graph", "_compare": "gains"}[lost]
    assert f"fedaghn is shown without its {what}: unexpected KeyError: " in text
    for mine, before in zip(data_of(text)["methods"], whole, strict=True):
        kept = {key for key, value in before.items() if mine.get(key) == value}
        assert {"scores", "label"} <= kept
        assert ("frames" in kept) == (lost != "_show_relation")
        assert ("curves" in kept) == (lost != "_curves")
