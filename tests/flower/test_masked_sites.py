"""Masked rounds of sites: equal to plain ones, whoever vanishes; nothing at the server holds an upload."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kinfed import __version__
from kinfed.core.method import AveragedParams, SharedParams
from kinfed.core.private.privacy import Privacy, noise_for
from kinfed.core.private.private_training import SecretLots
from kinfed.errors import RunError, UsageError
from kinfed.report.page.html_page import page
from kinfed_flower import plan
from kinfed_flower.masking.fixed_point import FixedPoint
from kinfed_flower.masking.member import Member
from kinfed_flower.masking.upload_numbers import check_digits, find_largest, flatten_upload, read_sum
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.gateway import Gateway, split_by_client
from kinfed_flower.site.masked_rounds import MaskedRounds
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire import keys
from kinfed_flower.wire.messages import Failure, Message

NAMES = [f"site{i}" for i in range(10)]
JOINING = {"task": {"name": "Classification", "classes": 2}, "shape": [6], "outputs": 2, "layout": ""}


class Network(Here):
    """Sites in this process, of which some do not answer: `silent` holds (site, kind, round from 1)."""

    def __init__(self, sites, silent=()):
        super().__init__(sites)
        self.silent, self.seen, self.changes = set(silent), [], {}

    def push(self, node, kind, message, seconds):
        name, round = self.sites[node].name, int(message.fields.get("round", -1)) + 1
        message = self.changes.get((name, kind, round), lambda sent: sent)(message)
        self.seen.append((name, kind, "sent", message))
        if (name, kind, round) in self.silent:
            id = f"lost {len(self.seen)}"
            self._arrived[id] = Failure("it crashed", False)
            return id
        id = super().push(node, kind, message, seconds)
        self.seen.append((name, kind, "come", self._arrived[id]))
        return id


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    for name, module in (("LOOK", "broker"), ("RETRY", "broker"), ("RETRY", "nodes"), ("LATER", "nodes")):
        monkeypatch.setattr(f"kinfed_flower.server.{module}.{name}", 0.0)


def make_sites(folder, names=NAMES, masks=MaskedRounds, classes=2, **how):
    draw, made = torch.Generator().manual_seed(5), []
    for i, name in enumerate(names):
        (folder / "sites").mkdir(exist_ok=True)
        x = torch.randn(20 + i, 6, generator=draw)
        y = (x[:, 0] + 0.3 * x[:, i % 6] > 0).long()
        y = y + (classes - 2) * (x[:, 1] > 0.5)
        parts = {"test": slice(0, 4), "validation": slice(4, 8), "train": slice(8, None)}
        arrays = {f"{k}_{part}": t[at].numpy() for part, at in parts.items() for k, t in (("x", x), ("y", y))}
        path = folder / "sites" / f"{name}.npz"
        np.savez(path, **arrays)
        policy = how.get("policy") or Policy(runs="any")
        made.append(Site(name, path, folder / "sites", "cpu", Reading(few_rows=True), policy=policy, masks=masks(name)))
    return made


def planned(method="fedavg", masked=True, rounds=3, model=None, participation=1.0, privacy=None, **flower):
    private = {"privacy": {"masked": True, "members": 5, **(privacy or {})}} if masked else {}
    table = {
        "rounds": rounds,
        "participation": participation,
        "model": model or {"name": "mlp", "hidden": [5]},
        "training": {"epochs": 1, "batch": 8},
        "method": {"name": method} if isinstance(method, str) else method,
        "flower": {"clients": 10, "classes": 2, "beside": [], "quorum": 0.3, **flower},
    }
    return plan.resolve(private | table)


def run(folder, network, plan_, name="run"):
    lines = []
    summary = serve(plan_, network, folder / name, lines.append, 0.001)
    return summary, lines


def states(folder, experiment):
    """Private states of all sites, and the last shared model that each has kept."""
    from safetensors.torch import load_file

    return {
        path.parent.parent.name: {k: t for k, t in load_file(path).items() if k.startswith("state/")}
        for path in (folder / "sites").glob(f"*/{experiment}/state.safetensors")
    }


def last_model(network):
    """What the server has last sent to train from, or to evaluate."""
    sent = [m.arrays for _, kind, way, m in network.seen if kind == "round" and way == "sent" and m.arrays]
    return {name.partition("/")[2]: t for name, t in sent[-1].items()} if sent else {}


@pytest.mark.parametrize(
    "method", ["fedavg", "fedrep", "scaffold", "ditto", "fedem", "ifca", "local", "private-pooling"]
)
def test_ten_masked_sites_learn_what_plain_ones_learn(tmp_path, method):
    """A linear model is of labels of three classes."""
    ends = {}
    linear = method == "private-pooling"
    classes, model = (3, {"name": "linear"}) if linear else (2, None)
    for masked in (False, True):
        folder = tmp_path / str(masked)
        folder.mkdir()
        network = Network(make_sites(folder, classes=classes))
        summary, lines = run(folder, network, planned(method, masked, model=model, classes=classes))
        ends[masked] = last_model(network), summary.scores, states(folder, summary.sites.experiment)
        assert summary.rounds == 3
        assert any("masks:" in line for line in lines) is masked
    for plain, hidden in zip(ends[False][:1], ends[True][:1], strict=True):
        assert plain.keys() == hidden.keys()
        for name, t in plain.items():
            torch.testing.assert_close(hidden[name], t, rtol=1e-5, atol=1e-6)
    for name, state in ends[False][2].items():
        for field, t in state.items():
            torch.testing.assert_close(ends[True][2][name][field], t, rtol=1e-5, atol=1e-6)


def plain_uploads(folder, method="fedavg"):
    """Each site's uploads, in rounds without masks; the same to rounding as those under masks."""
    folder.mkdir()
    network = Network(make_sites(folder))
    run(folder, network, planned(method, masked=False))
    return [
        (name, m.fields["round"], {k: t for k, t in m.arrays.items() if k.startswith("upload/")})
        for name, kind, way, m in network.seen
        if kind == "round" and way == "come" and "upload" in m.fields
    ]


