"""How kinfed sends Flower's calls: by a client of its own, which follows no redirect and reads no endless answer."""

import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Any

import httpx

LARGEST = 32 << 20  # bytes of an answer; Flower cuts arrays into pieces of 5 MiB


class Wire:
    """The last of a Flower client's interceptors, by its own interface; what it sends bears `headers` as well."""

    def __init__(self, ca: str, headers: Mapping[str, str] | None = None, seconds: float = 30.0) -> None:
        """`ca` is the file of the server's certificate authority, empty without TLS."""
        verify = ssl.create_default_context(cafile=ca) if ca else True
        self._http = httpx.Client(verify=verify, timeout=seconds, follow_redirects=False, trust_env=False)
        self._headers = dict(headers or {})

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Send a call, and read its answer if that is not too long."""
        request: httpx.Request = context.request
        request.headers.update(self._headers)
        answer, content = self._http.send(request, stream=True), bytearray()
        try:
            for piece in answer.iter_raw():
                content += piece
                if len(content) > LARGEST:
                    raise httpx.RemoteProtocolError(f"an answer is longer than {LARGEST:,} bytes", request=request)
        finally:
            answer.close()
        if answer.is_redirect:  # a server could have this machine call others in its network
            raise httpx.RemoteProtocolError(f"the server redirects to {answer.headers.get('location', '')!r:.80}")
        kept = [(name, value) for name, value in answer.headers.multi_items() if name != "content-encoding"]
        return httpx.Response(answer.status_code, headers=kept, content=bytes(content), request=request)


def url_of(address: str, ca: str) -> str:
    """The address of a server as HTTP clients take it."""
    return urllib.parse.urlunsplit(("https" if ca else "http", address, "", "", ""))


def reason(answer: httpx.Response) -> str:
    """What an answer that refuses a call says, in a line."""
    text = answer.text.strip()
    try:
        content = answer.json()
        error = content.get("error", content)
        text = str(error.get("message") or error.get("detail") or text)
    except (ValueError, AttributeError):
        pass
    return f"{answer.status_code}: {' '.join(text.split())[:200]}"
