"""Settings that are objects, and parts of one's own."""

from dataclasses import dataclass
from itertools import permutations
from typing import Protocol

import pytest

from kinfed.core.engine import Participation, Rounds
from kinfed.core.field_checks import sentences
from kinfed.core.optimiser import SGD, Adam, Optimiser
from kinfed.core.training import Training
from kinfed.data.partitions import PARTITIONS
from kinfed.data.split import Split
from kinfed.data.tables.table_reader import TableReader
from kinfed.errors import UsageError
from kinfed.methods import METHODS
from kinfed.runs.config.experiment import override, read, resolve, write
from kinfed.runs.config.parts import call, settings
from kinfed.simulation.attacks import ATTACKS
from kinfed.simulation.execution import Execution


class Structure(Protocol):
    def update(self, links): ...


@dataclass(frozen=True)
class KnownGraph:
    def update(self, links):
        return links


@dataclass(frozen=True)
class Cosine:
    power: float = 1.0


@dataclass(frozen=True)
class Similarity:
    neighbours: int = 5
    measure: Cosine | None = None
    optimiser: SGD | Adam = Adam(0.5)

    def update(self, links):
        return links


@dataclass(frozen=True)
class QP:
    gamma: float = 1.0

    def update(self, links):
        return links


@dataclass(frozen=True)
class Toy:
    structure: KnownGraph | Similarity | QP | Structure = KnownGraph()
    optimiser: SGD | Adam | Optimiser = SGD(0.1, momentum=0.9)
    start: int | QP = 3
    weights: tuple[float, ...] = ()


def toy(**asked):
    return call(Toy, asked, "method")