def test_nothing_that_the_server_has_holds_an_upload(tmp_path):
    uploads = plain_uploads(tmp_path / "plain")
    folder = tmp_path / "masked"
    folder.mkdir()
    network = Network(make_sites(folder))
    _, lines = run(folder, network, planned())
    seen = [m for _, _, way, m in network.seen if way == "come"]
    assert not any(name.startswith("upload") for m in seen for name in m.arrays)
    texts = b"".join(path.read_bytes() for path in sorted((folder / "run").rglob("*")) if path.is_file())
    texts += json.dumps([m.fields for m in seen]).encode() + "\n".join(lines).encode()
    for _, round, arrays in uploads:
        for t in arrays.values():
            whole = t.numpy()
            assert whole.tobytes()[:64] not in texts
            if round:
                continue  # of later rounds it differs in the last digits
            for m in seen:
                for array in m.arrays.values():
                    numbers = array.numpy().reshape(-1).astype(np.float64)
                    if len(numbers) < len(whole.reshape(-1)):
                        continue
                    part = numbers[: whole.size] - numbers[: whole.size].mean()
                    assert abs(np.corrcoef(part, whole.reshape(-1))[0, 1]) < 0.7
    stored = (folder / "sites").glob("*/*/state.safetensors")
    assert not [path for path in stored if b"upload/" in path.read_bytes()]


