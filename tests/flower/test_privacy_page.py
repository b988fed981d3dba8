"""What docs/privacy.md says leaves a site, stays there, or is not promised, where no other test shows it."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kinfed.core.private.privacy import NoisedSteps, Privacy
from kinfed.core.private.private_training import SecretLots
from kinfed.errors import RunError
from kinfed_flower import plan
from kinfed_flower.masking import key_agreement
from kinfed_flower.masking.fixed_point import FixedPoint
from kinfed_flower.masking.key_agreement import BoxKey
from kinfed_flower.masking.member import SHARE, Member
from kinfed_flower.masking.unmasking import unmask
from kinfed_flower.programs import site_app
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.ledger import Ledger
from kinfed_flower.site.masked_rounds import MaskedRounds
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire import contents
from kinfed_flower.wire.messages import Message
from kinfed_flower.wire.transport import unpack

NAMES = [f"site{i}" for i in range(5)]
ANY = Policy(runs="any")


class Listening(Here):
    """Sites in this process, and all that they reply."""

    def __init__(self, sites):
        super().__init__(sites)
        self.replies = []

    def push(self, number, kind, message, seconds):
        id = super().push(number, kind, message, seconds)
        self.replies.append((self.sites[number].name, kind, self._arrived[id]))
        return id


@pytest.fixture
def played(tmp_path):
    """Plays a run of five sites with tables of numbers; returns the sites, their replies and the summary."""

    def play(privacy=None, rounds=2, **flower):
        sites, place = [], tmp_path / ("masked" if privacy else "plain")
        place.mkdir()
        for i, name in enumerate(NAMES):
            draw = np.random.default_rng(i)
            lines = [f"{draw.normal(60, 9):.7f},{draw.normal(5, 2):.7f},{draw.integers(2)}" for _ in range(60 + i)]
            path = place / f"{name}.csv"
            path.write_text("\n".join(["age,stay,sick", *lines]) + "\n")
            sites.append(Site(name, path, place / "at", "cpu", Reading("sick"), policy=ANY, masks=MaskedRounds(name)))
        raw = {"rounds": rounds, "method": "fedavg", "model": "linear", "training": {"epochs": 1, "batch": 16}}
        raw |= {"privacy": privacy} if privacy else {}
        raw |= {"flower": {"clients": 5, "beside": [], "norm_bound": 10.0, **flower}}
        network = Listening(sites)
        summary = serve(plan.resolve(json.loads(json.dumps(raw))), network, place / "run", lambda line: None, 0.0)
        return sites, network.replies, summary

    return play


def test_no_message_carries_an_example(played):
    """Neither its cells as text, nor its inputs or target beside each other in a tensor."""
    sites, replies, _ = played(beside=["local"])
    assert {kind for _, kind, _ in replies} == {"hello", "describe", "join", "round", "verdict"}
    for site in sites:
        rows = [line.split(",") for line in site._data.read_text().split()[1:]]
        text = json.dumps([reply.fields for name, _, reply in replies if name == site.name])
        assert not [cell for row in rows for cell in row[:2] if cell.rstrip("0") in text]
        x = site._last[1].x.double()
        for name, _, reply in replies:
            for t in reply.arrays.values() if name == site.name else ():
                windows = t.double().flatten().unfold(0, 2, 1) if t.numel() > 1 else torch.empty(0, 2)
                assert not (torch.cdist(windows, x) < 1e-6).any()


def test_without_beside_no_score_leaves_of_what_a_site_could_do_alone(played):
    assert "verdict" not in {kind for _, kind, _ in played()[1]}


def test_an_epsilon_does_not_cover_how_many_rows_there_are(played):
    pytest.importorskip("dp_accounting")
    columns = {"age": [0, 120], "stay": [-5, 15]}
    _, replies, _ = played({"epsilon": 8.0, "columns": columns})
    sizes = [reply.fields["size"] for _, kind, reply in replies if kind == "join"]
    assert sizes == [42, 43, 44, 44, 45]  # of 60 to 64 rows, without a fifth and a tenth
    greeted = {name: reply.fields for name, kind, reply in replies if kind == "hello"}
    assert greeted["site0"]["columns"] == ["age", "stay"]
    assert greeted["site0"]["table"]["labels"] == ["0", "1"]
    assert not [reply for _, kind, reply in replies if kind in ("describe", "verdict") or "scores" in reply.fields]
    ledgers = [contents.describe_reply(reply.fields, {}) for _, kind, reply in replies if "privacy" in reply.fields]
    assert len(ledgers) == 10
    assert all(re.fullmatch(r"epsilon [0-9.]+ of 8 is spent", line) for line in ledgers)  # as kinfed flower log has it


def test_whoever_deletes_all_of_a_sites_state_sets_its_ledger_back(tmp_path):
    """So does a second folder of the same rows: as the page says, nothing notices."""
    pytest.importorskip("dp_accounting")
    privacy, steps, spent = Privacy(epsilon=8.0), NoisedSteps(0.5, 3.0, 2), []
    for state in ("state", "copy"):
        spent.append(Ledger(tmp_path / state / "d").spend("run", steps, privacy, 8.0)["spent"])
    for path in [*(tmp_path / "state").rglob("*")]:
        if path.is_file():
            path.unlink()
    spent.append(Ledger(tmp_path / "state" / "d").spend("run", steps, privacy, 8.0)["spent"])
    assert spent[0] == spent[1] == spent[2]


def test_secret_noise_is_a_sum_of_four_of_normal_spread(monkeypatch):
    asked, real = [], SecretLots.draw_uniform

    def draw(lots, key, count):
        asked.append(count)
        return real(lots, key, count)

    monkeypatch.setattr(SecretLots, "draw_uniform", draw)
    noise = SecretLots().draw_normal(torch.tensor(0), torch.empty(4000, dtype=torch.float64))
    assert asked == [8 * 4000]  # a radius and an angle for each of four
    assert float(noise.std()) == pytest.approx(1, abs=0.06)  # five deviations of that of 4,000 numbers
    assert float(noise.mean()) == pytest.approx(0, abs=0.08)


def test_secrets_of_a_masked_round_are_in_no_file_of_the_site(played, tmp_path, monkeypatch):
    secrets, real = [], Member.__init__

    def watch(member, *arguments, **how):
        real(member, *arguments, **how)
        secrets.extend([member._seed, member._key_seed])

    monkeypatch.setattr(Member, "__init__", watch)
    _, replies, _ = played({"masked": True, "members": 3})
    masked = [reply.arrays["masked"].numpy().tobytes() for _, _, reply in replies if "masked" in reply.arrays]
    assert len(masked) == 10
    assert len(secrets) == 20
    files = [path.read_bytes() for path in (tmp_path / "masked" / "at").rglob("*") if path.is_file()]
    assert files
    for hidden in (*secrets, *masked):
        assert not [content for content in files if hidden in content or hidden.hex().encode() in content]


def test_a_masked_upload_is_twice_as_large(played):
    plain, masked = (
        sum(t.nbytes for _, kind, reply in played(privacy)[1] for t in reply.arrays.values() if kind == "round")
        for privacy in (None, {"masked": True, "members": 3})
    )
    assert 2 * plain <= masked <= 2.5 * plain  # and one weight for each


def test_the_server_cannot_bound_what_it_does_not_see(played, monkeypatch):
    """One site's upload far above `norm_bound` is left out of a plain mean, and moves a masked one."""
    moved, finish = {}, Site.finish

    def spoil(site, work, outcome):
        if site.name == NAMES[0]:
            outcome = outcome._replace(upload=type(outcome.upload)(*(50.0 + t for t in outcome.upload)))
        return finish(site, work, outcome)

    monkeypatch.setattr(Site, "finish", spoil)
    for masked in (False, True):
        sites, _, summary = played({"masked": True, "members": 3, "largest": 1e4} if masked else None, rounds=1)
        path = sites[1].folder / summary.sites.experiment / "model.safetensors"
        moved[masked] = max(float(t.abs().max()) for t in load_file(path).values() if t.is_floating_point())
    assert moved[False] < 5
    assert moved[True] > 5


