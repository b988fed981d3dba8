import inspect
import tomllib
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, strategies as st
from kinds import KINDS

from kinfed.cli import main
from kinfed.core.engine import Participation
from kinfed.core.optimiser import SGD, Adam
from kinfed.core.training import Training
from kinfed.data.datasets import DATASETS, OWNED
from kinfed.data.graphs import GRAPHS
from kinfed.data.partitions import PARTITIONS
from kinfed.data.split import Split
from kinfed.errors import UsageError
from kinfed.methods import CFL, METHODS, SFL, FedAMP
from kinfed.models import MODELS
from kinfed.runs.config import experiment as config
from kinfed.runs.config.experiment import override, read, resolve, write
from kinfed.runs.config.parts import call, make, settings

LEAST = {
    "federation": {"dataset": "digits", "partition": "iid", "clients": 3},
    "model": "linear",
    "method": "local",
}


def again(experiment, path):
    """The experiment that the written config makes."""
    write(experiment.table, path)
    return resolve(read(str(path), []))


def leaves(table):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in leaves(value))
        else:
            yield name, value


def test_least_config_is_filled_in():
    found = resolve(LEAST)
    assert found.table == {
        "rounds": 20,
        "seed": 0,
        "seeds": 1,
        "evaluate_every": 1,
        "participation": {"share": 1.0, "by_group": 0, "late": 0.0, "joins": 0},
        "federation": {
            "dataset": {"name": "digits"},
            "clients": 3,
            "partition": {"name": "iid"},
            "split": {
                "test": 0.2,
                "validation": 0.1,
                "examples": 0,
                "shuffle": False,
                "own_times": False,
                "share": 1.0,
                "fold": 0,
            },
            "graph": {"name": "given"},
        },
        "model": {"name": "linear"},
        "training": {
            "epochs": 2,
            "batch": 8,
            "optimiser": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
            "clip": float("inf"),
        },
        "method": {"name": "local", "personal": [], "frozen": [], "bn": "averaged"},
    }
    assert (found.training, found.split, found.participation) == (Training(), Split(), Participation())


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_method_is_written_down(name, tmp_path):
    found = resolve({**LEAST, "method": name})
    known = settings(METHODS[name])
    assert {"name": name, **found.table["method"]} == found.table["method"]
    # TOML has no word for None: what is left out is None again.
    assert set(found.table["method"]) - {"name"} == {k for k, p in known.items() if p.default is not None}
    assert found.method == METHODS[name]()
    assert again(found, tmp_path / "c.toml").method == found.method


@pytest.mark.parametrize("name", KINDS)
def test_the_written_config_is_the_same_experiment(name, tmp_path):
    found = resolve(read(name, ["seed=7", "training.optimiser=adam", "federation.graph.name=shuffled"]))
    second = again(found, tmp_path / "c.toml")
    assert second.table == found.table
    assert dict(leaves(second.table)).keys() == dict(leaves(found.table)).keys()
    for part in ("method", "training", "split", "partition", "participation"):
        assert getattr(second, part) == getattr(found, part), part
    assert again(second, tmp_path / "d.toml").table == found.table
    assert (tmp_path / "c.toml").read_bytes() == (tmp_path / "d.toml").read_bytes()


@pytest.mark.parametrize("graph", ["oracle", {"name": "label_overlap", "most": 2}, {"name": "random", "of": "oracle"}])
def test_the_federation_has_the_graph_that_was_chosen(graph, tmp_path):
    table = {**LEAST, "federation": {**LEAST["federation"], "clients": 8, "partition": "rotations", "graph": graph}}
    found = resolve(table)
    federation = found.federation(None, 5)
    name = graph if isinstance(graph, str) else graph["name"]
    arguments = {} if isinstance(graph, str) else {k: v for k, v in graph.items() if k != "name"}
    expected = GRAPHS[name](replace(federation, graph=None), 5, **arguments)
    assert torch.equal(federation.graph.weights, expected.weights)
    assert federation.graph.origin == expected.origin
    assert torch.equal(again(found, tmp_path / "c.toml").federation(None, 5).graph.weights, expected.weights)
    assert resolve({**LEAST}).federation(None, 0).graph is None


