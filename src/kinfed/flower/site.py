"""Site: one client at its own place: its examples, its private state, its personalised model.

A site answers three kinds of messages. "hello": who is there and what its examples look like. "join": this is the
experiment. "round": judge the models of the round before, and train for this one. Everything that a round changes is in
one file, which is replaced as a whole; so a site that was killed answers again as if nothing had happened, and a round
that it has done already is not trained twice.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import __version__
from ..core import checkpoint, trees
from ..core.fleet import Evaluation
from ..core.layout import Layout
from ..core.seeding import generator, tags
from ..core.tasks import Classification, Regression, Task
from ..core.trees import Tree
from ..data import tables
from ..data.federation import Federation
from ..data.split import Split
from ..datasets import directory
from ..errors import RunError, UsageError
from ..files import make_folder, replacing
from ..simulation.devices import pick_device
from ..simulation.execution import Execution
from ..simulation.simulation import Simulation
from . import messages, plan
from .messages import Message, Words

ALONE = torch.tensor([0])
LAST = 1 << 31  # rounds that a message may name
KINDS: dict[str, dict[str, type]] = {  # what a message must say
    "join": {"experiment": str, "table": dict, "task": dict, "shape": list, "outputs": int, "layout": str},
    "round": {"experiment": str, "layout": str},
}
OPTIONAL: dict[str, type] = {"selected": dict, "chosen": str, "judged": int}


class Memory(NamedTuple):
    """What a site remembers of an experiment between two rounds."""

    base: Tree  # private state after the last round whose answer the server has taken
    state: Tree  # private state after the last round trained here
    accepted: int  # that round of base, -1 before the first
    trained: int  # that round of state
    digest: str  # of the message answered last
    reply: Message  # what was answered
    forms: Words  # type and shape of what the server sends, by name


class Site:
    """Answers the server's messages about one client; nothing but its answers leaves its folder."""

    def __init__(self, name: str, data: Path, folder: Path, device: str = "auto", target: str = "y") -> None:
        self.name, self._data, self._folder, self._device = name, data, folder / name, pick_device(device)
        self._target = target

    def answer(self, kind: str, order: Message) -> Message:
        """The reply to a message. What cannot be done is refused in words: {"refused": why}."""
        try:
            return {"hello": self._hello, "join": self._join, "round": self._round}[kind](order)
        except (UsageError, RunError, OSError) as problem:
            return Message({"client": self.name, "refused": f"client {self.name}: {problem}"}, {})

    def _hello(self, order: Message) -> Message:
        arrays, columns = read(self._data, self._target)
        task = _task(arrays)
        y = arrays.get("y", arrays.get("y_train"))
        assert y is not None
        said = {
            "client": self.name,
            "kinfed": __version__,
            "shape": list(next(iter(arrays.values())).shape[1:]),
            "outputs": task.classes if isinstance(task, Classification) else int(np.prod(y.shape[1:])),
            "task": plan.describe_task(task),
            "columns": columns,
        }
        return Message(said, {})

    def _join(self, order: Message) -> Message:
        if order.words.get("kinfed") != __version__:
            raise UsageError(
                f"this site runs kinfed {__version__}, the server {order.words.get('kinfed')}; install the same version"
            )
        _check("join", order.words)
        simulation = self._simulate(order)
        problem = messages.problem_with(order.arrays, messages.forms({"theta": simulation.model.theta}))
        if problem:
            raise UsageError(f"the server's model cannot be used: {problem}")
        if order.words.get("layout") != messages.layout_digest(simulation.model.layout):
            raise UsageError("the server's model has other layers than this site's; install the same version of kinfed")
        known, done = self._joined(order.words["experiment"]), _round_of(order, "accepted")
        if known is None or messages.digest(known) != messages.digest(order):
            make_folder(self._at(order))
            checkpoint.write(order.arrays, self._at(order) / "join.safetensors", {"words": json.dumps(order.words)})
        reply = Message({"client": self.name, "size": int(simulation.sizes[0])}, {})
        messages.put(tree_map(lambda t: t[0], simulation.client_statistics()), reply, "introduction")
        if self._recall(order) is None:
            state = tree_map(lambda t: t[0].clone(), simulation.state)
            self._remember(order, Memory(state, state, done, done, "", Message({}, {}), {}))
        return reply

    def _round(self, order: Message) -> Message:
        _check("round", order.words)
        joined = self._joined(order.words["experiment"])
        memory = None if joined is None else self._recall(joined)
        if joined is None or memory is None:
            return Message({"client": self.name, "join": True}, {})
        digest = messages.digest(order)
        if memory.digest == digest:
            return memory.reply
        simulation = self._simulate(joined)
        if order.words["layout"] != messages.layout_digest(simulation.model.layout):
            raise UsageError("the server's model has other layers than this site's; install the same version of kinfed")
        accepted = _round_of(order, "accepted")
        base = self._base(memory, accepted)
        round = _round_of(order, "round") if "train" in order.words else None
        if round is not None and round <= accepted:
            raise UsageError(f"round {round + 1} is over: this client was counted in round {accepted + 1} already")
        memory = memory._replace(base=base, state=base, accepted=accepted, trained=accepted)
        reply = Message({"client": self.name}, {})
        forms = dict(memory.forms)
        models = Models(self._at(joined), simulation.model.layout)
        models.choose(order.words)
        if "evaluate" in order.words:
            same = {f"evaluate/{n[6:]}": t for n, t in order.arrays.items() if n.startswith("train/")}
            received = self._receive(order._replace(arrays=same | order.arrays), "evaluate", forms)
            simulation.state = tree_map(lambda t: t[None].clone(), base)
            evaluated = _round_of(order, "evaluated")
            found = simulation.evaluate(evaluated, ALONE, received)
            assert isinstance(found, Evaluation)
            models.keep(evaluated, tree_map(lambda t: t[0], found.models))
            reply.words["scores"] = [[*key, float(value)] for key, value in found.scores.items()]
            reply.words["evaluated"] = evaluated
            models.choose(order.words)
        if round is not None:
            received = self._receive(order, "train", forms)
            simulation.state = tree_map(lambda t: t[None].clone(), base)
            _, upload = simulation.train(round, ALONE, received)
            messages.put(tree_map(lambda t: t[0], upload), reply, "upload")
            reply.words["round"] = round
            state = tree_map(lambda t: t[0].clone(), simulation.state)
            memory = memory._replace(state=state, trained=round)
        self._remember(joined, memory._replace(digest=digest, reply=reply, forms=forms))
        return reply

    def _base(self, memory: Memory, accepted: int) -> Tree:
        """The private state from which the server counts: what it never heard of is undone."""
        if accepted == memory.trained:
            return memory.state
        if accepted == memory.accepted:
            return memory.base
        raise RunError(
            f"the server last counted this client in round {accepted + 1}, but this site remembers rounds "
            f"{memory.accepted + 1} and {memory.trained + 1} only (0: none): server or site went back to an older copy "
            f"of its files; delete {self._folder} to join anew"
        )

    def _receive(self, order: Message, part: str, forms: Words) -> Tree:
        """A checked part of the order, [1, ...]; the first of its kind says what the later ones must look like."""
        mine = {name: t for name, t in order.arrays.items() if name.startswith(f"{part}/")}
        known: Words = forms.setdefault(part, {name: list(form) for name, form in messages.forms(mine).items()})
        like = {}
        for name, (dtype, shape) in known.items():
            got = tuple(mine[name].shape) if name in mine else tuple(shape)
            # The first axis of a table may count clients, whose number changes.
            counts = len(shape) > 1 and len(got) == len(shape) and got[1:] == tuple(shape[1:])
            like[name] = (dtype, got if counts else tuple(shape))
        problem = messages.problem_with(mine, like)
        if problem:
            raise UsageError(f"what the server sent to {part} cannot be used: {problem}")
        return tree_map(lambda t: t[None], messages.take(order, part))

    def _simulate(self, joined: Message) -> Simulation:
        """A simulation of this client alone: the same program, draws and examples as among all others."""
        words = joined.words
        planned = plan.resolve(words["table"])
        federation = federate(self._data, self.name, plan.read_task(words["task"]), planned, self._target)
        if list(federation.x.shape[1:]) != list(words["shape"]):
            raise UsageError(
                f"{self._data}: an example is {list(federation.x.shape[1:])} here but {words['shape']} at other sites"
            )
        if federation.outputs != words["outputs"]:
            raise UsageError(
                f"{self._data} needs {federation.outputs} outputs, the server's model has {words['outputs']}"
            )
        model = planned.model(tuple(words["shape"]), words["outputs"])
        if "theta" not in joined.arrays:
            raise UsageError("the server's model is not in its message")
        if joined.arrays["theta"].shape != model.theta.shape:
            raise UsageError(
                f"the server's model has {joined.arrays['theta'].numel():,} numbers, this site's "
                f"{model.theta.numel():,}; install the same version of kinfed"
            )
        model.theta = joined.arrays["theta"]
        learning = planned.learning
        return Simulation(
            federation,
            model,
            learning.method,
            learning.training,
            seed=learning.seed,
            execution=Execution("loop", onednn=False, device=str(self._device)),
        )

    def _at(self, order: Message) -> Path:
        name = order.words["experiment"]
        if not (isinstance(name, str) and name.replace("-", "").isalnum()):
            raise UsageError(f"an experiment is named by letters, digits and '-'; got {name!r:.80}")
        return self._folder / name

    def _joined(self, experiment: str) -> Message | None:
        path = self._at(Message({"experiment": experiment}, {})) / "join.safetensors"
        if not path.exists():
            return None
        arrays, text = _load(path)
        with _damage(path):
            found = Message(json.loads(text["words"]), arrays)
            _check("join", found.words)
        return found

    def _recall(self, joined: Message) -> Memory | None:
        path = self._at(joined) / "state.safetensors"
        if not path.exists():
            return None
        arrays, text = _load(path)
        reply = {n.removeprefix("reply/"): t for n, t in arrays.items() if n.startswith("reply/")}
        with _damage(path):
            said = json.loads(text["memory"])
            whole = Message(said["structures"], arrays)
            return Memory(
                messages.take(whole, "base"),
                messages.take(whole, "state"),
                _round_of(Message(said, {}), "accepted"),
                _round_of(Message(said, {}), "trained"),
                str(said["digest"]),
                Message(dict(said["reply"]), reply),
                {part: {n: [str(d), list(s)] for n, (d, s) in held.items()} for part, held in said["forms"].items()},
            )

    def _remember(self, joined: Message, memory: Memory) -> None:
        whole = Message({}, {f"reply/{name}": t for name, t in memory.reply.arrays.items()})
        messages.put(memory.base, whole, "base")
        messages.put(memory.state, whole, "state")
        said = {
            "structures": whole.words,
            "accepted": memory.accepted,
            "trained": memory.trained,
            "digest": memory.digest,
            "reply": memory.reply.words,
            "forms": memory.forms,
        }
        checkpoint.write(whole.arrays, self._at(joined) / "state.safetensors", {"memory": json.dumps(said)})


