"""Whole runs with faults: bad answers, silence, crashes of either side, clients that come later."""

import csv
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, Error, Message
from kinds import KINDS
from safetensors.torch import load_file

from kinfed.errors import RunError, UsageError
from kinfed.runs.round_tables import read_cost
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.simulation import Simulation
from kinfed_flower import plan
from kinfed_flower.server import server as serving
from kinfed_flower.server.agreed_plan import agree
from kinfed_flower.server.validation import bound_sizes, too_many_classes
from kinfed_flower.site import site, site_files
from kinfed_flower.wire import transport as carrier


def changed(change):
    """A fault that alters the arrays of an answer."""

    def fault(answer):
        message = carrier.unpack(answer.content)
        arrays = {name: change(name, t) for name, t in message.arrays.items()}
        answer.content = carrier.pack(message._replace(arrays=arrays))
        return answer

    return fault


def claiming(**words):
    """A fault that alters the words of an answer."""

    def fault(answer):
        message = carrier.unpack(answer.content)
        answer.content = carrier.pack(message._replace(fields=message.fields | words))
        return answer

    return fault


def failed(code, reason="no reason"):
    """A fault: an error of Flower's instead of the answer."""

    def fault(answer):
        error = Message(Error(code, reason), reply_to=answer)
        error.metadata.__dict__["_reply_to_message_id"] = answer.metadata.reply_to_message_id
        return error

    return fault


def garbage(answer):
    name = next(iter(answer.content["arrays"]))
    answer.content["arrays"][name] = Array("float32", (1,), "numpy.ndarray", b"no numbers at all")
    return answer


def oversized(answer):
    """An array whose header claims more than there is, to make the reader allocate it."""
    name = next(iter(answer.content["arrays"]))
    data = answer.content["arrays"][name].data
    shape = str(answer.content["arrays"][name].shape).encode()
    claimed = b"(99999999999,)".ljust(len(shape))
    answer.content["arrays"][name].data = data.replace(shape, claimed, 1) if len(claimed) == len(shape) else data[:-4]
    return answer


FAULTS = {  # where it happens: what happens, and what is said about it
    ("b", 2): (changed(lambda name, t: t * torch.nan), "client b out: upload/theta holds NaN or infinity"),
    ("c", 2): (changed(lambda name, t: t / 0), "client c out: upload/theta holds NaN or infinity"),
    ("d", 2): (
        changed(lambda name, t: t[:-1]),
        "client d out: upload/theta is torch.float32 [52], not torch.float32 [53]",
    ),
    ("a", 3): (
        changed(lambda name, t: t.double()),
        "client a out: upload/theta is torch.float64 [53], not torch.float",
    ),
    ("b", 3): (changed(lambda name, t: t * 1e6), "times the median of the others', more than 10"),
    ("c", 3): (garbage, "client c out: the message cannot be read"),
    ("a", 4): (oversized, "client a out: the message cannot be read"),
    ("d", 4): (claiming(round=7), "client d out: it replies for round 7"),
    ("e", 4): (claiming(client="a"), "client e out: the reply is from client 'a'"),
    ("a", 5): (failed(2, "<class 'ValueError'>"), "client a out: <class 'ValueError'>"),
    ("b", 5): (lambda answer: None, "continuing without b: no reply in time"),
}


@pytest.mark.parametrize("name", ["fedaghn", "scaffold"])
def test_a_bad_answer_is_left_out_named_and_undone_at_its_site(trial, name):
    trial = trial(name, rounds=6, deadline=0.5)
    trial.grid.faults = {where: fault for where, (fault, _) in FAULTS.items()}
    expected = trial.simulate(absent=FAULTS)
    trial.serve()
    trial.compare(expected)
    for _, message in FAULTS.values():
        assert sum(message in line for line in trial.lines) == 1, (message, trial.lines)
    assert sum("left" in line or "without" in line for line in trial.lines) == len(FAULTS)


