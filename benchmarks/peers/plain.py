"""FedAvg as one would write it in plain PyTorch: a loop over clients, torch.optim.SGD, evaluation client by client."""

import copy
import sys

import torch
from networks import build
from torch.nn.functional import cross_entropy
from workload import EPOCHS, cohort, read, serve

arrays, w = read(sys.argv[1])
x, y, x_test, y_test = (torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test"))
torch.manual_seed(0)
shared = build(w["model"], w["shape"])


def area(scores, y):
    """Area under the ROC curve of scores: [n, C], ties counted half: the mean over the classes that have pairs."""
    mine = torch.nn.functional.one_hot(y, scores.shape[1]).bool()
    pairs = mine[:, None] & ~mine  # [n, n, C] an example of the class, and one of another
    wins = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    count = pairs.sum((0, 1))
    return ((pairs * wins).sum((0, 1)) / count)[count > 0].mean() if count.any() else torch.tensor(0.5)


def train(client):
    model = copy.deepcopy(shared)
    optimiser = torch.optim.SGD(model.parameters(), lr=w["lr"])
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y[client])).split(w["batch"]):
            optimiser.zero_grad()
            cross_entropy(model(x[client, rows]), y[client, rows]).backward()
            optimiser.step()
    return model.state_dict()


def round(i):
    found = [train(client) for client in cohort(w, i)]
    shared.load_state_dict({name: torch.stack([f[name] for f in found]).mean(0) for name in found[0]})
    hits = 0.0
    with torch.no_grad():
        for client in range(w["clients"]):
            outputs = shared(x_test[client])
            hits += (outputs.argmax(1) == y_test[client]).float().mean().item()
            area(outputs.softmax(1), y_test[client]).item()
    return hits / w["clients"]


serve(round)
