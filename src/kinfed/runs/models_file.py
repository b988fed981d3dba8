"""The file of a run's models: tensors by client, with a checksum each."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core import checkpoint, trees
from ..core.history import History
from ..core.model import Model, digest_plain_tensors
from ..core.rows import Part
from ..core.trees import Tree
from ..errors import UsageError

STAR = "*"  # the owner, in a key, of a tensor that all share
ALL = ""  # the same among owners, of whom one may be called *
CHECKSUMS, SAME = "crc32", "same"  # in the file's metadata
# raised by a file of other models
UNREADABLE = (SafetensorError, OSError, RuntimeError, TypeError, LookupError, ValueError, AttributeError)
Owned = Mapping[str, Mapping[str, Tensor]]  # tensors by owner, a client or `ALL`, and name


class ModelsFile:
    """The models in a run's folder, of which each tensor is read when it is asked for.

    `keys` are the names of tensors by owner, and where each is, one mapping for all clients with the same model;
    `method` alone exports the models, if it is not ""; `identity` is that of the run's summary. The constructor raises
    what safetensors does for what cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, safe_open(path, "pt")
        about, names = self._file.metadata() or {}, sorted(self._file.keys())
        digits = about.get(CHECKSUMS, "")
        self._sums = {name: digits[8 * i : 8 * i + 8] for i, name in enumerate(names)} if digits else {}
        self._plain: dict[str, str] = json.loads(about.get("plain", "{}"))
        self.method, self.identity = about.get("method", ""), about.get("identity")
        self.keys: dict[str, dict[str, str]] = defaultdict(dict)
        for key in names:
            owner, _, tensor = key.partition("/")
            self.keys[ALL if owner == STAR else unquote(owner)][tensor] = key
        same: dict[str, list[str]] = json.loads(about.get(SAME, "{}"))
        others = [name for names in same.values() for name in names]
        if not same.keys() <= self.keys.keys() or len({*others, *self.keys}) < len(others) + len(self.keys):
            raise ValueError("some clients have two models, or none")
        self.keys |= {name: self.keys[owner] for owner, names in same.items() for name in names}

    def dtype(self, key: str) -> str:
        """The type of a tensor, in safetensors' words."""
        return str(self._file.get_slice(key).get_dtype())

    def read(self, key: str) -> Tensor:
        """A tensor of one's own; raises UsageError if it is not what was written."""
        # A copy: in the file a tensor may lie at an address for which products are rounded differently.
        array: Tensor = self._file.get_tensor(key).clone()
        if self._sums and checkpoint.checksums({key: array}) != self._sums[key]:
            raise UsageError(
                f"{self._path}: '{key}' is not what was written, as its checksum differs; copy the file again, or run "
                "again"
            )
        return array

    def read_personal(self, client: str, model: Model) -> Tree:
        """What a client's model consists of, `theta: [d]` and the rest; raises TypeError for another model's."""
        keys, layout = {**self.keys.get(ALL, {}), **self.keys.get(client, {})}, model.layout
        arrays = {part: self.read(key) for part, key in keys.items() if part not in layout.frozen}
        tensors = {e.name: arrays.pop(e.name) for e in layout.entries}
        for e in layout.entries:
            got = tensors[e.name]
            if got.shape != e.shape or got.dtype != (e.dtype or model.theta.dtype):
                wanted = e.dtype or "floating-point"
                raise TypeError(f"'{e.name}' is {got.dtype} {list(got.shape)}, not {wanted} {list(e.shape)}")
        return trees.nest({"theta": layout.flatten(tensors), **arrays})

    def check_module(self, model: Model) -> None:
        """Raise UsageError if the module holds other plain tensors than the one that was trained."""
        now = digest_plain_tensors(model.original)
        if changed := [name for name, digest in self._plain.items() if now.get(name) != digest]:
            raise UsageError(
                f"{self._path.parent}: the module's tensor '{changed[0]}' differs from that of training, and no run "
                "holds a plain attribute; train again with it registered as a buffer (self.register_buffer)"
            )


def list_tensors(history: History, model: Model) -> Owned:
    """The tensors of the clients' models: those that all share once, of `ALL`, and what is frozen.

    Clients with the same model have the same mapping.
    """
    layout, owned, names = model.layout, defaultdict[str, dict[str, Tensor]](dict), history.names
    (arrays, shared), owners = history.kept, _find_owners(history)
    if arrays:
        owned[ALL] |= model.frozen
    for part, values in arrays.items():
        if part in shared and isinstance(values, Tensor):
            of_owners = [(ALL, values)]
        else:
            of_owners = [(names[i], values[i]) for i in sorted({*owners})]
        for name, values_of in of_owners:
            is_model = part == "theta" and values_of.numel() == layout.size
            owned[name] |= layout.tensors(values_of) if is_model else {part: values_of}
    return owned | {name: owned[names[i]] for name, i in zip(names, owners, strict=True)}


def _find_owners(history: History) -> list[int]:
    """By client, the place of the first one with the same model."""
    owners = torch.arange(len(history.names))
    for table in history.kept.arrays.values():
        if isinstance(table, Part):  # all such have the same rows in common
            _, places = table.separate()
            return torch.full_like(owners, len(owners)).scatter_reduce(0, places, owners, "amin")[places].tolist()
    return owners.tolist()


def write_models(path: Path, owned: Owned, model: Model, method: str = "", identity: str = "") -> None:
    """Write models as CLIENT/TENSOR, and what all share as */TENSOR.

    Of clients with the same mapping the first has the tensors, and `same` in the metadata lists the others by it. A
    name has %2F for a slash and %25 for a percent sign, and *, if that is all of it, is %2A. With them are digests of
    the tensors that the model's module holds beside these, by which a reader knows the module.
    """
    first: dict[int, str] = {}  # by mapping, its first owner
    same = defaultdict[str, list[str]](list)
    for name, tensors in owned.items():
        if (owner := first.setdefault(id(tensors), name)) != name:
            same[owner].append(name)
    arrays = {f"{_quote(name)}/{key}": t for name in first.values() for key, t in owned[name].items()}
    plain = digest_plain_tensors(model.original)
    about = {"method": method, "identity": identity, "plain": json.dumps(plain) if plain else ""}
    about[SAME] = json.dumps(same) if same else ""
    about[CHECKSUMS] = checkpoint.checksums(arrays)
    checkpoint.write(arrays, path, {key: text for key, text in about.items() if text})


def _quote(name: str) -> str:
    """An owner as in a key."""
    if name == ALL:
        return STAR
    return "%2A" if name == STAR else name.replace("%", "%25").replace("/", "%2F")