def test_the_difference_of_two_sums_is_the_upload_of_the_site_that_one_leaves_out():
    """With the same uploads, as from the same model and all rows in one step: masks do not hide that."""
    uploads = {name: np.random.default_rng(i).normal(size=20) for i, name in enumerate(NAMES)}
    sums = []
    for here in (NAMES, NAMES[1:]):
        form, members = FixedPoint(100.0, len(here)), {name: Member(name, 3, b"plan") for name in here}
        listed = {name: member.keys for name, member in members.items()}
        boxes = {name: member.share(listed) for name, member in members.items()}
        masked = {}
        for name, member in members.items():
            member.open({other: sent[name] for other, sent in boxes.items()})
            masked[name] = member.mask(form.encode(uploads[name]))
        tags = {name: member.confirm(here) for name, member in members.items()}
        given = {
            name: member.reveal({other: sent[name] for other, sent in tags.items() if other != name})
            for name, member in members.items()
        }
        seeds = {name: seed for name, (seed, _) in given.items()}
        shares = [part for _, part in given.values()][: members[here[0]].threshold]
        sums.append(form.decode(unmask(masked, seeds, shares, here, listed, b"plan")))
    assert np.abs(sums[0] - sums[1] - uploads[NAMES[0]]).max() < 1e-8