def _round_of(order: Message, name: str) -> int:
    """A round that an order names, -1 before the first; it becomes a part of file names."""
    value = order.words.get(name)
    if type(value) is not int or not -1 <= value < LAST:
        raise UsageError(f"the server's {name} must be a round; got {value!r:.40}")
    return value


def _check(kind: str, words: Words) -> None:
    """Raise UsageError unless a message says what its kind must, and all that it says is of the right type."""
    needed = KINDS[kind]
    for name, form in (needed | {name: form for name, form in OPTIONAL.items() if name in words}).items():
        if type(words.get(name)) is not form:
            raise UsageError(f"the server's {name} must be {form.__name__}; got {words.get(name)!r:.80}")


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Whatever reading a file's words can end in becomes a RunError that names it."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise RunError(f"{path} is not what this site wrote ({why:.200}); delete its folder to join anew") from None


class Models:
    """The personalised models of one client: those that may still be chosen, and the chosen one as model.safetensors.

    Only the server sees all clients' scores, so it says which kind of model and which round are best; the models stay.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder, self._layout = folder, layout
        self._kept = folder / "models"

    def keep(self, round: int, named: dict[str, Tree]) -> None:
        """Keep a round's models until it is known which are best."""
        make_folder(self._kept)
        arrays = {f"{name}/{leaf}": t for name, tree in named.items() for leaf, t in trees.pack(tree).items()}
        checkpoint.write(arrays, self._kept / f"{round}.safetensors", {"names": json.dumps(list(named))})

    def choose(self, words: Words) -> None:
        """Put the best model in its place, and delete those that can be best no more."""
        rounds = sorted(int(path.stem) for path in self._kept.glob("*.safetensors") if path.stem.isdecimal())
        if not rounds:
            return
        selected, chosen = words.get("selected", {}), words.get("chosen", "")
        wanted = selected.get(chosen)
        self._write(wanted if wanted in rounds else rounds[-1], chosen)  # a client that was away has its latest
        for round in rounds[:-1]:
            if round <= words.get("judged", -1) and round not in selected.values():
                (self._kept / f"{round}.safetensors").unlink(missing_ok=True)

    def _write(self, round: int, chosen: str) -> None:
        kept = self._kept / f"{round}.safetensors"
        arrays, text = _load(kept)
        with _damage(kept):
            names = [str(name) for name in json.loads(text["names"])]
            name = chosen if chosen in names else names[0]
        said = {"round": round + 1, "model": name}
        path = self._folder / "model.safetensors"
        # In the file itself, as two files are not replaced at once.
        if path.exists() and _load(path)[1].get("said") == json.dumps(said):
            return
        mine = {leaf.removeprefix(f"{name}/"): t for leaf, t in arrays.items() if leaf.startswith(f"{name}/")}
        theta = mine.pop("theta", None)
        if theta is not None:
            mine |= self._layout.tensors(theta) if theta.numel() == self._layout.size else {"theta": theta}
        checkpoint.write(mine, path, {"said": json.dumps(said)})
        with replacing(self._folder / "model.json") as part:
            part.write_text(json.dumps(said))


