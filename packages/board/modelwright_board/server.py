"""The board's HTTP server: who may see it, its routes, and the stream of what changes."""

import asyncio
import ctypes
import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from modelwright.cli.processes import leave_with_parent
from modelwright.core.config import ConfigError
from modelwright.pipeline.report.blocks import compact, count, number, percent, plural, seconds, size
from modelwright_board.command import KEYS_VARIABLE, LOOPBACK
from modelwright_board.files import OutsideError, open_inside
from modelwright_board.forms import Action
from modelwright_board.jobs import Job, command_line
from modelwright_board.project import has_command
from modelwright_board.runs import shown_path
from modelwright_board.screen import Board, Query, Screen, readable, sandboxed
from modelwright_board.screens import SCREENS

PERIOD_S = 1.0
M_ARENA_MAX = -8  # option number of mallopt(3), from glibc's malloc.h
MOST_BODY_BYTES = 1_000_000
MOST_UPLOAD_BYTES = 20_000_000_000
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'{inline}; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; frame-src 'self'; frame-ancestors 'self'; base-uri 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "SAMEORIGIN", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY.format(inline=""),
}  # fmt: skip
STATIC = {
    "board.js": ("modelwright_board", "static/board.js"), "board.css": ("modelwright_board", "static/board.css"),
    "pages.css": ("modelwright.serve", "static/pages.css"), "plotly.js": ("plotly", "package_data/plotly.min.js"),
}  # fmt: skip
"""Files of /static, each with its package; all pages of the project share pages.css."""


class Access:
    """Who may see the board: whoever has the token of the printed URL or, with a key file, a key of an administrator.
    A browser that has shown it once keeps a cookie. `hosts`: names in the Host header, against pages of other sites
    that let their name point to this machine.
    """

    def __init__(self, secret: str, keys: Sequence[str], hosts: Sequence[str], cookie: str) -> None:
        self.secret, self.keys, self.hosts, self.cookie = secret, keys, hosts, cookie
        self.token = "" if keys else secret
        self.session = self._derived("session")
        self.csrf = self._derived("csrf")

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    def opens(self, word: str) -> bool:
        """Returns True for the token, or for a key of an administrator."""
        word = word.strip()
        hashed = hashlib.sha256(word.encode("utf-8", "surrogateescape")).hexdigest()
        if self.keys:
            return any(hmac.compare_digest(hashed, key) for key in self.keys)
        return hmac.compare_digest(word.encode("utf-8", "surrogateescape"), self.token.encode())

    def is_known(self, request: Request) -> bool:
        kept = request.cookies.get(self.cookie, "")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(kept.encode(), self.session.encode()) or (
            scheme.lower() == "bearer" and self.opens(key)
        )

    def admit(self, request: Request, target: str) -> Response:
        """Lets the browser in, and leads it to a page of the board."""
        response = RedirectResponse(target, status_code=303)
        secure = request.url.scheme == "https"
        response.set_cookie(self.cookie, self.session, httponly=True, samesite="lax", secure=secure)
        return response


