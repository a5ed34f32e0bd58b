"""Where and with what a run was made: versions, machine, command and code, so that it can be made again."""

import functools
import getpass
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.errors import RunDamagedError
from paceline.json_text import encode_document
from paceline.runs.durable import read_json, write_atomic
from paceline.runs.repository import Repository, describe_repository

JOB_VARIABLE = "PACELINE_JOB"
"""In which a job that was launched finds its id."""

RECORDED_VARIABLES = ("CUDA_", "OMP_", "NCCL_", "GLOO_", "TORCH_", "PACELINE_", "SGD_", "SLURM_JOB_ID")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_HIDDEN = "***"
_NVIDIA_SMI_TIMEOUT_S = 5.0


def environment() -> dict[str, Any]:
    """The record of this process, made at the first call: what is loaded by then does not change any more. But a script
    may change its folder and its variables from run to run.

    Runs of a notebook that edits files in between are told apart by the function's source, in run.json.
    """
    return {**_record()[0], "cwd": _cwd(), "variables": recorded_variables(os.environ)}


def write_environment(run_dir: Path) -> None:
    """environment.json, and code.diff if the code differs from its commit. The first call takes a while."""
    record, (_, repository) = environment(), _record()
    if (job := os.environ.get(JOB_VARIABLE) or job_of(run_dir)) is not None:
        record["job"] = job
    if repository is not None and repository.diff:
        write_atomic(run_dir / "code.diff", repository.diff.encode(), durable=False)
    write_atomic(run_dir / "environment.json", encode_document(record), durable=False)


def job_of(run_dir: Path | str) -> str | None:
    """The last job on a cluster in which the run was driven; it may have been gone on with elsewhere since."""
    try:
        job = (read_json(os.path.join(run_dir, "environment.json")) or {}).get("job")
    except RunDamagedError:
        return None
    return job if isinstance(job, str) else None


@functools.cache
def _record() -> tuple[dict[str, Any], Repository | None]:
    repository = _find_repository()
    packages = installed_packages()
    record = {
        "paceline": packages.get("paceline"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": os.uname().nodename,
        "user": _user(),
        "command": hide_secrets(sys.orig_argv),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "git": repository.summary() if repository else None,
        "packages": packages,
    }
    return record, repository


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Only names that begin as in RECORDED_VARIABLES, and none that sounds like a secret."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(RECORDED_VARIABLES) and not _SECRET_NAME.search(name)
    }


def hide_secrets(command: Sequence[str]) -> list[str]:
    """The command line with the values of options such as --api-key replaced: run folders get shared."""
    shown: list[str] = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            word = _HIDDEN
        elif equals and _SECRET_NAME.search(name):
            word = f"{name}={_HIDDEN}"
        hide_next = word.startswith("-") and not equals and bool(_SECRET_NAME.search(name))
        shown.append(word)
    return shown


def installed_packages() -> dict[str, str]:
    """Name and version of everything on sys.path, as `import` would find it.

    Read from the names of the metadata folders: opening each one's METADATA takes a hundred times as long.
    """
    found: dict[str, str] = {}
    for directory in sys.path:
        with suppress(OSError):
            for entry in os.listdir(directory or "."):
                name, version = _distribution(directory or ".", entry)
                if name and version:
                    found.setdefault(name, version)
    return dict(sorted(found.items()))


def _distribution(directory: str, entry: str) -> tuple[str | None, str | None]:
    stem, dot, kind = entry.rpartition(".")
    if not dot or kind not in ("dist-info", "egg-info"):
        return None, None
    name, _, version = stem.partition("-")
    if not version:  # an egg-info beside the sources does not carry the version in its name
        with suppress(Exception):
            version = metadata.Distribution.at(Path(directory, entry)).version
    return re.sub(r"[-_.]+", "-", name).lower(), version.partition("-py")[0] if kind == "egg-info" else version


def _find_repository() -> Repository | None:
    """Of the script that runs; of the working directory for a command (`python -m paceline` among them, which may come
    from a repository of its own), a notebook and a REPL."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    directories, commands = [_cwd()], (sys.prefix, Path(__file__).absolute().parents[1])
    if script and not any(Path(script).absolute().is_relative_to(one) for one in commands):
        directories.insert(0, str(Path(script).absolute().parent))
    found = (describe_repository(directory) for directory in directories if directory)
    return next((repository for repository in found if repository), None)


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without a name
        return str(os.getuid())


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _gpus() -> list[str]:
    """One line of text per GPU; empty where there is no NVIDIA driver."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                query, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S
            )
            if done.returncode == 0:
                return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            match = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
            models.append(match[1] if match else path.parent.name)
    return models