@pytest.mark.parametrize("kind", ["offer", "share", "round", "confirm", "reveal"])
def test_members_that_vanish_in_a_phase_cost_the_round_nothing(tmp_path, kind):
    gone = [NAMES[2], NAMES[7]]
    network = Network(make_sites(tmp_path), silent=[(name, kind, 2) for name in gone])
    plain = tmp_path / "plain"
    plain.mkdir()
    late = kind in ("confirm", "reveal")  # once all uploads have come
    unmasked = Network(make_sites(plain), silent=[] if late else [(name, "round", 2) for name in gone])
    how = {"deadline": 1.0}
    summary, _ = run(tmp_path, network, planned(**how))
    run(plain, unmasked, planned(masked=False, **how))
    rows = [line.split(",") for line in (tmp_path / "run" / "bytes.csv").read_text().splitlines()[1:]]
    used = {(name, int(round)) for name, round, *_, flag in rows if flag == "1"}
    here = NAMES if late else [name for name in NAMES if name not in gone]
    assert {name for name, round in used if round == 2} == {*here}
    assert {name for name, round in used if round == 3} == {*NAMES}
    assert summary.rounds == 3
    for name, t in last_model(unmasked).items():
        torch.testing.assert_close(last_model(network)[name], t, rtol=1e-5, atol=1e-6)


def test_a_round_of_too_few_members_is_skipped_and_the_next_goes_on(tmp_path):
    network = Network(make_sites(tmp_path), silent=[(name, "reveal", 2) for name in NAMES[:5]])
    summary, lines = run(tmp_path, network, planned(deadline=1.0))
    assert any("skipped round 2: 5 sites gave revealed" in line for line in lines) or any(
        re.search(r"skipped round 2: .* 6 must", line) for line in lines
    )
    assert summary.rounds == 3


def restarted(network, name, masks=MaskedRounds):
    """The site as it is after its program was started anew."""
    at = next(i for i, site in enumerate(network.sites) if site.name == name)
    old = network.sites[at]
    network.sites[at] = Site(
        name, old._data, old.folder.parent, "cpu", Reading(few_rows=True), policy=old._policy, masks=masks(name)
    )


@pytest.mark.parametrize("kind", ["share", "round", "confirm", "reveal"])
def test_a_site_that_is_started_anew_sits_out_the_round_and_takes_part_in_the_next(tmp_path, kind):
    network = Network(make_sites(tmp_path))

    def restart(message):
        restarted(network, NAMES[3])
        return message

    network.changes[NAMES[3], kind, 2] = restart
    summary, lines = run(tmp_path, network, planned(deadline=1.0))
    assert summary.rounds == 3
    assert any(f"left client {NAMES[3]} out: it has no keys of this round" in line for line in lines)
    rounds = [
        m.fields["round"]
        for name, k, way, m in network.seen
        if (name, k, way) == (NAMES[3], "round", "come") and "masked" in m.arrays
    ]
    assert rounds == ([0, 1, 2] if kind in ("confirm", "reveal") else [0, 2])


def last(network, site, kind, way="sent"):
    """The last message of a kind to a site, or from it."""
    found = [m for name, k, w, m in network.seen if (name, k, w) == (site.name, kind, way)]
    return next(m for m in reversed(found) if kind != "round" or "round" in m.fields)


def ask(network, site, kind, **words):
    """What a site answers to the last message of a kind with other words."""
    message = last(network, site, kind)
    return site.reply(kind, message._replace(fields=message.fields | words)).fields


def test_a_replay_is_answered_by_the_same_bytes_and_nothing_is_masked_twice(tmp_path):
    network, replayed = Network(make_sites(tmp_path)), []

    def replay(message):
        """As its own upload of round 2 is to be opened, a site is sent the round again, as it was, and changed."""
        site = network.sites[0]
        sent, reply = last(network, site, "round"), last(network, site, "round", "come")
        replayed.append((reply, site.reply("round", sent)))
        boxes = dict(reversed(sent.fields["boxes"].items()))
        replayed.append(site.reply("round", sent._replace(fields=sent.fields | {"boxes": boxes, "judged": 0})).fields)
        return message

    network.changes[NAMES[0], "reveal", 2] = replay
    run(tmp_path, network, planned())
    (first, second), changed = replayed
    assert torch.equal(first.arrays["masked"], second.arrays["masked"])
    assert "masked already" in changed["refused"]
    site = network.sites[0]
    assert "refused" in ask(network, site, "round")
    assert "it has masked an upload of round 3, and masks none of that" in ask(network, site, "offer")["refused"]
    restarted(network, site.name)
    site = network.sites[0]
    assert "it has masked an upload of round 3" in ask(network, site, "offer")["refused"]
    assert "no keys of this round" in ask(network, site, "reveal")["refused"]