def test_a_run_whose_every_round_passes_has_nothing_to_show(trial):
    trial = trial("fedavg", rounds=1)
    trial.grid.faults = {(name, 1): changed(lambda name, t: t * torch.nan) for name in "abcdef"}
    with pytest.raises(RunError, match="no round of 1 had enough usable replies, so there is no model"):
        trial.serve()


class Stopped(Exception):
    pass


def serve_until(trial, monkeypatch, done, when="after"):
    """Run a trial whose server dies in a round, before or after its checkpoint."""
    real = serving.checkpoint.save

    def dying(path, at, history):
        if at.done == done and when == "before":
            raise Stopped
        real(path, at, history)
        if at.done == done:
            raise Stopped

    with monkeypatch.context() as during:
        during.setattr(serving.checkpoint, "save", dying)
        with pytest.raises(Stopped):
            trial.serve()


def come_late(trial):
    """The last node is away at first, and greeted in round 2."""
    node = list(trial.grid.sites)[-1]
    config = trial.grid.sites.pop(node)
    trial.grid.faults["a", 1] = lambda answer: trial.grid.sites.update({node: config}) or answer


@pytest.mark.parametrize(
    "made_up",
    [
        [["evil", "validation", "accuracy", 1.0], ["shared", "validation", "accuracy", 0.5]],
        [["shared", "validation", "accuracy", float("inf")]],
        [["shared", "validation", "accuracy", 1.5]],
        [["shared", "test", "loss", -1.0]],
        [["shared", "validation", "accuracy", 10**400]],
        [["shared", "test"]],
        7,
    ],
)
def test_made_up_scores_neither_end_a_run_nor_choose_its_models(trial, monkeypatch, made_up):
    trial = trial("fedavg", rounds=4)
    clean = trial.simulate().history
    trial.grid.faults["c", 2] = claiming(scores=made_up)  # of round 1
    serve_until(trial, monkeypatch, 3)
    summary = trial.serve().to_dict()
    assert summary["scores"].keys() == {"shared"}
    assert summary["scores"]["shared"]["round"] == clean.select("shared") + 1


def test_a_site_that_has_validation_examples_where_none_are_asked_for(trial):
    """All sites of these tests have them; where the split has none they do not count, and the last round is taken."""
    one = trial("fedavg", rounds=2)
    one.planned = plan.resolve(one.planned.table | {"federation": {"split": {"validation": 0.0}}})
    summary = one.serve().to_dict()
    assert summary["scores"]["shared"]["round"] == 2
    assert "validation" not in summary["scores"]["shared"]


def test_a_round_whose_only_client_gives_nothing_good_passes_and_three_in_a_row_end_the_run(trial):
    once = trial("fedavg", rounds=3, share=0.1)
    first = next(_asked(once))[0]
    once.grid.faults[first, 1] = changed(lambda name, t: t * torch.nan)
    assert once.serve().to_dict()["rounds"] == 3
    assert f"skipped round 1: only 0 of 1 clients gave a usable reply, but 1 must; check {first}" in (once.lines)
    with (once.folder / "out" / "bytes.csv").open() as file:
        counted = {(row["client"], row["round"]): row["used"] for row in csv.DictReader(file)}
    assert counted[first, "1"] == "0"
    assert sorted(counted.values()).count("1") == 2  # one client a round
    cost, summary = read_cost(once.folder / "out" / "cost.csv"), RunFolder(once.folder / "out").read_summary()
    assert list(cost) == [2, 3]  # the first is skipped, and its bytes count
    assert (cost[3].bytes_down, cost[3].bytes_up) == (summary.cost.bytes_down, summary.cost.bytes_up)
    assert 0 < cost[2].bytes_down < cost[3].bytes_down
    assert cost[2].seconds > 0


def test_too_many_bad_answers_three_rounds_in_a_row_end_the_run(trial):
    trial = trial("fedavg", rounds=5, quorum=0.7)
    for round in (2, 3, 4):
        for name in "abc":
            trial.grid.faults[name, round] = changed(lambda name, t: t * torch.nan)
    with pytest.raises(RunError, match=r"round 4, the 3rd in a row: only 3 of 6 clients gave .* but 5 must"):
        trial.serve()
    trial.grid.faults.clear()
    assert trial.serve().to_dict()["rounds"] == 5


