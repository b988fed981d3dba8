import math
import tomllib

import pytest
import torch

from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.runs.run_folder import RunFolder
from kinfed_papers.analyses.weights import blocks, look, similar, weights

PAIRS = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)


def test_the_table_is_that_of_the_runs_own_summaries_and_uniform_weights_are_seen(study, tmp_path):
    # At this rate some rounds are worse than those before, so that another than the last is selected.
    asked = study("local", "seeds=2", "rounds=6", "training.optimiser.lr=1.0", "methods.fedaghn.sharpness=10")
    found = weights(asked, methods=["fedavg", "fedaghn"], partitions=["rotations", "iid"])
    assert [(row["partition"], row["method"]) for row in found.rows] == [
        ("rotations", "fedavg"),
        ("rotations", "fedaghn"),
        ("iid", "fedavg"),
        ("iid", "fedaghn"),
    ]
    uniform, learned, alike, _ = found.rows
    folder = RunFolder(tmp_path / "runs" / "rotations-fedaghn")
    assert [one.read_relations().selected for one in folder.repeats()] != [5, 5]
    summary = folder.read_summary().relation
    assert learned["self"] == pytest.approx(summary["itself"])
    assert learned["similar"] == pytest.approx(summary["within"])
    assert learned["others"] == pytest.approx(summary["between"])
    assert learned["AUROC"] == pytest.approx(summary["auroc"])
    assert learned["similar"] > 2 * learned["others"]
    assert learned["entropy"] < uniform["entropy"]
    assert uniform["entropy"] == pytest.approx(math.log(8), abs=1e-3)  # clients differ by an example or two
    assert uniform["from uniform"] == pytest.approx(0, abs=0.01)
    assert uniform["self"] + 3 * uniform["similar"] + 4 * uniform["others"] == pytest.approx(1)
    assert alike["others"] is None  # everybody is like everybody
    assert alike["AUROC"] is None
    assert found.pictures[0].read_bytes().startswith(b"\x89PNG")
    assert "rotations: similar are clients of one hidden group" in found.notes
    assert "iid: similar are clients whose labels overlap by 50% or more" in found.notes


def test_every_run_has_its_methods_own_settings_and_the_partition_that_was_described(study, tmp_path):
    asked = study(
        "fedamp",
        "method.alpha=0.7",
        'federation.partition={name="pathological", classes_per_client=5}',
        "methods.cfl.begin=3",
    )
    weights(asked, methods=["fedamp", "cfl"], partitions=["pathological", "label_groups"])

    def table(name):
        return tomllib.loads((tmp_path / "runs" / name / "config.toml").read_text())

    assert table("pathological-fedamp")["method"]["alpha"] == 0.7
    assert table("pathological-cfl")["method"]["begin"] == 3
    assert table("pathological-cfl")["method"]["eps1"] == 0.4
    assert table("pathological-cfl")["federation"]["partition"] == {"name": "pathological", "classes_per_client": 5}
    assert table("label_groups-fedamp")["federation"]["partition"] == {
        "name": "label_groups",
        "groups": 5,
        "share": 0.8,
    }


@pytest.mark.filterwarnings("ignore:(fedamp|kernel)")
def test_negative_weights_have_no_entropy_and_this_is_said(study):
    found = weights(study("fedamp", "method.alpha=5000"), methods=["fedamp"], partitions=["rotations"])
    assert found.rows[0]["self"] < 0
    assert found.rows[0]["entropy"] is None
    assert any("negative" in note for note in found.notes)


def test_numbers_of_a_relation_by_hand():
    relation = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    found = look(relation, PAIRS)
    assert found == pytest.approx(
        {
            "self": 1.75 / 3,
            "similar": 0.75 / 2,  # entries [0, 1] and [1, 0]
            "others": 0.5 / 4,
            "entropy": 2 * 1.5 * math.log(2) / 3,
            "from uniform": (1 / 6 + 1 / 6 + 2 / 3) / 3,
            "consensus": 1 - (0 + 0.75 + 0.75) / 3,  # over the three pairs of clients
            "isolation": (1.75 - 1) / 2,
            "AUROC": (3 + 4) / 8,  # 0.25 beats two zeros and ties twice with 0.25; 0.5 beats all four
        }
    )


def test_similar_are_clients_of_one_group_or_those_with_labels_in_common(study):
    grouped = study("local", "seeds=2").federations()
    what, (first, second) = similar(grouped, 0.5)
    assert what == "of one hidden group"
    assert first.tolist() == second.tolist() == [[i // 4 == j // 4 for j in range(8)] for i in range(8)]
    # Classes 2 i and 2 i + 1 modulo 10: five kinds of clients, the first three twice.
    pathological = study("local", "federation.partition=pathological").federations()
    assert similar(pathological, 0.5)[1][0].tolist() == [[(i - j) % 5 == 0 for j in range(8)] for i in range(8)]
    # Client 0 holds classes 0, 1 and 2, client 3 holds 9, 0 and 1: two thirds in common, or nearly.
    three = study("local", 'federation.partition={name="pathological", classes_per_client=3}').federations()
    assert similar(three, 0.5)[1][0][0, 3]
    assert not similar(three, 0.8)[1][0][0, 3]


def test_who_is_similar_must_be_known():
    numbers = Federation.from_arrays(torch.rand(30, 2), torch.rand(30), torch.arange(30) % 3)
    with pytest.raises(UsageError, match="neither hidden groups nor labels"):
        similar([numbers], 0.5)
    with pytest.raises(UsageError, match=r"analysis.overlap is a share of labels, in \(0, 1\]; got 0"):
        similar([numbers], 0)


def test_a_method_that_mixes_no_models_is_refused_plainly(study):
    with pytest.raises(UsageError, match="pfedhn mixes no models"):
        weights(study("pfedhn"), methods=["pfedhn"], partitions=["rotations"])


def test_a_wrong_method_is_told_before_anything_runs(study, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'fedaghn'"):
        weights(study("fedavg"), methods=["fedavg", "fedagnh"], partitions=["iid"])
    assert not (tmp_path / "runs").exists()


def test_blocks_put_similar_clients_together():
    apart = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    label = blocks(apart)
    assert label[0] == label[2] != label[1]
