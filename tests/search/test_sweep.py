"""Which runs a sweep is made of, and which setting wins."""

import math
from dataclasses import replace

import pytest

from kinfed.core.summary import Metric
from kinfed.errors import UsageError
from kinfed.methods import METHODS
from kinfed.runs.config import experiment
from kinfed.runs.run_folder import RunFolder
from kinfed.search.study import Study
from kinfed.search.sweep import parse, plan_sweep
from kinfed.simulation.execution import Execution


@pytest.fixture
def ask(tmp_path):
    return lambda *texts, methods=(), table=(): plan_sweep(
        Study(experiment.read("fedprox", list(table)), Execution(), tmp_path), methods, texts
    )


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,1,10", ["0.1", "1", "10"]),
        ("0..2", ["0", "1", "2"]),
        ("-1..1,5", ["-1", "0", "1", "5"]),
        ("7", ["7"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ('[[1,2],[3]], ["a]",4]', ["[[1,2],[3]]", '["a]",4]']),
        ('"a,b",c', ['"a,b"', "c"]),
        ("'a,\"b'", ["'a,\"b'"]),
        ("{name='mlp',hidden=[4,4]},linear", ["{name='mlp',hidden=[4,4]}", "linear"]),
    ],
)
def test_values_are_parted_by_commas_outside_of_lists_and_quotes(text, values):
    assert parse([f"key={text}"]) == {"key": values}


def test_every_combination_is_a_run_of_its_own(ask):
    wanted = ask(
        "seed=3,5",
        "training.batch=8,16",
        "rounds=2",
        "methods.fedprox.mu=0.1,1",
        "methods.fedamp.neighbours=1,2",
        methods=["fedprox", "fedamp"],
    )
    runs = wanted.runs()
    assert list(runs) == [
        f"{method}/methods.{key},training.batch={batch}/seed-{seed}"
        for method, keys in (
            ("fedprox", ("fedprox.mu=0.1", "fedprox.mu=1")),
            ("fedamp", ("fedamp.neighbours=1", "fedamp.neighbours=2")),
        )
        for batch, key in ((b, k) for b in (8, 16) for k in keys)
        for seed in (3, 5)
    ]
    table = wanted.study.experiment(runs["fedamp/methods.fedamp.neighbours=2,training.batch=16/seed-5"]).table
    assert (table["method"]["name"], table["method"]["neighbours"]) == ("fedamp", 2)
    assert (table["training"]["batch"], table["rounds"], table["seed"], table["seeds"]) == (16, 2, 5, 1)
    assert wanted.check() == [f"{name}: 4 settings x 2 seeds = 8 runs, 16 training rounds" for name in wanted.methods]


def test_a_setting_of_one_method_is_tried_even_where_the_config_has_one(ask):
    wanted = ask("methods.fedprox.mu=1,2", "methods.fedprox.noise=0.5", table=["method.mu=3", "methods.fedprox.mu=4"])
    tables = [wanted.study.experiment(run).table["method"] for run in wanted.runs().values()]
    assert [(table["mu"], table["noise"]) for table in tables] == [(1.0, 0.5), (2.0, 0.5)]


def test_a_papers_grid_is_tried_but_for_what_is_named(ask):
    def settings(*texts, methods=("fedprox", "ditto")):
        return [one.values for one in ask("grid=paper", *texts, methods=methods).settings()]

    fedprox = [{"methods.fedprox.mu": mu} for mu in ("0.001", "0.01", "0.1", "1.0")]
    assert settings() == fedprox + [{"methods.ditto.pull": pull} for pull in ("0.1", "1.0", "2.0")]
    assert settings("methods.ditto.pull=3,4")[4:] == [{"methods.ditto.pull": pull} for pull in ("3", "4")]
    assert settings("method.mu=0.5,5", methods=()) == [{"method.mu": mu} for mu in ("0.5", "5")]
    with pytest.raises(UsageError, match="no grid is printed for local, fedavg; there is one for fedprox, ditto"):
        settings(methods=("local", "ditto", "fedavg"))
    with pytest.raises(UsageError, match="--method: there is no 'fedporx'; did you mean 'fedprox'"):
        settings(methods=("fedporx",))