def test_a_masked_upload_that_is_asked_for_again_is_in_no_file_of_a_site_that_was_started_anew(tmp_path):
    network, replies = Network(make_sites(tmp_path)), []

    def replay(message):
        sent = last(network, network.sites[3], "round")
        restarted(network, NAMES[3])
        replies.append(network.sites[3].reply("round", sent))
        return message

    network.changes[NAMES[3], "confirm", 2] = replay
    summary, _ = run(tmp_path, network, planned(deadline=1.0))
    assert "it has no keys of this round" in replies[0].fields["refused"]
    assert not replies[0].arrays
    assert summary.rounds == 3


def test_a_site_reveals_nothing_unless_enough_have_confirmed_the_same_uploads(tmp_path):
    network = Network(make_sites(tmp_path))

    def cut(message):
        tags = dict([*message.fields["tags"].items()][:3])
        return message._replace(fields=message.fields | {"tags": tags})

    network.changes[NAMES[4], "reveal", 2] = cut
    summary, lines = run(tmp_path, network, planned(deadline=1.0))
    assert any(f"left client {NAMES[4]} out: 4 members have confirmed the same list" in line for line in lines)
    assert summary.rounds == 3
    assert not any("skipped" in line for line in lines)


def test_reveal_and_share_are_answered_once(tmp_path):
    network = Network(make_sites(tmp_path))
    run(tmp_path, network, planned())
    site = network.sites[0]
    first = ask(network, site, "reveal")
    assert first == last(network, site, "reveal", "come").fields
    assert "once in a round" in ask(network, site, "reveal", tags={})["refused"]
    assert "once in a round" in ask(network, site, "confirm", uploaded=NAMES[:6])["refused"]
    listed = last(network, site, "share").fields["keys"]
    others = listed | {NAMES[1]: Member(NAMES[1], 5, b"").keys.to_json()}
    assert "shared its secrets of this round already" in ask(network, site, "share", keys=others)["refused"]


def test_a_server_that_sends_one_site_another_model_gets_nothing_of_it(tmp_path):
    network = Network(make_sites(tmp_path))

    def crafted(message):
        arrays = {k: t + 1 if k.startswith("train/") else t for k, t in message.arrays.items()}
        return message._replace(arrays=arrays)

    network.changes[NAMES[4], "round", 2] = crafted
    _, lines = run(tmp_path, network, planned(deadline=1.0))
    assert any(f"left client {NAMES[4]} out: the server has sent another model" in line for line in lines)

    def lie(message):
        return message._replace(fields=message.fields | {"model": "0" * 64})

    (tmp_path / "run").rename(tmp_path / "first")
    network = Network(make_sites(tmp_path))
    network.changes[NAMES[4], "offer", 2] = lie
    _, lines = run(tmp_path, network, planned(deadline=1.0, rounds=2))
    assert any("cannot be opened" in line for line in lines)
    assert any("skipped round 2" in line for line in lines)