class Guard:
    """Middleware: headers of every answer; refuses other hosts, strangers, and changes without the CSRF token."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (self._refusal(request) or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if self.access.hosts and host.strip("[]").lower() not in self.access.hosts:
            return _plain(400, "This board answers to its own address only.")
        if request.url.path.startswith("/static/") or request.url.path == "/login":
            return None
        if not self.access.is_known(request):
            word = request.query_params.get("token", "")
            if word and request.method == "GET" and self.access.opens(word):
                rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
                query = f"?{urlencode(rest)}" if rest else ""
                return self.access.admit(request, f"/{quote(request.url.path.lstrip('/'))}{query}")
            if self.access.keys and request.method == "GET":
                return RedirectResponse("/login", status_code=303)
            return _plain(403, "Open the URL that `modelwright board` has printed; its token lets you in.")
        if "token" in request.query_params and request.method == "GET":
            return RedirectResponse(request.url.path, status_code=303)  # not to stay in the history
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin", "")
            if origin and origin != "null" and origin.partition("://")[2] != request.headers.get("host"):
                return _plain(403, "This request comes from another site.")
            token = request.headers.get("x-csrf", "")
            if not hmac.compare_digest(token.encode(), self.access.csrf.encode()):
                # A form without script has it in its body, which the route checks.
                request.scope["needs_csrf"] = True
        return None


def _plain(status: int, text: str) -> Response:
    return Response(f"{text}\n", status_code=status, media_type="text/plain")


class Pages:
    """Templates and the routes that every screen has."""

    def __init__(self, board: Board, access: Access) -> None:
        self.board, self.access = board, access
        self.screens = {screen.name: screen for screen in SCREENS}
        folders = [files("modelwright_board") / "screens", files("modelwright_board")]
        # Escaped, because names, texts and settings come from users' data.
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader([str(folder) for folder in folders]), autoescape=True,
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        formats = (compact, count, number, percent, plural, seconds, size)
        self.templates.filters |= {form.__name__: form for form in formats}
        self.templates.filters |= {"readable": readable, "query": lambda pairs: urlencode(pairs, True)}
        # Blocks are drawn alone, too, and then know nothing that their template imports.
        self.templates.globals |= {"csrf": access.csrf, "has_command": has_command, "command_line": command_line}
        self.templates.globals["ui"] = self.templates.get_template("macros.jinja").module

    def context(self, screen: Screen, query: Query) -> dict[str, Any]:
        run = self.board.chosen_run(query)
        values = {key: entries[-1] for key, entries in query.items()}
        fields = [one for action in screen.actions for one in action.fields.values()]
        presets = {one.name: self.board.preset(one, run) for one in fields}
        return {
            "screen": screen, "chosen": run, "root": shown_path(self.board.root), "query": query,
            "values": presets | values,
            "rail": [(one, one.rail_words(self.board, run)) for one in SCREENS if one.is_step],
            "jobs": self.board.jobs.of(screen.name)[:8], "board": self.board, "back": back_of(screen, query),
            "first_words": {action.name: self.line(action, presets | values)[0] for action in screen.actions},
            "suggestions": {}, **screen.show(self.board, query),
        }  # fmt: skip

    def line(self, action: Action, values: Mapping[str, str]) -> tuple[str, Sequence[str]]:
        """Returns the command line of a form and its words, or an error as a comment and no words."""
        try:
            words = action.words(self.board.root, self.board.own, values)
        except ConfigError as error:
            return f"# {error}", []
        if any("\0" in word or "\n" in word for word in words):
            return "# a value has a line break", []
        return command_line(words), words

    def html(self, screen: Screen, query: Query) -> str:
        return self.templates.get_template(f"{screen.name}.html.jinja").render(self.context(screen, query))

    async def show(self, request: Request) -> Response:
        screen = self.screen_of(request)
        text = await run_in_threadpool(self.html, screen, query_of(request))
        # Plotly writes a style element; no other page has inline styles.
        policy = _POLICY.format(inline=" 'unsafe-inline'" if screen.charts else "")
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    async def events(self, request: Request) -> Response:
        """Server-sent events: blocks of the page as they change, and points of its curves."""
        screen, query = self.screen_of(request), query_of(request)

        def look(shown: dict[str, str], sent: dict[str, Any]) -> list[str]:
            events: list[str] = []
            if screen.charts and (message := screen.charts(self.board, query, sent)):
                events.append(f"event: curves\ndata: {json.dumps(message)}\n\n")
            template = self.templates.get_template(f"{screen.name}.html.jinja")
            blocks = self.templates.get_template("base.html.jinja").blocks | template.blocks
            context = template.new_context(self.context(screen, query))
            for name in ("rail", *screen.blocks):
                text = "".join(blocks[name](context))
                # The first time, too: since the page was drawn, something may have changed.
                if shown.get(name) != text:
                    events.append(f"event: block\ndata: {json.dumps({'id': f'live-{name}', 'html': text})}\n\n")
                shown[name] = text
            return events

        async def stream() -> AsyncIterator[str]:
            shown: dict[str, str] = {}
            sent: dict[str, Any] = {}
            yield "retry: 1000\n\n"
            while not await request.is_disconnected() and not request.app.state.is_ending():
                events = await run_in_threadpool(look, shown, sent)
                yield "".join(events) or ": nothing new\n\n"
                # Pieces of a long file follow each other without a pause.
                await asyncio.sleep(0.01 if any('"share": 0.' in event for event in events) else PERIOD_S)

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def form(self, request: Request) -> dict[str, str]:
        """Returns the fields of a form. Raises `HTTPException` for one without the CSRF token."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY_BYTES:
                raise HTTPException(413, "The form is too large.")
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=500)
        values = {name: entries[-1] for name, entries in fields.items()}
        self.check(request, values.pop("csrf", ""))
        return values

    def check(self, request: Request, token: str = "") -> None:
        if request.scope.get("needs_csrf") and not hmac.compare_digest(token.encode(), self.access.csrf.encode()):
            raise HTTPException(403, "The page is out of date; load it again.")

    def action(self, request: Request) -> tuple[Screen, Action]:
        screen = self.screen_of(request)
        action = next((one for one in screen.actions if one.name == request.path_params["action"]), None)
        if action is None:
            raise HTTPException(404, "There is no such button.")
        return screen, action

    def screen_of(self, request: Request) -> Screen:
        screen = self.screens.get(request.path_params.get("screen", SCREENS[0].name))
        if screen is None:
            raise HTTPException(404, "There is no such page.")
        return screen

    async def command(self, request: Request) -> Response:
        """Returns the command line for the present fields of a form."""
        _, action = self.action(request)
        line, words = await run_in_threadpool(self.line, action, await self.form(request))
        return JSONResponse({"line": line, "is_complete": bool(words)})

    async def start(self, request: Request) -> Response:
        """Starts the command of a form."""
        screen, action = self.action(request)
        values = await self.form(request)

        def begin() -> Job:
            line, words = self.line(action, values)
            if not words:
                raise HTTPException(400, line.removeprefix("# "))
            run = action.run_name(self.board.root, values)
            try:
                return self.board.jobs.start(words, screen=screen.name, action=action.name, run=run)
            except OSError as error:
                raise HTTPException(507, f"The command cannot be started: {error}") from None

        job = await run_in_threadpool(begin)
        return back_to(values, f"/{screen.name}?job={job.id}")

    async def stop(self, request: Request) -> Response:
        """Asks a job or the process of a run to end; both resume where they were."""
        values = await self.form(request)

        def end() -> None:
            job, run = self.board.jobs.get(values.get("job", "")), self.board.runs.get(values.get("run", ""))
            if job:
                self.board.jobs.stop(job)
            elif run and run.pid:
                mine = [one for one in self.board.jobs.all() if one.is_alive and one.run == run.name]
                if not (mine and self.board.jobs.stop(mine[0])):
                    os.kill(run.pid, signal.SIGTERM)

        try:
            await run_in_threadpool(end)
        except OSError as error:
            raise HTTPException(409, f"The process cannot be stopped: {error}") from None
        return back_to(values, "/")

    async def upload(self, request: Request) -> Response:
        """Takes a dropped file, whose name becomes harmless, into the board's folder."""
        self.check(request)
        given = Path(request.query_params.get("name", "").replace("\\", "/")).name
        name = "".join(letter if letter.isalnum() or letter in "._- " else "_" for letter in given).strip(" .")[-120:]
        if not name:
            raise HTTPException(400, "The file has no name.")
        folder = self.board.own / "data"
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{secrets.token_hex(8)}"
        total = 0
        try:
            with open(draft, "wb") as file:
                async for piece in request.stream():
                    total += len(piece)
                    if total > MOST_UPLOAD_BYTES:
                        raise HTTPException(413, "The file is too large; name its path instead.")
                    await run_in_threadpool(file.write, piece)
            os.replace(draft, folder / name)
        except OSError as error:
            raise HTTPException(507, f"The file cannot be written: {error}") from None
        finally:
            draft.unlink(missing_ok=True)
        return JSONResponse({"path": os.path.relpath(folder / name), "bytes": total})

    async def report(self, request: Request) -> Response:
        """The report that a run has written, without scripts."""
        run = self.board.runs.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, "There is no such run.")

        def read() -> bytes:
            with open_inside(run.path, "report.html") as file:
                return file.read(30_000_000)

        try:
            text = await run_in_threadpool(read)
        except (OutsideError, OSError):
            raise HTTPException(404, "This run has no report yet.") from None
        return sandboxed(text)

    async def static(self, request: Request) -> Response:
        package, place = STATIC.get(request.path_params["name"], ("", ""))
        spec = find_spec(package) if package else None
        if spec is None or spec.origin is None:
            raise HTTPException(404, "There is no such file.")
        path = Path(spec.origin).parent / place
        # Plotly's script has megabytes, and changes only with its package.
        is_large = path.suffixes[-2:] == [".min", ".js"]
        return FileResponse(path, headers={"Cache-Control": "max-age=3600"} if is_large else {})

    async def login(self, request: Request) -> Response:
        """Asks for a key of an administrator if the board has a key file."""
        if not self.access.keys:
            return RedirectResponse("/", status_code=303)
        problem = ""
        if request.method == "POST":
            body = (await request.body())[:10_000].decode("utf-8", "replace")
            if self.access.opens(parse_qs(body).get("key", [""])[-1]):
                return self.access.admit(request, "/")
            problem = "This key does not open the board."
            await asyncio.sleep(0.5)
        text = self.templates.get_template("login.html.jinja").render(problem=problem)
        return HTMLResponse(text, status_code=403 if problem else 200)

    async def failed(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else "The board has failed; its terminal says how."
        if "text/html" not in request.headers.get("accept", ""):
            return JSONResponse({"error": detail}, status_code=status)
        text = self.templates.get_template("problem.html.jinja").render(status=status, detail=detail)
        return HTMLResponse(text, status_code=status)


def back_to(values: Mapping[str, str], default: str) -> Response:
    """Leads back to the page of a form, if it is one of this board: "//host" would be another one."""
    target = values.get("back", "")
    is_own = target.startswith("/") and not target.startswith(("//", "/\\"))
    return RedirectResponse(target if is_own else default, status_code=303)


def back_of(screen: Screen, query: Query) -> str:
    """Returns the page's own address, to which a button leads back."""
    words = urlencode([(key, value) for key, values in query.items() for value in values if key != "token"])
    return f"/{screen.name}" + (f"?{words}" if words else "")


def query_of(request: Request) -> dict[str, list[str]]:
    """Returns the values of the page's address, at most 20 of a name."""
    result: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if len(result.setdefault(name[:60], [])) < 20:
            result[name[:60]].append(value[:4000])
    return result


def build_app(board: Board, access: Access) -> Starlette:
    """Returns the application; every route is behind `Guard`."""
    pages = Pages(board, access)
    routes = [
        Route("/", pages.show), Route("/login", pages.login, methods=["GET", "POST"]),
        Route("/static/{name}", pages.static), Route("/report/{run}", pages.report),
        Route("/events/{screen}", pages.events), Route("/command/{screen}/{action}", pages.command, methods=["POST"]),
        Route("/start/{screen}/{action}", pages.start, methods=["POST"]), Route("/stop", pages.stop, methods=["POST"]),
        Route("/upload", pages.upload, methods=["PUT"]),
        *(route for screen in SCREENS for route in screen.routes(board)), Route("/{screen}", pages.show),
    ]  # fmt: skip
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        HTTPException: pages.failed, Exception: pages.failed,
    }  # fmt: skip
    app: Any = Starlette(routes=routes, exception_handlers=handlers)
    app.state.pages = pages
    app.state.is_ending = lambda: False
    app.add_middleware(Guard, access=access)
    return app


