"""What tests of commands share."""

import pytest

from kinfed.runs import pool


@pytest.fixture
def second_run_interrupted(monkeypatch):
    """Ctrl-C comes when a command begins its second run, the first time that it does; the folders that were begun."""
    once, begun = pool.once, []

    def interrupted(experiment, folder, execution, data_dir):
        begun.append(folder)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return once(experiment, folder, execution, data_dir)

    monkeypatch.setattr(pool, "once", interrupted)
    return begun