@pytest.mark.parametrize("name", ["kin", "fedaghn", "pfedgat", "fedsem", "cfl"])
def test_a_method_that_needs_single_uploads_is_refused_before_it_has_any(tmp_path, name):
    network = Network(make_sites(tmp_path))
    with pytest.raises(UsageError, match=r"of each client's upload, and privacy\.masked=true .*'fedavg'") as problem:
        run(tmp_path, network, planned(name))
    assert "\n" not in str(problem.value)
    assert not {kind for _, kind, _, _ in network.seen} & {"offer", "round"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clients": 4}, r"privacy\.members=5 .* flower\.clients=4"),
        ({"stale": "drop"}, r"flower\.stale"),
        ({"privacy": {"epsilon": 2.0, "unit": "client", "masked": False}}, r"set privacy\.masked=true as well"),
        ({"privacy": {"members": 2}}, r"privacy\.members must be"),
        ({"privacy": {"epsilon": 2.0, "unit": "client", "delta": 0.2}}, r"privacy\.delta must be below 1 / clients"),
    ],
)
def test_plans_whose_masks_could_not_hold_are_refused(settings, why):
    with pytest.raises(UsageError, match=why) as problem:
        planned(**settings)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        ({"epsilon": 2.0, "unit": "client", "clip": 1e-320}, "too small for a masked sum"),
        ({"largest": 1e18}, "leaves no digits for the sum"),
        ({"largest": 4e9}, r"privacy\.rows=1,000,000 leave too few digits for a mean over sites of 10 rows"),
        ({"rows": 2**31 - 1, "largest": 1e6}, "leave too few digits"),
    ],
)
def test_a_plan_whose_masks_leave_too_few_digits_is_refused_by_server_and_site(tmp_path, privacy, why):
    network = Network(make_sites(tmp_path))
    with pytest.raises(UsageError, match=why):
        run(tmp_path, network, planned(privacy=privacy))
    assert not network.seen
    table = planned(privacy=privacy).table
    reply = network.sites[0].reply(
        "join", Message({"experiment": "e", "kinfed": __version__, **JOINING, "table": table}, {})
    )
    assert re.search(why, reply.fields["refused"])


def test_a_plan_at_the_limit_of_its_digits_keeps_the_mean():
    """Of sites of ten rows, whose share in the sum is the least; the limit is where rounding moves a mean by 1e-4."""
    privacy = Privacy(masked=True, members=5, largest=2.0**29, rows=20_000)
    check_digits(privacy, 3)
    with pytest.raises(UsageError, match="too few digits"):
        check_digits(replace(privacy, largest=2.0**38), 3)
    form = FixedPoint(privacy.largest, 5)
    theta = torch.linspace(-0.3, 0.3, 50, dtype=torch.float64)
    sent, uploads = SharedParams(theta * 0), [AveragedParams(theta + i) for i in range(5)]
    total = sum(form.encode(flatten_upload(privacy, 3, sent, upload, 10.0)) for upload in uploads)
    mean = read_sum(privacy, 3, sent, uploads[0], form.decode(total)).theta
    torch.testing.assert_close(mean, theta + 2, rtol=0, atol=1e-4)


def test_masked_sites_compare_with_what_they_could_do_alone_and_with_fedavg(tmp_path):
    """A site knows nothing of the server's deployment, and fewer sites may be left for FedAvg than began."""
    network = Network(make_sites(tmp_path))
    summary, lines = run(tmp_path, network, planned("scaffold", rounds=1, beside=["local", "fedavg"]))
    assert not [m for _, kind, way, m in network.seen if (kind, way) == ("verdict", "come") and "refused" in m.fields]
    assert summary.verdict["over"]["alone"]["mean"] is not None
    assert (tmp_path / "run" / "beside" / "fedavg" / "summary.json").exists(), lines


def test_a_draw_of_too_few_sites_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"4 sites are drawn for a round, and privacy\.members=5"):
        run(tmp_path, Network(make_sites(tmp_path)), planned(participation=0.4))


def test_a_policy_that_requires_masks_wins_over_the_plan(tmp_path):
    rules = Policy(runs="any", masked="required")
    with pytest.raises(RunError):
        run(tmp_path, network := Network(make_sites(tmp_path, policy=rules)), planned(masked=False))
    told = [m.fields for _, kind, way, m in network.seen if kind == "join" and way == "come"]
    assert all("its policy asks for masks" in words["refused"] for words in told)
    run(tmp_path, Network(make_sites(tmp_path, policy=rules)), planned(), "second")


def test_a_site_without_memory_for_secrets_says_so(tmp_path):
    with pytest.raises(RunError):
        run(tmp_path, network := Network(make_sites(tmp_path, masks=lambda name: None)), planned())
    told = [m.fields for _, kind, way, m in network.seen if kind == "join" and way == "come"]
    assert all("start it with kinfed flower node" in words["refused"] for words in told)