def test_in_a_cohort_of_two_an_upload_is_compared_with_those_before(trial):
    trial = trial("fedavg", rounds=4, clients=2, linked=False)
    for node in list(trial.grid.sites)[2:]:
        del trial.grid.sites[node]
    trial.grid.faults["b", 3] = changed(lambda name, t: t * 1e6)
    trial.serve()
    assert sum("client b out: the norm of its upload is" in line for line in trial.lines) == 1


def test_two_servers_do_not_work_in_one_folder(trial, monkeypatch):
    trial = trial("fedavg")
    monkeypatch.setattr(serving, "WAIT", 1)
    (trial.folder / "out").mkdir()
    with serving.only_process(trial.folder / "out", print), pytest.raises(UsageError, match="another process works in"):
        trial.serve()
    assert trial.serve().to_dict()["rounds"] == 3


def test_an_answer_lost_on_the_way_is_given_again_without_training_twice(trial, monkeypatch):
    trained = []
    real = site.Simulation.train

    def counted(self, round, cohort, sent):
        trained.append((self.names[0], round + 1))
        return real(self, round, cohort, sent)

    trial = trial("fedaghn")
    expected = trial.simulate()
    monkeypatch.setattr(site.Simulation, "train", counted)
    lost = iter([True, False])
    trial.grid.faults["b", 2] = lambda answer: failed(5)(answer) if next(lost) else answer
    trial.serve()
    trial.compare(expected)
    assert trained.count(("b", 2)) == 1
    assert [entry for entry in trial.grid.log if entry[0] == "b"].count(("b", "round", "2")) == 2


@pytest.mark.parametrize(("name", "when"), [("fedaghn", "before"), ("pfedgat", "after")])
def test_a_server_that_died_goes_on_as_if_it_had_not(trial, monkeypatch, name, when):
    """It dies in round 3, before or after its checkpoint; sites have trained that round already."""
    trial = trial(name, rounds=5, share=0.5)
    expected = trial.simulate()
    serve_until(trial, monkeypatch, 3, when)
    summary = trial.serve().to_dict()
    trial.compare(expected)
    assert summary["rounds"] == 5
    assert summary["selection"]["chosen"] == expected.history.chosen
    for key, scores in summary["by_client"]["scores"].items():
        assert scores == pytest.approx(expected.history.test(key).tolist(), abs=1e-5)
    assert len(np.load(trial.folder / "out" / "relations.npz")["round"]) == 5
    assert trial.serve().to_dict() == summary  # a finished run tells its end again


@pytest.mark.parametrize("at", ["train", "write"])
def test_a_site_that_breaks_down_in_a_round_answers_again_as_if_it_had_not(trial, monkeypatch, at):
    trial = trial("fedaghn")
    expected = trial.simulate()
    owner, name = {"train": (site.Simulation, "train"), "write": (site_files.ExperimentFolder, "save_state")}[at]
    real, left = getattr(owner, name), [1]

    def breaking(self, *rest):
        mine, second = (self.path.parent.name, rest[0].trained == 1) if at == "write" else (self.names[0], rest[0] == 1)
        if mine == "c" and second and left:
            left.pop()
            raise KeyboardInterrupt
        return real(self, *rest)

    monkeypatch.setattr(owner, name, breaking)
    with pytest.raises(KeyboardInterrupt):  # in this test both sides are one process, so the server goes as well
        trial.serve()
    monkeypatch.setattr(owner, name, real)
    trial.serve()
    trial.compare(expected)


def test_a_site_without_disk_space_is_left_out_and_keeps_what_it_had(trial, monkeypatch):
    trial = trial("fedaghn", rounds=4)
    expected = trial.simulate(absent={("c", 2)})
    real = site_files.checkpoint.write

    class Last:
        shape, dtype = torch.Size([1]), torch.bool

        def __getitem__(self, at):
            raise OSError(28, "No space left on device")

    def full(arrays, path, metadata=None):
        ends = "/c/" in str(path) and "state" in str(path) and '"trained": 1,' in metadata["state"]
        real(arrays | {"last": Last()} if ends else arrays, path, metadata)

    monkeypatch.setattr(site_files.checkpoint, "write", full)
    trial.serve()
    trial.compare(expected)
    (line,) = [one for one in trial.lines if "left client c out" in one]
    assert line.startswith("left client c out: cannot write c/")  # and no folder of the site's machine
    assert line.endswith("/state.safetensors: No space left on device")


