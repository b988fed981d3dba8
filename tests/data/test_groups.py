"""Rows of one group, such as a person: they are in one part of the split, and one observation of the verdict."""

import json

import numpy as np
import pytest
import torch

import kinfed
from kinfed import Split, UsageError
from kinfed.cli import main
from kinfed.core.seeding import generators, tags


def cut(split, owned, blocks, seed=0):
    names = [str(i) for i in range(len(owned))]
    return split.by_block(owned, blocks, generators(seed, "split", tags(names).tolist()), seed)


def parts_of(parts, blocks):
    """The parts in which each block has rows."""
    found = {}
    for rows in parts:
        for name, at in rows.items():
            for block in blocks[at].tolist():
                found.setdefault(block, set()).add(name)
    return found


@pytest.mark.parametrize("fold", [0, 1])
def test_a_group_is_in_one_part_and_parts_have_their_share_of_groups(fold):
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 12, 60)
    blocks = torch.from_numpy(np.repeat(np.arange(60), sizes))
    owned = [torch.nonzero(blocks % 2 == i).flatten() for i in range(2)]
    parts = cut(Split(0.2, 0.1, fold=fold), owned, blocks)
    assert {len(one) for one in parts_of(parts, blocks).values()} == {1}
    for rows, held in zip(parts, owned, strict=True):
        assert sorted(torch.cat(list(rows.values())).tolist()) == held.tolist()  # nobody is lost
        assert [len(blocks[rows[name]].unique()) for name in ("train", "validation", "test")] == [21, 3, 6]
    again = cut(Split(0.2, 0.1, fold=fold), owned, blocks)
    assert all(torch.equal(one[name], two[name]) for one, two in zip(parts, again, strict=True) for name in one)


def test_a_group_with_rows_of_several_clients_is_in_the_same_part_at_all():
    blocks = torch.arange(400) % 80
    owned = [torch.arange(400)[i::3] for i in range(3)]
    parts = cut(Split(), owned, blocks)
    assert {len(one) for one in parts_of(parts, blocks).values()} == {1}
    shares = [len(torch.cat([rows[name] for rows in parts])) / 400 for name in ("train", "validation", "test")]
    assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.1)


def test_a_client_with_fewer_groups_than_parts_gets_nothing():
    assert cut(Split(), [torch.arange(50)], torch.arange(50) // 25) == [{}]
    assert cut(Split(validation=0.0), [torch.arange(50)], torch.arange(50) // 25)[0].keys() == {
        "test",
        "validation",
        "train",
    }


def visits(folder, persons=40, each=6, spanning=False, few=False):
    """A table of four wards, whose persons come several times; what a person answers hardly changes."""
    draw, lines = np.random.default_rng(0), ["ward,person,day,age,dose,ill"]
    for i in range(persons):
        age, ill = draw.normal(50, 10), int(draw.integers(2))
        for visit in range(each):
            ward = (i + spanning * visit) % 4
            person = "" if i == 3 and visit == 0 else f"p{i % 2 if few else i}"
            lines.append(f"ward {ward},{person},2024-01-{1 + visit:02},{age:.1f},{ill + draw.normal():.3f},{ill}")
    path = folder / "visits.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_of_a_table_persons_stay_together_and_are_no_input(tmp_path):
    path = visits(tmp_path)
    data = kinfed.from_csv(path, client="ward", target="ill", group="person", ignore=["day"])
    assert [column.name for column in data.columns.inputs] == ["age", "dose"]
    parts = [{name: rows[i] for name, rows in data.rows.items()} for i in range(4)]
    assert {len(one) for one in parts_of(parts, data.blocks).values()} == {1}
    assert len(data.blocks.unique()) == 41  # a row without a person is by itself
    ordered = kinfed.from_csv(path, client="ward", target="ill", group="person", time="day")
    assert ordered.in_order
    assert len(ordered.blocks.unique()) == 41
    with pytest.raises(UsageError, match="as rows of one group stay together"):
        kinfed.from_csv(visits(tmp_path, few=True), client="ward", target="ill", group="person")
    with pytest.raises(UsageError, match="no column 'preson'"):
        kinfed.from_csv(path, client="ward", target="ill", group="preson")


@pytest.mark.parametrize("spanning", [False, True])
def test_a_verdict_counts_persons(tmp_path, capsys, spanning):
    path, out = visits(tmp_path, spanning=spanning), tmp_path / "run"
    asked = ["run", str(path), "--client", "ward", "--target", "ill", "--group", "person", "--ignore", "day"]
    assert (
        main([*asked, "--method", "kin", "rounds=2", "model=linear", "--beside", "local,fedavg", "--out", str(out)])
        == 0
    )
    notes = json.loads((out / "summary.json").read_text())["verdict"]["notes"]
    assert "test rows of one group count as one observation" in notes
    assert (
        any("have rows of several clients, so these clients are not independent" in note for note in notes) == spanning
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "rows at random, stratified by class, those of one `person` together" in said
    assert "test rows of one group count as one observation" in said


def test_a_window_is_of_the_group_of_the_first_reading_that_is_forecast(tmp_path):
    """Readings of four steps a day: windows whose forecast begins on one day are one group, at all clients."""
    lines = [
        f"{who},{step},{step // 4},{(step * (2 + i)) % 7}.5"
        for i, who in enumerate(("Ulm", "Bonn"))
        for step in range(120)
        if (who, step) != ("Ulm", 9)
    ]
    path = tmp_path / "levels.csv"
    path.write_text("station,when,day,level\n" + "\n".join(lines) + "\n")
    data = kinfed.from_csv(path, client="station", target="level", time="when", past=5, horizon=2, group="day")
    days = {}
    for split in data.rows.values():
        for at in torch.cat(list(split)).tolist():
            first = at + 5  # Bonn's readings come first, then Ulm's, of which the tenth is missing
            days.setdefault(int(data.blocks[at]), []).append("missing" if first == 120 + 9 else first % 120 // 4)
    assert all(len({*found}) == 1 for found in days.values())
    real = [found[0] for found in days.values() if found[0] != "missing"]
    assert len(real) == len({*real})  # both clients' windows of a day are one group
    assert data.in_order
    assert "day" not in {column for column in data.scale.get("inputs", {})}