def test_a_setting_that_is_an_object_is_named_with_its_own_settings():
    assert toy()[0] == Toy()
    assert toy(structure="qp")[0] == toy(structure={"name": "qp"})[0] == Toy(structure=QP())
    found, table = toy(structure={"name": "similarity", "measure": {"name": "cosine", "power": 2}})
    assert found == Toy(structure=Similarity(measure=Cosine(2.0)))
    assert table["structure"] == {
        "name": "similarity",
        "neighbours": 5,
        "measure": {"name": "cosine", "power": 2.0},
        "optimiser": {"name": "adam", "lr": 0.5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    }
    assert toy(start=4)[0].start == 4
    assert toy(start={"name": "qp", "gamma": 2})[0].start == QP(2.0)


def test_what_is_left_out_is_the_settings_own_default():
    momentum = toy(optimiser={"momentum": 0.5})[0].optimiser
    assert momentum == toy(optimiser={"name": "sgd", "momentum": 0.5})[0].optimiser == SGD(0.1, momentum=0.5)
    assert toy(optimiser={"name": "adam"})[0].optimiser == Adam()
    assert toy(structure={"name": "similarity", "optimiser": {"beta1": 0}})[0].structure.optimiser == Adam(0.5, 0.0)


@pytest.mark.parametrize(
    "asked", [{}, {"structure": "qp"}, {"structure": {"name": "similarity", "measure": "cosine"}}, {"weights": [1, 2]}]
)
def test_the_complete_table_makes_the_same_and_itself(asked):
    found, table = toy(**asked)
    assert call(Toy, table, "method") == (found, table)


def test_dotted_settings_reach_into_objects():
    for texts in (
        ["structure.name=qp", "structure.gamma=2"],
        ["structure=qp", "structure.gamma=2"],
        ["structure.gamma=2", "structure.name=qp"],
        ["structure.gamma=2", "structure=qp"],
        ["structure.gamma=3", "structure={name = 'qp', gamma = 2}"],  # nothing is left of what a table replaces
        ["structure.gamma=3", "structure=qp", "structure.gamma=2"],  # of one key the last counts
    ):
        for before in ({}, {"structure": "similarity"}, {"structure": {"name": "similarity", "neighbours": 3}}):
            assert toy(**override(before, list(texts)))[0] == Toy(structure=QP(2.0)), (texts, before)
    texts = ["structure=similarity", "structure.measure=cosine", "structure.measure.power=3"]
    for order in permutations(texts):
        for before in ({"structure": "similarity"}, {"structure": {"name": "qp", "gamma": 4}}, {}):
            assert toy(**override(before, list(order)))[0].structure.measure == Cosine(3.0), (order, before)


@pytest.mark.parametrize(
    "texts",
    [
        ["structure=qp", "structure.gamma=2", "structure=similarity"],
        ["structure.name=qp", "structure=similarity", "structure.gamma=2"],
        ["structure.name=qp", "structure.name=similarity"],
    ],
)
def test_two_names_for_one_part_are_a_conflict(texts):
    with pytest.raises(
        UsageError, match=r"^'structure.*=\w+' and 'structure.*=\w+' name two parts where only one is possible"
    ):
        override({}, texts)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"structure": "pq"}, r"^method\.structure: there is no 'pq'; known: known-graph, qp, similarity$"),
        ({"structure": {"name": "qp", "gama": 1}}, r"^unknown key 'method\.structure\.gama'; did you mean 'gamma'\?$"),
        ({"structure": {"gamma": 1}}, ": 'known-graph' has no 'gamma'; set method.structure.name=qp as well$"),
        ({"structure": {"name": "qp", "gamma": "1"}}, r"^method\.structure\.gamma must be a number; got '1'$"),
        ({"structure": 3}, r"^method\.structure must be 'known-graph' or 'similarity' or 'qp' or .*; got 3$"),
        ({"start": {"gamma": 3}}, r"^method\.start needs a name; known: qp$"),
        ({"start": "q"}, r"^method\.start: there is no 'q'; did you mean 'qp'\?$"),
        (
            {"structure": {"name": "similarity", "measure": {"name": "cosine", "powr": 1}}},
            r"^unknown key 'method\.structure\.measure\.powr'; did you mean 'power'\?$",
        ),
        ({"structure": f"{__name__}:Cosine"}, r"^method\.structure: '.*:Cosine' cannot stand here: it has no update$"),
        (
            {"structure": f"{__name__}:Cosin"},
            r"^method\.structure: there is no 'Cosin' in .*; did you mean 'Cosine'\?$",
        ),
        ({"structure": "mine.py:QP"}, r"^method\.structure: cannot read mine\.py \(in .*\): No such file"),
        ({"structure": "nothing.here:QP"}, r"^method\.structure: 'nothing\.here' cannot be imported: it is not inst"),
    ],
)
def test_wrong_objects_name_the_place_and_the_nearest(asked, said):
    with pytest.raises(UsageError, match=said):
        toy(**asked)


def test_a_path_names_any_class_of_the_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Ring:\n    radius: int = 1\n\n"
        "    def update(self, links):\n        return links\n"
    )
    found, table = toy(structure={"name": "mine.py:Ring", "radius": 2})
    assert (type(found.structure).__name__, found.structure.radius) == ("Ring", 2)
    assert table["structure"] == {"name": "mine.py:Ring", "radius": 2}
    assert call(Toy, table, "method") == (found, table)
    assert toy(structure=f"{__name__}:QP")[0] == Toy(structure=QP())


def test_the_optimiser_of_training_is_such_an_object(tmp_path):
    least = {
        "federation": {"dataset": "digits", "partition": "iid", "clients": 3},
        "model": "linear",
        "method": "local",
    }
    found = resolve({**least, "training": {"optimiser": {"name": "adam", "lr": 0.5}}})
    assert found.training == Training(optimiser=Adam(0.5))
    write(found.table, tmp_path / "c.toml")
    assert resolve(read(str(tmp_path / "c.toml"), [])).table == found.table


def test_every_setting_of_a_part_has_a_sentence():
    kinds = [SGD, Adam, Execution, Training, Rounds, Participation, Split, TableReader]
    kinds += [registry[name] for registry in (METHODS, PARTITIONS, ATTACKS) for name in registry]
    without = [f"{kind.__name__}.{key}" for kind in kinds for key in settings(kind) if not sentences(kind).get(key)]
    assert without == []