def kept_secret(board: Board) -> str:
    """Returns the board's secret, which stays the same so that an open page survives a restart of the board."""
    path = board.own / "secret"
    try:
        secret = path.read_text(encoding="ascii").strip()
        if len(secret) >= 40 and not path.is_symlink():
            return secret
    except (OSError, ValueError):
        pass
    secret = secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secret)
    return secret


def run_board(root: Path, *, host: str, port: int, keys: Sequence[str] = ()) -> int:
    """Serves the board until a signal ends it. Raises `ConfigError`. keys: SHA-256 of each key that opens it."""
    board = Board(root)
    # The board writes there, and a folder of runs may come from somebody else.
    if link := next((one for one in (board.own, board.own / "data", board.own / "jobs") if one.is_symlink()), None):
        raise ConfigError(f"{link}: is a link; remove it")
    try:
        board.own.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = kept_secret(board)
    except OSError as error:
        raise ConfigError(f"{root}: cannot be written ({error.strerror}); choose another folder of runs") from None
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--port: {host}:{port} cannot be bound ({error.strerror}); choose another one") from None
    port = listener.getsockname()[1]
    # Cookies know no ports, so two boards of a machine need two names.
    access = Access(secret, keys, LOOPBACK if host in LOOPBACK else (), f"modelwright-board-{port}")
    shown = f"[{host}]" if ":" in host else host
    print(f"board     http://{shown}:{port}/" + (f"?token={access.token}" if access.token else ""), flush=True)
    print(f"runs      {root}\nCtrl-C ends the board; what it has started goes on", flush=True)
    app = build_app(board, access)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, lifespan="off",
        server_header=False,
    )  # fmt: skip
    # While the first page is drawn: it reads metrics, and takes a quarter of a second to import.
    threading.Thread(target=import_module, args=("pyarrow.json",), daemon=True).start()
    server = uvicorn.Server(config)
    app.state.is_ending = lambda: server.should_exit  # streams would keep it waiting
    server.run(sockets=[listener])
    return 0


def main(runs: str, host: str, port: str, exit_with_parent: str) -> int:
    """Runs the board in this process, with the options of `modelwright board` that have been checked."""
    if exit_with_parent != "0":
        leave_with_parent()
        if os.getppid() != int(exit_with_parent):  # it has ended before this process could watch it
            return 0
    with suppress(OSError, AttributeError):  # another C library than glibc
        # Each of the threads that draw pages would keep a heap of its own: half as much memory again.
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    try:
        # Taken out, for the commands that the board starts have no use for them.
        keys = os.environ.pop(KEYS_VARIABLE, "").split()
        return run_board(Path(runs), host=host, port=int(port), keys=keys)
    except ConfigError as error:
        print(f"modelwright: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
