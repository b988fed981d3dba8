"""FedAvg as one would write it in plain PyTorch: a loop over clients, torch.optim.SGD, evaluation client by client."""

import copy
import statistics
import sys

import torch
from networks import build, loss, score
from workload import FEW, cohort, read, serve

arrays, w = read(sys.argv[1])
x, y, x_test, y_test = (torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test"))
torch.manual_seed(0)
shared, lost = build(w["model"], w["shape"]), loss(w["model"])


def area(scores, y):
    """Area under the ROC curve of scores: [n, C], ties counted half: the mean over the classes that have pairs."""
    mine = torch.nn.functional.one_hot(y, scores.shape[1]).bool()
    pairs = mine[:, None] & ~mine  # [n, n, C] an example of the class, and one of another
    wins = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    count = pairs.sum((0, 1))
    return ((pairs * wins).sum((0, 1)) / count)[count > 0].mean() if count.any() else torch.tensor(0.5)


def train(client, initial, x, epochs):
    model, targets = copy.deepcopy(initial), y.to(x.dtype) if y.is_floating_point() else y
    optimiser = torch.optim.SGD(model.parameters(), lr=w["lr"])
    for _ in range(epochs):
        for rows in torch.randperm(len(y[client])).split(w["batch"]):
            optimiser.zero_grad()
            lost(model(x[client, rows]), targets[client, rows]).backward()
            optimiser.step()
    return model.state_dict()


def round(i):
    updates = [train(client, shared, x, w["epochs"]) for client in cohort(w, i)]
    shared.load_state_dict({name: torch.stack([f[name] for f in updates]).mean(0) for name in updates[0]})
    scores = []
    with torch.no_grad():
        for client in range(w["clients"]):
            outputs = shared(x_test[client])
            scores.append(score(w["model"], outputs, y_test[client]))
            if w["model"] != "gru":
                area(outputs.softmax(1), y_test[client]).item()
    return sum(scores) / len(scores)


def error():
    """How far updates of an epoch are from those in float64, relative to their length: the median of a few clients."""
    begun = torch.cat([t.flatten() for t in shared.state_dict().values()]).double()
    distances = []
    for client in range(min(FEW, w["clients"])):
        updates = []
        for initial, inputs in ((shared, x), (copy.deepcopy(shared).double(), x.double())):
            torch.manual_seed(client)
            now = train(client, initial, inputs, 1)
            updates.append(torch.cat([t.flatten() for t in now.values()]).double() - begun)
        distances.append(float((updates[0] - updates[1]).norm() / updates[1].norm()))
    return statistics.median(distances)


serve(round, error())
