"""How far an executor's update is from that in float64."""

import copy

import torch

from kinfed import Federation
from kinfed.core.model import Model
from kinfed.methods import FedAvg
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation


def error(module, data, training, share=1.0, **how):
    """The distance of a client's update from float64's, relative to its length: the median over a cohort."""
    updates = []
    for kind, execution in ((torch.float64, {"executor": "loop"}), (torch.float32, how)):
        y = data.y.to(kind) if data.y.is_floating_point() else data.y
        cast = Federation(data.x.to(kind), y, data.rows, data.task)
        fleet = Simulation(
            cast,
            Model(copy.deepcopy(module).to(kind)),
            FedAvg(),
            training,
            share=share,
            execution=Execution(**execution),
        )
        roster = fleet.roster()
        cohort = torch.arange(max(1, round(share * len(data.names))))
        sent = fleet.method.send(roster, fleet.method.start(roster), cohort)
        updates.append((fleet.train(0, cohort, sent)[1].theta - fleet.model.theta).double())
    return float(((updates[1] - updates[0]).norm(dim=1) / updates[0].norm(dim=1)).median())
