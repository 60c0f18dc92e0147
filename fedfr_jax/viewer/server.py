"""Read-only web server of run pages, for this machine only or with a token.

Requests name runs in the folder, not paths.
"""

import contextlib
import hmac
import ipaddress
import pathlib
import secrets
import socket
from collections.abc import Callable, Sequence

from fedfr_jax.version import library_version
from fedfr_jax.viewer import page
from fedfr_jax.viewer.run_files import RunFiles, find_runs, read_run
from fedfr_jax.viewer.runs_table import read_runs, run_name, run_row

COOKIE = "fedfr_token"
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
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse
    from starlette.routing import Route

    async def home(request):
        runs = await run_in_threadpool(read_runs, folder)
        rows = sorted(map(run_row, runs), key=lambda row: -row["changed"])
        template = page.templates().get_template("runs.html")
        context = {"folder": folder, "runs": rows, "version": library_version()}
        return HTMLResponse(template.render(context))

    async def report(request):
        names = request.query_params.getlist("run")
        runs = await run_in_threadpool(_named_runs, folder, names)
        if not runs:
            return HTMLResponse("<p>No such run. <a href='./'>All runs</a></p>", 404)
        text = await run_in_threadpool(page.render, runs, live=True, home="./")
        return HTMLResponse(text)

    async def listing(request):
        runs = await run_in_threadpool(read_runs, folder)
        return JSONResponse([run_row(run) for run in runs])

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


def _named_runs(folder: pathlib.Path, names: Sequence[str]) -> list[RunFiles]:
    """Read the named runs of a folder."""
    paths = {run_name(path, folder): path for path in find_runs(folder)}
    return [read_run(paths[name], name=name) for name in names if name in paths]


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
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


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