def test_a_site_that_lost_its_state_joins_anew(trial):
    trial = trial("fedavg", rounds=4)
    folder = trial.folder / "sites" / "c" / "c"

    def lose(answer):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        return answer

    trial.grid.faults["c", 2] = lose
    expected = trial.simulate()
    summary = trial.serve().to_dict()
    assert any("joining again, as their state is lost: c" in line for line in trial.lines)
    (mine,) = folder.iterdir()
    for key, value in load_file(mine / "model.safetensors").items():
        i = list(trial.examples).index("c")
        torch.testing.assert_close(value, expected.layout.tensors(expected.history.models["theta"][i])[key])
    assert summary["scores"]["shared"]["mean"] == pytest.approx(float(expected.history.test("shared").mean()))


def test_too_few_answers_end_the_run_with_what_to_do_and_it_goes_on_later(trial):
    trial = trial("fedavg", quorum=0.7, deadline=0.2, patience=0.5)
    expected = trial.simulate()
    for name in "abc":
        trial.grid.faults[name, 2] = lambda answer: None
    with pytest.raises(RunError, match=r"only 3 of 6 clients gave a usable reply, but 5 must; check a, b, c"):
        trial.serve()
    trial.grid.faults.clear()
    summary = trial.serve().to_dict()
    assert summary["scores"]["shared"]["mean"] == pytest.approx(float(expected.history.test("shared").mean()))


def test_clients_that_come_later_count_from_the_next_round(trial):
    late = trial("fedamp", rounds=4, linked=False, clients=4)
    nodes = dict(late.grid.sites)
    for node in list(nodes)[4:]:
        del late.grid.sites[node]

    def arrive(answer):
        late.grid.sites.update(nodes)
        return answer

    late.grid.faults["a", 1] = arrive  # greeted in round 2
    summary = late.serve().to_dict()
    assert summary["by_client"]["names"] == list("abcdef")
    assert "joined after round 2: e, f" in late.lines
    asked = [(name, group) for name, kind, group in late.grid.log if kind == "round"]
    assert ("e", "2") not in asked
    assert ("e", "3") in asked
    with np.load(late.folder / "out" / "relations.npz") as file:
        assert file["relation"].shape[1:] == (6, 6)
        assert not file["relation"][0][4:].any()
        assert file["relation"][-1][4, :4].sum() > 0  # it listens to the others
    rows = (late.folder / "out" / "history.csv").read_text().splitlines()
    assert any(row.startswith("2,e,") and row.endswith("nan") for row in rows)
    assert any(row.startswith("4,e,") and not row.endswith("nan") for row in rows)


@pytest.mark.parametrize("name", ["sfl", "panacea"])
def test_a_client_that_comes_later_has_the_links_that_the_file_gives_it(trial, name):
    late = trial(name, rounds=4, clients=5)
    (late.folder / "links.csv").write_text("from,to\na,b\nb,c\nc,d\na,e\nf,b\nf,stranger\n")
    come_late(late)
    assert late.serve().to_dict()["by_client"]["names"] == list("abcdef")
    links = json.loads((late.folder / "out" / "federation.json").read_text())["graph"]
    assert links[5] == [0, 1, 0, 0, 0, 0]
    assert [row[5] for row in links] == [0, 1, 0, 0, 0, 0]