def read(path: Path, target: str = "y") -> tuple[dict[str, np.ndarray], list[str]]:
    """A site's examples by name: x and y, or x_train, y_train, x_test and y_test, perhaps with x_validation and so on.

    For a table `target` is the column to predict, and the names of the others are returned in the order of x. Raises
    UsageError or RunError naming the file when it is missing, damaged or otherwise.
    """
    load = LOADERS.get(path.suffix.lower())
    if load is None:
        raise UsageError(f"{path}: a site's examples are in a file of one of these kinds: {', '.join(LOADERS)}")
    arrays, columns = load(path, target)
    wholes = [name for name in ("", "_train", "_test", "_validation") if f"x{name}" in arrays or f"y{name}" in arrays]
    if ("" in wholes and len(wholes) > 1) or ("" not in wholes and not {"_train", "_test"} <= set(wholes)):
        raise UsageError(
            f"{path} must hold x and y, or x_train, y_train, x_test and y_test; it has {', '.join(arrays) or 'none'}"
        )
    for name in wholes:
        x, y = arrays.get(f"x{name}"), arrays.get(f"y{name}")
        if x is None or y is None or len(x) != len(y) or not len(x):
            got = "and".join(f" {len(a)} of {k}{name} " for k, a in (("x", x), ("y", y)) if a is not None)
            raise UsageError(f"{path} needs as many x{name} as y{name}, and at least one; got{got}")
        if x.dtype.kind not in "fiu" or y.dtype.kind not in "fiu" or x.ndim < 2:
            raise UsageError(
                f"{path}: x{name} must be numbers [n, ...] and y{name} labels or targets [n, ...]; "
                f"got {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}"
            )
    return arrays, columns


