"""What a site answers of a plan that its operator agreed to, and of one that was not, whatever a server asks."""

import copy
import json
import random
import re
import threading

import numpy as np
import pytest
import torch
from altered_messages import Noting, alter

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed.cli import main
from kinfed.errors import RunError, UsageError
from kinfed_flower import plan
from kinfed_flower.programs import node
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site import agreements
from kinfed_flower.site.agreements import REPEATED, agree
from kinfed_flower.site.gateway import Gateway
from kinfed_flower.site.policy import Policy, passes
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_cohort import computing
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire.messages import Message

RAW = {
    "rounds": 4,
    "method": "fedavg",
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"epochs": 2, "batch": 8},
    "flower": {"clients": 2, "beside": [], "patience": 20.0},
}


@pytest.fixture
def ward(tmp_path):
    """Makes a site with the rows of a ward, and a list of what its operator is told."""

    def make(name="west", policy=None, folder="site", rows=60):
        draw, said = np.random.default_rng(len(name)), []
        cells = zip(draw.normal(60, 9, rows), draw.integers(0, 3, rows), draw.integers(0, 2, rows), strict=True)
        lines = [f"{age:.4f},kind-{kind},{sick}" for age, kind, sick in cells]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,kind,sick", *lines]) + "\n")
        place = tmp_path / folder
        return Site(
            name, tmp_path / f"{name}.csv", place, "cpu", Reading("sick"), report=said.append, policy=policy
        ), said

    return make


def planned(**more):
    return plan.resolve(json.loads(json.dumps(RAW | more)))


def honest(ward, tmp_path, raw=None, folder="site"):
    """The messages of an honest run to west, whose operator has agreed to it, by kind."""
    wanted, sites = raw or planned(), [ward("west", folder=folder)[0], ward("east", folder=folder)[0]]
    for site in sites:
        agree([wanted], site.folder)
    transport = Noting(sites)
    serve(wanted, transport, tmp_path / f"run-{folder}", lambda line: None, 0.0)
    return transport.sent_to("west")


def changed(message, **words):
    return message._replace(fields=message.fields | words)


def test_a_plan_that_was_not_agreed_to_gets_nothing_but_a_name(ward, tmp_path):
    sent = honest(ward, tmp_path)
    site, said = ward(folder="other")
    asked = []
    site.ask = asked.append
    for _ in range(3):
        reply = site.reply("hello", sent["hello"][0])
        assert reply.arrays == {}
        assert reply.fields.keys() == {"client", "kinfed", "refused", "waits"}
    assert len(asked) == 1
    assert "4 rounds of 2 epochs, 8 rows a step; 20 % of rows for the test" in " ".join(said)
    for kind in ("describe", "join", "round"):
        for message in sent[kind]:
            reply = site.reply(kind, message)
            assert reply.arrays == {}
            assert reply.fields.keys() <= {"client", "refused", "join"}
    assert agreements.read_asked(site.folder) == sent["hello"][0].fields["plans"]


def test_a_run_begins_once_its_operators_have_agreed(ward, tmp_path):
    sites, lines, wanted = [ward("west")[0], ward("east")[0]], [], planned()
    agree([wanted], sites[1].folder)
    sites[0].ask = lambda plans: threading.Timer(0.5, lambda: agree(plans, sites[0].folder)).start()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("broker.LOOK", "broker.RETRY", "nodes.RETRY"):
            patch.setattr(f"kinfed_flower.server.{name}", 0.1)
        summary = serve(wanted, Here(sites), tmp_path / "run", lines.append, 0.01)
    assert summary.clients.names == ["east", "west"]
    waited = [line for line in lines if "waiting for the node of west: its operator has not agreed" in line]
    assert len(waited) == 1


def test_an_agreement_is_for_one_run_with_one_description(ward, tmp_path):
    sent = honest(ward, tmp_path)
    site, _ = ward()
    assert "refused" not in site.reply("hello", sent["hello"][0]).fields
    another = site.reply("hello", changed(sent["hello"][0], experiment="another")).fields
    assert "agreed to one run of this plan, which is another one" in another["refused"]
    assert (
        "one run of this plan"
        in site.reply("describe", changed(sent["describe"][0], experiment="another")).fields["refused"]
    )
    assert (
        "one run of this plan" in site.reply("join", changed(sent["join"][0], experiment="another")).fields["refused"]
    )
    invitation = copy.deepcopy(sent["join"][0])
    (age,) = (one for one in invitation.fields["description"]["inputs"] if one["name"] == "age")
    age["deviation"] *= 4
    assert "is not the one that this run began with" in site.reply("join", invitation).fields["refused"]
    agree([planned()], site.folder)  # for another run
    assert "refused" not in site.reply("hello", changed(sent["hello"][0], experiment="another")).fields


