"""The address of a SuperLink, and why it cannot be reached."""

import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kinfed.errors import RunError

HEADER = b"kinfed-secret"  # of calls that need the secret of the server's own user
PRESENCE = b"/kinfed/presence"  # when each key last called
UNKNOWN = "the key is not a member's"
STALE = "not signed, or not lately"  # why the gate refuses a site's call
START = 90.0  # seconds within which a SuperLink that was started must answer
SILENT = "nobody listens there yet"  # the one problem that time may mend
_SECURED = "; if its SuperLink uses TLS, give --keys, the folder with ca.crt and key"
_CERTIFICATE = "use the ca.crt of its keys, and name this host when making them: kinfed flower keys DIR --host NAME"
_EXPIRED = "its operator must renew it, see docs/deploy.md"


@dataclass(frozen=True)
class Link:
    """A SuperLink and how it is reached; `ca` is the file of its certificate authority, empty without TLS."""

    address: str  # HOST:PORT
    ca: str = ""

    def problem(self) -> str:
        """Why the SuperLink cannot be reached: empty if it can, SILENT if nobody listens there yet."""
        try:
            opener = self._opener()
        except (OSError, ssl.SSLError) as problem:
            return f"{self.ca} is not a certificate ({problem}); expected the ca.crt that kinfed flower keys made"
        try:
            opener.open(self._request("/health"), timeout=10).close()
            return ""
        except urllib.error.HTTPError as problem:
            return f"{self.address} answers {problem.code}: it is not a SuperLink"
        except urllib.error.URLError as problem:
            return self._explain(problem.reason)
        except (OSError, ValueError) as problem:  # a TLS server hangs up on plain HTTP
            return f"{self.address} closed the connection ({problem}){'' if self.ca else _SECURED}"

    def ask(self, path: str, secret: str) -> dict[str, Any]:
        """What kinfed's own gate answers those who know the secret; nothing if it does not answer."""
        try:
            with self._opener().open(self._request(path, secret), timeout=10) as answer:
                return dict(json.loads(answer.read()))
        except (OSError, ValueError, TypeError):
            return {}

    def _opener(self) -> urllib.request.OpenerDirector:
        context = ssl.create_default_context(cafile=self.ca) if self.ca else None
        return urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def _request(self, path: str, secret: str = "") -> urllib.request.Request:
        headers = {HEADER.decode(): secret} if secret else {}
        return urllib.request.Request(f"http{'s' if self.ca else ''}://{self.address}{path}", headers=headers)

    def wait(self, is_alive: Callable[[], bool]) -> str:
        """Wait until a SuperLink that is starting answers; returns what is wrong if it does not."""
        deadline = time.monotonic() + START
        while (problem := self.problem()) and time.monotonic() < deadline and is_alive():
            time.sleep(0.3)
        return problem

    def wait_for_server(self, report: Callable[[str], object]) -> None:
        """Wait as long as nobody listens, as a site may be up before its server; raises RunError for other problems."""
        if (problem := self.problem()) == SILENT:
            report(f"waiting for a SuperLink at {self.address}")
        while problem == SILENT:
            time.sleep(2)
            problem = self.problem()
        if problem:
            raise RunError(problem)

    def _explain(self, reason: object) -> str:
        if isinstance(reason, ssl.SSLCertVerificationError):
            fix = _EXPIRED if "expired" in reason.verify_message else _CERTIFICATE
            return f"the certificate of {self.address} cannot be trusted ({reason.verify_message}); {fix}"
        if isinstance(reason, ssl.SSLError):
            return f"{self.address} does not speak TLS ({reason.reason}); was its SuperLink started with --insecure?"
        if isinstance(reason, socket.gaierror):
            return f"there is no host {self.address.rpartition(':')[0]}"
        if isinstance(reason, ConnectionResetError) and not self.ca:
            return f"{self.address} closed the connection{_SECURED}"
        return SILENT