def federate(path: Path, name: str, task: Task, planned: plan.Plan, target: str = "y") -> Federation:
    """A federation of one client, divided as it would be among all others: draws depend on its name alone.

    Images as uint8 are brought to [-1, 1] as kinfed's own image sets are; all other numbers are taken as they are.
    """
    arrays, _ = read(path, target)
    kind = np.int64 if isinstance(task, Classification) else np.float32
    x = {n: torch.from_numpy(a).float() for n, a in arrays.items() if n.startswith("x")}
    x = {n: t.div_(127.5).sub_(1) if arrays[n].dtype == np.uint8 else t for n, t in x.items()}
    y = {n: torch.from_numpy(a.astype(kind)) for n, a in arrays.items() if n.startswith("y")}
    if isinstance(task, Classification) != (next(iter(y.values())).ndim == 1 and _integers(arrays)):
        raise UsageError(
            f"{path}: y must be {'labels' if isinstance(task, Classification) else 'targets'}, as elsewhere"
        )
    seed, split = planned.learning.seed, planned.split
    if "x" in x:
        owner = np.full(len(x["x"]), name)
        return Federation.from_arrays(x["x"], y["y"], owner, split=split, seed=seed, task=task)
    if "x_validation" not in x:
        _cut(x, y, split, isinstance(task, Classification), generator(seed, "split", int(tags([name]))))
    rows, at = {}, 0
    for part in ("train", "validation", "test"):
        count = len(x[f"x_{part}"])
        rows[part] = [torch.arange(at, at + count)]
        at += count
    whole = [torch.cat([table[f"{k}_{part}"] for part in rows]) for k, table in (("x", x), ("y", y))]
    return Federation(whole[0], whole[1], rows, task, (name,))


