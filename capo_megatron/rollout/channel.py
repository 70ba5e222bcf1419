"""Calls from a trainer to an engine server: JSON over HTTP, signed with a secret that both know.

An answer begins at once and then beats every two seconds until its JSON comes, in a line. A server that dies breaks the
connection, one whose machine is gone falls silent: either way the caller knows within `SeparateConfig.silence_s`, and
no call lasts longer than `limit_s`. Nothing is unpickled, and nobody without the secret is listened to; what is said is
not encrypted, as the weights are not, so both belong into a network that is trusted.

Calls of a run are numbered. Trainer ranks that share a server all make the same calls, and the server works on each
once and gives all of them its answer; so a call whose connection broke can be made again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from capo_megatron import errors
from capo_megatron.errors import CapoError, ConfigError, RolloutError

SECRET = "CAPO_ENGINE_TOKEN"  # the environment variable
_SHORTEST = 16  # characters of a secret
_BEAT_S = 2.0
_MOST_ASKED, _MOST_ANSWERED = 2**28, 2**32  # bytes
_ATTEMPTS, _AGAIN_S = 2, 1.0  # a connection may break without a reason


def secret() -> bytes:
    """The secret of this environment. Raises ConfigError if it is missing or easily guessed."""
    found = os.environ.get(SECRET, "")
    if len(found) < _SHORTEST:
        what = f"has {len(found)} characters, at least {_SHORTEST} are needed" if found else "is not set"
        raise ConfigError(
            f"{SECRET}: {what}. rollout.placement=separate lets nobody in without it: set this environment variable to "
            "the same secret where the trainer and the engine servers start (openssl rand -hex 32)."
        )
    return os.fsencode(found)


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of host:port. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != address:
        raise ConfigError(f"{address!r}: expected host:port, e.g. node1:29600 or [::1]:29600.")
    return host, port


# --- the caller -------------------------------------------------------------------------------------------------------


class Line:
    """The calls of one trainer rank to one server."""

    def __init__(self, server: str, key: bytes, session: str, silence_s: float, limit_s: float) -> None:
        self.server = server
        self._key, self._session, self._silence_s, self._limit_s = key, session, silence_s, limit_s
        self._numbers = count()

    def reach(self, wait_s: float) -> str:
        """Wait until the server answers; this machine's address as the server sees it. RolloutError after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self._status()[1]
            except (OSError, HTTPException) as error:
                if time.monotonic() > deadline:
                    raise RolloutError(
                        f"engine server {self.server}: not there after {wait_s:g} s ({error}). Start it (capo-megatron "
                        "engine CONFIG), correct rollout.separate.servers, or use rollout.placement=colocated."
                    ) from error
                time.sleep(min(1.0, wait_s))

    def status(self) -> dict[str, Any]:
        """What the server says of itself, also while it works. Raises RolloutError if it has another run now."""
        try:
            found = self._status()[0]
        except (OSError, HTTPException) as error:
            raise self._lost("status", error) from error
        if found["session"] != self._session:
            raise RolloutError(f"engine server {self.server}: {_OTHER_RUN}")
        return found

    def call(self, name: str, **arguments: Any) -> Any:
        """What the server answers. Raises the CapoError that it answers with; RolloutError if it dies or is silent."""
        return self._exchange(name, self._body(name, arguments))

    def start(self, name: str, **arguments: Any) -> Pending:
        """The same in a thread, for a call during which the caller has something to do."""
        body = self._body(name, arguments)
        return Pending(lambda: self._exchange(name, body))

    def _body(self, name: str, arguments: dict[str, Any]) -> bytes:
        asked = {"session": self._session, "number": next(self._numbers), "name": name, "arguments": arguments}
        return json.dumps(asked).encode()

    def _exchange(self, name: str, body: bytes) -> Any:
        deadline = time.monotonic() + self._limit_s
        for attempt in range(_ATTEMPTS):
            try:
                return self._answer(name, body, deadline)
            except TimeoutError as error:
                raise self._lost(name, f"nothing was heard of it for {self._silence_s:g} s") from error
            except (OSError, HTTPException) as error:
                if attempt == _ATTEMPTS - 1:
                    raise self._lost(name, error) from error
                time.sleep(_AGAIN_S)
        raise AssertionError("the last attempt returns or raises")

    def _answer(self, name: str, body: bytes, deadline: float) -> Any:
        connection = HTTPConnection(*split_address(self.server), timeout=self._silence_s)
        try:
            connection.request("POST", "/", body, _signed(self._key, body))
            response = connection.getresponse()
            if response.status != 200:
                raise RolloutError(f"engine server {self.server}: {name}: {response.read(2000).decode()}")
            answer = json.loads(self._last_line(name, response, deadline))
        finally:
            connection.close()
        if "error" in answer:
            raise getattr(errors, answer["kind"])(f"engine server {self.server}: {answer['error']}")
        return answer["value"]

    def _last_line(self, name: str, response: HTTPResponse, deadline: float) -> bytes:
        while (line := response.readline(_MOST_ANSWERED)) == b"\n":
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"engine server {self.server}: {name} has taken more than rollout.separate.limit_s="
                    f"{self._limit_s:g}. Look at the server, or raise it."
                )
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection ended before the answer did")
        return line

    def _status(self) -> tuple[dict[str, Any], str]:
        connection = HTTPConnection(*split_address(self.server), timeout=self._silence_s)
        try:
            connection.request("GET", "/")
            here = connection.sock.getsockname()[0]
            return json.loads(connection.getresponse().read(2**20)), here
        except ValueError as error:
            raise HTTPException(f"it is no engine server: {error}") from error
        finally:
            connection.close()

    def _lost(self, name: str, why: object) -> RolloutError:
        return RolloutError(
            f"engine server {self.server}: lost during {name} ({why or 'the connection broke'}). Look at its output "
            "and start it again; the same train command then continues from the newest checkpoint."
        )


