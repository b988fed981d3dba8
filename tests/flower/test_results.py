"""What a federation's run leaves in its folder."""

from kinfed.core.history import Cost, History, Spent
from kinfed.core.tasks import Classification
from kinfed_flower.server.federation_results import count_bytes


def count(spent, traffic):
    history = History((), Classification(2), cost=Cost(spent=spent))
    count_bytes(history, traffic)
    return history.cost.spent


def test_bytes_until_a_round_are_those_of_all_sites_up_to_the_next():
    traffic = {"ann": {0: [1, 0], 1: [10, 2], 3: [100, 20]}, "bob": {2: [1000, 200], 4: [10**4, 2000], 6: [10**6, 9]}}
    spent = [Spent(round, 0, 0, 7, 1.5) for round in (1, 3, 4)]
    by_hand = [(1, 1011, 202), (3, 11_111, 2222), (4, 11_111, 2222)]
    assert count(spent, traffic) == [Spent(*one, 7, 1.5) for one in by_hand]
    assert count([], traffic) == []


def test_bytes_are_added_up_once_however_many_rounds_there_are():
    read = []

    class Read(dict):
        def items(self):
            read.append(1)
            return super().items()

    traffic = {str(site): Read({round: [1, 1] for round in range(52)}) for site in range(3)}
    assert count([Spent(round, 0, 0, 0) for round in range(1, 51)], traffic)[-1].bytes_up == 3 * 52
    assert len(read) == 3