def _cut(x: dict[str, Tensor], y: dict[str, Tensor], split: Split, labelled: bool, draw: torch.Generator) -> None:
    """Take validation examples off the training examples."""
    rows = torch.arange(len(x["x_train"]))
    parts: dict[str, Tensor] = {"test": rows[:0], "train": rows}
    if split.validation:
        two = Split(split.validation, 0.0)
        by_label = labelled and split.stratify is not False
        [parts] = two([rows], [draw], y["y_train"] if by_label else None)
    if not parts:
        raise UsageError("one training example leaves none for validation; set federation.split.validation=0")
    for table, key in ((x, "x"), (y, "y")):
        table[f"{key}_validation"] = table[f"{key}_train"][parts["test"]]
        table[f"{key}_train"] = table[f"{key}_train"][parts["train"]]


def _task(arrays: dict[str, np.ndarray]) -> Task:
    labels = [a for name, a in arrays.items() if name.startswith("y")]
    if _integers(arrays):
        return Classification(max(int(a.max()) for a in labels) + 1)
    return Regression()


def _integers(arrays: dict[str, np.ndarray]) -> bool:
    return all(a.dtype.kind in "iu" and a.ndim == 1 for name, a in arrays.items() if name.startswith("y"))


def _npz(path: Path, target: str) -> tuple[dict[str, np.ndarray], list[str]]:
    names = [f"{k}{part}" for part in ("", "_train", "_validation", "_test") for k in "xy"]
    arrays = directory.read(path.parent, path.stem, (), names)[1]
    return {name: np.atleast_1d(array) for name, array in arrays.items()}, []


Loader = Callable[[Path, str], tuple[dict[str, np.ndarray], list[str]]]
# A kind of file, and what reads its arrays and columns as `read` explains them.
LOADERS: dict[str, Loader] = {".npz": _npz, ".csv": tables.of_one_client, ".parquet": tables.of_one_client}


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            # Copies: in the file a tensor may lie at an address for which products are rounded differently.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise RunError(f"{path} cannot be read ({problem}); delete its folder to join anew") from None