@pytest.mark.parametrize(
    ("privacy", "why"), [({"largest": 0.01}, r"above privacy\.largest"), ({"rows": 15}, r"more than privacy\.rows")]
)
def test_a_site_whose_numbers_the_plan_does_not_hold_says_so(tmp_path, privacy, why):
    with pytest.raises(RunError):
        run(tmp_path, network := Network(make_sites(tmp_path)), planned(privacy=privacy, deadline=1.0))
    told = [m.fields["refused"] for _, k, way, m in network.seen if way == "come" and "refused" in m.fields]
    assert any(re.search(why, line) for line in told)


class Stopped(Exception):
    """The server was killed."""


@pytest.mark.parametrize("kind", ["share", "round", "confirm", "reveal"])
def test_a_server_that_was_killed_in_a_phase_skips_the_round_at_most(tmp_path, kind):
    network = Network(make_sites(tmp_path))

    def kill(message):
        raise Stopped

    network.changes[NAMES[9], kind, 2] = kill
    with pytest.raises(Stopped):
        run(tmp_path, network, planned(deadline=1.0, rounds=4))
    network.changes.clear()
    begun = len(network.seen)
    summary, lines = run(tmp_path, network, planned(deadline=1.0, rounds=4))
    assert summary.rounds == 4
    skipped = any(line.startswith("skipped round 2") for line in lines)
    assert skipped is (kind != "share")  # else most sites have masked an upload of it, and mask no other
    sent = [m.fields["round"] for _, k, way, m in network.seen[begun:] if k == "reveal" and way == "sent"]
    assert {*sent} == ({1, 2, 3} if not skipped else {2, 3})


def test_no_single_upload_is_measured(tmp_path):
    run(tmp_path, Network(make_sites(tmp_path)), planned())
    table = tmp_path / "run" / "diagnostics.csv"
    assert not table.exists() or "update" not in table.read_text()


CLIENT = {"epsilon": 8.0, "delta": 1e-3, "unit": "client", "clip": 0.5}


def shared_models(network):
    """The models that the server has sent to train from, by round."""
    return {
        m.fields["round"]: m.arrays["train/theta"].double()
        for _, kind, way, m in network.seen
        if kind == "round" and way == "sent" and "train" in m.fields
    }


def test_clients_have_an_epsilon_by_noise_that_they_make_together(tmp_path):
    pytest.importorskip("dp_accounting")
    network = Network(make_sites(tmp_path))
    summary, _ = run(tmp_path, network, planned(privacy=CLIENT))
    assert summary.privacy["unit"] == "client"
    assert summary.privacy["steps"] == [3] * 10
    assert 0.97 * 8 < max(summary.privacy["spent"]) <= 8
    ledger = json.loads((tmp_path / "sites" / "site3.privacy.json").read_text())
    noise = noise_for(8.0, 1e-3, 1.0, 3)
    assert ledger["runs"] == [{"run": summary.sites.experiment, "rate": 1.0, "noise": noise, "steps": 3}]
    assert all("scores" not in m.fields for _, _, way, m in network.seen if way == "come")
    again = Network(make_sites(tmp_path))
    with pytest.raises(RunError):
        run(tmp_path, again, planned(privacy=CLIENT, deadline=1.0), "again")
    told = [m.fields["refused"] for _, k, way, m in again.seen if way == "come" and "refused" in m.fields]
    assert any("its rows have cost epsilon" in line for line in told)
    assert not [m for _, _, way, m in again.seen if way == "come" and "masked" in m.arrays]


