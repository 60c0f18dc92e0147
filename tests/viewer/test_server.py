"""The server of pages: read-only, by name, and with a token where others reach it."""

import http.client
import json
import socket
import threading

import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.viewer import server

uvicorn = pytest.importorskip("uvicorn")


@pytest.fixture
def ask(run):
    """(path, headers) -> (status, headers, text) of a server of the folder's runs."""
    listening = server._listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    tokens = {"open": "", "closed": "secret"}
    servers = {}
    for name, token in tokens.items():
        hosts = ("127.0.0.1",) if not token else ("*",)
        app = server.build_app(run.parent, token=token, hosts=hosts)
        made = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        made.install_signal_handlers = lambda: None
        place = listening if name == "open" else server._listen("127.0.0.1", 0)
        thread = threading.Thread(target=made.run, args=([place],), daemon=True)
        thread.start()
        servers[name] = made, thread, place.getsockname()[1], place
    del port

    def ask(path, which="open", method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", servers[which][2])
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return found

    yield ask
    for made, thread, _, place in servers.values():
        made.should_exit = True
        thread.join()
        place.close()


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


def test_elsewhere_a_token_is_needed_once(ask):
    assert ask("/", "closed")[0] == 401
    assert ask("/?token=wrong", "closed")[0] == 401
    status, headers, _ = ask("/run?run=a&token=secret", "closed")
    assert status == 307 and headers["location"].endswith("/run?run=a")
    cookie = headers["set-cookie"].partition(";")[0]
    assert "HttpOnly" in headers["set-cookie"]
    assert ask("/", "closed", Cookie=cookie)[0] == 200


def test_mistakes_are_one_line(run, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(run.parent), f"--port={port}"]) == 2
    assert f"--port={port} on 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert "must be a folder of runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "host, expected",
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
    + [("192.168.0.3", False), ("example.org", False)],
)
def test_loopback_addresses_are_those_that_this_machine_alone_reaches(host, expected):
    assert server.is_loopback(host) is expected
