"""Two processes that share the clients find what one finds alone."""

import json
from dataclasses import replace

import pytest
import torch
from processes import run_kinfed
from safetensors.torch import load_file

from kinfed import Federation, UsageError
from kinfed.core.batches import Ragged
from kinfed.core.tasks import Classification
from kinfed.simulation.distributed import take_examples


def run(tmp_path, processes, name, method, *more):
    arguments = ("run", method, "rounds=3", "federation.clients=8", "training.epochs=1", "participation=0.5", *more)
    return run_kinfed(tmp_path, processes, *arguments, "--out", name, "--json", "how.executor=loop", "how.workers=1")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedaghn", "scaffold", "ifca"])
def test_two_processes_end_with_the_models_of_one(tmp_path, method):
    run(tmp_path, 1, "alone", method)
    (out, said, _), (silent, nothing, _) = run(tmp_path, 2, "shared", method)
    assert (silent, nothing) == ("", "")
    summary, alone = json.loads(out), json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert "everything is in shared" in said
    assert "clients are divided among 2 processes" in summary["cost"]["reason"]
    assert summary["selection"] == alone["selection"]
    for key in ("bytes_up", "bytes_down", "parameters"):
        assert summary["cost"][key] == alone["cost"][key]
    for name, scores in alone["by_client"]["scores"].items():
        assert summary["by_client"]["scores"][name] == pytest.approx(scores, abs=1e-6)
    assert (summary["relation"] or {}) == pytest.approx(alone["relation"] or {}, abs=1e-6)
    models, wanted = (load_file(tmp_path / name / "models.safetensors") for name in ("shared", "alone"))
    assert models.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(models[name], value, rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in (tmp_path / "shared").iterdir()) == sorted(
        p.name for p in (tmp_path / "alone").iterdir()
    )