def test_the_noise_of_the_least_number_of_sites_is_the_whole(monkeypatch):
    """The sum of what `members` sites put under their masks, less what they would without noise."""
    pytest.importorskip("dp_accounting")
    privacy = Privacy(8.0, unit="client", clip=0.5, masked=True, members=4, delta=1e-3)
    sent, upload = SharedParams(torch.ones(5000)), AveragedParams(torch.ones(5000) + 1.0)
    drawn = sum(flatten_upload(privacy, 3, sent, upload, 7.0) for _ in range(4))
    deviation = noise_for(8.0, 1e-3, 1.0, 3) * 0.5
    clipped = 4 * 0.5 / 5000**0.5
    assert drawn[-1] == 4
    assert (drawn[:-1] - clipped).std() == pytest.approx(deviation, rel=0.05)
    assert abs((drawn[:-1] - clipped).mean()) < 5 * deviation / 5000**0.5
    given = read_sum(privacy, 3, sent, AveragedParams(torch.zeros(5000)), drawn)
    torch.testing.assert_close(given.theta.double(), 1 + torch.from_numpy(drawn[:-1]) / 4, rtol=1e-6, atol=1e-6)
    assert np.abs(drawn[:-1]).max() < 4 * find_largest(privacy, 3)
    monkeypatch.setattr(SecretLots, "draw_normal", lambda self, key, like: torch.zeros_like(like))
    quiet = flatten_upload(privacy, 3, sent, upload, 7.0)
    assert np.linalg.norm(quiet[:-1]) == pytest.approx(0.5)


def test_noise_is_the_sites_own_and_differs_from_run_to_run(tmp_path):
    pytest.importorskip("dp_accounting")
    ends = []
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        network = Network(make_sites(folder))
        run(folder, network, planned(privacy=CLIENT))
        ends.append(shared_models(network))
    assert torch.equal(ends[0][0], ends[1][0])
    assert float((ends[0][1] - ends[1][1]).norm()) > 0.01


def test_a_policy_takes_shared_noise_only_if_it_says_so(tmp_path):
    pytest.importorskip("dp_accounting")
    for masked, name in (("", "trusts nobody"), ("required", "shares")):
        (folder := tmp_path / name).mkdir()
        network = Network(make_sites(folder, policy=Policy(runs="any", epsilon=9.0, delta=0.01, masked=masked)))
        if masked:
            assert run(folder, network, planned(privacy=CLIENT))[0].rounds == 3
            continue
        with pytest.raises(RunError):
            run(folder, network, planned(privacy=CLIENT))
        told = [m.fields["refused"] for _, k, way, m in network.seen if way == "come" and "refused" in m.fields]
        assert all("needs no trust in others" in line for line in told)


def test_signed_keys_of_members_alone_are_summed(tmp_path):
    keys.make(tmp_path / "keys", [], NAMES)
    trusted = tmp_path / "members.txt"
    lines = [f"{name} {(tmp_path / 'keys' / 'sites' / name / 'key.pub').read_text()}" for name in NAMES]
    trusted.write_text("".join(lines))

    def signed(name):
        return MaskedRounds(name, tmp_path / "keys" / "sites" / name / "key", str(trusted))

    summary, _ = run(tmp_path, Network(make_sites(tmp_path, masks=signed)), planned())
    assert summary.rounds == 3
    trusted.write_text("".join(lines[:-1]))
    network = Network(make_sites(tmp_path, masks=signed))
    with pytest.raises(RunError, match="so its sum stays closed"):
        run(tmp_path, network, planned(deadline=1.0), "with a stranger")
    told = [m.fields["refused"] for _, k, way, m in network.seen if k == "share" and "refused" in m.fields]
    assert all("site9, which is not in this site's file of members" in line for line in told)


