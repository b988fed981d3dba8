"""A first run: does it help a client to learn from its kin?

    python examples/first_run.py

Twenty clients hold handwritten digits, turned by 0, 90, 180 or 270 degrees; nobody tells the method which. With
`kin` each learns whom to listen to. `local`, where each learns from its own examples alone, is what it must beat.
"""

import kinfed
from kinfed.runs.config import experiment as config


def main(rounds: int = 20) -> None:
    """Train with both methods and print their mean test accuracy."""
    for name in ("local", "kin"):
        experiment = config.resolve(config.read(name, [f"rounds={rounds}"]))
        federation = experiment.federation(None, seed=0)
        run = kinfed.fit(
            experiment.method,
            federation,
            experiment.module(federation, seed=0),
            rounds=rounds,
            training=experiment.training,
        )
        print(f"{name}: {run.history.test(run.history.headline).mean():.3f}")


if __name__ == "__main__":
    main()