@pytest.mark.parametrize("kinds", [("train",), ("evaluate",), ("train", "evaluate")])
def test_answers_of_all_kinds_count_against_one_limit_and_each_is_shown(ward, tmp_path, kinds):
    sent = honest(ward, tmp_path)
    site, said = ward(folder="other")
    agree([planned()], site.folder)
    for kind in ("hello", "describe", "join"):
        assert "refused" not in site.reply(kind, sent[kind][0]).fields
    first, said[:] = sent["round"][0], []
    given = dict.fromkeys(("training", "evaluation"), 0)
    for i in range(60):
        words = {name: value for name, value in first.fields.items() if name not in ("train", "round")}
        if "train" in kinds:
            words |= {"train": first.fields["train"], "round": i, "accepted": i - 1}
        if "evaluate" in kinds:
            words |= {"evaluate": first.fields["train"], "evaluated": i}
        other = {name: t + i / 100 if t.is_floating_point() else t for name, t in first.arrays.items()}
        other |= {name.replace("train/", "evaluate/"): t for name, t in other.items()} if kinds == ("evaluate",) else {}
        if kinds == ("evaluate",):
            other = {name: t for name, t in other.items() if name.startswith("evaluate/")}
        reply = site.reply("round", Message(words, other))
        if "refused" in reply.fields:
            break
        given["training"] += "round" in reply.fields
        given["evaluation"] += "scores" in reply.fields
    assert sum(max(0, count - 4) for count in given.values()) <= REPEATED
    assert max(given.values()) <= 4 + REPEATED
    assert "this site answers it no more" in reply.fields["refused"]
    shown = [line for line in said if line.startswith("sent: ")]
    assert len(shown) == max(given.values())
    if "evaluate" in kinds:
        assert "test (shared) accuracy" in shown[0]


def test_numbers_are_cut_at_the_sites_own_deviations(ward, tmp_path):
    """Of whatever description: a row far outside is as one three deviations away."""
    sent = honest(ward, tmp_path)
    site, _ = ward(folder="other", policy=Policy(runs="any"))
    path = tmp_path / "west.csv"
    text = path.read_text().splitlines()
    path.write_text("\n".join([text[0], "9999,kind-1,1", *text[2:]]) + "\n")
    (tmp_path / "other" / "west.draws.json").unlink(missing_ok=True)
    invitation = copy.deepcopy(sent["join"][0])
    for one in invitation.fields["description"]["inputs"]:
        if one["name"] == "age":
            one |= {"mean": 0.0, "deviation": 1e9}
    federation, _ = site._examples(invitation, planned())
    ages = federation.x[:, -1].double() * 1e9
    train = federation.rows["train"][0]
    assert ages.max() < 9999 or 0 in train.tolist()  # in the training rows it widens the deviation itself
    assert ages.max() <= ages[train].mean() + 12 * ages[train].std()


@pytest.mark.parametrize(
    ("raw", "most"),
    [
        ({"training": {"epochs": 1, "steps": 10**9, "batch": 16}}, 253968254),
        ({"method": {"name": "fedrep", "head_epochs": 10, "base_epochs": 2}, "training": {"epochs": 3}}, 12),
        ({"method": {"name": "fedala", "mix_epochs": 50}, "training": {"epochs": 3}}, 53),
        ({"method": {"name": "ditto", "epochs": 7}, "training": {"epochs": 3}}, 10),
        ({"method": {"name": "ditto"}, "training": {"epochs": 3}}, 6),
        ({"method": {"name": "pfedme", "steps": 30}, "training": {"epochs": 3}}, 90),
        ({"method": {"name": "per-fedavg", "steps": 100, "batch": 21}}, 101),
        ({"method": {"name": "sfl", "steps": 4}, "training": {"epochs": 3}}, 3),
    ],
)
def test_all_passes_over_the_rows_count_as_epochs(raw, most):
    """Of 63 rows; counted by hand."""
    assert passes(plan.resolve({"rounds": 1, "model": "mlp", "method": "fedavg", **raw}).learning, 63) == most


def test_a_model_of_too_many_parameters_is_refused_before_it_is_built(ward, tmp_path, monkeypatch):
    sent = honest(ward, tmp_path)
    site, _ = ward(folder="other", policy=Policy(runs="any", parameters=1000))
    invitation = copy.deepcopy(sent["join"][0])
    invitation.fields["table"]["model"]["hidden"] = [200_000, 200_000]  # 160 GB
    monkeypatch.setattr(plan.Plan, "model", lambda *_: pytest.fail("it was built"))
    assert "allows 1,000 parameters, and the plan has 40,0" in site.reply("join", invitation).fields["refused"]


