"""The service: clients' models answer rows by HTTP."""

import asyncio
import hmac
import ipaddress
import json
import math
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import prometheus_client as prometheus
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..data.tables.words import known_name
from ..errors import UsageError, nearest
from ..runs import connections
from ..runs.predictor import Predictor
from .requests import CSV, JSON, Refused, answer, collect_warnings

IGNORED = "Kinfed-Ignored"  # the header of CSV answers that names columns the run was not trained with
WARNINGS = "Kinfed-Warnings"  # and the one that says what else is to be known of the rows
KEYS = {IGNORED: "ignored", WARNINGS: "warnings"}  # the same in JSON
ABROAD = "another machine could ask it: set a token as KINFED_TOKEN"


@dataclass(frozen=True)
class Limits:
    """What the service takes at a time."""

    megabytes: float = 16  # of a request
    concurrency: int = 64  # requests; one more gets 503
    workers: int = 2  # threads that answer

    def __post_init__(self) -> None:
        for name in ("megabytes", "concurrency", "workers"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be a number above 0; got {getattr(self, name)}")


def listen(host: str, port: int, token: str) -> socket.socket:
    """The socket that a service listens on; raises UsageError for a host that others reach without a token."""
    if not 0 <= port < 1 << 16:
        raise UsageError(f"a port is a number from 0 to 65535; got {port}")
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as problem:
        raise UsageError(f"there is no host '{host}' with port {port} to serve on ({problem})") from None
    if not token and not ipaddress.ip_address(info[4][0]).is_loopback:
        raise UsageError(f"serving on {host}, {ABROAD}")
    try:
        return socket.create_server(info[4][:2], family=info[0], backlog=1 << 16)
    except OSError as problem:
        why = os.strerror(problem.errno) if problem.errno else problem  # its own text repeats the address
        raise UsageError(f"cannot serve on {host}:{port} ({why}); choose another --port") from None


class Service:
    """A run's models behind four addresses.

    POST /predict/CLIENT answers rows with that client's model, POST /predict those of several by their column of
    clients; as JSON, or as CSV if they come as `text/csv`. GET /clients, /health and /metrics need no body. With a
    token all but /health need `Authorization: Bearer TOKEN`. What cannot be answered gets {"error": why}.
    """

    def __init__(self, predictor: Predictor, method: str, token: str = "", limits: Limits = Limits()) -> None:
        self.predictor, self.method, self.token, self.limits = predictor, method, token, limits
        self.server: uvicorn.Server | None = None  # while it runs
        self._under_way = 0  # requests
        self._free = asyncio.Semaphore(limits.workers)
        self.registry = registry = prometheus.CollectorRegistry()
        self._count = prometheus.Counter("kinfed_requests", "Requests by status", ["status"], registry=registry)
        self._seconds = prometheus.Histogram("kinfed_request_seconds", "Seconds of a request", registry=registry)
        self._rows = prometheus.Counter("kinfed_rows", "Rows answered", registry=registry)

    def app(self) -> Starlette:
        """The program that a server of ASGI runs."""
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/predict/{client:path}", self._predict, methods=["POST"]),
            Route("/clients", self._clients),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers: dict[Any, Any] = {HTTPException: _no_such, Refused: _refuse, Exception: _broken}
        return Starlette(routes=routes, exception_handlers=handlers)

    def run(self, at: socket.socket) -> None:
        """Answer until a signal to stop; requests that are being answered are finished."""
        torch.set_num_threads(max(1, torch.get_num_threads() // self.limits.workers))
        listener = connections.Listener(at)
        config = uvicorn.Config(
            self._limit_requests(self.app(), listener),
            http=connections.make_impatient_protocol(),
            ws="none",
            loop="asyncio",  # another one would accept connections itself
            log_level="warning",
            access_log=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=10,
            lifespan="off",
        )
        self.server = uvicorn.Server(config)
        with collect_warnings():
            self.server.run(sockets=[listener])

    def _limit_requests(self, app: Any, listener: connections.Listener) -> Any:
        """The program, which answers 503 to one request more than may be under way; connections are none."""

        async def limit(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            listener.admit(scope["client"])
            if self._under_way >= self.limits.concurrency:
                why = {"error": f"{self.limits.concurrency} requests are under way already; come again"}
                return await JSONResponse(why, 503)(scope, receive, send)
            self._under_way += 1
            try:
                await app(scope, receive, send)
            finally:
                self._under_way -= 1

        return limit

    async def _predict(self, request: Request) -> Response:
        begin = time.perf_counter()
        try:
            response = await self._answer(request)
        except Refused as problem:
            response = _refuse(request, problem)
        self._count.labels(str(response.status_code)).inc()
        self._seconds.observe(time.perf_counter() - begin)
        return response

    async def _answer(self, request: Request) -> Response:
        self._admit(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (CSV, JSON):
            raise Refused(415, f"send {JSON} or {CSV} as Content-Type; got '{kind:.80}'")
        predictor, client = self.predictor, request.path_params.get("client")
        if client is not None:
            if (client := known_name(client, predictor.names)) not in predictor.names:
                raise Refused(404, f"there is no client '{client:.80}'; {nearest(client[:80], predictor.names)}")
            predictor = predictor.of_client(client)
        body = await self._read_body(request)
        async with self._free:
            work = partial(_work, predictor, body, kind)
            text, rows, headers = await asyncio.get_running_loop().run_in_executor(None, work)
        self._rows.inc(rows)
        return Response(text, headers=headers, media_type=kind)

    def _admit(self, request: Request) -> None:
        """Raise Refused for a request without the token, if there is one."""
        given = request.headers.get("authorization", "").encode("latin-1")
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise Refused(401, "this needs the header Authorization: Bearer TOKEN")

    async def _read_body(self, request: Request) -> bytes:
        """The body; what is too large is read to its end, unless the sender waits to be asked, and forgotten."""
        most = int(self.limits.megabytes * 1e6)
        large = Refused(413, f"a request may have {self.limits.megabytes:g} MB; send fewer rows at a time")
        length, body, size = request.headers.get("content-length", ""), bytearray(), 0
        if length.isdecimal() and int(length) > most and "expect" in request.headers:
            raise large
        try:
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    body += part
        except ClientDisconnect:
            raise Refused(400, "the request broke off") from None
        if size > most:
            raise large
        return bytes(body)

    async def _clients(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"clients": list(self.predictor.names)})

    async def _metrics(self, request: Request) -> Response:
        self._admit(request)
        return Response(prometheus.generate_latest(self.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "method": self.method, "clients": len(self.predictor.names)})


def _work(predictor: Predictor, body: bytes, kind: str) -> tuple[str, int, dict[str, str]]:
    """The text of the answers, how many there are, and headers."""
    answers, ignored, warned = answer(predictor, body, kind)
    beside = {name: lines for name, lines in ((IGNORED, ignored), (WARNINGS, warned)) if lines}
    if kind == CSV:
        return answers.write_csv(), len(answers), {name: ", ".join(map(quote, lines)) for name, lines in beside.items()}
    more = "".join(f', "{KEYS[name]}": {json.dumps(lines)}' for name, lines in beside.items())
    return f'{{"answers": {answers.write_json()}{more}}}', len(answers), {}


def _refuse(request: Request, problem: Refused) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if problem.status == 401 else None
    return JSONResponse({"error": problem.why}, problem.status, headers=headers)


def _no_such(request: Request, problem: HTTPException) -> Response:
    routes = "POST /predict/CLIENT, POST /predict, GET /clients, GET /health, GET /metrics"
    return JSONResponse({"error": f"{request.method} {request.url.path[:80]} is none of {routes}"}, problem.status_code)


def _broken(request: Request, problem: Exception) -> Response:
    return JSONResponse({"error": f"unexpected {type(problem).__name__}; please report it"}, 500)
