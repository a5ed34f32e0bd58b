"""`paceline xp ray` beside a server that answers, refuses, or is not there."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app

JOB = {
    "type": "SUBMISSION",
    "submission_id": "raysubmit_1\x1b[2J",
    "status": "FAILED",
    "entrypoint": "python train.py",
    "message": "it broke",
    "start_time": 1_000_000,
    "end_time": 1_090_000,
}


@pytest.fixture
def serve(monkeypatch):
    """A server that gives the same answer to all, but for the version; its address."""
    servers = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def serve(code, answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                import ray

                version = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": "s"}
                body = json.dumps(version if "version" in self.path and code == 200 else answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def ray(*words, code=0):
    result = CliRunner().invoke(app, ["xp", "ray", *words])
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result


def test_jobs(serve):
    address = serve(200, [JOB])
    shown = ray("--address", address).stdout.splitlines()
    assert shown[0] == f"dashboard  {address}"
    assert shown[3].split() == ["raysubmit_1\\x1b[2J", "FAILED", "1m30s", "python", "train.py", "it", "broke"]
    found = json.loads(ray("--address", address, "--json").stdout)
    assert (found["dashboard"], found["jobs"][0]["state"]) == (address, "FAILED")


def test_cluster_that_refuses(serve):
    said = ray("--address", serve(401, {"error": "Unauthorized"}), code=2).stderr
    assert "refuses. It asks for a token: set RAY_AUTH_MODE=token" in said


def test_cluster_that_is_not_there(serve):
    assert "no Ray cluster at http://127.0.0.1:1," in ray("--address", "http://127.0.0.1:1", code=2).stderr
    assert "expected http://HOST:8265" in ray("--address", "ftp://x", code=2).stderr
