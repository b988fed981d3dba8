"""Which classes are taken for which: against scikit-learn, by hand, from fitted runs and through the command line."""

import csv
import json
from pathlib import Path

import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import nn

import kinfed
from kinfed import UsageError
from kinfed.cli import main
from kinfed.core.tasks import Classification
from kinfed.data.federation import Federation
from kinfed.runs.round_tables import read_confusion, write_confusion
from kinfed.runs.run_folder import RunFolder
from kinfed.verdict.class_counts import confusion


def test_each_clients_table_is_that_of_scikit_learn():
    draw = torch.Generator().manual_seed(0)
    outputs, y, sizes = torch.randn(57, 4, generator=draw), torch.randint(0, 4, (57,), generator=draw), [20, 0, 37]
    found = confusion(outputs, y, sizes, 4).to_dense()
    parts = zip(outputs.argmax(1).split(sizes), y.split(sizes), strict=True)
    wanted = [confusion_matrix(truth, taken, labels=range(4)) if len(truth) else 0 for taken, truth in parts]
    assert all((one.numpy() == other).all() for one, other in zip(found, wanted, strict=True))
    assert found.sum() == 57


@pytest.fixture
def run():
    """Two clients whose models may answer wrongly; class 2 is hard to tell from class 1."""
    draw = torch.Generator().manual_seed(1)
    x, client = torch.randn(240, 3, generator=draw), torch.arange(240) % 2
    y = x.argmax(1)
    noisy = (y == 2) & (torch.rand(240, generator=draw) < 0.5)
    federation = Federation.from_arrays(x, torch.where(noisy, 1, y), client, task=Classification(3))
    return kinfed.fit(kinfed.Local(), federation, nn.Linear(3, 3), rounds=3)


@pytest.mark.parametrize("method", [kinfed.Local, kinfed.FedAvg])
def test_a_run_counts_its_test_examples_by_its_chosen_models(run, method):
    run = kinfed.fit(method(), run.federation, nn.Linear(3, 3), rounds=2)
    found, federation = run.confusion().to_dense(), run.federation
    for i, rows in enumerate(federation.rows["test"]):
        taken = run.model(position=i)(federation.x[rows]).argmax(1)
        wanted = confusion_matrix(federation.y[rows], taken, labels=range(3))
        assert (found[i].numpy() == wanted).all()
        assert found[i].trace() == run.score_examples()[i].sum()


def test_the_command_shows_all_clients_or_one(run, tmp_path, capsys):
    kinfed.save(run, tmp_path / "run")
    counts = run.confusion().to_dense()

    def shown(*words):
        assert main(["compare", str(tmp_path / "run"), "--confusion", "--json", *words]) == 0
        [table] = json.loads(capsys.readouterr().out)["tables"].values()
        return torch.tensor([one["examples"] for one in table["rows"]]).view(3, 3), table["notes"][0]

    whole, note = shown()
    assert torch.equal(whole, counts.sum(0))
    assert note.startswith(f"{counts.sum(0).trace()} of {counts.sum()} test examples right")
    assert torch.equal(shown("--client", "1")[0], counts[1])
    assert main(["compare", str(tmp_path / "run"), "--confusion", "--out", str(tmp_path / "tables")]) == 0
    text = capsys.readouterr().out
    assert "local: classes of the test examples of all clients" in text
    with (tmp_path / "tables" / "confusion.csv").open() as file:
        assert [int(row["examples"]) for row in csv.DictReader(file)] == whole.flatten().tolist()
    for words, why in (
        (["--confusion", "--client", "7"], "has no test scores of a client '7'; known: 0, 1"),
        (["--client", "1"], "--client goes with --confusion"),
    ):
        assert main(["compare", str(tmp_path / "run"), *words]) == 2
        assert why in capsys.readouterr().err
    (tmp_path / "run" / "confusion.csv").unlink()
    assert main(["compare", str(tmp_path / "run"), "--confusion"]) == 2
    assert "has no confusion.csv: it was deleted; run again" in capsys.readouterr().err


def test_many_classes_are_listed_by_their_most_frequent_mistakes(run_of, tmp_path, capsys):
    path = run_of(tmp_path / "many", [[0.5, 0.5]], facts={"classes": [f"k{i}" for i in range(20)]})
    counts = torch.zeros(2, 20, 20, dtype=torch.int64)
    counts[0, 3, 4], counts[1, 3, 4], counts[1, 7, 0], counts[0, 5, 5] = 2, 5, 1, 9
    write_confusion(RunFolder(path).confusion, counts.to_sparse(), ["c0", "c1"], [f"k{i}" for i in range(20)])
    assert main(["compare", str(path), "--confusion"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.index(["k3", "k4", "7"]) + 1 == lines.index(["k7", "k0", "1"])
    assert ["9", "of", "17", "test", "examples", "right"] in lines


def test_numbers_have_no_confusion_table(tmp_path, capsys):
    federation = Federation.from_arrays(torch.randn(40, 2), torch.randn(40), torch.arange(40) % 2)
    run = kinfed.fit(kinfed.Local(), federation, nn.Linear(2, 1), rounds=1)
    with pytest.raises(UsageError, match="a confusion table needs class labels"):
        run.confusion()
    kinfed.save(run, tmp_path / "run")
    assert main(["compare", str(tmp_path / "run"), "--confusion"]) == 2
    assert "has no confusion.csv: the target has no classes" in capsys.readouterr().err


def test_a_table_that_may_not_be_read_is_not_called_broken(run, tmp_path, monkeypatch):
    kinfed.save(run, tmp_path / "run")
    folder, opened = RunFolder(tmp_path / "run"), Path.open

    def closed(path, *args, **kwargs):
        if path.name == "confusion.csv":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(PermissionError):
        read_confusion(folder.confusion)


def test_a_split_without_examples_has_no_scores(run):
    federation = Federation.from_arrays(
        run.federation.x, run.federation.y, torch.arange(240) % 2, split=kinfed.Split(0.2, 0.0)
    )
    run = kinfed.fit(kinfed.Local(), federation, nn.Linear(3, 3), rounds=1)
    assert run.score_examples("validation") == []
    assert run.confusion().to_dense().sum() == sum(map(len, federation.rows["test"]))