@pytest.mark.parametrize("name", [name for name in METHODS if getattr(METHODS[name], "grid", {})])
def test_a_papers_grid_is_of_settings_that_the_method_has(name, ask):
    wanted = ask("grid=paper", methods=(name,))
    tried = math.prod(map(len, METHODS[name].grid.values()))
    assert len({wanted.study.experiment(overrides).method for overrides in wanted.runs().values()}) == tried > 1


def test_an_unequal_budget_is_told(ask):
    both = {"methods": ["fedprox", "local"]}
    assert ask("methods.fedprox.mu=0.1,1", "rounds=3,5", **both).check() == [
        "fedprox: 4 settings x 1 seed = 4 runs, 16 training rounds",
        "local: 2 settings x 1 seed = 2 runs, 8 training rounds",
        "NOT AN EQUAL BUDGET: more settings or rounds give a method more chances to look good",
    ]
    assert ask("rounds=3", **both).check() == [
        "fedprox: 1 setting x 1 seed = 1 run, 3 training rounds",
        "local: 1 setting x 1 seed = 1 run, 3 training rounds",
    ]


def test_one_optimiser_after_another_is_tried_only_where_it_makes_a_difference(ask):
    wanted = ask("training.optimiser.lr=0.1,0.2", "training.batch=8,16", methods=["fedprox", "pfedme"])
    assert [one.name for one in wanted.settings() if one.method == "pfedme"] == [
        "pfedme/training.batch=8",
        "pfedme/training.batch=16",
    ]
    assert wanted.check()[-1].startswith("NOT AN EQUAL BUDGET")


def test_seeds_are_the_configs_unless_they_are_named(ask):
    assert list(ask().runs()) == ["fedprox/as-configured/seed-0"]
    assert ask("seeds=3", "seed=4").seeds == [4, 5, 6]
    assert ask(table=["seeds=2", "seed=7"]).seeds == [7, 8]
    assert ask("seed=1..3", table=["seeds=9"]).seeds == [1, 2, 3]


def test_folders_are_safe_different_and_the_same_again(ask):
    shapes = ["{name='mlp',hidden=[4]}", "{name='mlp',hidden=[5]}", "linear"]
    names = [one.name for one in ask("model=" + ",".join(shapes)).settings()]
    assert len(set(names)) == 3
    assert names[2] == "fedprox/model=linear"
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.,=-/") for name in names)
    assert [one.name for one in ask("model=" + ",".join([*shapes[::-1], "cnn"])).settings()][:3] == names[::-1]
    long = "0." + "1" * 200
    assert len(ask(f"method.mu={long},{long}2").settings()[0].name) < 160


