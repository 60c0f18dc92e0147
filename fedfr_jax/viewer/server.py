"""Read-only web server of run pages, for this machine only or with a token.

Requests name runs in the folder, not paths.
"""

import contextlib
import hmac
import ipaddress
import math
import pathlib
import secrets
import socket
from collections.abc import Callable, Sequence

from fedfr_jax.runs.run_files import RunList
from fedfr_jax.text import printable
from fedfr_jax.version import library_version
from fedfr_jax.viewer import page

COOKIE = "fedfr_token"
PAGE_SIZE = 200  # runs of the list on one page
MAX_PROBLEMS = 20  # shown above the list
HEADER_SECONDS = 10  # within which a connection must send a whole request header
MAX_CONNECTIONS = 256
HEADERS = {
    # Scripts and styles are in the page itself; Vega compiles expressions.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline' "
    "'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def build_app(folder: pathlib.Path, *, token: str = "", hosts: Sequence[str] = ("*",)):
    """Build the ASGI application for a folder of runs.

    Args:
      token: required of a request as ?token=, or as the cookie that this sets; "" for
        none.
      hosts: host names that requests may have, against DNS rebinding.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse
    from starlette.routing import Route

    run_list = RunList(folder)

    def home(request):
        words = request.query_params.get("words", "")
        listing = run_list.read(words.split())
        rows = sorted(listing.rows, key=lambda row: -row["changed"])
        number = request.query_params.get("page", "1")
        number = int(number) if number.isdecimal() and len(number) < 9 else 1
        last = max(math.ceil(len(rows) / PAGE_SIZE), 1)
        first = (min(max(number, 1), last) - 1) * PAGE_SIZE
        context = {
            "folder": printable(str(folder)),
            "runs": rows[first : first + PAGE_SIZE],
            "count": len(rows),
            "page": first // PAGE_SIZE + 1,
            "last_page": last,
            "words": words,
            "problems": listing.problems[:MAX_PROBLEMS],
            "num_problems": len(listing.problems),
            "version": library_version(),
        }
        template = page.templates().get_template("runs.html")
        return HTMLResponse(template.render(context))

    def report(request):
        runs = run_list.find(request.query_params.getlist("run"))
        if not runs:
            return HTMLResponse("<p>No such run. <a href='./'>All runs</a></p>", 404)
        return HTMLResponse(page.render(runs, live=True, home="./"))

    def listing(request):
        return JSONResponse(run_list.read().rows)

    async def guard(request, call_next):
        sent_token = request.query_params.get("token", request.cookies.get(COOKIE, ""))
        if token and not hmac.compare_digest(sent_token.encode(), token.encode()):
            message = "Open the address with ?token=... that fedfr serve has printed."
            return HTMLResponse(f"<p>{message}</p>", 401, headers=HEADERS)
        if token and "token" in request.query_params:  # out of the address bar
            answer = RedirectResponse(request.url.remove_query_params("token"))
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        else:
            answer = await call_next(request)
        answer.headers.update(HEADERS)
        return answer

    from starlette.middleware.base import BaseHTTPMiddleware

    return Starlette(
        routes=[
            Route("/", home),
            Route("/run", report),
            Route("/compare", report),
            Route("/runs.json", listing),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
            Middleware(BaseHTTPMiddleware, dispatch=guard),
        ],
    )


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def serve(
    folder: pathlib.Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    started: Callable[[str], None] = print,
) -> None:
    """Serve the pages until Ctrl-C.

    Args:
      started: is called with the address, once it answers.

    Raises:
      ImportError: without the extra `report`.
      ValueError: for a port in use, or an address that is not of this machine.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(
            f"fedfr serve needs the packages of the extra `report`: {page.NEEDS}."
        ) from error
    page.templates()
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    hosts = ("localhost", "127.0.0.1", "::1", "[::1]", host)
    query = f"?token={token}" if token else ""
    name = f"[{host}]" if ":" in host else host
    started(f"http://{name}:{port}/{query}")
    app = build_app(folder, token=token, hosts=("*",) if token else hosts)
    config = server_config(app, log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])


def server_config(app, *, log_level: str):
    """Configuration of uvicorn: no connection can be held without a request."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Closes a connection whose request header is not whole in time."""

        def connection_made(self, transport):
            super().connection_made(transport)
            self.timeout_keep_alive_task = self.loop.call_later(
                HEADER_SECONDS, self.timeout_keep_alive_handler
            )

        def data_received(self, data):
            # The base class stops the clock at the first byte: here a request does.
            cycle = self.cycle
            self.conn.receive_data(data)
            self.handle_events()
            if self.cycle is not cycle:
                self._unset_keepalive_if_required()

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_level=log_level,
        access_log=False,
        timeout_keep_alive=HEADER_SECONDS,
        limit_concurrency=MAX_CONNECTIONS,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Open a listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(
            f"--port={port} on {host} cannot be used ({error.strerror}). Choose "
            "another --port, or 0 for any free one."
        ) from error
    return listening
