import torch

from kinfed.data.partitions import LabelGroups


def test_the_case_study(deal):
    # 60,000 images of 10 classes, 20 clients: 2 classes a group, of which a client has 1,200 each, and 600 common ones.
    counts = deal(LabelGroups(), torch.arange(60_000) % 10, 20)
    assert (counts.sum(1) == 3_000).all()
    own = counts >= 1_200
    assert (own.sum(1) == 2).all()
    assert (own.sum(0) == 4).all()
    for i in range(20):
        assert torch.equal(own[i], own[i // 4 * 4])  # alike within a group
    # A client's 600 common examples hold about 60 of each class (hypergeometric, deviation 7).
    common = counts - 1_200 * own.long()
    assert (common.sum(1) == 600).all()
    assert 20 < int(common.min()) <= int(common.max()) < 100


def test_without_a_common_rest_groups_share_nothing(deal):
    # 5 classes of 7 over 2 groups of 2 clients: three classes (4 + 3 each) for one group, two for the other.
    counts = deal(LabelGroups(groups=2, share=1.0), torch.arange(35) % 5, 4)
    holders = counts.view(2, 2, 5).sum(1)  # [groups, C]
    assert sorted(holders.sum(1).tolist()) == [14, 21]
    assert (holders.min(0).values == 0).all()
    assert sorted(set(counts.flatten().tolist())) == [0, 3, 4]


def test_which_classes_a_group_has_is_drawn(deal):
    y = torch.arange(40) % 4
    held = {
        tuple((deal(LabelGroups(groups=2, share=1.0), y, 2, seed)[0] > 0).nonzero().flatten().tolist())
        for seed in range(20)
    }
    assert len(held) > 1