def test_class_weights_at_which_a_row_counts_alone_are_refused(ward, tmp_path):
    wanted = planned(training={"epochs": 1, "batch": 1024, "class_weights": [1e-12, 1.0]})
    site, _ = ward(policy=Policy(runs="any"))
    path = tmp_path / "west.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(f"{line[:-1]}{int(i < 4)}" for i, line in enumerate(lines[1:]))]) + "\n")
    other, _ = ward("east", policy=Policy(runs="any"))
    transport = Noting([site, other])
    with pytest.raises(Exception, match="check west"):
        serve(wanted, transport, tmp_path / "run", lambda line: None, 0.0)
    refused = [reply.fields["refused"] for name, kind, _, reply in transport.seen if (name, kind) == ("west", "join")]
    assert "by training.class_weights 3.0 rows of this site's 42 decide" in refused[0]


def test_coefficients_at_which_a_row_counts_alone_get_no_sums(ward, tmp_path):
    wanted = planned(method="partial-pooling", model="linear")
    sent = honest(ward, tmp_path, wanted)
    site, _ = ward(folder="other")
    agree([wanted], site.folder)
    for kind in ("hello", "describe", "join"):
        site.reply(kind, sent[kind][0])
    first = sent["round"][0]
    assert "refused" not in site.reply("round", first).fields
    federation, model = site._examples(sent["join"][0], wanted)
    x = federation.x[federation.rows["train"][0]]
    width, column = x.shape[1], int((x.sort(0).values[-1] - x.sort(0).values[-2]).argmax())
    theta = torch.zeros_like(model.theta)  # a weight [2, d] and a bias [2]
    theta[width + column], theta[-1] = 1e4, -1e4 * float(x[:, column].max())  # only there the loss is curved
    steep = {name: theta if t.shape == theta.shape else t for name, t in first.arrays.items()}
    steep = first._replace(fields=first.fields | {"round": 1, "accepted": 0}, arrays=steep)
    assert "rows of this site's 42 decide what it would upload" in site.reply("round", steep).fields["refused"]


def test_scores_say_no_more_than_their_rows_support(ward, tmp_path):
    sites = [ward("west", policy=Policy(runs="any"))[0], ward("east", policy=Policy(runs="any"))[0]]
    transport = Noting(sites)
    serve(planned(), transport, tmp_path / "run", lambda line: None, 0.0)
    scores = [one for _, _, _, reply in transport.seen for one in reply.fields.get("scores", [])]
    assert scores
    for _, split, _, value in scores:
        if np.isfinite(value):
            numerator, _ = float(value).as_integer_ratio()
            assert numerator.bit_length() <= np.log2({"validation": 6, "test": 12}[split]) + 2


def test_a_gateway_waits_for_one_yes_for_all_its_clients(ward, tmp_path):
    sent, files, said, asked = honest(ward, tmp_path), {}, [], []
    for name in ("hub.a", "hub.b"):
        ward(name)
        files[name] = tmp_path / f"{name}.csv"
    reading = Reading("sick", client="ward")
    gateway = Gateway("hub", files, tmp_path / "hub", "cpu", reading, (), said.append)
    next(iter(gateway.sites.values())).ask = asked.append
    reply = gateway.reply("hello", sent["hello"][0]).fields
    assert (reply["client"], reply["waits"], len(asked)) == ("hub", True, 1)
    assert len([line for line in said if "asks for a run" in line]) == 1
    for site in gateway.sites.values():
        agree(asked[0], site.folder)
    assert set(gateway.reply("hello", sent["hello"][0]).fields["clients"]) == {"hub.a", "hub.b"}