def test_many_clients_of_gateways_are_members_of_their_own(tmp_path):
    """Two gateways of 25 clients and two single sites, with masks and without."""
    ends = []
    for masked in (False, True):
        (folder := tmp_path / str(masked)).mkdir()
        made, draw = [], np.random.default_rng(1)
        for site in ("g", "h"):
            rows = [
                f"{x:.3f},{z:.3f},{'yes' if x > z else 'no'},w{i % 25}"
                for i, (x, z) in enumerate(draw.normal(size=(600, 2)))
            ]
            (folder / f"{site}.csv").write_text("\n".join(["p,q,y,ward", *rows]) + "\n")
            files = split_by_client(folder / f"{site}.csv", "ward", site, folder / "parts")
            reading = Reading(target="y", few_rows=True, client="ward")
            made.append(
                Gateway(site, files, folder / "sites", "cpu", reading, (), lambda line: None, Policy(runs="any"))
            )
        for name in ("s", "t"):
            lines = (folder / "g.csv").read_text().splitlines()
            (folder / f"{name}.csv").write_text(
                "\n".join(line.rpartition(",")[0] for line in lines[: 40 + 10 * (name == "t")]) + "\n"
            )
            reading = Reading(target="y", few_rows=True)
            policy = Policy(runs="any")
            made.append(
                Site(
                    name,
                    folder / f"{name}.csv",
                    folder / "sites",
                    "cpu",
                    reading,
                    policy=policy,
                    masks=MaskedRounds(name),
                )
            )
        network = Here(made)
        raw = {"rounds": 2, "method": "fedrep", "model": {"name": "mlp", "hidden": [4]}}
        raw |= {"flower": {"clients": 52, "beside": []}} | (
            {"privacy": {"masked": True, "members": 40}} if masked else {}
        )
        summary = serve(plan.resolve(raw), network, folder / "run", lambda line: None, 0.0)
        assert summary.rounds == 2
        assert len(summary.clients.names) == 52
        ends.append(states(folder, summary.sites.experiment))
    assert ends[0].keys() == ends[1].keys()
    for name, state in ends[0].items():
        for field, t in state.items():
            torch.testing.assert_close(ends[1][name][field], t, rtol=1e-4, atol=1e-5)


PUBLIC = {"age": [0, 100], "ward": ["a", "b"], "cost": [0, 12]}


@pytest.mark.parametrize(
    ("method", "model", "privacy"),
    [
        ("private-pooling", "linear", {"epsilon": 8.0, "delta": 1e-3, "unit": "client", "columns": PUBLIC}),
        ("mixed-model", "linear", {}),
        ({"name": "mixed-model", "random": "age intercept"}, "linear", {}),
        ("personal-boosting", "trees", {}),
    ],
)
def test_tables_of_numbers_are_learned_from_sums_alone(tmp_path, method, model, privacy):
    if privacy:
        pytest.importorskip("dp_accounting")
    made = []
    for i, name in enumerate(NAMES):
        draw = np.random.default_rng(i)
        age, ward = draw.normal(50, 10, 60), draw.integers(0, 2, 60)
        cost = age / 10 + ward + draw.normal(0, 0.5) + draw.normal(0, 0.3, 60)
        cells = [f"{a:.1f},{'ab'[w]},{c:.2f}" for a, w, c in zip(age, ward, cost, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,ward,cost", *cells]) + "\n")
        policy, reading = Policy(runs="any"), Reading("cost")
        made.append(
            Site(name, tmp_path / f"{name}.csv", tmp_path, policy=policy, reading=reading, masks=MaskedRounds(name))
        )
    network, rounds = Network(made), 30 if model == "trees" else 8
    summary, _ = run(tmp_path, network, planned(method, rounds=rounds, model=model, privacy=privacy, classes=0))
    assert summary.rounds == rounds
    arrays = {k for _, _, way, m in network.seen if way == "come" for k in m.arrays}
    assert arrays == {"masked"}
    if privacy:
        assert 7.9 < max(summary.privacy["spent"]) <= 8
        assert not {k for _, k, _, _ in network.seen} & {"describe", "verdict"}
    elif model == "trees":
        assert summary.scores["mixed"]["mean"] < 0.6  # the costs deviate by 1.2, and their noise by 0.3
    else:
        assert summary.scores["mixed"]["mean"] < summary.scores["fixed"]["mean"]
        text = page([tmp_path / "run"])
        assert f"restricted maximum likelihood, {len(NAMES)} clients" in text
