"""Masked sums among members in one process: who vanishes, who lies, and what no number may be."""

import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kinfed.errors import UsageError
from kinfed_flower.masking import signatures
from kinfed_flower.masking.fixed_point import FixedPoint
from kinfed_flower.masking.key_agreement import PublicKeys, join, split
from kinfed_flower.masking.member import Member, find_threshold
from kinfed_flower.masking.unmasking import unmask

SIZE, LARGEST = 50, 100.0


class Round:
    """A round of members; `gone` names those that vanish in a phase."""

    def __init__(self, count=9, least=5, contexts=None, gone=()):
        draw = np.random.default_rng(3)
        self.names, self.gone = [f"s{i}" for i in range(count)], {phase: set(names) for phase, names in gone}
        self.uploads = {name: draw.normal(size=SIZE) for name in self.names}
        self.members = {name: Member(name, least, (contexts or {}).get(name, b"plan")) for name in self.names}
        self.form, self.masked = FixedPoint(LARGEST, count), {}

    def here(self, names, phase):
        return [name for name in names if name not in self.gone.get(phase, set())]

    def deal(self):
        self.keys = {name: member.keys for name, member in self.members.items()}
        self.sharing = self.here(self.names, "share")
        self.boxes = {name: self.members[name].share(self.keys) for name in self.sharing}

    def mask(self):
        for name in self.sharing:
            self.members[name].open({other: boxes[name] for other, boxes in self.boxes.items()})
        for name in self.here(self.sharing, "mask"):
            self.masked[name] = self.members[name].mask(self.form.encode(self.uploads[name]))

    def confirm(self, lists=None):
        """Members confirm who has uploaded: all the same, or each what `lists` has by its name."""
        names = self.here(self.masked, "confirm")
        tags = {name: self.members[name].confirm((lists or {}).get(name, [*self.masked])) for name in names}
        self.tags = {name: {other: sent[name] for other, sent in tags.items() if name in sent} for name in tags}

    def total(self):
        self.deal()
        self.mask()
        self.confirm()
        given = {name: self.members[name].reveal(self.tags[name]) for name in self.here(self.tags, "reveal")}
        threshold = self.members["s0"].threshold if self.members["s0"].count else self.members["s1"].threshold
        if len(given) < threshold:
            raise UsageError("too few reveal")
        seeds = {name: seed for name, (seed, _) in given.items()}
        shares = [shares for _, shares in given.values()][:threshold]
        return self.form.decode(unmask(self.masked, seeds, shares, self.sharing, self.keys, b"plan"))


@pytest.mark.parametrize(
    "gone",
    [
        (),
        [("share", ["s1"])],
        [("mask", ["s0", "s3"])],
        [("confirm", ["s3", "s5"])],
        [("reveal", ["s2"])],
        [("share", ["s4"]), ("mask", ["s1"]), ("confirm", ["s2"]), ("reveal", ["s0"])],
    ],
    ids=["nobody", "share", "mask", "confirm", "reveal", "one in each"],
)
def test_the_sum_is_that_of_all_who_uploaded_whoever_vanishes(gone):
    played = Round(gone=gone)
    total = played.total()
    plain = sum(played.uploads[name] for name in played.masked)
    assert (
        np.abs(total - plain).max() <= len(played.masked) * 2.0 ** -(played.form.bits + 1) + 1e-14
    )  # of the plain sum


def test_a_masked_upload_and_differences_of_two_say_nothing():
    played = Round()
    played.total()
    numbers = {name: values.view(np.int64) / 2.0**63 for name, values in played.masked.items()}
    for name, values in numbers.items():
        assert abs(np.corrcoef(values, played.uploads[name])[0, 1]) < 0.6
        assert 0.2 < np.abs(values).mean() < 0.8  # of numbers that are uniform it is a half
    assert len({values.tobytes() for values in played.masked.values()}) == len(played.names)


@pytest.mark.parametrize("phase", ["share", "mask", "confirm", "reveal"])
def test_too_few_members_are_refused_in_each_phase(phase):
    with pytest.raises(UsageError, match=r"few|at least"):
        Round(gone=[(phase, [f"s{i}" for i in range(5)])]).total()


def test_two_halves_can_never_both_reveal():
    assert find_threshold(3, 10) == 6
    assert find_threshold(8, 10) == 8
    assert all(2 * find_threshold(1, count) > count for count in range(1, 50))


