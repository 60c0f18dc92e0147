"""The server of pages: read-only, by name, and with a token where others reach it."""

import contextlib
import http.client
import json
import re
import socket
import threading

import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.viewer import server

uvicorn = pytest.importorskip("uvicorn")


@contextlib.contextmanager
def serving(app):
    """Port of a server of the application, until the block ends."""
    made = uvicorn.Server(server.server_config(app, log_level="critical"))
    made.install_signal_handlers = lambda: None
    place = server._listen("127.0.0.1", 0)
    thread = threading.Thread(target=made.run, args=([place],), daemon=True)
    thread.start()
    yield place.getsockname()[1]
    made.should_exit = True
    thread.join()
    place.close()


def get(port, path, method="GET", **headers):
    """(status, headers, text) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


@pytest.fixture
def ask(run):
    """(path, "open" or "closed", ...) -> `get` of a server of the folder's runs."""
    open_app = server.build_app(run.parent, hosts=("127.0.0.1",))
    closed_app = server.build_app(run.parent, token="secret")
    with serving(open_app) as open_port, serving(closed_app) as closed_port:
        ports = {"open": open_port, "closed": closed_port}
        yield lambda path, which="open", *x, **how: get(ports[which], path, *x, **how)


def test_pages_are_live_by_name_and_read_only(ask, run):
    status, headers, text = ask("/")
    assert status == 200 and ">a</a>" in text
    assert "default-src 'none'" in headers["content-security-policy"]
    status, _, text = ask("/run?run=a")
    assert status == 200 and "const LIVE = true" in text
    assert ask("/compare?run=a&run=a")[0] == 200
    assert json.loads(ask("/runs.json")[2])[0]["state"] == "finished"
    assert ask("/run?run=a", method="POST")[0] == 405
    assert ask("/run?run=a", method="DELETE")[0] == 405


@pytest.mark.parametrize(
    "path",
    ["/../config.json", "/a/config.json", "/run?run=../a", "/run?run=/etc", "/run"]
    + ["/%2e%2e/%2e%2e/etc/passwd", "/run?run=a/../a", "/run?run=..%2fruns%2fa"],
)
def test_no_path_leads_out_of_the_folder(ask, path):
    assert ask(path)[0] == 404


def test_another_name_for_this_machine_is_refused(ask):
    assert ask("/", Host="evil.example")[0] == 400


def test_a_connection_without_a_whole_header_is_closed(monkeypatch, run):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    half = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
    whole = b"GET /none HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving(server.build_app(run.parent)) as port:
        for sent, start in [(b"", b""), (half, b""), (whole + half, b"HTTP/1.1 404 ")]:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
                slow.sendall(sent)
                answer = b"".join(iter(lambda: slow.recv(2**16), b""))  # to its end
            assert answer.startswith(start) and bool(answer) == bool(start)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as long:
            long.sendall(half + b"x" * 2**16)
            assert long.recv(2**16).startswith(b"HTTP/1.1 400 ")


def test_on_all_addresses_the_printed_token_is_needed(run, monkeypatch):
    apps, addresses = [], []
    config = server.server_config
    monkeypatch.setattr(uvicorn.Server, "run", lambda made, sockets: sockets[0].close())
    noted = lambda app, **how: apps.append(app) or config(app, **how)
    monkeypatch.setattr(server, "server_config", noted)
    for host in ("127.0.0.1", "0.0.0.0"):
        server.serve(run.parent, host=host, port=0, started=addresses.append)
    monkeypatch.undo()
    assert "token" not in addresses[0]
    token = addresses[1].partition("?token=")[2]
    assert len(token) >= 32
    with serving(apps[0]) as port:
        assert get(port, "/")[0] == 200
    with serving(apps[1]) as port:
        for path in ("/", "/run?run=a", "/runs.json", f"/?token={token[:-1]}"):
            assert get(port, path)[0] == 401, path
        cookie = f"{server.COOKIE}={token}"
        assert get(port, "/", Cookie=cookie[:-1])[0] == 401
        assert get(port, "/runs.json", Cookie=cookie)[0] == 200
        assert get(port, f"/?token={token}")[0] == 307


def test_a_long_list_has_pages_and_is_filtered(ask, run, make_run, monkeypatch):
    monkeypatch.setattr(server, "PAGE_SIZE", 2)
    for name in ("b", "c"):
        make_run(run.parent / name)
    found = lambda path: re.findall(r'href="run[?]run=(\w)"', ask(path)[2])
    pages = [found(f"/?page={number}") for number in (1, 2, 3, 0, "x", "%C2%B2")]
    assert sorted(pages[0] + pages[1]) == ["a", "b", "c"] and len(pages[0]) == 2
    assert pages[2] == pages[1] and pages[3] == pages[4] == pages[5] == pages[0]
    assert found("/?words=FIN+b") == ["b"] and found("/?words=none") == []
    assert "page 1 of 2" in ask("/")[2] and "3 runs" in ask("/")[2]


def test_an_odd_run_is_named_above_the_list(ask, run):
    (run / "summary.json").write_text('{"methods": 5}')
    text = ask("/")[2]
    assert "summary.json: methods must be" in text and ">a</a>" in text
    (run.parent / "b\udcff").mkdir()
    run.rename(run.parent / "b\udcff" / "<b>")
    assert "&lt;b&gt;" in ask("/")[2]
    assert ask("/run?run=b%5Cudcff/%3Cb%3E")[0] == 200


def test_mistakes_are_one_line(run, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(run.parent), f"--port={port}"]) == 2
    assert f"--port={port} on 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert "must be a folder of runs" in capsys.readouterr().err