def test_the_command_agrees_to_what_the_server_asked_for_with_the_options_of_the_node(ward, tmp_path, capsys):
    sent = honest(ward, tmp_path)
    site, _ = ward(folder="other")
    site.reply("hello", sent["hello"][0])
    home = tmp_path / "other" / "west" / "node"
    home.mkdir(parents=True)
    node.keep_options(home, tmp_path / "west.csv", Reading("sick", columns={"Alter": "age"}), [])
    assert node.read_options(home)[1] == Reading("sick", columns={"Alter": "age"})
    node.keep_options(home, tmp_path / "west.csv", Reading("sick"), [])
    assert main(["flower", "agree", "west", "--state", str(tmp_path / "other"), "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "what leaves this site for the server" in printed
    assert "agreed: west takes part in one run of this plan" in printed
    assert "refused" not in site.reply("hello", sent["hello"][0]).fields


def test_an_operator_says_yes_at_the_terminal(ward, tmp_path, monkeypatch):
    site, said = ward()
    lines = iter(["what is that?\n", "yes\n", ""])
    heard = threading.Event()

    class Terminal:
        def readline(self):
            line = next(lines)
            if not line:
                heard.set()
            return line

    monkeypatch.setattr(node, "_has_terminal", lambda: True)
    monkeypatch.setattr(node.sys, "stdin", Terminal())
    node.Prompt("west", tmp_path / "site", [site.folder], said.append)([planned()])
    assert heard.wait(10)
    assert said[-2:] == ["not agreed; type yes to agree", "agreed, for one run; it begins within seconds"]
    assert json.loads((site.folder.parent / f"west.{agreements.AGREED}").read_text())


def lie(draw, sent):
    """A message of a server's that is changed somewhere, and what kind it is of."""
    kind = draw.choice(["hello", "describe", "join", "join", "round", "round"])
    return kind, alter(draw, draw.choice(sent[kind]), draw.randint(1, 3))[0]


def test_a_hundred_lying_plans_get_nothing_and_end_in_a_line(ward, tmp_path, capsys):
    """None is agreed to. Nothing is raw, nothing is silent, and nothing of the rows leaves."""
    sent, draw = honest(ward, tmp_path), random.Random(7)
    site, said = ward(folder="other")
    for i in range(100):
        kind, message = lie(draw, sent)
        before = len(said)
        reply = site.reply(kind, message)
        assert reply.arrays == {}, (i, kind)
        assert reply.fields.keys() <= {"client", "kinfed", "refused", "waits", "join"}, (i, kind, reply.fields)
        assert "unexpected" not in str(reply.fields.get("refused")), (i, kind, message.fields, reply.fields)
        assert "\n" not in str(reply.fields), (i, kind)
        told = said[before:]
        assert told or reply.fields.get("waits") or reply.fields.get("join"), (i, kind)
        assert not any("Error:" in line or "Errno" in line for line in told), (i, kind, told)
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "other" / "west.draws.json").exists()


def test_a_hundred_lies_in_an_agreed_run_end_in_a_line_and_within_its_limit(ward, tmp_path, capsys):
    sent, draw = honest(ward, tmp_path), random.Random(8)
    site, said = ward(folder="other")
    agree([planned()], site.folder)
    for kind in ("hello", "describe", "join"):
        site.reply(kind, sent[kind][0])
    trained = 0
    for i in range(100):
        kind, message = lie(draw, sent)
        before = len(said)
        reply = site.reply(kind, message)
        trained += "upload" in reply.fields
        assert "unexpected" not in str(reply.fields.get("refused")), (i, kind, message.fields, said[before:])
        assert not any("Errno" in line for line in said[before:]), (i, said[before:])
        assert said[before:] or kind == "hello" or reply.fields.keys() <= {"client", "join"}, (i, kind, reply.fields)
    assert trained <= 4 + REPEATED
    assert "Traceback" not in capsys.readouterr().err
    assert torch.is_tensor(next(iter(sent["join"][0].arrays.values())))


def put(*path_and_value):
    """A change of a message: a value at a path in its fields."""
    *path, last, value = path_and_value

    def change(message):
        here = message.fields
        for part in path:
            here = here[part]
        here[last] = value

    return change


@computing()
def fail(problem, cause=None):
    raise problem from cause


def test_what_a_server_is_told_of_an_error_says_nothing_of_rows():
    """Executors quote the error of a client's program, which may quote a label or a cell."""
    error = IndexError("Target 17 is out of bounds")
    for problem, cause in ((error, None), (RunError(f"round 1: client west: IndexError: {error}"), error)):
        with pytest.raises(UsageError, match=f"{COMPUTED} .IndexError.") as refusal:
            fail(problem, cause)
        assert "17" not in str(refusal.value)
    with pytest.raises(RunError, match="round 3: training diverges"):
        fail(RunError("round 3: training diverges"))
    with pytest.raises(RunError, match="memory is too small"):
        fail(RunError("the device's memory is too small"), RuntimeError("of 17 bytes"))


def repeat(*path):
    """A change of a message: an entry of a list twice."""

    def change(message):
        here = message.fields
        for part in path:
            here = here[part]
        here.append(copy.deepcopy(here[0]))

    return change


USED = "what the server says of the columns cannot be used"
DESCRIBED = "the server's description of the columns cannot be used"
INPUTS = "description", "inputs"
COMPUTED = "the method cannot compute with what the server sent"


@pytest.mark.parametrize(
    ("kind", "lie", "why"),
    [
        ("describe", put("agreed", "inputs", 0, ""), USED),
        ("describe", put("agreed", "inputs", 0, [["age"], "number"]), USED),
        ("describe", put("agreed", "inputs", 0, ["age", "\x1b[2J"]), USED),
        ("describe", put("agreed", "inputs", "ab"), USED),
        ("describe", repeat("agreed", "inputs"), USED),
        ("describe", put("agreed", "inputs", 0, ["sick", "number"]), "asked for a column that stays at the site"),
        ("describe", put("agreed", "targets", ["age"]), r"it predicts sick \(--target\)"),
        ("describe", put("agreed", "targets", "sick"), USED),
        ("describe", put("agreed", "classes", ["1"]), "the server leaves out classes that this site has"),
        ("describe", put("agreed", "classes", ["0", "1", "1"]), USED),
        ("describe", put("agreed", "classes", []), USED),
        ("describe", put("agreed", "classes", 0, None), USED),
        ("describe", put("agreed", "counts", float("nan")), USED),
        ("describe", put("plan", "ledger"), "its operator has not agreed to this plan"),
        ("describe", put("plan", "run old"), "its operator has not agreed to this plan"),
        ("join", put("agreed", "inputs", 1, [None]), DESCRIBED),
        ("join", put("agreed", "classes", ["0"]), DESCRIBED),
        ("join", put(*INPUTS, 0, "deviation", []), DESCRIBED),
        ("join", put(*INPUTS, 0, "deviation", 0), DESCRIBED),
        ("join", put(*INPUTS, 0, "deviation", -1.0), DESCRIBED),
        ("join", put(*INPUTS, 0, "mean", float("nan")), DESCRIBED),
        ("join", put(*INPUTS, 0, "mean", 10**400), DESCRIBED),
        ("join", put(*INPUTS, 0, "median", float("inf")), DESCRIBED),
        ("join", put(*INPUTS, 0, "median", -1e300), DESCRIBED),
        ("join", put("description", "within", {"age": [0, 1]}), DESCRIBED),
        ("join", put("description", "formats", "decimal", ","), DESCRIBED),
        ("join", put(*INPUTS, 0, "missing", [1, 2]), DESCRIBED),
        ("join", put(*INPUTS, 0, "missing", True), DESCRIBED),
        ("join", put(*INPUTS, 1, "categories", ["kind-1", "kind-1"]), DESCRIBED),
        ("join", repeat(*INPUTS), DESCRIBED),
        ("join", lambda message: message.fields["description"]["inputs"].reverse(), DESCRIBED),
        ("join", put("description", "targets", []), DESCRIBED),
        ("join", put("description", "targets", 0, "classes", ["1", "0"]), DESCRIBED),
        ("join", put("description", "clients", {"west": {"age": {"mean": 0, "deviation": 0, "median": 0}}}), DESCRIBED),
        ("join", put("task", {"name": "Regression", "mean": [float("nan")], "deviation": [1.0]}), "finite numbers"),
        ("join", lambda message: message.arrays.update(theta=message.arrays["theta"].long()), "is torch.int64"),
        ("round", put("train", {"a": {}}), COMPUTED),
        ("round", put("train", ["tuple"]), COMPUTED),
        ("round", put("train", ["kinfed.core.tasks:Classification", None]), "structure that this version"),
    ],
)
def test_what_a_server_makes_up_is_refused_in_a_line_and_leaves_no_mark(ward, tmp_path, capsys, kind, lie, why):
    """Nothing is computed, what is said is no fault of the site's file, and the honest message is answered after it."""
    sent = honest(ward, tmp_path)
    site, said = ward(folder="other")
    agree([planned()], site.folder)
    path, kinds = tmp_path / "other" / "west.agreed.json", ("hello", "describe", "join", "round")
    agreed = json.loads(path.read_text())  # with what else lies there: a note of a ledger, a run of another policy
    others = {"ledger": {"id": "0", "count": 1}, "run old": next(iter(agreed.values()))}
    path.write_text(json.dumps(agreed | others))
    for before in kinds[: kinds.index(kind)]:
        assert "refused" not in site.reply(before, sent[before][0]).fields
    message = copy.deepcopy(sent[kind][0])
    lie(message)
    said.clear()
    reply = site.reply(kind, message)
    assert re.search(why, reply.fields["refused"]), reply.fields
    assert not reply.arrays
    assert len(said) == 1
    assert "\n" not in said[0]
    assert "Traceback" not in capsys.readouterr().err
    assert "refused" not in site.reply(kind, sent[kind][0]).fields