def test_shares_are_revealed_once_and_an_upload_masked_once():
    played = Round(3, 2)
    played.deal()
    with pytest.raises(UsageError, match="has shared its secrets"):
        played.members["s0"].share(played.keys)
    with pytest.raises(UsageError, match="after its own upload"):
        played.members["s0"].confirm(played.names)
    played.mask()
    with pytest.raises(UsageError, match="masks one upload"):
        played.members["s0"].mask(np.zeros(3, np.uint64))
    with pytest.raises(UsageError, match="masked already"):
        played.members["s0"].open({name: played.boxes[name]["s0"] for name in played.names})
    for uploaded in (["s1"], ["s1", "stranger"], ["s0", "s2"]):
        with pytest.raises(UsageError, match="at least 2"):
            played.members["s1"].confirm(uploaded)
    with pytest.raises(UsageError, match="after it has confirmed"):
        played.members["s0"].reveal({})
    played.confirm()
    with pytest.raises(UsageError, match="confirms once"):
        played.members["s0"].confirm(["s0", "s1"])
    played.members["s0"].reveal(played.tags["s0"])
    with pytest.raises(UsageError, match="once"):
        played.members["s0"].reveal(played.tags["s0"])


def test_a_server_that_tells_members_of_different_uploads_opens_nothing():
    """Of 20 members each is told of 11: lists that differ, of which 4 are on all, would give the sum of these 4."""
    played = Round(20, 11)
    played.deal()
    played.mask()
    targets, others = played.names[:4], played.names[4:]
    turns = {name: others[4 * i :] + others[: 4 * i] for i, name in enumerate(targets)}
    turns |= {name: others[i:] + others[:i] for i, name in enumerate(others)}
    lists = {name: targets + turn[:7] for name, turn in turns.items()}
    missing = [sum(name not in uploaded for uploaded in lists.values()) for name in others]
    assert min(missing) >= 11  # without confirmations as many would reveal shares of the others' keys
    played.confirm(lists)
    for name in played.names:
        with pytest.raises(UsageError, match=r"[12] members have confirmed the same list"):
            played.members[name].reveal(played.tags[name])


def test_confirmations_of_others_and_changed_ones_do_not_count():
    played = Round(5, 3)
    played.deal()
    played.mask()
    played.confirm()
    sent = played.tags["s0"]
    swapped = {name: sent[other] for name, other in zip(sent, reversed(sent), strict=True)}
    for tags in (swapped, {"s1": sent["s1"]}, {"s0": sent["s1"], "stranger": sent["s2"], "s1": sent["s1"]}, {}):
        with pytest.raises(UsageError, match="at least 3 must have"):
            played.members["s0"].reveal(tags)
    seed, _ = played.members["s0"].reveal({name: sent[name] for name in ("s2", "s4")})
    assert hashlib.sha256(seed).digest() == played.keys["s0"].seal


def test_a_site_that_was_sent_another_model_or_plan_cannot_be_opened():
    with pytest.raises(UsageError, match="another model"):
        Round(contexts={"s2": b"another"}).total()


@pytest.mark.parametrize("forged", ["own", "another", "twice", "few", "none"])
def test_lists_of_keys_that_were_changed_are_refused(forged):
    played = Round(4, 3)
    keys = {name: member.keys for name, member in played.members.items()}
    stranger = Member("s1", 3, b"plan").keys
    keys |= {"own": {"s0": stranger}, "another": {"s1": stranger}, "twice": {"s1": keys["s2"]}}.get(forged, {})
    keys = {"few": {name: keys[name] for name in ("s0", "s1")}, "none": {}}.get(forged, keys)
    member = played.members["s0"]
    if forged != "another":
        with pytest.raises(UsageError):
            member.share(keys)
        return
    boxes = member.share(keys)  # it cannot know, but the others' boxes do not open
    honest = {name: one.keys for name, one in played.members.items()}
    others = {name: played.members[name].share(honest)["s0"] for name in ("s1", "s2", "s3")}
    with pytest.raises(UsageError, match="cannot be opened"):
        member.open({"s0": boxes["s0"], **others})


def test_boxes_of_others_and_changed_ones_do_not_open():
    played = Round(3, 2)
    played.deal()
    boxes = {name: played.boxes[name]["s0"] for name in played.names}
    with pytest.raises(UsageError, match="others than the members"):
        played.members["s0"].open(boxes | {"stranger": boxes["s1"]})
    with pytest.raises(UsageError, match="fewer than"):
        played.members["s0"].open({"s0": boxes["s0"]})
    swapped = boxes | {"s1": boxes["s2"]}
    with pytest.raises(UsageError, match="shares of s1 cannot be opened"):
        played.members["s0"].open(swapped)
    with pytest.raises(UsageError, match="shares of s2 cannot be opened"):
        played.members["s0"].open(boxes | {"s2": b""})