def test_a_data_set_keeps_its_own_graph_unless_another_is_chosen():
    known = {"dataset": "synthetic", "partition": "natural"}
    own = resolve({**LEAST, "federation": known}).federation(None, 0).graph
    assert own.origin == "given"
    assert own.weights.sum() > 0
    other = resolve({**LEAST, "federation": {**known, "graph": "shuffled"}}).federation(None, 0).graph
    assert other.weights.sum() == own.weights.sum()
    assert not torch.equal(other.weights, own.weights)


def test_models_of_one_seed_are_equal_and_nobody_elses_draws_are_moved():
    found = resolve({**LEAST, "model": {"name": "mlp", "hidden": [5, 4]}})
    federation = found.federation(None, 0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (found.module(federation, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [tuple(p.shape) for p in one.parameters()] == [(5, 64), (5,), (4, 5), (4,), (10, 4), (10,)]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_tuned_settings_are_those_of_the_method_that_runs():
    table = {**LEAST, "methods": {"fedamp": {"sigma": 0.5, "neighbours": 3}, "cfl": {"begin": 2}}}
    assert resolve({**table, "method": "fedamp"}).method == FedAMP(sigma=0.5, neighbours=3)
    more = resolve({**table, "method": {"name": "fedamp", "neighbours": 9}})
    assert more.method == FedAMP(sigma=0.5, neighbours=9)
    assert "methods" not in resolve({**table, "method": "fedamp"}).table
    with pytest.raises(UsageError, match=r"unknown key 'methods.fedapm'; did you mean 'fedamp'"):
        resolve({**table, "methods": {"fedapm": {}}})
    with pytest.raises(UsageError, match=r"methods.fedamp must be a table; got 3"):
        resolve({**table, "method": "fedamp", "methods": {"fedamp": 3}})


def test_another_method_comes_with_its_own_tuned_settings_and_leaves_the_formers_behind():
    table = {**LEAST, "method": {"name": "fedamp", "neighbours": 7}, "methods": {"cfl": {"begin": 2}}}
    assert resolve(override(deepcopy(table), ['method.name="cfl"'])).method == CFL(begin=2)
    # Whatever the order, what is asked for in the same breath is kept.
    for asked in (["method.name=cfl", "method.min_size=3"], ["method.min_size=3", "method.name=cfl"]):
        assert resolve(override(deepcopy(table), asked)).method == CFL(begin=2, min_size=3)
    assert resolve(override(deepcopy(table), ["method.name=fedamp"])).method == FedAMP(neighbours=7)


def test_another_partition_model_or_optimiser_drops_the_formers_settings():
    raw = read("fedavg", ["federation.partition.name=dirichlet", "model.name=linear", "training.optimiser.name=adam"])
    assert raw["federation"]["partition"] == {"name": "dirichlet"}
    assert raw["model"] == {"name": "linear"}
    assert raw["training"] == {"epochs": 2, "batch": 8, "optimiser": {"name": "adam"}}
    resolve(raw)


def holds(table, asked):
    """Whether a complete table has what another asks for; a part may be asked for by its name alone."""
    asked = {"name": asked} if isinstance(table, dict) and isinstance(asked, str) else asked
    return all(holds(table[k], v) for k, v in asked.items()) if isinstance(asked, dict) else table == asked


def test_the_embedded_experiment_has_no_methods_settings_and_its_tuned_ones_fit():
    """A method has one set of defaults; what was tuned for these data is given explicitly, by a file beside it."""
    raw = tomllib.loads(config.DEFAULT.read_text())
    assert set(raw) == {"rounds", "federation", "model", "training"}
    tuned = tomllib.loads((Path(__file__).parents[2] / "evidence" / "tuned" / config.DEFAULT.name).read_text())
    for name, chosen in tuned.pop("methods").items():
        found = resolve({**tuned, "method": name, "methods": {name: chosen}})
        assert holds(found.table["method"], chosen)
    assert tuned == raw


def test_a_part_that_a_config_sets_is_changed_in_the_settings_that_are_named(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(config.DEFAULT.read_text() + '[methods.pfedhn]\noptimiser = { name = "adam", lr = 0.001 }\n')

    def optimiser(*overrides):
        return resolve(read(str(own), ["method.name=pfedhn", *overrides])).method.optimiser

    assert optimiser("method.optimiser.lr=0.5") == Adam(0.5)  # of the one that is set
    assert optimiser("method.optimiser=adam") == Adam(0.001)
    assert optimiser("method.optimiser.name=sgd") == SGD(0.01, 0.9, 0.001)  # the method's own


def test_a_method_runs_the_embedded_experiment():
    assert read("sfl", [])["method"] == {"name": "sfl"}
    assert read("sfl", ["method.steps=3"])["method"] == {"name": "sfl", "steps": 3}
    assert read(str(config.DEFAULT), []) == tomllib.loads(Path(config.DEFAULT).read_text())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=5", 5),
        ("a.b=0.5", 0.5),
        ("a.b=true", True),
        ("a.b=word", "word"),
        ('a.b="5"', "5"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ('a.b={ name = "c", d = 1 }', {"name": "c", "d": 1}),
        ("a.b=runs/2026-01-01-x", "runs/2026-01-01-x"),
    ],
)
def test_values_of_overrides(text, value):
    found = override({"a": {"c": 1}}, [text])["a"]
    assert found == {"c": 1, "b": value}
    assert type(found["b"]) is type(value)


def test_overrides_open_named_parts_and_the_last_one_wins():
    table = {"method": "fedamp", "federation": {"graph": "random"}, "training": {"optimiser": "sgd"}}
    found = override(
        table, ["method.alpha=1", "method.alpha=2", "federation.graph.of=oracle", "training.optimiser.lr=3"]
    )
    assert found == {
        "method": {"name": "fedamp", "alpha": 2},
        "federation": {"graph": {"name": "random", "of": "oracle"}},
        "training": {"optimiser": {"name": "sgd", "lr": 3}},
    }
    assert override({}, ["model.hidden=[3]"]) == {"model": {"hidden": [3]}}


@pytest.mark.parametrize("text", ["rounds", "=5", ""])
def test_what_is_not_an_override(text):
    with pytest.raises(UsageError, match=r"is not an override; write dotted.key=value"):
        override({}, [text])


def test_overrides_do_not_look_inside_values():
    with pytest.raises(UsageError, match=r"'rounds\.x': 'rounds' is not a table"):
        override({"rounds": 3}, ["rounds.x=1"])


def test_sources_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"'fedamq' is neither a method nor a config file; did you mean 'fedamp'"):
        read("fedamq", [])
    with pytest.raises(UsageError, match=r"cannot read .*missing.toml: No such file"):
        read(str(tmp_path / "missing.toml"), [])
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(UsageError, match=r"bad.toml is not valid TOML"):
        read(str(tmp_path / "bad.toml"), [])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.toml").write_text(f"rounds = {'[' * 5000}")
    with pytest.raises(UsageError, match=r"deep.toml is not valid TOML"):
        read(str(tmp_path / "deep.toml"), [])
    assert override({}, [f"rounds={'[' * 5000}"]) == {"rounds": "[" * 5000}
    with pytest.raises(UsageError, match=r"'federation.dataset.path=K\\udcf6ln.csv' is not UTF-8, .* rename the file"):
        override({}, ["federation.dataset.path=K\udcf6ln.csv"])
    with pytest.raises(UsageError, match=r"binary.toml is not valid TOML"):
        read(str(tmp_path / "binary.toml"), [])
    with pytest.raises(UsageError, match="cannot read"):
        read(str(tmp_path), [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"round": 3}, "unknown key 'round'; did you mean 'rounds'"),
        ({"federation.client": 3}, "unknown key 'federation.client'; did you mean 'clients'"),
        ({"federation.dataset": "digit"}, "federation.dataset: there is no 'digit'; did you mean 'digits'"),
        (
            {"federation.partition": "dirichle"},
            "federation.partition: there is no 'dirichle'; did you mean 'dirichlet'",
        ),
        ({"federation.graph": "oracel"}, "federation.graph: there is no 'oracel'; did you mean 'oracle'"),
        ({"federation.graph": {"of": "oracle"}}, "federation.graph needs a name; known: complete, given"),
        ({"federation.graph": {"name": "oracle", "of": "given"}}, "unknown key 'federation.graph.of'; known: none"),
        (
            {"federation.graph": {"name": "random", "of": "data"}},
            "of must be one of 'given', 'oracle', 'label_overlap' or left out; got",
        ),
        ({"federation.graph": {"name": "label_overlap", "most": 2.5}}, "most must be a whole number; got 2.5"),
        ({"federation.split": 0.3}, "federation.split must be a table; got 0.3"),
        ({"federation.split": {"tset": 0.3}}, "unknown key 'federation.split.tset'; did you mean 'test'"),
        ({"model": {"name": "mlp", "hidden": 5}}, "model.hidden must be a list; got 5"),
        ({"model": {"name": "mlp", "hidden": [5, "6"]}}, r"model.hidden\[1\] must be a whole number; got '6'"),
        ({"model": {"name": "mlp", "width": 5}}, "unknown key 'model.width'; known: cut, hidden"),
        ({"model": 5}, "model needs a name"),
        (
            {"method": {"name": "fedprox", "mu": 1e39}},
            r"method.mu must be at most 3.4e\+38, what single precision can hold; got 1e\+39",
        ),
        ({"training": {"steps": 10**20}}, r"training.steps must be below 2\*\*31; got 10000"),
        ({"method": {"name": "sfl", "step": 2}}, "unknown key 'method.step'; did you mean 'steps'"),
        ({"method": {"name": "sfl", "steps": 2.0}}, r"method.steps must be a whole number; got 2\.0"),
        ({"method": {"name": "sfl", "steps": True}}, "method.steps must be a whole number; got True"),
        ({"method": {"name": "sfl", "rho": "1"}}, "method.rho must be a number; got '1'"),
        ({"method": {"name": "sfl", "rho": True}}, "method.rho must be a number; got True"),
        ({"method": {"name": "sfl", "begin": 1}}, "method.begin must be one of 'own', 'mixed', 'shared'; got 1"),
        ({"method": {"name": "sfl", "structure": "similar"}}, "method.structure: there is no 'similar'; did you mean"),
        ({"method": {"name": "sfl", "personal": "head"}}, "method.personal must be a list; got 'head'"),
        ({"method": {"name": "fedah", "base_epochs": "2"}}, "base_epochs must be a whole number or left out; got '2'"),
        ({"training": {"optimiser": "sdg"}}, "training.optimiser: there is no 'sdg'; did you mean 'sgd'"),
        ({"training": {"epoch": 2}}, "unknown key 'training.epoch'; did you mean 'epochs'"),
        ({"training": 2}, "training must be a table; got 2"),
        ({"rounds": "20"}, "rounds must be a whole number; got '20'"),
        ({"seed": -1}, "seed must be a whole number, at least 0"),
        ({"seed": 2**62}, r"below 2\*\*62"),
        ({"seeds": 0}, "seeds counts runs"),
        ({"participation": "all"}, "participation must be a number; got 'all'"),
        ({"participation": {"chare": 1.0}}, "unknown key 'participation.chare'; did you mean 'share'"),
    ],
)
def test_wrong_settings_name_the_place_and_the_nearest(change, said):
    table = {**LEAST, "federation": dict(LEAST["federation"])}
    for dotted, value in change.items():
        *outer, last = dotted.split(".")
        (table[outer[0]] if outer else table)[last] = value
    with pytest.raises(UsageError, match=said):
        resolve(table)


