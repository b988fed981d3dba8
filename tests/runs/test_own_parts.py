"""Parts of one's own, from a file: on the command line, in TOML, at a site."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import kinfed
from kinfed.cli import main
from kinfed.core.summary import Metric
from kinfed.errors import UsageError
from kinfed.runs.config import experiment, plugins
from kinfed.runs.run import Run
from kinfed.runs.run_folder import RunFolder

MINE = '''
from dataclasses import dataclass, replace
from typing import ClassVar
import torch
from torch import nn
import kinfed
from kinfed.core.summary import Metric
from kinfed.core.optimiser import SGD


@dataclass(frozen=True)
class Stay(kinfed.Local):
    """Local under another name."""

    share: kinfed.methods.Share = 0.5  # of nothing


class Plain(kinfed.Local):
    kind: ClassVar[str] = "plain"
    share: kinfed.methods.Share = 0.5


class Net(nn.Module):
    def __init__(self, shape, outputs, *, width: int = 4):
        super().__init__()
        self.body, self.head = nn.Linear(2, width), nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())


def points(data_dir, *, count: int = 60):
    x = torch.arange(2.0 * count).reshape(count, 2).sin()
    return kinfed.Dataset(x, (x[:, 0] > 0).long(), kinfed.Classification(2), client=torch.arange(count) % 3)


@dataclass(frozen=True)
class Absolute:
    metric: ClassVar[str] = "gap"
    higher_is_better: ClassVar[bool] = False
    selectable: ClassVar[tuple[str, ...]] = ("gap", "loss")
    times: float = 1.0

    def loss(self, outputs, y):
        return self.times * (outputs[:, 0] - y).abs()

    def score(self, outputs, y, weight):
        gap = (self.loss(outputs, y) * weight).sum() / weight.sum()
        return {"gap": gap, "loss": gap}

    def check(self, y):
        pass


@dataclass(frozen=True)
class Half(SGD):
    pass


@dataclass(frozen=True)
class Halves:
    def __call__(self, dataset, clients, draw):
        return kinfed.Parts([rows for rows in torch.arange(len(dataset.y)).tensor_split(clients)], dataset)


def ring(federation, seed):
    return kinfed.Graph(torch.eye(len(federation)), "given")


@dataclass(frozen=True)
class Zero(kinfed.Attack):
    def tamper(self, before, after, keys):
        return before * 0


number = 3


def text(shape, outputs):
    return "no module"


def nothing(data_dir):
    pass


class Bare(kinfed.Method):
    pass
'''
DATA = ["federation.dataset=mine.py:points", "rounds=1"]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("mine.py")
    path.write_text(MINE)
    return path


def test_a_run_may_consist_of_ones_own_parts(capsys):
    arguments = [*DATA, "model.name=mine.py:Net", "model.width=3", "training.optimiser=mine.py:Half", "seeds=1"]
    arguments += ["federation.partition=mine.py:Halves", "federation.clients=4", "federation.graph=mine.py:ring"]
    arguments += ["attack.name=mine.py:Zero", "attack.share=0.25", "method.share=0.25"]
    assert main(["run", "mine.py:Stay", *arguments, "--out", "out", "--json", "--quiet"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["method"], summary["data"]["dataset"], summary["data"]["clients"]) == ("Stay", "points", 4)
    table = experiment.read("out/config.toml", [])
    assert table["method"]["share"] == 0.25
    assert table["model"] == {"name": "mine.py:Net", "width": 3}
    assert list(table["code"]) == ["mine.py"]
    assert experiment.resolve(table).table == table
    assert kinfed.load_model("out", position=0).body.weight.shape == (3, 2)
    assert main(["resume", "out", "--quiet"]) == 0


def test_a_task_of_ones_own_trains_scores_and_selects(capsys):
    task = ["federation.task.name=mine.py:Absolute", "federation.task.times=2", "select_by=gap"]
    assert main(["run", "local", *DATA, *task, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["metric"]["name"] == "gap"


def test_a_method_of_ones_own_is_the_method_that_it_derives_from(capsys):
    scores = []
    for name in ("local", "mine.py:Stay"):
        assert main(["run", name, *DATA, "--json", "--quiet"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["scores"])
    assert scores[0] == scores[1]
    assert {path.name for path in Path("runs").iterdir()} == {"local", "Stay"}
    assert main(["compare", *map(str, Path("runs").glob("*/points/*"))]) == 0


def test_a_sweep_takes_methods_of_ones_own(capsys):
    keys = ["federation.dataset=mine.py:points", "rounds=1", "methods.Stay.share=0,1"]
    assert main(["sweep", "local", *keys, "--method", "local,mine.py:Stay", "--out", "s", "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["share"]) for row in rows] == [("local", None), ("Stay", "0"), ("Stay", "1")]


def test_a_changed_file_is_noticed_by_what_was_written_with_the_old_one(mine, capsys):
    assert main(["run", "mine.py:Stay", *DATA, "--out", "out", "--quiet"]) == 0
    mine.write_text(MINE.replace("0.5  # of", "0.75  # of"))
    for command in (["run", "out/config.toml"], ["resume", "out"]):
        if command[0] == "resume":
            Path("out/summary.json").unlink()
        assert main([*command, "--quiet"]) == 2
        assert "mine.py is not what this config was written with" in capsys.readouterr().err
    table = experiment.read("out/config.toml", [])
    del table["code"], table["method"]["share"]
    assert experiment.resolve(table).method.share == 0.75


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.py:Stay"], "method: cannot read gone.py (in "),
        (["mine.py"], "'mine.py' is a file of code: name a method in it, such as mine.py:Stay"),
        (["mine.py:Sty"], "method: there is no 'Sty' in mine.py; did you mean 'Stay'?"),
        (["mine.py:Net"], "method: 'mine.py:Net' is not a kinfed.Method: derive the class from it"),
        (["mine.py:number"], "method: 'mine.py:number' is not a kinfed.Method"),
        (["mine.py:Bare"], "method: 'mine.py:Bare' cannot be made: write "),
        (
            ["mine.py:Plain"],
            "method: 'share' of 'mine.py:Plain' is not a setting yet: write @dataclass(frozen=True) above",
        ),
        (["mine.py:Stay", "method.share=2"], "method.share must be in [0, 1]; got 2"),
        (["mine.py:Stay", "method.shar=1"], "unknown key 'method.shar'; did you mean 'share'?"),
        (["broken.py:Stay"], "method: broken.py cannot be imported: line 2: ZeroDivisionError: division by zero"),
        (["wrong.py:Stay"], "method: wrong.py cannot be imported: line 1: "),
        (["ends.py:Stay"], "method: ends.py cannot be imported: line 1: SystemExit: 3"),
        (["no.such.package:Stay"], "method: 'no.such.package' cannot be imported: it is not installed"),
        (["local", "model=mine.py:text"], "model: 'mine.py:text' must make a torch.nn.Module; got 'no module'"),
        (["local", "model=mine.py:points"], "model: 'mine.py:points' cannot be made: TypeError: points() takes 1 "),
        (
            ["local", "model=mine.py:number"],
            "model: 'mine.py:number' is not a class or function that could make a torch",
        ),
        (["local", "federation.dataset=mine.py:text"], "federation.dataset needs a value for outputs"),
        (["local", "federation.dataset=mine.py:nothing"], "'mine.py:nothing' must make a kinfed.Dataset; got None"),
        (["local", "attack=mine.py:Net"], "attack: 'mine.py:Net' is not a kinfed.Attack: derive the class from it"),
        (["local", "training.optimiser=mine.py:Stay"], "'mine.py:Stay' cannot stand here: it has no"),
        (
            ["local", "federation.task=mine.py:Half"],
            "federation.task: 'mine.py:Half' must make a kinfed.Task, and what it makes has no check, ",
        ),
        (
            ["local", "federation.task=mine.py:number"],
            "'mine.py:number' is not a class or function that could make a kinfed",
        ),
        (["local", "federation.partition=mine.py:Half"], "has no __call__"),
        (
            ["local", "federation.partition=mine.py:number"],
            "not a class or function that could make a kinfed.Partition",
        ),
        (
            ["local", "federation.graph=gone.py:ring"],
            "federation.graph: cannot read gone.py (in ",
        ),
    ],
)
def test_what_is_no_such_part_is_one_line_and_code_2(arguments, said, capsys):
    Path("broken.py").write_text("x = 1\nx / 0\n")
    Path("wrong.py").write_text("class Stay(:\n")
    Path("ends.py").write_text("raise SystemExit(3)\n")
    assert main(["run", *arguments, "rounds=1", "--quiet"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not Path("runs").exists() or not list(Path("runs").rglob("config.toml"))


@pytest.mark.parametrize(
    "command",
    [
        "sweep mine.py:{} seed=0,1",
        "sweep local seed=0,1 --method local,mine.py:{}",
        "papers run pfedgat.table1 --method fedavg,mine.py:{} --out out",
        "run mine.py:{} --dry-run",
        "papers analyse weights mine.py:{} --out out",
        "list methods mine.py:{}",
    ],
)
@pytest.mark.parametrize("name", ["Net", "number"])
def test_every_command_refuses_what_is_no_method(command, name, capsys):
    assert main(command.format(name).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"'mine.py:{name}' is not a kinfed.Method: derive the class from it" in line
    assert not list(Path().rglob("config.toml"))


def test_debug_shows_where_a_file_fails(capsys):
    Path("broken.py").write_text("x = 1\nx / 0\n")
    assert main(["run", "broken.py:Stay", "--debug"]) == 2
    assert 'File "broken.py", line 2' in capsys.readouterr().err


def test_a_site_reads_the_files_that_its_operator_names_and_nothing_else(tmp_path):
    (tmp_path / "home").mkdir()
    theirs = tmp_path / "home" / "mine.py"
    theirs.write_text(MINE)
    raw = {"federation": {"dataset": "digits", "partition": "iid", "clients": 3}, "model": "linear"}
    sent = plugins.for_sites(experiment.resolve({**raw, "method": f"{theirs}:Stay"}).table)
    assert (sent["method"]["name"], sent["method"]["share"]) == ("mine.py:Stay", 0.5)
    assert str(tmp_path) not in json.dumps(sent)
    with plugins.local([theirs]):
        assert type(experiment.resolve(sent).method).__name__ == "Stay"
        with pytest.raises(UsageError, match=r"no file '../mine.py'; if its operator .* with --code"):
            experiment.resolve({**raw, "method": "../mine.py:Stay"})
        with pytest.raises(UsageError, match="a server cannot choose the module 'os' of a site"):
            experiment.resolve({**raw, "method": "os:system"})
        theirs.write_text(MINE + "\n")
        with pytest.raises(UsageError, match=r"^mine.py is not what this config was written with"):
            experiment.resolve(sent)
    with plugins.local([]), pytest.raises(UsageError, match=r"this site has no file 'mine.py'"):
        experiment.resolve(sent)
    with pytest.raises(UsageError, match="there is no file"), plugins.local([tmp_path / "gone.py"]):
        pass
    with pytest.raises(UsageError, match="two files of the same name"), plugins.local([theirs, tmp_path / "mine.py"]):
        pass


def test_a_reproduced_table_gets_a_row_of_ones_own(tmp_path):
    from kinfed_papers import published_table
    from kinfed_papers.reproduction import Reproduction

    table = published_table.load("pfedgat.table1")
    column = next(iter(table.columns))
    made = Reproduction(table, tmp_path / "out", None, ["fedavg", "mine.py:Stay"], [])
    rows = {cell.row.name: cell for cell in made.cells()}
    assert list(rows) == ["fedavg", "Stay"]
    raw = made.protocol.raw(rows["Stay"].row, table.columns[column])
    assert raw["method"] == "mine.py:Stay"
    with pytest.raises(UsageError, match=r"there is no 'Sty' in mine.py; did you mean 'Stay'"):
        Reproduction(table, tmp_path / "out", None, ["mine.py:Sty"], [])


def patients(path):
    """Four hospitals, a rare outcome that one marker tells."""
    draw = np.random.default_rng(0)
    lines = ["hospital,age,marker,outcome"]
    for who in "ABCD":
        for dead in draw.random(60) < 0.25:
            lines.append(f"{who},{draw.normal():.2f},{draw.normal() + 3 * dead:.2f},{'dead' if dead else 'alive'}")
    Path(path).write_text("\n".join(lines) + "\n")
    return [path, "--client", "hospital", "--target", "outcome"]


def example():
    """The file of the page on parts of one's own."""
    page = (Path(__file__).parents[2] / "docs" / "own-parts.md").read_text()
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if block.startswith("# loss.py"))