def test_whoever_reads_a_nodes_memory_opens_shares_of_earlier_rounds():
    """The key by which they travel lasts while the node runs; what was sent then opens with it later."""
    boxes = {name: BoxKey() for name in NAMES[:3]}
    members = {name: Member(name, 3, b"round 1", box=box) for name, box in boxes.items()}
    listed = {name: member.keys for name, member in members.items()}
    sent = members[NAMES[1]].share(listed)[NAMES[0]]
    later = Member(NAMES[0], 3, b"round 2", box=boxes[NAMES[0]])  # all that is left is the key of its node
    common = boxes[NAMES[0]].exchange(listed[NAMES[1]].box)
    transcript = key_agreement.transcribe(b"round 1", listed)
    keys = key_agreement.derive(common, key_agreement.name_pair(*NAMES[:2], "box"), transcript, 4)
    opened = [
        key_agreement.unlock(keys[at : at + 32], sent, transcript, NAMES[1])
        for at in (0, 32)
        if _opens(keys[at : at + 32], sent, transcript)
    ]
    assert [len(text) for text in opened] == [2 * SHARE]
    assert later.keys.box == listed[NAMES[0]].box


def _opens(key, box, transcript):
    try:
        return bool(key_agreement.unlock(key, box, transcript, ""))
    except ValueError:
        return False


def test_a_run_that_has_failed_keeps_a_sites_model_in_its_checkpoint(trial, tmp_path):
    """Which a run that has ended hands to nobody: do not hand on the folder of one that has not."""
    made = trial("fedamp", rounds=2, quorum=1.0, deadline=0.2, patience=0.3)
    uploads = []

    def keep(answer):
        uploads.append(unpack(answer.content).arrays["upload/theta"])
        return answer

    made.grid.faults = {("a", 1): keep, **{(name, 2): lambda answer: None for name in "abcdef"}}
    with pytest.raises(RunError):
        made.serve()
    [path] = (tmp_path / "out").rglob("checkpoint.safetensors")
    rows = [
        row
        for values in load_file(path).values()
        if values.is_floating_point() and values.ndim == 2 and values.shape[1] == len(uploads[0])
        for row in values
    ]
    assert any(torch.allclose(row, uploads[0]) for row in rows)


def test_limits_hold_on_an_existing_deployment(trial):
    """Of an app's nodes: what a site's operator has not agreed to, and gradients of few rows, do not leave."""
    made = trial("fedavg", rounds=1)
    table = {key: value for key, value in made.planned.table.items() if key != "flower"}
    node = {name: value for name, value in made.grid.sites[101].items() if name not in ("policy", "reading")}
    waiting = site_app._site(node, {}).reply("hello", Message({"plans": [table], "experiment": "e"}, {}))
    assert waiting.fields["waits"] is True
    assert waiting.fields.keys() == {"client", "kinfed", "refused", "waits"}
    for config in made.grid.sites.values():
        config["reading"] = "{}"
    with pytest.raises(RunError, match="clients gave a usable reply"):
        made.serve()
    assert any("left client a out: it has 3 training rows" in line for line in made.lines)