class Pending:
    """A call under way."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(work,), name="engine call", daemon=True).start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # whoever waits has to know
            self._failure = error
        self._over.set()

    def over(self) -> bool:
        return self._over.is_set()

    def result(self) -> Any:
        """Wait for it; what it returned. Raises what it raised."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure
        return self._value


def _signed(key: bytes, body: bytes) -> dict[str, str]:
    digest = hashlib.sha256(body).hexdigest()
    return {"X-Digest": digest, "Authorization": hmac.new(key, digest.encode(), "sha256").hexdigest()}


# --- the server -------------------------------------------------------------------------------------------------------

_OTHER_RUN = (
    "it was started again, or serves another run now, and holds none of this run's weights. The same train command "
    "continues from the newest checkpoint."
)


@dataclass(eq=False)
class Call:
    """One call, made by all trainer ranks that share the server."""

    session: str
    name: str
    arguments: dict[str, Any]
    digest: str
    done: threading.Event = field(default_factory=threading.Event)
    answer: bytes = b""
    fetched: int = 0  # by so many ranks

    def succeed(self, value: Any) -> None:
        self._finish({"value": value})

    def fail(self, error: CapoError) -> None:
        self._finish({"error": str(error), "kind": type(error).__name__})

    def _finish(self, answer: dict[str, Any]) -> None:
        self.answer = json.dumps(answer).encode() + b"\n"
        self.done.set()


class Desk:
    """Where calls come in from the network, to be worked on by one thread, one at a time."""

    def __init__(self, listen: str, key: bytes) -> None:
        """Listen at host:port from now on. Raises ConfigError if that is not possible."""
        self.status: dict[str, Any] = {"session": "", "version": -1}
        self._key, self._clients = key, 1
        self._calls: dict[int, Call] = {}  # of this session, that some rank has still to fetch
        self._begun = -1
        self._lock, self._queue = threading.Lock(), queue.SimpleQueue[Call]()
        try:
            self._http = ThreadingHTTPServer(split_address(listen), _Handler)
        except OSError as error:
            raise ConfigError(f"--listen {listen}: {error.strerror or error}. Choose another port or host.") from error
        self._http.desk = self  # type: ignore[attr-defined]
        threading.Thread(target=self._http.serve_forever, name="engine desk", daemon=True).start()

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    def take(self, wait_s: float) -> Call | None:
        """The next call, or None if none comes in time."""
        try:
            call = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return None
        if call.session == self.status["session"]:
            return call
        call.fail(RolloutError(_OTHER_RUN))
        return None

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def authorized(self, digest: str, signature: str) -> bool:
        return hmac.compare_digest(hmac.new(self._key, digest.encode(), "sha256").hexdigest(), signature)

    def hand_in(self, body: bytes, digest: str) -> Call:
        """The call that is asked for, perhaps by another rank before. Raises RolloutError if it cannot be worked on."""
        asked = json.loads(body)
        session, number = asked["session"], asked["number"]
        with self._lock:
            if asked["name"] == "open" and session != self.status["session"]:
                self.status = {"session": session, "version": -1}
                self._clients, self._calls, self._begun = asked["arguments"]["clients"], {}, -1
            if session != self.status["session"]:
                raise RolloutError(_OTHER_RUN)
            if number == self._begun + 1:
                self._begun = number
                self._calls[number] = Call(session, asked["name"], asked["arguments"], digest)
                self._queue.put(self._calls[number])
            call = self._calls.get(number)
            if call is None or call.digest != digest:
                raise RolloutError(
                    f"call {number} ({asked['name']}) is not the one that other trainer ranks have made."
                )
            return call

    def fetched(self, call: Call) -> None:
        with self._lock:
            call.fetched += 1
            if call.fetched == self._clients:
                self._calls = {number: kept for number, kept in self._calls.items() if kept is not call}


class _Handler(BaseHTTPRequestHandler):
    """One request, in a thread of its own."""

    timeout = 60  # seconds that a peer may stop in the middle of a request
    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        self._say(200, json.dumps(self._desk.status).encode())

    def do_POST(self) -> None:
        digest, size = self.headers.get("X-Digest", ""), self.headers.get("Content-Length", "")
        if not self._desk.authorized(digest, self.headers.get("Authorization", "")):
            self._say(403, f"the trainer's {SECRET} is not the server's.".encode())
            return
        if not size.isdecimal() or int(size) > _MOST_ASKED:
            self._say(413, f"got {size} bytes, at most {_MOST_ASKED} are taken.".encode())
            return
        body = self.rfile.read(int(size))
        if hashlib.sha256(body).hexdigest() != digest:
            self._say(400, b"the request is damaged.")
            return
        try:
            call = self._desk.hand_in(body, digest)
        except RolloutError as error:
            self._say(409, str(error).encode())
            return
        self.send_response(200)
        self.end_headers()
        while not call.done.wait(_BEAT_S):
            self.wfile.write(b"\n")
        self.wfile.write(call.answer)
        self._desk.fetched(call)

    @property
    def _desk(self) -> Desk:
        return self.server.desk  # type: ignore[attr-defined]

    def _say(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing: calls are frequent."""