@pytest.mark.parametrize(
    ("texts", "methods", "said"),
    [
        (["rounds"], [], "'rounds' is not a setting; write key=a,b,c"),
        (["rounds=1", "rounds=2"], [], "rounds is given twice"),
        (["rounds=1,,2"], [], "'rounds=1,,2' has an empty value"),
        (["rounds=1,2,1"], [], "'rounds=1,2,1' has the value 1 twice"),
        (["rounds=5..3"], [], "a range goes upwards; write 3..5"),
        (["rounds=2,x"], [], "rounds must be a whole number; got 'x'"),
        (["roundz=2,3"], [], "unknown key 'roundz'; did you mean 'rounds'?"),
        (["seed=0,1", "seeds=2"], [], "leave seeds out"),
        (["seeds=1,2"], [], "write which seeds, as in seed=0..2"),
        (["seed=0,a"], [], "seed must be a whole number; got 'a'"),
        (["method=local,fedavg"], [], "methods are named by --method local,fedavg, not by method="),
        ([], ["locl"], "--method: there is no 'locl'; did you mean 'local'?"),
        ([], ["local", "local"], "names a method twice"),
        (["methods.cfl.begin=1,2"], ["local"], "methods.cfl.begin is a setting of cfl, which is not swept"),
        (["methods.fedprox.nu=1,2"], ["fedprox"], "unknown key 'method.nu'; known: bn, frozen, mu, noise"),
        (["method.mu=1,2"], ["fedprox", "local"], r"local: .*unknown key 'method.mu'.*methods.NAME.KEY"),
        (["federation.split.validation=0"], [], "a sweep chooses on validation data"),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(ask, texts, methods, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        ask(*texts, methods=methods).check()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def pretend(finished):
    """Writes summaries as finished runs leave them: by run, (validation, test) of the models `own` and `shared`."""

    def write(wanted, scores):
        for name, (own, shared) in scores.items():
            found = {m: {"validation": v, "mean": t, "std": 0.05} for m, v, t in (("own", *own), ("shared", *shared))}
            finished(wanted.study.folder(name), found)

    return write


def test_the_winner_is_chosen_on_validation_data_as_a_mean_over_seeds(ask, pretend):
    wanted = ask("method.mu=0.1,1,10", "seed=0,1")
    low = (0.0, 0.0)
    pretend(
        wanted,
        {
            "fedprox/method.mu=0.1/seed-0": ((0.9, 0.5), low),
            "fedprox/method.mu=0.1/seed-1": ((0.5, 0.9), (0.6, 0.6)),  # `own` is better over both seeds
            "fedprox/method.mu=1/seed-0": (low, (0.8, 0.6)),
            "fedprox/method.mu=1/seed-1": (low, (0.7, 0.64)),
            "fedprox/method.mu=10/seed-0": ((0.99, 0.99), low),
        },
    )
    outcomes = wanted.score_settings({"fedprox/method.mu=10/seed-1"})
    found = wanted.tabulate(outcomes)
    numbers = ["validation accuracy (%)", "test accuracy (%)", "over seeds"]
    assert [(row["winner"], row["mu"], row["model"], row["failed"]) for row in found.rows] == [
        ("*", "1", "shared", None),
        (None, "0.1", "own", None),
        (None, "10", None, "1 of 2"),
    ]
    assert [found.rows[0][key] for key in numbers] == pytest.approx([75, 62, 4 / 2**0.5])
    assert [found.rows[1][key] for key in numbers] == pytest.approx([70, 70, 40 / 2**0.5])
    # Student's interval of two seeds: 60 and 64 have a deviation of 4 / sqrt(2), and t(1) at 97.5 % is 12.7062.
    half = 12.7062047 * 2
    assert [found.rows[0][key] for key in ("95 % from", "to")] == pytest.approx([62 - half, 62 + half])
    assert "95 %: interval of the mean test score, Student's over seeds" in found.notes
    winners = wanted.winners(outcomes)
    assert [folder.path for folder in winners] == [wanted.study.folder("fedprox/method.mu=1")]
    assert [found.rows[2][key] for key in numbers] == [None] * 3
    assert "* fedprox: mu=1" in found.notes


def test_of_an_error_the_lowest_wins_and_of_equals_the_first(ask, pretend):
    wanted = ask("method.mu=0.1,1,10")
    scores = zip(wanted.runs(), (2.0, 1.0, 1.0), strict=True)
    pretend(wanted, {name: ((value, 3.0), (9.0, 9.0)) for name, value in scores})
    for path in wanted.study.out.rglob("summary.json"):
        folder = RunFolder(path.parent)
        summary = folder.read_summary()
        selection = replace(summary.selection, by="mae", higher_is_better=False, caution="they knew")
        metric = Metric(name="mae", higher_is_better=False)
        folder.write_summary(replace(summary, metric=metric, selection=selection))
    found = wanted.tabulate(wanted.score_settings(()))
    assert [(row["mu"], row["winner"], row["validation mae"]) for row in found.rows] == [
        ("1", "*", 1.0),
        ("10", None, 1.0),
        ("0.1", None, 2.0),
    ]
    assert found.notes[-1] == "LEAKING: they knew; these scores are not a fair estimate"


def test_settings_are_compared_by_one_score(ask, tmp_path, finished):
    """By the one that selects; the smaller loss wins."""
    with pytest.raises(UsageError, match="a sweep chooses by one validation score; give select_by one value"):
        ask("select_by=accuracy,loss").check()
    found = ask("select_by=loss", "training.batch=8,16", "seed=0")
    for batch, loss in ((8, 0.5), (16, 0.4)):
        folder = tmp_path / "runs" / "fedprox" / f"training.batch={batch}" / "seed-0"
        finished(folder, {"shared": {"validation": loss}}, selected_by="loss")
    rows = found.tabulate(found.score_settings([])).rows
    assert [(row["batch"], row["winner"], row["validation loss"]) for row in rows] == [
        ("16", "*", 0.4),
        ("8", None, 0.5),
    ]
