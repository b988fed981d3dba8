"""One site: what it refuses, what it remembers, and which model it ends with."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from kinfed import RunError, Split, UsageError, __version__
from kinfed.core.method import Params
from kinfed.core.tasks import Classification, Regression
from kinfed.data.federation import Federation
from kinfed_flower import plan
from kinfed_flower.site import site as module, site_examples
from kinfed_flower.site.model_store import ModelStore
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire import messages
from kinfed_flower.wire.messages import Message

TABLE = {
    "rounds": 9,
    "seed": 4,
    "model": {"name": "mlp", "hidden": [5]},
    "training": {"epochs": 1, "batch": 8, "optimiser": {"name": "sgd", "lr": 0.2}},
    "method": "fedamp",
}


@pytest.fixture
def site(tmp_path, examples):
    np.savez(tmp_path / "d.npz", **examples["d"])
    return Site("d", tmp_path / "d.npz", tmp_path / "state", "cpu", policy=Policy(runs="any"))


@pytest.fixture
def model():
    return plan.resolve(TABLE).model((6,), 3)


@pytest.fixture
def invitation(model):
    table = {key: value for key, value in plan.resolve(TABLE).table.items() if key != "flower"}
    words = {
        "experiment": "e1",
        "kinfed": __version__,
        "table": table,
        "shape": [6],
        "task": {"name": "Classification", "classes": 3},
        "outputs": 3,
        "layout": messages.layout_digest(model.layout),
        "accepted": -1,
    }
    return Message(words, {"theta": model.theta})


@pytest.fixture
def joined(site, invitation):
    assert "refused" not in site.reply("join", invitation).fields
    return site


def request(invitation, round=0, accepted=-1, scale=1.0, evaluate=None, **words):
    layout = invitation.fields["layout"]
    message = Message({"experiment": "e1", "layout": layout, "accepted": accepted, **words}, {})
    tree = Params(invitation.arrays["theta"] * scale)
    if round is not None:
        message.fields["round"] = round
        messages.put(tree, message, "train")
    if evaluate is not None:
        message.fields["evaluated"] = evaluate
        messages.put(tree, message, "evaluate")
    return message


def nested(depth):
    """What JSON can hold and no method sends."""
    return {"a": nested(depth - 1)} if depth else None


def theta(site, part="state"):
    return load_file(Path(site.folder) / "e1" / "state.safetensors")[f"{part}/theta"]


def test_a_greeting_is_answered_with_what_the_server_must_know_and_no_more(site):
    words = site.reply("hello", Message({}, {}))
    assert words.arrays == {}
    assert words.fields == {
        "client": "d",
        "kinfed": __version__,
        "shape": [6],
        "outputs": 3,
        "task": {"name": "Classification", "classes": 3},
        "columns": [],
    }


def test_a_message_answered_before_is_answered_again_from_memory(joined, invitation, monkeypatch):
    first = joined.reply("round", request(invitation))
    monkeypatch.setattr(module.Simulation, "train", lambda *_: pytest.fail("trained twice"))
    again = joined.reply("round", request(invitation))
    assert again.fields == first.fields
    assert torch.equal(again.arrays["upload/theta"], first.arrays["upload/theta"])


def test_training_that_the_server_did_not_count_is_undone(joined, invitation):
    start = theta(joined)
    first = joined.reply("round", request(invitation, 0))
    assert not torch.equal(theta(joined), start)
    assert torch.equal(theta(joined, "base"), start)
    lost = joined.reply("round", request(invitation, 1, accepted=-1))  # round 1's answer never arrived
    assert torch.equal(theta(joined, "base"), start)
    counted = joined.reply("round", request(invitation, 2, accepted=1))
    assert torch.equal(theta(joined, "base"), lost.arrays["upload/theta"])
    assert not torch.equal(counted.arrays["upload/theta"], first.arrays["upload/theta"])


def test_a_server_or_site_with_older_files_is_refused(joined, invitation):
    joined.reply("round", request(invitation, 0))
    joined.reply("round", request(invitation, 1, accepted=0))
    words = joined.reply("round", request(invitation, 2, accepted=-1)).fields["refused"]
    assert "the server last accepted round 0 of this client, but this site remembers only rounds 1 and 2" in words
    assert "delete" in words


def test_a_server_cannot_have_it_train_without_end(joined, invitation):
    """Each time from another model, and as if no upload had ever arrived: its nine rounds, and five again."""
    uploads = [joined.reply("round", request(invitation, 0, scale=1 + i / 100)) for i in range(15)]
    assert all("upload/theta" in reply.arrays for reply in uploads[:14])
    assert "training 14 of 9, which is all that its plan needs, and 5 repeated" in uploads[14].fields["refused"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda m: m.arrays.update({"train/theta": m.arrays["train/theta"] * torch.nan}), "holds NaN or infinity"),
        (lambda m: m.arrays.update({"train/theta": m.arrays["train/theta"][:-1]}), r"is torch.float32 \[52\], not"),
        (lambda m: m.arrays.update({"train/theta": m.arrays["train/theta"].double()}), "is torch.float64"),
        (lambda m: m.arrays.update({"train/more": torch.ones(1)}), "also has train/more"),
        (lambda m: m.arrays.clear(), "lacks train/theta"),
        (lambda m: m.fields.update(layout="other"), "other layers than this site's"),
        (lambda m: m.fields.update(train=["os:system", None]), "structure that this version of kinfed does not know"),
        (lambda m: m.fields.update(experiment="../../etc"), "an experiment's name consists of letters"),
        (lambda m: m.fields.update(round=0), "round 1 is over: the server accepted this client's round 1"),
        (lambda m: m.fields.update(round="1"), "the server's round must be a round; got '1'"),
        (lambda m: m.fields.update(accepted=0.0), "the server's accepted must be a round; got 0.0"),
        (
            lambda m: m.fields.update(evaluate=m.fields["train"], evaluated="../../e2/state"),
            "evaluated must be a round",
        ),
        (lambda m: m.fields.update(round=2**70), "the server's round must be a round; got 11805"),
        (lambda m: m.fields.pop("experiment"), "the server's experiment must be str; got None"),
        (lambda m: m.fields.update(selected=[3]), r"the server's selected must be dict; got \[3\]"),
        (lambda m: m.fields.update(train=nested(600)), "the message's train is nested too deeply"),
    ],
)
def test_a_wrong_message_is_refused_and_changes_nothing(joined, invitation, spoil, why):
    joined.reply("round", request(invitation, 0))
    before = (Path(joined.folder) / "e1" / "state.safetensors").read_bytes()
    message = request(invitation, 1, accepted=0)
    spoil(message)
    words = joined.reply("round", message).fields["refused"]
    assert re.search(why, words), words
    assert (Path(joined.folder) / "e1" / "state.safetensors").read_bytes() == before


def test_a_wrong_first_message_is_refused_by_the_model(joined, invitation):
    message = request(invitation)
    message.arrays["train/theta"] = torch.ones(7)
    assert "refused" in joined.reply("round", message).fields


def test_it_joins_only_what_it_runs_itself(site, invitation):
    other = Message(invitation.fields | {"kinfed": "0.0.9"}, invitation.arrays)
    assert f"runs kinfed {__version__}, the server 0.0.9" in site.reply("join", other).fields["refused"]
    other = Message(invitation.fields | {"shape": [7]}, invitation.arrays)
    assert "an example is [6] here but [7] at other sites" in site.reply("join", other).fields["refused"]
    other = invitation._replace(arrays={"theta": torch.zeros(9)})
    assert (
        "the server's model cannot be used: theta is torch.float32 [9], not torch.float32 [53]"
        in site.reply("join", other).fields["refused"]
    )
    other = invitation._replace(arrays={"theta": invitation.arrays["theta"] * torch.nan})
    assert "theta holds NaN or infinity" in site.reply("join", other).fields["refused"]
    other = Message(invitation.fields | {"layout": "another"}, invitation.arrays)
    assert "other layers than this site's" in site.reply("join", other).fields["refused"]
    other = Message(invitation.fields | {"outputs": 4}, invitation.arrays)
    assert "d.npz needs 3 outputs, but the server's model has 4" in site.reply("join", other).fields["refused"]
    other = Message(invitation.fields | {"outputs": 10**15}, invitation.arrays)  # of which nothing is built
    assert "allows 10,000,000 parameters" in site.reply("join", other).fields["refused"]
    other = Message(invitation.fields | {"shape": "six"}, invitation.arrays)
    assert "the server's shape must be list; got 'six'" in site.reply("join", other).fields["refused"]
    assert "it lacks theta" in site.reply("join", invitation._replace(arrays={})).fields["refused"]
    assert not list(Path(site.folder).glob("*/*"))
    assert site.reply("round", request(invitation)).fields == {"client": "d", "join": True}


def test_joining_twice_forgets_nothing(joined, invitation):
    first = joined.reply("round", request(invitation, 0))
    joined.reply("join", invitation)
    assert torch.equal(theta(joined), first.arrays["upload/theta"])


def test_another_experiment_is_another_folder(joined, invitation):
    joined.reply("round", request(invitation, 0))
    before = theta(joined)
    joined.reply("join", Message(invitation.fields | {"experiment": "e2"}, invitation.arrays))
    assert torch.equal(theta(joined), before)
    assert (Path(joined.folder) / "e2" / "state.safetensors").exists()


def test_damaged_files_are_reported_with_what_to_do(joined, invitation):
    (Path(joined.folder) / "e1" / "state.safetensors").write_bytes(b"broken")
    words = joined.reply("round", request(invitation)).fields["refused"]
    assert "cannot be read" in words
    assert "delete its folder to join again" in words


@pytest.mark.parametrize("words", [{}, {"state": "7"}, {"state": "{}"}, {"state": "[" * 9999}])
def test_a_state_from_elsewhere_is_reported_with_what_to_do(joined, invitation, words):
    path = Path(joined.folder) / "e1" / "state.safetensors"
    path.write_bytes(save(load_file(path), words))
    words = joined.reply("round", request(invitation)).fields["refused"]
    assert re.search(r"state.safetensors is not what this site wrote .* delete its folder to join again", words)


def test_scores_leave_the_site_and_models_do_not(joined, invitation):
    reply = joined.reply("round", request(invitation, None, evaluate=0))
    assert reply.arrays == {}
    assert {tuple(key) for *key, _ in reply.fields["scores"]} == {
        (name, split, metric)
        for name in ("own", "mixed")
        for split in ("validation", "test")
        for metric in ("accuracy", "loss")
    }


def test_the_model_is_the_one_of_the_chosen_kind_and_round(tmp_path, model):
    store = ModelStore(tmp_path, model)

    def named(round):
        return {"own": Params(torch.full((53,), float(round))), "mixed": Params(torch.full((53,), 10.0 + round))}

    def value():
        return float(load_file(tmp_path / "model.safetensors")["head.bias"][0])

    store.select({"judged": -1, "selected": {}, "chosen": ""})
    assert not (tmp_path / "model.safetensors").exists()
    store.save(0, named(0))
    store.select({"judged": -1, "selected": {}, "chosen": ""})
    assert value() == 0.0  # the headline, as nothing is known yet
    store.save(1, named(1))
    store.select({"judged": 0, "selected": {"own": 0, "mixed": 0}, "chosen": "mixed"})
    assert value() == 10.0
    store.save(2, named(2))
    store.select({"judged": 1, "selected": {"own": 0, "mixed": 1}, "chosen": "mixed"})
    assert value() == 11.0
    assert json.loads((tmp_path / "model.json").read_text()) == {"round": 2, "model": "mixed"}
    store.select({"judged": 2, "selected": {"own": 0, "mixed": 1}, "chosen": "own"})
    assert value() == 0.0
    assert {p.stem for p in (tmp_path / "models").iterdir()} == {"0", "1", "2"}
    store.save(3, named(3))
    store.select({"judged": 3, "selected": {"own": 3, "mixed": 3}, "chosen": "own"})
    assert {p.stem for p in (tmp_path / "models").iterdir()} == {"3"}
    assert value() == 3.0


def test_a_client_that_was_away_in_the_best_round_has_its_latest(tmp_path, model):
    store = ModelStore(tmp_path, model)
    store.save(5, {"own": Params(torch.full((53,), 5.0))})
    store.select({"judged": 5, "selected": {"own": 2}, "chosen": "own"})
    assert load_file(tmp_path / "model.safetensors")["head.bias"].tolist() == [5.0] * 3


def test_one_file_is_divided_as_in_a_simulation(tmp_path):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 6, generator=draw), torch.randint(0, 3, (60,), generator=draw)
    owner = np.array(["ann"] * 25 + ["bob"] * 35)
    whole = Federation.from_arrays(x, y, owner, split=Split(0.3, 0.2), seed=4)
    planned = plan.resolve({**TABLE, "federation": {"split": {"test": 0.3, "validation": 0.2}}})
    for i, name in enumerate(("ann", "bob")):
        mine = owner == name
        np.savez(tmp_path / f"{name}.npz", x=x[mine].numpy(), y=y[mine].numpy())
        alone = site_examples.SiteArrays(tmp_path / f"{name}.npz", name).federate(
            {}, Classification(3), planned.split, planned.learning.seed
        )
        for split in ("train", "validation", "test"):
            assert torch.equal(alone.x[alone.rows[split][0]], whole.x[whole.rows[split][i]])
            assert torch.equal(alone.y[alone.rows[split][0]], whole.y[whole.rows[split][i]])


def test_given_parts_stay_and_validation_comes_off_the_training_examples(tmp_path):
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 3
    np.savez(tmp_path / "a.npz", x_train=x[:15], y_train=y[:15], x_test=x[15:], y_test=y[15:])
    planned = plan.resolve({**TABLE, "federation": {"split": {"validation": 0.2}}})
    made = site_examples.SiteArrays(tmp_path / "a.npz", "a").federate(
        {}, Classification(3), planned.split, planned.learning.seed
    )
    assert torch.equal(made.x[made.rows["test"][0]], torch.from_numpy(x[15:]))
    train, validation = (made.x[made.rows[split][0]] for split in ("train", "validation"))
    assert (len(train), len(validation)) == (12, 3)
    assert sorted(torch.cat((train, validation))[:, 0].tolist()) == x[:15, 0].tolist()


def test_arrays_have_example_weights_beside_them(tmp_path):
    x, y, weight = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2, np.arange(20) / 4
    planned = plan.resolve({**TABLE, "federation": {"split": {"validation": 0.2}}})
    parts = {"x_train": x[:15], "y_train": y[:15], "x_test": x[15:], "y_test": y[15:]}

    def federate(**arrays):
        np.savez(tmp_path / "a.npz", **arrays)
        data = site_examples.find(tmp_path / "a.npz", "a", Reading())
        return data.federate({}, Classification(2), planned.split, planned.learning.seed)

    for made in (
        federate(x=x, y=y, weight=weight),
        federate(**parts, weight_train=weight[:15], weight_test=weight[15:]),
    ):
        rows = torch.cat([made.rows[split][0] for split in ("train", "validation", "test")])
        assert sorted(made.x[rows][:, 0].tolist()) == x[1:, 0].tolist()  # the first counts as no row
        assert made.weights[rows].tolist() == pytest.approx((made.x[rows][:, 0] / 8).tolist())
    for arrays, problem in (
        ({"x": x, "y": y, "weight": weight[:5]}, r"weight must be a number for each of y's 20; got float64 \[5\]"),
        ({"x": x, "y": y, "weight": -weight}, "weight must be finite numbers from 0"),
        ({"x": x, "y": y, "weight": 0 * weight}, "at least one of them above"),
        ({**parts, "weight_train": weight[:15]}, "needs weight_train, weight_test, and holds weight_train"),
    ):
        with pytest.raises(UsageError, match=problem):
            federate(**arrays)


def test_images_and_targets(tmp_path):
    planned = plan.resolve(TABLE)
    images = np.array([0, 255] * 8, np.uint8).reshape(8, 1, 1, 2)
    np.savez(tmp_path / "i.npz", x=images, y=np.arange(8) % 2)
    made = site_examples.SiteArrays(tmp_path / "i.npz", "i").federate(
        {}, Classification(2), planned.split, planned.learning.seed
    )
    assert made.x.dtype == torch.float32
    assert made.x.unique().tolist() == [-1.0, 1.0]
    np.savez(tmp_path / "t.npz", x=np.ones((8, 2)), y=np.linspace(0, 1, 16).reshape(8, 2))
    made = site_examples.SiteArrays(tmp_path / "t.npz", "t").federate(
        {}, Regression(), planned.split, planned.learning.seed
    )
    assert (made.x.dtype, made.y.dtype, made.outputs) == (torch.float32, torch.float32, 2)
    with pytest.raises(UsageError, match="y must be labels, as at the other sites"):
        site_examples.SiteArrays(tmp_path / "t.npz", "t").federate(
            {}, Classification(2), planned.split, planned.learning.seed
        )


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"x": np.ones((3, 2))}, r"as many x as y, and at least one; got 3 of x"),
        ({"x": np.ones((3, 2)), "y": np.ones(4, int)}, "got 3 of x and 4 of y"),
        ({"x": np.ones((0, 2)), "y": np.ones(0, int)}, "got 0 of x and 0 of y"),
        ({"z": np.ones(3)}, "must hold x and y, or x_train, y_train, x_test and y_test; it holds none"),
        ({"x_train": np.ones((3, 2)), "y_train": np.ones(3, int)}, "must hold x and y, or"),
        ({"x": np.ones(3), "y": np.ones(3, int)}, r"x must be numbers \[n, ...\]"),
        ({"x": np.ones((3, 2)), "y": np.array(list("abc"))}, "got float64 .* and <U1"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, arrays, why):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UsageError, match=why) as caught:
        site_examples.read(tmp_path / "bad.npz")
    assert "bad.npz" in str(caught.value)


def test_other_kinds_of_files_are_refused_by_name(tmp_path):
    (tmp_path / "data.xyz").touch()
    with pytest.raises(UsageError, match=r"data.xyz: a site's examples must be in a file .npz, .csv or .parquet"):
        site_examples.find(tmp_path / "data.xyz", "d", Reading())
    (tmp_path / "cut.npz").write_bytes(b"PK")
    with pytest.raises(RunError, match=r"cut.npz cannot be read"):
        site_examples.read(tmp_path / "cut.npz")
