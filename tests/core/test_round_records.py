"""What a user's own method reports of its rounds spoils no run that it has trained."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import kinfed
from kinfed import Params
from kinfed.methods import GraphMethod, PerClient, Shared, put


@dataclass(frozen=True)
class Mean(GraphMethod):
    """Each client starts from the mean of all models."""

    reports: Callable[[int, int], Any] = lambda round, count: torch.eye(count)  # its relation
    notes: Callable[[int, int], Any] = lambda round, count: {}

    def start(self, roster):
        return Params(roster.copies())

    def graph(self, roster, server, cohort):
        return torch.full((len(cohort), len(roster)), 1 / len(roster))

    def aggregate(self, roster, server, cohort, uploads):
        return Params(put(server.theta, cohort, uploads.theta))

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def relation(self, roster, server, cohort):
        return self.reports(roster.round, len(roster))

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return self.notes(roster.round, len(roster))


def train(method, tmp_path):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(60) % 3)
    run = kinfed.fit(method, federation, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), rounds=3)
    kinfed.save(run, tmp_path / "run")
    return run


def by_layer(round, count):
    """[N, N] in a warm-up, and [L, N, N] later."""
    return torch.eye(count) if round < 2 else torch.eye(count).expand(2, -1, -1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reports", [by_layer, lambda round, count: by_layer(2 - round, count)])
def test_a_relation_may_have_layers_in_some_rounds_alone(reports, tmp_path):
    run = train(Mean(reports=reports), tmp_path)
    assert [relation.shape for relation in run.history.relations] == [(2, 3, 3)] * 3
    with np.load(tmp_path / "run" / "relations.npz") as file:
        np.testing.assert_array_equal(file["relation"], np.broadcast_to(np.eye(3), (3, 2, 3, 3)))
        assert len(file["layers"]) == 2


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        (lambda round, count: torch.eye(count + (round > 0)), r"round 2: Mean.relation\(...\) is \[4, 4\]"),
        (lambda round, count: torch.eye(count).expand(2 + round, -1, -1), "round 2: .* has 3 layers, and had 2 before"),
        (lambda round, count: np.eye(count), "round 1: .* is a ndarray"),
        (lambda round, count: torch.full((count, count), math.nan), "round 1: .* holds NaN"),
    ],
)
def test_a_relation_that_cannot_be_kept_is_left_out_and_the_run_is_saved(reports, why, tmp_path):
    with pytest.warns(UserWarning, match=why) as warned:
        run = train(Mean(reports=reports), tmp_path)
    assert len([one for one in warned if "relation(" in str(one.message)]) == 1
    assert run.relation is None
    assert kinfed.Run.open(tmp_path / "run", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).theta("1").shape == (30,)


@pytest.mark.parametrize(
    ("notes", "why", "kept"),
    [
        (lambda round, count: {"a": torch.ones(count, 3)}, r"has 'a': \[3, 3\], and must be one number", [set()] * 3),
        (lambda round, count: {"a": torch.ones(count + 1)}, r"has 'a': \[4\]", [set()] * 3),
        (lambda round, count: {"a": "x", "b": 1}, "has 'a': a str", [{"b"}] * 3),
        (lambda round, count: None if round else {"a": 1.5}, "returns a NoneType", [{"a"}, set(), set()]),
        (lambda round, count: {f"a{round}": torch.ones(count)}, "", [{"a0"}, {"a1"}, {"a2"}]),
    ],
)
def test_diagnostics_that_cannot_be_kept_are_left_out(notes, why, kept, tmp_path, recwarn):
    run = train(Mean(notes=notes), tmp_path)
    assert re.search(why, " ".join(str(warned.message) for warned in recwarn))
    assert [{*diagnostics} for diagnostics in run.history.diagnostics] == kept
    assert (tmp_path / "run" / "summary.json").exists()


class Counted(NamedTuple):
    """A state with a number that is no tensor."""

    theta: PerClient
    count: Shared


@dataclass(frozen=True)
class Counting(Mean):
    """A server that counts rounds in a whole number."""

    def start(self, roster):
        return Counted(roster.copies(), 0)

    def aggregate(self, roster, server, cohort, uploads):
        return Counted(put(server.theta, cohort, uploads.theta), server.count + 1)


@dataclass(frozen=True)
class Halving(Mean):
    """Each client alone for the first half of all rounds."""

    def graph(self, roster, server, cohort):
        assert roster.rounds == 3
        return (
            torch.eye(len(roster))[cohort]
            if 2 * roster.round < roster.rounds
            else super().graph(roster, server, cohort)
        )


def test_a_state_is_made_of_tensors_and_a_roster_knows_how_many_rounds_there_are(tmp_path):
    with pytest.raises(kinfed.UsageError, match="round 1: the server's state of Counting holds a int"):
        train(Counting(), tmp_path)
    assert train(Halving(), tmp_path).history.cost.done == 3


def test_models_have_the_same_names_for_all_clients_and_in_all_rounds(tmp_path):
    calls = []

    @dataclass(frozen=True)
    class Naming(Mean):
        """Another name each time."""

        def personalise(self, client, state, received):
            calls.append(client)
            return {f"model {len(calls)}": received}

    with pytest.raises(kinfed.UsageError, match=r"personalise names (other|the) models"):
        train(Naming(), tmp_path)