def test_a_client_that_cannot_join_at_first_is_asked_again(trial, monkeypatch):
    late = trial("fedamp", rounds=6, linked=False, clients=5)
    come_late(late)
    real, full = site_files.checkpoint.write, [True]

    def write(arrays, path, metadata=None):
        if "sites/f/" in str(path) and full:
            full.pop()
            raise OSError(28, "No space left on device")
        real(arrays, path, metadata)

    monkeypatch.setattr(site_files.checkpoint, "write", write)
    assert late.serve().to_dict()["by_client"]["names"] == list("abcdef")
    assert any("left client f out" in line and "No space left" in line for line in late.lines)


@pytest.mark.parametrize("stale", ["keep", "drop", "decay"])
def test_a_server_that_died_after_a_client_had_come_goes_on(trial, monkeypatch, stale):
    def run(folder_of, dies):
        one = trial("fedamp", rounds=6, linked=False, clients=5, stale=stale, decay=0.5)
        come_late(one)
        if dies:
            serve_until(one, monkeypatch, 4)
        summary = one.serve().to_dict()
        (one.folder / "out").rename(one.folder / folder_of)
        for name in "abcdef":
            for folder in (one.folder / "sites" / name / name).iterdir():
                shutil.rmtree(folder)
        return summary

    whole, resumed = run("whole", False), run("resumed", True)
    assert whole["by_client"]["names"] == resumed["by_client"]["names"] == list("abcdef")
    for model, scores in whole["by_client"]["scores"].items():
        assert resumed["by_client"]["scores"][model] == pytest.approx(scores, nan_ok=True)


def test_a_client_that_leaves_keeps_its_last_model_and_the_others_go_on(trial):
    trial = trial("fedaghn", rounds=4)
    expected = trial.simulate(absent={("f", 3), ("f", 4)})
    gone = {}

    def leave(answer):
        (node,) = (node for node, site in trial.grid.sites.items() if site["client-id"] == "f")
        gone[node] = trial.grid.sites.pop(node)
        return answer

    trial.grid.faults["a", 3] = leave  # asked before f is
    summary = trial.serve().to_dict()
    assert summary["rounds"] == 4
    trial.compare(expected, "abcde")
    (folder,) = (trial.folder / "sites" / "f" / "f").iterdir()
    assert json.loads((folder / "model.json").read_text())["round"] in (1, 2)
    assert load_file(folder / "model.safetensors").keys() == expected.layout.names


@pytest.fixture
def lie(monkeypatch):
    """Makes a site say other things than are so, when it is greeted ("_hello") or joins ("_join")."""

    def make(name, when, **claims):
        real = getattr(site.Site, when)

        def lying(self, order):
            answer = real(self, order)
            return answer._replace(fields=answer.fields | claims) if self.name == name else answer

        monkeypatch.setattr(site.Site, when, lying)

    return make


