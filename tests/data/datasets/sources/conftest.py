"""A server that plays the publishers of the originals."""

import hashlib
import http.server
import threading

import pytest
from small_originals import SMALL

from kinfed.data.datasets.sources.originals import ORIGINALS, Original


class Publisher:
    """Serves `files` at `address`; knows what it was asked, and can be told to break off."""

    def __init__(self):
        self.files, self.asked, self.breaks_after, self.ranges = {}, [], None, True
        publisher = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                span = self.headers.get("Range")
                publisher.asked.append((name, span))
                data = publisher.files.get(self.path.lstrip("/"), publisher.files.get(name))
                if data is None:
                    return self.send_error(404)
                begin = int(span.removeprefix("bytes=").rstrip("-")) if span and publisher.ranges else 0
                if begin >= len(data) > 0 and span and publisher.ranges:
                    return self.send_error(416)
                self.send_response(206 if begin else 200)
                self.send_header("Content-Length", str(len(data) - begin))
                self.end_headers()
                rest = data[begin:]
                if publisher.breaks_after is not None:
                    rest, publisher.breaks_after = rest[: publisher.breaks_after], None
                self.wfile.write(rest)
                return None

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()


@pytest.fixture
def publisher(monkeypatch):
    made = Publisher()
    monkeypatch.setenv("KINFED_MIRROR", made.address)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def publish(publisher, monkeypatch):
    """Publish a data set's small originals with checksums that fit; returns the files."""

    def do(name, checksums=True):
        files = SMALL[name]()
        publisher.files.update(files)
        original = ORIGINALS[name]
        sources = tuple(
            s._replace(checksum=f"md5:{hashlib.md5(files[s.name]).hexdigest()}" if checksums else None)
            for s in original.sources
        )
        monkeypatch.setitem(ORIGINALS, name, Original(sources, original.convert))
        return files

    return do