@pytest.mark.parametrize("name", ["federation.dataset", "federation.partition", "model", "method"])
def test_parts_that_must_be_named(name):
    table = {**LEAST, "federation": dict(LEAST["federation"])}
    *outer, last = name.split(".")
    del (table[outer[0]] if outer else table)[last]
    with pytest.raises(UsageError, match=f"{name} needs a name; known: "):
        resolve(table)


def test_examples_with_owners_are_theirs_and_a_table_gets_an_mlp(tmp_path):
    """What only data without owners, or images, must be told."""
    csv = {"name": "csv", "path": "x.csv", "client": "who", "target": "y"}
    found = resolve({"method": "local", "federation": {"dataset": csv}}).table
    assert found["federation"]["partition"] == {"name": "natural"}
    assert found["federation"]["clients"] == 0  # as many as the file has
    assert found["model"] == {"name": "mlp", "hidden": [64], "cut": 3.0}
    smaller = resolve({"method": "local", "federation": {"dataset": csv}, "model": {"hidden": [8]}}).table
    assert smaller["model"] == {"name": "mlp", "hidden": [8], "cut": 3.0}
    table = [f"federation.dataset.{key}={value}" for key, value in csv.items()]
    # Rates that were tuned on digits are not for your own table.
    assert read("fedavg", table) == {"method": {"name": "fedavg"}, "federation": {"dataset": csv}}
    for asked, clients, partition in (
        ([], None, None),
        (["federation.partition=natural"], None, "natural"),
        (["federation.partition=iid"], 20, "iid"),
        (["federation.clients=4"], 4, None),
    ):
        dealt = read("fedavg", ["federation.dataset=synthetic", *asked])["federation"]
        assert (dealt.get("clients"), dealt.get("partition")) == (clients, partition)
    assert read("fedavg", ["federation.dataset=cifar10"])["federation"]["clients"] == 20


