"""`paceline xp ray` beside a server that answers, refuses, or is not there."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from paceline.cli.app import build
from paceline.cli.ray_cluster import _why
from paceline.runs import RunFolder

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
    """A server that gives the same answer to all, but for the version, and for one job of a list the first; its
    address."""
    servers = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def serve(code, answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                import ray

                version = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": "s"}
                told = answer[0] if isinstance(answer, list) and "jobs/paceline_" in self.path else answer
                body = json.dumps(version if "version" in self.path and code == 200 else told).encode()
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


LAUNCHED = {
    **JOB,
    "submission_id": "paceline_1234",
    "status": "PENDING",
    "metadata": {"paceline.name": "digits", "paceline.kind": "train"},
    "end_time": None,
}


def ray(*words, code=0):
    return call("xp", "ray", *words, code=code)


def call(*words, code=0):
    result = CliRunner().invoke(build(), [*words])
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


def test_cluster_that_takes_no_jobs_yet():
    answer = "Request failed with status code 500: No available agent to submit job, please try again later.."
    said = _why("http://head:8265", RuntimeError(answer))
    assert "no Ray cluster" not in said
    assert "has no agent that takes jobs" in said
    assert "--dashboard-agent-listen-port" in said


def test_cluster_that_is_not_there(serve):
    assert "no Ray cluster at http://127.0.0.1:1," in ray("--address", "http://127.0.0.1:1", code=2).stderr
    assert "no Ray cluster at http://127.0.0.1:403," in ray("--address", "http://127.0.0.1:403", code=2).stderr
    assert "expected http://HOST:8265" in ray("--address", "ftp://x", code=2).stderr


def test_flag_counts_before_the_variable(serve, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    address = serve(200, [])
    assert ray("--address", address).stdout == f"dashboard  {address}\n"
    assert "no Ray cluster at http://127.0.0.1:1," in ray(code=2).stderr


def test_run_that_only_its_job_knows(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path))
    address = serve(200, [LAUNCHED, JOB])
    [row] = json.loads(call("xp", "ls", "--address", address, "--json").stdout)
    assert (row["name"], row["state"], row["job"]) == ("digits/paceline_1234", "PENDING", "paceline_1234")
    assert call("xp", "ls", "--address", address, "-q", "--state", "PENDING").stdout == "digits/paceline_1234\n"
    for narrow in (["--state", "FAILED"], ["--name", "x*"], ["--since", "1d"], ["--tag", "a"], ["--filter", "steps>1"]):
        assert call("xp", "ls", "--address", address, "-q", *narrow).stdout == ""
    waited = call("xp", "wait", "paceline_1234", "--timeout", "0s", "--address", address, code=124)
    assert waited.stderr == "digits/paceline_1234: PENDING\n"
    assert "--rank: the folder" in call("xp", "logs", "dig", "--rank", "0", "--address", address, code=2).stderr
    assert "No run has a name" in call("xp", "logs", "other", "--address", address, code=3).stderr


def test_folders_come_first_where_only_the_variable_names_a_cluster(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", serve(200, [LAUNCHED]))
    (tmp_path / "digits/run_001").mkdir(parents=True)
    (tmp_path / "digits/run_001/status.json").write_text('{"state": "FAILED"}')
    assert "digits/run_001" in call("xp", "wait", "digits", code=1).stderr
    assert "digits/paceline_1234: PENDING" in call("xp", "wait", "digits", "pace", "--timeout", "0s", code=124).stderr
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    listed = call("xp", "ls", "-q")
    assert listed.stdout == "digits/run_001\n"
    assert "no Ray cluster at http://127.0.0.1:1" in listed.stderr


def test_stop_of_a_run_that_another_machine_has_gone_on_with(serve, tmp_path, monkeypatch):
    """The job in which it began has ended; the run has not."""
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", serve(200, [{**LAUNCHED, "status": "STOPPED"}]))
    with RunFolder.create(tmp_path / "digits") as folder:
        folder.set_state("RUNNING")
    (folder.path / "environment.json").write_text('{"job": "paceline_1234"}')
    status = json.loads((folder.path / "status.json").read_text())
    (folder.path / "status.json").write_text(json.dumps({**status, "host": "elsewhere"}))
    assert "on elsewhere, which cannot be seen from here" in call("xp", "stop", "digits", code=2).stderr


def test_no_cluster_is_asked_unless_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)  # as if it were not installed
    (tmp_path / "digits/run_001").mkdir(parents=True)
    (tmp_path / "digits/run_001/status.json").write_text('{"state": "SUCCEEDED"}')
    assert call("xp", "ls", "-q").stdout == "digits/run_001\n"
    call("xp", "wait", "digits")
    assert "needs the package 'ray'" in call("xp", "wait", "digits", "--address", "auto", code=2).stderr