def test_the_task_of_the_page_is_known_to_all_that_people_read(capsys):
    Path("loss.py").write_text(example())
    task = ["federation.task.name=loss.py:Focal", "federation.task.gamma=1", "rounds=6"]
    beside = ["--beside", "local"]
    assert main(["run", *patients("p.csv"), "--method", "fedavg", *task, *beside, "--out", "out"]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "f1, %" in said
    assert "points" in said
    summary = RunFolder(Path("out")).read_summary()
    assert summary.metric == Metric(name="f1", higher_is_better=True, unit="%")
    assert summary.selection.higher_is_better
    assert summary.scores["shared"]["mean"] > 0.7
    settings = {"classes": 2, "by_class": True, "reweighted": False, "selects": "", "scored": "accuracy", "gamma": 1.0}
    assert summary.data.task == {"name": "focal", **settings}
    run = experiment.resolve(experiment.read("out/config.toml", []))
    settings = {"reweighted": False, "selects": "", "scored": "accuracy", "gamma": 1.0}
    assert run.table["federation"]["task"] == {"name": "loss.py:Focal", **settings}
    assert main(["run", "out/config.toml", "--out", "again", "--quiet"]) == 0
    assert RunFolder(Path("again")).read_summary().scores == summary.scores
    capsys.readouterr()
    assert main(["compare", "out", "again"]) == 0
    assert "f1 in % (higher is better)" in capsys.readouterr().out
    assert main(["report", "out", "--out", "page.html"]) == 0
    assert f"{100 * summary.scores['shared']['mean']:.1f} %" in Path("page.html").read_text()
    assert main(["run", *patients("p.csv"), *task, "--method", "fedavg", "--dry-run"]) == 0
    mixed = ["--method", "local,fedavg", "--budget", "6", "--out", "chosen"]
    assert main(["choose", *patients("p.csv"), *task[:2], "rounds=1", *mixed]) == 0
    assert "f1, %" in " ".join("".join(capsys.readouterr()).split())


def test_a_task_of_ones_own_takes_the_scale_of_numbers_from_the_table():
    Path("huber.py").write_text(
        "from dataclasses import dataclass\nfrom torch.nn.functional import huber_loss\nimport kinfed\n"
        "@dataclass(frozen=True)\nclass Huber(kinfed.Regression):\n    beyond: kinfed.methods.Positive = 1.0\n"
        "    def loss(self, outputs, y):\n"
        "        return huber_loss(outputs, self.standardise(y), reduction='none', delta=self.beyond).mean(-1)\n"
    )
    arguments = [*patients("p.csv")[:-1], "marker", "--ignore", "outcome", "rounds=2", "--method", "local", "--quiet"]
    assert main(["run", *arguments, "federation.task=huber.py:Huber", "--out", "out"]) == 0
    summary = RunFolder(Path("out")).read_summary()
    assert summary.data.task["mean"] == [summary.data.scale["targets"]["marker"]["mean"]]
    assert main(["run", *arguments, "federation.task=huber.py:Huber", "federation.task.mean=[0]"]) == 2


BAD = {
    "loss must be one number for each example, [B]; of 2 got 0.5": ("loss", "return 0.5"),
    "loss fails: line 14: AttributeError": ("loss", "return outputs.nothing()"),
    "score, for many clients at once (torch.func.vmap), fails: line 16: RuntimeError": (
        "score",
        "return {'f1': y.sum() if outputs.sum() > 0 else y.sum()}",
    ),
    "score must be a dict of tensors [] by name; got 3": ("score", "return 3"),
    "score has no 'f1', but loss": ("score", "return {'loss': outputs.sum()}"),
    "the score 'f1' must be one number for a client, []; got [2]": (
        "score",
        "return {'f1': y * 1.0, 'loss': outputs.sum()}",
    ),
    "metric must be a word, as files are named by it; got 'a/b'": ("metric", "a/b"),
    "higher_is_better must be True or False; got 'yes'": ("higher_is_better", "yes"),
}


@pytest.mark.parametrize("said", BAD)
def test_a_broken_task_is_refused_in_one_line(capsys, said):
    where, what = BAD[said]
    lines = [
        "from dataclasses import dataclass",
        "from typing import ClassVar",
        "import torch",
        "import kinfed",
        "@dataclass(frozen=True)",
        "class Mine:",
        f"    metric: ClassVar[str] = {what if where == 'metric' else 'f1'!r}",
        f"    higher_is_better: ClassVar[bool] = {what if where == 'higher_is_better' else True!r}",
        "    selectable: ClassVar[tuple] = ('loss',)",
        "    def check(self, y): pass",
        "    def outputs(self, y): return 2",
        "",
        "    def loss(self, outputs, y):",
        f"        {what if where == 'loss' else 'return outputs.sum(-1)'}",
        "    def score(self, outputs, y, weight):",
        f"        {what if where == 'score' else 'return {k: outputs.sum() for k in (self.metric, *self.selectable)}'}",
    ]
    Path("bad.py").write_text("\n".join(lines) + "\n")
    assert main(["run", *patients("p.csv"), "--method", "local", "federation.task=bad.py:Mine", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert f"the task Mine: {'its ' * (not said.startswith('the') and not said.startswith('higher'))}{said}" in err
    assert err.count("\n") == 1


def test_a_task_for_other_targets_is_refused(capsys):
    Path("loss.py").write_text(example())
    arguments = [*patients("p.csv")[:-1], "marker", "--ignore", "outcome", "--method", "local"]
    assert main(["run", *arguments, "federation.task=loss.py:Focal"]) == 2
    assert "Focal is a task of classification, but that of this data is regression; predict" in capsys.readouterr().err


def test_a_finished_run_knows_what_its_models_were_trained_for():
    Path("loss.py").write_text(example())
    arguments = [*patients("p.csv"), "rounds=1", "--method", "local", "--quiet"]
    assert main(["run", *arguments, "federation.task=loss.py:Focal", "--out", "own"]) == 0
    task = Run.open(Path("own")).task
    assert (type(task).__name__, task.classes, task.gamma) == ("Focal", 2, 2.0)
    arguments[4] = "age,marker"
    assert main(["run", *arguments, "--out", "numbers"]) == 0
    task = Run.open(Path("numbers")).task
    kept = RunFolder(Path("numbers")).read_summary().data.task
    assert (task.names, task.mean[0]) == (("age", "marker"), kept["mean"][0])