def test_data_sets_with_owners_are_declared():
    for name in ("digits", "synthetic"):
        dataset = make(DATASETS, {"name": name}, "dataset", given=1)[0](None)
        assert (dataset.client is not None) == (name in OWNED)


def part(a: int, b: float = 2.0, c: bool = False, d: Literal["x", "y"] = "x", *, e: int | None = None):
    return a, b, c, d, e


def test_calls_are_checked_and_filled_in():
    assert call(part, {"a": 1, "b": 3}, "p") == ((1, 3.0, False, "x", None), {"a": 1, "b": 3.0, "c": False, "d": "x"})
    assert call(part, {"d": "y", "e": 4, "a": 1}, "p")[0] == (1, 2.0, False, "y", 4)
    with pytest.raises(UsageError, match="p must be a table; got 1000"):
        call(part, 1000, "p")
    later, table = call(part, {"b": 1}, "p", given=1)
    assert (later(9), table) == ((9, 1.0, False, "x", None), {"b": 1.0, "c": False, "d": "x"})
    assert call(part, {}, "p", a=5) == ((5, 2.0, False, "x", None), {"b": 2.0, "c": False, "d": "x"})
    for asked, said in [
        ({}, "p needs a value for a"),
        ({"a": 1, "f": 1}, "unknown key 'p.f'"),
        ({"a": 1, "c": 1}, "p.c must be true or false; got 1"),
        ({"a": 1, "d": "z"}, "p.d must be one of 'x', 'y'; got 'z'"),
        ({"a": 1, "e": "z"}, "p.e must be a whole number or left out; got 'z'"),
    ]:
        with pytest.raises(UsageError, match=said):
            call(part, asked, "p")


