"""The files of an experiment at a site: the invitation by which it joined, and its state after the last round."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kinfed.core import checkpoint
from kinfed.core.trees import Tree
from kinfed.errors import RunError, UsageError
from kinfed.files import make_folder, read_json, write_json
from kinfed.runs.openers import SITE

from ..plan import hash_json
from ..wire import messages
from ..wire.messages import Fields, Message

ERRORS = "errors.safetensors"  # of the selected model on the site's test rows


class SiteState(NamedTuple):
    """What a site remembers of an experiment between two rounds."""

    base: Tree  # private state after the last round whose reply the server accepted
    state: Tree  # private state after the last round trained here
    accepted: int  # that round of base, -1 before the first
    trained: int  # that round of state
    digest: str  # of the last message that was answered
    reply: Message  # the reply to it
    forms: Fields  # type and shape of what the server sends, by name


class ExperimentFolder:
    """A site's folder for one experiment; raises UsageError for a name that cannot be a folder's."""

    def __init__(self, site: Path, experiment: object) -> None:
        if not (isinstance(experiment, str) and experiment.replace("-", "").isalnum() and len(experiment) <= 64):
            raise UsageError(
                f"an experiment's name consists of letters, digits and '-', 64 at most; got {experiment!r:.80}"
            )
        self.path = site / experiment

    @property
    def stamp(self) -> tuple[int, int]:
        """Of the file that says how the site joined this run, which is another once it has joined anew; 0 before."""
        path = self.path / SITE
        about = path.stat() if path.exists() else None
        return (about.st_ino, about.st_mtime_ns) if about else (0, 0)

    def invitation(self) -> Message | None:
        """The message by which the site joined, None before it has; raises RunError if its file is damaged."""
        path = self.path / SITE
        if not path.exists():
            return None
        arrays, text = read_tensors(path)
        with expecting_own(path):
            invitation = Message(json.loads(text["words"]), arrays)
            messages.check("join", invitation.fields)
        return invitation

    def save_invitation(self, invitation: Message) -> None:
        """Remember by which message the site joined, unless it does already."""
        saved = self.invitation()
        if saved is None or messages.digest(saved) != messages.digest(invitation):
            make_folder(self.path)
            fields = {"words": json.dumps(invitation.fields)}
            checkpoint.write(invitation.arrays, self.path / SITE, fields)

    def description(self) -> Fields | None:
        """How the site's table becomes inputs, see `save_description`; None before it has joined."""
        return read_json(self.path / "description.json", "delete its folder to join again") or None

    def save_description(self, description: Fields) -> None:
        """Remember how the site's table becomes inputs, in the names of its own file, so that new rows can."""
        make_folder(self.path)
        write_json(self.path / "description.json", description)

    def state(self) -> SiteState | None:
        """The site's state, None before it has joined; raises RunError if its file is damaged."""
        path = self.path / "state.safetensors"
        if not path.exists():
            return None
        arrays, text = read_tensors(path)
        reply = {n.removeprefix("reply/"): t for n, t in arrays.items() if n.startswith("reply/")}
        with expecting_own(path):
            fields = json.loads(text["state"])
            trees = Message(fields["structures"], arrays)
            return SiteState(
                base=messages.take(trees, "base"),
                state=messages.take(trees, "state"),
                accepted=messages.round_of(fields, "accepted"),
                trained=messages.round_of(fields, "trained"),
                digest=str(fields["digest"]),
                reply=Message(dict(fields["reply"]), reply),
                forms={
                    part: {n: [str(d), list(s)] for n, (d, s) in forms.items()}
                    for part, forms in fields["forms"].items()
                },
            )

    def save_state(self, state: SiteState) -> None:
        """Replace the site's state as a whole."""
        trees = Message({}, {f"reply/{name}": t for name, t in state.reply.arrays.items()})
        messages.put(state.base, trees, "base")
        messages.put(state.state, trees, "state")
        fields = {
            "structures": trees.fields,
            "accepted": state.accepted,
            "trained": state.trained,
            "digest": state.digest,
            "reply": state.reply.fields,
            "forms": state.forms,
        }
        checkpoint.write(trees.arrays, self.path / "state.safetensors", {"state": json.dumps(fields)})


def hash_owner(folder: Path) -> str:
    """A hash of whose models lie in the folder of an experiment, and of how that site's rows become their inputs."""
    described = read_json(folder / "description.json")
    return hash_json({name: part for name, part in described.items() if name not in ("code", "examples")})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the text of a safetensors file; raises RunError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            # Copies: in the file a tensor may lie at an address for which products are rounded differently.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise RunError(f"{path} cannot be read ({problem}); delete its folder to join again") from None


@contextmanager
def expecting_own(path: Path) -> Iterator[None]:
    """Turn every error that reading a file's text can end in into a RunError that names the file."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise RunError(f"{path} is not what this site wrote ({why:.200}); delete its folder to join again") from None