STOPPING = """
import sys
from kinfed import RunError, cli
from kinfed.simulation.distributed import Distributed
real = Distributed.train
def train(self, round, cohort, sent):
    if round == 2 and self._rank == 1:
        self._local.train = lambda *_: (_ for _ in ()).throw(RunError("round 3: no more"))
    return real(self, round, cohort, sent)
Distributed.train = train
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_when_one_process_fails_all_end_and_one_alone_goes_on_from_there(tmp_path):
    run(tmp_path, 1, "alone", "fedaghn")
    arguments = ("run", "fedaghn", "rounds=3", "federation.clients=8", "training.epochs=1", "participation=0.5")
    how = ("--out", "shared", "how.executor=loop", "how.workers=1")
    ended = run_kinfed(tmp_path, 2, *arguments, *how, script=STOPPING, check=False)
    assert [code for _, _, code in ended] == [1, 1]
    assert ended[0][1].strip().endswith("kinfed: round 3: no more")
    assert ended[1][1] == ""
    assert (tmp_path / "shared" / "checkpoint.safetensors").exists()
    run_kinfed(tmp_path, 1, "resume", "shared")
    models, wanted = (load_file(tmp_path / name / "models.safetensors") for name in ("shared", "alone"))
    for name, value in wanted.items():
        torch.testing.assert_close(models[name], value, rtol=1e-5, atol=1e-6)


ENDING = """
import os, signal, sys
from kinfed import cli
from kinfed.simulation.distributed import Distributed
real = Distributed.train
def train(self, round, cohort, sent):
    if round == 2 and self._rank == int(os.environ["ENDS"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, round, cohort, sent)
Distributed.train = train
sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_process_is_killed_the_other_says_so_and_the_last_checkpoint_is_whole(tmp_path, rank, monkeypatch):
    monkeypatch.setenv("ENDS", str(rank))
    arguments = ("run", "fedaghn", "rounds=3", "federation.clients=8", "training.epochs=1", "how.checkpoint_seconds=0")
    how = ("--beside", "none", "how.executor=loop", "how.workers=1")
    run_kinfed(tmp_path, 1, *arguments, *how, "--out", "alone")
    ended = run_kinfed(tmp_path, 2, *arguments, *how, "--out", "shared", script=ENDING, check=False)
    assert [code for _, _, code in ended] == [-9 if i == rank else 1 for i in range(2)]
    assert "kinfed: another process of the run ended in the middle of it" in ended[1 - rank][1]
    assert "Traceback" not in ended[1 - rank][1]
    run_kinfed(tmp_path, 1, "resume", "shared")
    models, wanted = (load_file(tmp_path / name / "models.safetensors") for name in ("shared", "alone"))
    for name, value in wanted.items():
        torch.testing.assert_close(models[name], value, rtol=1e-5, atol=1e-6)


SHARED = """
import sys, torch
from torch import nn
from kinfed import SGD, Execution, Federation, Privacy, RunError, Training, fit
from kinfed.methods import METHODS
from kinfed.simulation import distributed, evaluation, state_store as states
from kinfed.simulation.distributed import Distributed
from kinfed.methods import Local
from kinfed.core.model import Model

PRIVATE = {
    "row": {"clip": 0.5, "unit": "row"},
    "few": {"clip": 0.5, "unit": "row"},  # one client in all, so that a process trains none
    "client": {"delta": 1e-3, "clip": 0.5, "unit": "client"},
    "masks": {"epsilon": None, "masked": True},
}

def trained(name):
    method, _, unit = name.partition("/")
    privacy = {"privacy": Privacy(**{"epsilon": 8.0, **PRIVATE[unit]})} if unit else {}
    large = method == "local"  # to be kept in memory
    evaluation.KEPT = states.LARGE = 0 if large else 1 << 30
    x = torch.randn(150, 4, generator=torch.Generator().manual_seed(1))
    owner = torch.arange(150) % 7 % 5  # unequal sizes
    data = Federation.from_arrays(x, (x[:, 0] > 0).long(), owner)
    torch.manual_seed(2)
    length = {"rounds": 1, "participation": 0.2} if unit == "few" else {"rounds": 3, "participation": 0.5}
    how = length | {"training": Training(2, 8, SGD(0.1), **privacy), "execution": Execution("loop")}
    run = fit(METHODS[method](), data, nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), **how)
    evaluation.KEPT = states.LARGE = 1 << 30
    return data, run

if __name__ == "__main__":
    alone = torch.load(sys.argv[1])
    with distributed.group():
        for method, (models, scores, privacy) in alone.items():
            device = torch.device("meta" if method == "scaffold" else "cpu")  # as if for a device of their own
            distributed.pick_device = lambda name: device
            data, run = trained(method)
            assert "divided among 2 processes" in run.cost.reason
            assert run.privacy == privacy
            for key, value in scores.items():
                torch.testing.assert_close(run.history.scores[-1][key], value, rtol=1e-6, atol=1e-6, equal_nan=True)
            assert run.history.models.keys() == (models.keys() if distributed.leads() else set())
            for key, value in run.history.models.items():
                torch.testing.assert_close(value, models[key], rtol=1e-5, atol=1e-6)
        fleet = Distributed(data, Model(nn.Linear(4, 2)), Local(), Training(), execution=Execution("loop"))
        assert len(fleet.roster()) == 5
        mine = 3 if distributed.leads() else 2
        assert fleet._local.state.theta.shape == (mine, 10), fleet._local.state.theta.shape
        assert len(fleet._local.clients.pool.x) == 150
        distributed.pick_device = lambda name: torch.device("meta")
        apart = Distributed(data, Model(nn.Linear(4, 2)), Local(), Training(), execution=Execution("loop"))
        assert len(apart._local.clients.pool.x) == (86 if distributed.leads() else 64)
        states.LARGE = 0
        filed = Distributed(data, Model(nn.Linear(4, 2)), Local(), Training(), execution=Execution("loop"))
        assert len(filed.states.keep()[0]) == 0  # nobody has joined: what a resumed run begins with
        ids, kept = fleet.states.keep()
        assert len(ids) == len(kept.theta) == (5 if distributed.leads() else 2)
        try:
            distributed.run_together(lambda: 1 / fleet._rank)
        except RunError as problem:
            assert "ZeroDivisionError" in str(problem)
        else:
            raise AssertionError("a failure of one process must reach the other")
"""


def test_two_processes_find_what_one_finds_and_each_holds_its_own_clients_states(tmp_path):
    space = {"__name__": "here"}
    exec(SHARED, space)
    alone = {}
    for method in (
        "fedaghn",
        "scaffold",
        "local",
        "fedavg/row",
        "fedavg/few",
        "local/row",
        "fedavg/client",
        "fedavg/masks",
    ):
        trained = space["trained"](method)[1]
        alone[method] = (trained.history.models, trained.history.scores[-1], trained.privacy)
    assert all(
        (alone[method][2] is not None) == (method.partition("/")[2] in ("row", "few", "client")) for method in alone
    )
    torch.save(alone, tmp_path / "alone.pt")
    run_kinfed(tmp_path, 2, tmp_path / "alone.pt", script=SHARED)


ONCE = """
import resource, torch
from pathlib import Path
from kinfed import Execution, Federation, RunError, UsageError, fit
from kinfed.simulation.attacks.label_flip import LabelFlip
from kinfed.methods import FedAvg
from kinfed.simulation import distributed

def build():
    print("built", flush=True)
    x = torch.arange(40000.0).reshape(10000, 4) / 40000
    owner = torch.arange(10000) % 7
    return Federation.from_arrays(x, (owner + torch.arange(10000)) % 3, owner)

def fail():
    raise UsageError("no such data")

def fill():
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
    return build()

def problem_of(work):
    try:
        distributed.build_once(work)
    except (UsageError, RunError) as problem:
        return str(problem)

with distributed.group():
    torch.manual_seed(0)
    data = distributed.build_once(build)
    mapped = "federation.pt (deleted)" in Path("/proc/self/maps").read_text()
    assert mapped == distributed.is_on()
    network = torch.nn.Linear(4, 3)
    for attack in (None, LabelFlip(0.3)):
        run = fit(FedAvg(), data, network, rounds=2, execution=Execution("loop"), attack=attack)
        scores = [round(score, 5) for score in run.history.test("shared").tolist()]
        print(run.federation.digest(), scores, flush=True)
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[4] for line in maps.splitlines() if "federation.pt" in line}) == 2 * mapped, maps
    if mapped:
        assert problem_of(fail) == "no such data"
        full = problem_of(fill)
        assert full.startswith("no room for the 0.00024 GB of examples, which processes share in a file of /"), full
        assert full.endswith(": File too large; free some, or set TMPDIR to a folder on a larger disk"), full
"""


def test_one_process_of_a_machine_builds_the_examples_and_all_map_its_file(tmp_path):
    ((alone, _, _),) = run_kinfed(tmp_path, 1, script=ONCE)
    (first, _, _), (other, _, _) = run_kinfed(tmp_path, 2, script=ONCE)
    assert alone.startswith("built\n")
    assert first == alone + "built\n"  # once more for a disk that is full
    assert other == alone.removeprefix("built\n")


def test_a_part_of_a_federation_need_not_train_on_all_classes_that_it_tests():
    y = torch.tensor([0, 0, 1, 1, 1, 0]).repeat(2)
    rows = torch.arange(12).split(3)
    parts = {"train": [r[:2] for r in rows], "validation": [r[:0] for r in rows], "test": [r[2:] for r in rows]}
    data = Federation(torch.randn(12, 2), y, parts, Classification(2))
    part = {"rows": {split: held[::2] for split, held in parts.items()}, "names": ("0", "2")}
    assert len(data.replace_unchecked(**part).to(torch.device("cpu"))) == 2
    with pytest.raises(UsageError, match="no client has a training example of class 1"):
        replace(data, **part)


def test_a_device_gets_examples_of_its_own_clients_alone():
    x = torch.arange(24.0)[:, None]
    rows = {
        "train": Ragged.join([torch.tensor([7, 3]), torch.tensor([20])]),
        "test": Ragged.join([torch.tensor([3, 9])]),
    }
    moved, pool = take_examples(rows, {"x": x, "y": x[:, 0], "weights": None})
    assert pool["x"].tolist() == [[3.0], [7.0], [9.0], [20.0]]
    assert pool["weights"] is None
    for split, parts in rows.items():
        for before, after in zip(parts, moved[split], strict=True):
            assert torch.equal(x[before], pool["x"][after])
            assert torch.equal(x[before, 0], pool["y"][after])
    windows = x[:, 0].unfold(0, 8, 1)  # [17, 8] of 24 numbers
    assert take_examples(rows, {"x": windows, "y": windows})[1]["x"] is windows


@pytest.mark.slow
def test_requests_that_cannot_be_shared_are_refused_once(tmp_path):
    ended = run_kinfed(tmp_path, 2, "run", "fedavg", "seeds=2", "--out", "x", check=False)
    assert [code for _, _, code in ended] == [2, 2]
    assert (
        ended[0][1]
        .strip()
        .endswith("several processes run one seed at a time; leave seeds out, or run without torchrun")
    )
    assert ended[1][1] == ""
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_table_is_described_once_and_its_method_must_be_named(tmp_path):
    rows = "".join(f"s{i % 4},{i % 7},{i % 7 > 2}\n" for i in range(200))
    (tmp_path / "shops.csv").write_text(f"shop,x,y\n{rows}")
    table = ("run", "shops.csv", "--client", "shop", "--target", "y")
    for command in (table, ("choose", "shops.csv", "--client", "shop", "--target", "y")):
        ended = run_kinfed(tmp_path, 2, *command, "--out", "x", check=False)
        assert [code for _, _, code in ended] == [2, 2], ended
        assert "several processes share one run; choose without torchrun" in ended[0][1]
        assert ended[1][:2] == ("", "")
    (_, said, _), (silent, nothing, _) = run_kinfed(
        tmp_path, 2, *table, "--method", "fedavg", "rounds=2", "--beside", "none", "--out", "y"
    )
    assert (silent, nothing) == ("", "")
    assert "everything is in y" in said