def test_what_was_asked_for_is_not_changed():
    asked = {"name": "sgd", "lr": 0.5}
    made, table = make({"sgd": SGD, "adam": Adam}, asked, "o")
    assert made == SGD(lr=0.5)
    assert asked == {"name": "sgd", "lr": 0.5}
    assert table == {"name": "sgd", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0}


@given(st.integers(), st.floats(allow_nan=False))
def test_numbers_survive_the_file(tmp_path_factory, whole, broken):
    path = tmp_path_factory.mktemp("c") / "c.toml"
    table = {"a": {"whole": max(-(2**63), min(whole, 2**63 - 1)), "broken": broken}}
    write(table, path)
    found = tomllib.loads(path.read_text())
    assert found == table
    assert type(found["a"]["broken"]) is float


@pytest.mark.parametrize(("registry", "given_first"), [(GRAPHS, 2), (MODELS, 2), (PARTITIONS, 0), (METHODS, 0)])
def test_every_setting_on_a_shelf_has_a_kind_and_a_default(registry, given_first):
    for name, made in registry.items():
        for key, parameter in settings(made, given_first).items():
            assert parameter.annotation is not inspect.Parameter.empty, (name, key)
            assert parameter.default is not inspect.Parameter.empty or name not in GRAPHS, (name, key)


def test_sfl_from_a_config():
    found = resolve({**LEAST, "method": {"name": "sfl", "personal": ["head.*"], "pull": 1}})
    assert found.method == SFL(personal=("head.*",), pull=1.0)
    assert found.table["method"]["personal"] == ["head.*"]


@pytest.mark.parametrize("name", ["rounds", "evaluate_every"])
def test_rounds_are_counted_from_one(name):
    with pytest.raises(UsageError, match=f"{name} must be a whole number, at least 1 .*; got 0"):
        resolve(read("local", [f"{name}=0"]))


def test_a_table_in_place_of_a_config_is_told_how_it_is_named(capsys):
    with pytest.raises(
        UsageError,
        match=r"is a table, not a config: .*dataset.path=shops.csv .* kinfed run shops.csv --client",
    ):
        config.read("shops.csv", [])
    assert main(["list", "shops.parquet"]) == 2
    assert "there is no file shops.parquet" in capsys.readouterr().err
