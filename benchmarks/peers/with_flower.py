"""FedAvg in Flower's simulation (Ray actors, one a core), evaluation by its clients as its tutorials do."""

import logging
import os
import sys
import time

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DEDUP_LOGS": "0"}
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from networks import build, loss, score
from workload import cohort, read, ready, took, wait

logging.getLogger("flwr").setLevel(logging.ERROR)
PATH = sys.argv[1]
client_app = ClientApp()
CACHE = {}  # an actor keeps the data that it has read


def mine(context):
    if not CACHE:
        arrays, CACHE["w"] = read(PATH)
        CACHE.update({name: torch.from_numpy(a) for name, a in arrays.items()})
    return CACHE, CACHE["w"], int(context.node_config["partition-id"])


def load_model(message, w):
    model = build(w["model"], w["shape"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@client_app.train()
def train(message: Message, context: Context) -> Message:
    data, w, client = mine(context)
    model, lost = load_model(message, w), loss(w["model"])
    optimiser = torch.optim.SGD(model.parameters(), lr=w["lr"])
    x, y = data["x_train"][client], data["y_train"][client]
    for _ in range(w["epochs"]):
        for rows in torch.randperm(len(y)).split(w["batch"]):
            optimiser.zero_grad()
            lost(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    data, w, client = mine(context)
    with torch.no_grad():
        metric = score(w["model"], load_model(message, w)(data["x_test"][client]), data["y_test"][client])
    return Message(RecordDict({"metrics": MetricRecord({"score": metric})}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    w = read(PATH)[1]
    torch.manual_seed(0)
    theta = build(w["model"], w["shape"]).state_dict()
    nodes = sorted(grid.get_node_ids())
    while len(nodes) < w["clients"]:
        time.sleep(0.1)
        nodes = sorted(grid.get_node_ids())

    def ask(kind, i, ids):
        content = RecordDict({"arrays": ArrayRecord(theta)})
        messages = [Message(content, dst_node_id=nodes[c], message_type=kind, group_id=str(i)) for c in ids]
        return [reply.content for reply in grid.send_and_receive(messages)]

    ready()
    i = 0
    while True:
        wait()
        begun = time.perf_counter()
        updates = [reply["arrays"].to_torch_state_dict() for reply in ask("train", i, cohort(w, i))]
        theta = {name: torch.stack([f[name] for f in updates]).mean(0) for name in updates[0]}
        scores = [reply["metrics"]["score"] for reply in ask("evaluate", i, range(w["clients"]))]
        took(time.perf_counter() - begun, np.mean(scores))
        i += 1


run_simulation(
    server_app,
    client_app,
    num_supernodes=read(PATH)[1]["clients"],
    backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": os.cpu_count()}},
)