def test_a_size_that_is_made_up_does_not_make_one_site_the_average(trial, lie, monkeypatch):
    """It is as in a simulation in which that site has ten times as many examples as the median of the others."""
    trial, most = trial("fedavg", rounds=3), 90  # of 3, 8, 9, 12 and 17
    real = Simulation.sizes.fget
    sizes = property(lambda self: torch.where(torch.arange(len(real(self))) == 4, most, real(self)))
    with monkeypatch.context() as counted:
        counted.setattr(Simulation, "sizes", sizes)
        expected = trial.simulate().history.test("shared")
    honest = trial.simulate().history.test("shared")
    lie("e", "_join", size=10**12)
    summary = trial.serve().to_dict()
    assert summary["by_client"]["scores"]["shared"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert summary["by_client"]["scores"]["shared"] != pytest.approx(honest.tolist(), abs=1e-5)
    assert summary["sites"]["bounded"] == {"e": {"claimed": 10**12, "counted": most}}
    line = (
        "client e claims to have 1,000,000,000,000 training examples, more than 10 times the median of the others "
        f"(flower.size_bound); it counts as if it had {most}"
    )
    assert trial.lines.count(line) == 1


def test_sizes_are_bounded_by_the_median_of_the_others():
    assert bound_sizes([50, 50, 10**12], 10) == [50, 50, 500]
    assert bound_sizes([10, 1000, 1000], 10) == [10, 1000, 1000]
    assert bound_sizes([3, 9, 8, 17, 4, 12], 10) == [3, 9, 8, 17, 4, 12]
    assert bound_sizes([5, 10**12], 10) == [5, 50]
    assert bound_sizes([1, 10, 11, 10**12, 10**12], 10) == [1, 10, 11, 105, 105]  # two of five
    assert bound_sizes([50, 50, 10**12], 0) == [50, 50, 10**12]
    assert bound_sizes([10**12], 10) == [10**12]


def test_classes_that_are_made_up_do_not_end_the_run_for_all(trial, lie):
    trial = trial("fedavg", rounds=2, classes=0, clients=5)
    lie("c", "_hello", task={"name": "Classification", "classes": 10**9}, outputs=10**9)
    summary = trial.serve().to_dict()
    assert summary["by_client"]["names"] == list("abdef")
    assert summary["data"]["classes"] == 3
    assert (
        "left client c out: its labels show 1,000,000,000 classes, more than 100,000; if that is right, set "
        "flower.classes"
    ) in trial.lines


@pytest.mark.parametrize(
    ("classes", "left_out"),
    [
        ({"a": 2, "b": 4, "c": 100}, ""),  # few labels at a site, as in splits by class
        ({"a": 1, "b": 1, "c": 1000}, ""),
        ({"a": 3, "b": 10**9, "c": 10**9}, "bc"),  # most lie
        ({"a": 8000, "b": 900, "c": 8142}, ""),
        ({"a": 10, "b": 10, "c": 1001}, "c"),
        ({"a": 10, "b": 10**9}, "b"),
        ({"a": 10, "b": 10, "c": 10, "d": 10**9, "e": 10**9}, "de"),
        ({"a": 5000}, "a"),
    ],
)
def test_classes_are_believed_if_they_are_few_or_others_have_as_many(classes, left_out):
    clients = {name: {"shape": [6], "task": {"name": "Classification", "classes": n}} for name, n in classes.items()}
    assert "".join(too_many_classes(clients)) == left_out


def test_each_site_is_told_if_all_claim_more_classes_than_there_can_be():
    """So that their operators, and the server's, learn of flower.classes, and no majority is looked for in none."""
    task, told = {"name": "Classification", "classes": 10**9}, {}
    sites = {name: {"shape": [6], "task": task, "columns": []} for name in "ab"}

    class Nodes:
        clients = sites

        def silent(self):
            return []

    class Broker:
        nodes = Nodes()

        def dismiss(self, client, why=""):
            told[client] = why

        def discover(self, enough, what):
            assert not enough()
            raise EOFError

    planned = SimpleNamespace(deployment=SimpleNamespace(clients=2, classes=0))
    with pytest.raises(EOFError):
        agree(planned, Broker())
    assert told.keys() == {"a", "b"}
    assert all("flower.classes" in why for why in told.values())


def test_only_those_whose_keys_the_server_has_take_part(trial):
    trial = trial("fedavg", rounds=2, clients=5)
    trial.grid.publics = {node: config["client-id"].encode() for node, config in trial.grid.sites.items()}
    members = {public: public.decode() for public in trial.grid.publics.values() if public != b"f"}
    summary = trial.serve(members=lambda: members).to_dict()
    assert summary["by_client"]["names"] == list("abcde")
    assert not any(name == "f" for name, *_ in trial.grid.log)


def test_sites_with_other_examples_are_left_out(trial):
    trial = trial("fedavg", clients=5, linked=False)
    odd = trial.grid.sites[106]
    np.savez(odd["data"], x=np.zeros((20, 7), np.float32), y=np.zeros(20, np.int64))
    summary = trial.serve().to_dict()
    assert summary["by_client"]["names"] == list("abcde")
    assert any("left client f out: its examples are [7]" in line for line in trial.lines)


def test_bytes_are_counted_by_client_and_round(trial):
    trial = trial("fedavg", rounds=3)
    summary = trial.serve().to_dict()
    d = 53  # 6 x 5 + 5 + 5 x 3 + 3
    with (trial.folder / "out" / "bytes.csv").open(newline="") as file:
        rows = {(row["client"], int(row["round"])): row for row in csv.DictReader(file)}
    assert rows.keys() == {(client, round) for client in "abcdef" for round in range(4)}
    models = {"down": [1, 1, 1, 2], "up": [0, 1, 1, 1]}  # the first when it joins; one more judges the last round
    for (client, round), row in rows.items():
        for way, counts in models.items():
            words = int(row[way]) - 4 * d * counts[round]
            assert 0 < words < 3000, (client, round, way)
    for way in ("down", "up"):
        each = {c: sum(int(row[way]) for (name, _), row in rows.items() if name == c) for c in "abcdef"}
        assert {name: counted[way] for name, counted in summary["sites"]["bytes_by_client"].items()} == each
        assert summary["cost"][f"bytes_{way}"] == sum(each.values())
        assert summary["cost"]["bytes_per_client_and_round"][way] == int(sum(each.values()) / 18 + 0.5)


def test_bytes_go_on_being_counted_after_a_crash(trial, monkeypatch):
    whole = trial("fedavg", rounds=4)
    serve_until(whole, monkeypatch, 2)
    whole.serve()
    rows = [row.split(",")[:2] for row in (whole.folder / "out" / "bytes.csv").read_text().splitlines()[1:]]
    assert rows == [[client, str(round)] for client in "abcdef" for round in range(5)]


def test_feedback_from_test_examples_is_told_wherever_scores_are(trial):
    trial = trial("fedaghn", rounds=2, method={"feedback": "test"})
    expected = trial.simulate()
    summary = trial.serve().to_dict()
    trial.compare(expected)
    assert summary["selection"]["caution"] == "the method used test examples as feedback"
    heading, *rows = (trial.folder / "out" / "history.csv").read_text().splitlines()
    assert heading.endswith(",caution")
    assert all(row.endswith(",the method used test examples as feedback") for row in rows)


def test_fair_feedback_is_not_told_off(trial):
    summary = trial("fedaghn", rounds=1).serve().to_dict()
    assert summary["selection"]["caution"] == ""


def gone_from(trial, name, round, back=None):
    """A fault that takes a client's node away in a round, and perhaps brings it back in another."""
    (node,) = (node for node, site in trial.grid.sites.items() if site["client-id"] == name)
    config = trial.grid.sites[node]

    def leave(answer):
        trial.grid.sites.pop(node, None)
        return answer

    def come(answer):
        trial.grid.sites[node] = config
        return answer

    trial.grid.faults["a", round] = leave  # asked before the others are
    if back:
        trial.grid.faults["a", back] = come


@pytest.mark.parametrize(("stale", "heard"), [("keep", True), ("drop", False)])
def test_what_others_hear_of_a_client_that_is_gone(trial, stale, heard):
    trial = trial("fedamp", rounds=6, stale=stale)
    gone_from(trial, "f", 3, back=5)
    summary = trial.serve().to_dict()
    with np.load(trial.folder / "out" / "relations.npz") as file:
        relation = file["relation"]
    assert (relation[1, :5, 5] > 0).all()  # it was there
    assert (relation[3, :5, 5] > 0).all() == heard  # it has missed two rounds
    np.testing.assert_allclose(relation.sum(-1), 1, rtol=1e-5)
    assert (relation[5, :5, 5] > 0).all()  # it is back
    assert summary["rounds"] == 6


@pytest.mark.parametrize("name", KINDS)
def test_methods_can_do_without_a_silent_client(trial, name):
    """From round 3, when f is known to be gone, to its return the others are as they would be if f had not been."""
    trial = trial(name, rounds=5, stale="drop")
    gone_from(trial, "f", 2, back=4)
    trial.serve()
    if (trial.folder / "out" / "relations.npz").exists():  # not where no models are mixed
        with np.load(trial.folder / "out" / "relations.npz") as file:
            relation = file["relation"]
        assert not relation[2][..., :5, 5].any()
        np.testing.assert_allclose(relation.sum(-1), 1, rtol=1e-5)
    (folder,) = (trial.folder / "sites" / "f" / "f").iterdir()
    assert json.loads((folder / "model.json").read_text())["round"] >= 1


def test_decay_ends_well_whoever_is_drawn(trial):
    trial = trial("fedaghn", rounds=6, stale="decay", decay=0.5)
    gone_from(trial, "f", 2, back=4)
    assert trial.serve().to_dict()["rounds"] == 6
    with np.load(trial.folder / "out" / "relations.npz") as file:
        np.testing.assert_allclose(file["relation"].sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_with_decay_no_site_is_ever_sent_a_model_of_zeros(trial, seed):
    trial = trial("fedaghn", rounds=8, stale="decay", decay=0.5)
    trial.planned.table["seed"] = seed
    trial.planned = plan.resolve(trial.planned.table)
    for round in (2, 4, 6):
        trial.grid.faults["f", round] = failed(2)
    trial.serve()
    for client, kind, message in trial.grid.sent:
        for name, array in message.arrays.items():
            assert not name.endswith("theta") or array.any(), (client, kind, message.fields)


def test_a_round_for_which_nobody_is_there_passes(trial):
    trial = trial("fedavg", rounds=3, share=0.1, deadline=0.05)
    drawn = [client for (client, kind, group) in _asked(trial)]
    (node,) = (node for node, site in trial.grid.sites.items() if site["client-id"] == drawn[1])
    assert drawn[0] != drawn[1]
    trial.grid.faults[drawn[0], 1] = lambda answer: trial.grid.sites.pop(node) and answer
    summary = trial.serve().to_dict()
    assert "skipped round 2: none of the clients drawn for it is online" in trial.lines
    assert summary["rounds"] == 3


def _asked(trial):
    """Who is drawn in which round: one client each."""
    from kinfed.core.engine import sample
    from kinfed.core.method import Roster
    from kinfed.core.seeding import tags

    names = list(trial.examples)
    ones = torch.ones(len(names), dtype=torch.int64)
    for round in range(3):
        roster = Roster(torch.zeros(1), None, ones, None, 11, tags(names), round=round)
        yield names[int(sample(roster, 0.1))], "round", round


def with_settings(planned, select_by, class_weights):
    training = {**planned.table["training"], "class_weights": class_weights}
    return plan.resolve({**planned.table, "select_by": select_by, "training": training})


def test_sites_weigh_their_classes_and_tell_scores_by_class(trial, tmp_path):
    trial = trial("scaffold", by_class=True)
    trial.planned = with_settings(trial.planned, "balanced_accuracy", "balanced")
    summary = trial.serve().to_dict()
    trial.compare(trial.simulate())
    score = summary["scores"][summary["selection"]["chosen"]]
    assert summary["selection"]["by"] == "balanced_accuracy"
    with (tmp_path / "out" / "history.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["round"]) == score["round"]]
    value = {(row["client"], row["split"], row["metric"]): float(row["value"]) for row in rows}
    validation = [value[name, "validation", "balanced_accuracy"] for name in summary["by_client"]["names"]]
    assert score["validation"] == pytest.approx(np.nanmean(validation))
    for c, row in enumerate(summary["recall"]["by_class"]):
        recall = np.array([value[name, "test", f"recall@{c}"] for name in summary["by_client"]["names"]])
        assert row["clients"] == int((~np.isnan(recall)).sum())
        assert row["recall"] == pytest.approx(np.nanmean(recall))
        assert "pooled" not in row  # how many examples of a class a site has, it does not tell
    assert (tmp_path / "out" / "recall.png").exists()


@pytest.mark.parametrize(
    ("select_by", "weights", "why"),
    [
        ("mae", None, "select_by: classification has no 'mae'"),
        ("accuracy", [1.0, 2.0], "class_weights must be 3 numbers, one per class; got 2"),
    ],
)
def test_settings_that_do_not_fit_the_sites_labels_are_refused_before_a_round(trial, select_by, weights, why):
    trial = trial("fedavg")
    settings = {"select_by": select_by, "class_weights": weights or "balanced"}
    trial.planned = with_settings(trial.planned, **settings)
    with pytest.raises(UsageError, match=why):
        trial.serve()