def test_wrong_shares_and_uploads_show():
    played = Round()
    played.deal()
    played.mask()
    played.confirm()
    given = {name: played.members[name].reveal(played.tags[name]) for name in played.names}
    seeds = {name: seed for name, (seed, _) in given.items()}
    shares = [shares for _, shares in given.values()][:5]
    plain = unmask(played.masked, seeds, shares, played.names, played.keys, b"plan")
    late = {name: seed for name, seed in seeds.items() if name != "s1"} | {"s2": seeds["s3"]}  # shares stand for these
    np.testing.assert_array_equal(plain, unmask(played.masked, late, shares, played.names, played.keys, b"plan"))
    wrong = {name: share[:2] + bytes(17) for name, share in shares[0].items()}
    with pytest.raises(UsageError, match=r"do not give the mask|no share of a secret"):
        unmask(played.masked, {}, [wrong, *shares[1:]], played.names, played.keys, b"plan")
    with pytest.raises(UsageError, match="no share"):
        unmask(played.masked, {}, [shares[0], *shares[:4]], played.names, played.keys, b"plan")
    played.masked["s3"] = np.arange(SIZE, dtype=np.uint64)
    total = unmask(played.masked, seeds, shares, played.names, played.keys, b"plan")
    with pytest.raises(UsageError, match="did not cancel"):
        played.form.decode(total)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e308, 101.0, -100.5])
def test_numbers_that_no_sum_could_hold_are_refused(bad):
    with pytest.raises(UsageError) as problem:
        FixedPoint(LARGEST, 9).encode(np.array([0.0, bad]))
    assert "\n" not in str(problem.value)


def test_fixed_point_never_wraps_at_its_bound():
    for largest, members in ((1.0, 1), (100.0, 9), (3e4, 4096), (1e9, 100)):
        form = FixedPoint(largest, members)
        values = np.array([largest, -largest, largest / 3, 0.0])
        total = sum(form.encode(values).astype(object) for _ in range(members))
        assert max(abs(int(np.int64(np.uint64(t % 2**64)))) for t in total) < 2**63
        total = np.array([t % 2**64 for t in total], dtype=np.uint64)
        np.testing.assert_allclose(form.decode(total), members * values, rtol=1e-9, atol=members * 2.0**-form.bits)
    with pytest.raises(UsageError, match="leaves no digits"):
        FixedPoint(1e18, 100)


def test_shares_give_a_secret_from_enough_of_them():
    secret = bytes(range(16))
    shares = split(secret, 3, 5)
    assert join(shares[1:4]) == join([shares[0], shares[4], shares[2]]) == secret
    assert join(shares[:2]) != secret
    with pytest.raises(UsageError):
        join([b"x", shares[0]])


@pytest.mark.parametrize("words", [None, [], ["zz"], ["00"] * 3, ["00" * 32] * 2, ["00" * 32] * 5, {"mask": 1}])
def test_what_are_no_keys_is_refused(words):
    with pytest.raises(UsageError, match="no keys"):
        PublicKeys.from_json(words)
    keys = Member("a", 2, b"").keys
    assert PublicKeys.from_json(keys.to_json()) == keys


def test_only_members_in_the_file_are_believed(tmp_path):
    lines, paths = [], {}
    for name in ("ann", "bob"):
        key = ec.generate_private_key(ec.SECP384R1())
        form = serialization.PrivateFormat.OpenSSH
        paths[name] = tmp_path / name
        paths[name].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        lines.append(f"{name} {public.decode()}")
    path = tmp_path / "members.txt"
    path.write_text("\n".join(["# exchanged by telephone", *lines, ""]))
    trusted = signatures.read_members(path)

    def check(name, text, signature):
        return signatures.check_signature(trusted, name, text, signature)

    def member(name, by):
        return Member(name, 2, b"plan", lambda text: signatures.sign(text, paths[by]))

    ann, bob = member("ann", "ann"), member("bob", "bob")
    assert ann.share({"ann": ann.keys, "bob": bob.keys}, check)
    for name, by, why in (("bob", "ann", "not signed by its key"), ("eve", "bob", "not in this site's file")):
        ann, forged = member("ann", "ann"), member(name, by)
        with pytest.raises(UsageError, match=why):
            ann.share({"ann": ann.keys, name: forged.keys}, check)
    part = member("bob.3", "bob")
    ann = member("ann", "ann")
    assert ann.share({"ann": ann.keys, "bob.3": part.keys}, check)
    path.write_text(lines[0] + "\n" + lines[0])
    with pytest.raises(UsageError, match=r"members\.txt, line 2: expected a site's name, once"):
        signatures.read_members(path)
    with pytest.raises(UsageError, match="cannot be read"):
        signatures.read_members(tmp_path / "none")
