"""A stand-in for a cluster: an API server whose pods are processes of this host."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

_INDEX = "batch.kubernetes.io/job-completion-index"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "000Z")


class Pod:
    """A process with the command of a container."""

    def __init__(self, cluster: FakeCluster, name: str, index: int, template: dict[str, Any], uid: str) -> None:
        self.cluster, self.name, self.index = cluster, name, index
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/controller-uid": uid}
        self.meta = {"name": name, "uid": str(uuid.uuid4()), "labels": labels, "annotations": {_INDEX: str(index)}}
        self.meta["creationTimestamp"] = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self.spec, self.lines, self.process, self.ended_at = template["spec"], list[str](), None, ""
        self.is_deleted = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _environ(self, container: dict[str, Any]) -> dict[str, str]:
        dropped = ("ONEACCORD_", "SLURM_", "PMI", "OMPI_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environ["JOB_COMPLETION_INDEX"] = str(self.index)
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                environ[each["name"]] = self.cluster.objects["secrets", reference["name"]]["stringData"][reference["key"]]
            elif "fieldRef" in source:
                (label,) = re.findall(r"\['(.*)'\]", source["fieldRef"]["fieldPath"])
                environ[each["name"]] = self.meta["labels"][label]
            else:
                environ[each["name"]] = expanded(each["value"], environ)
        return environ

    def _run(self) -> None:
        (container,) = self.spec["containers"]
        until = time.monotonic() + 20
        environ: dict[str, str] = {}
        while not self.is_deleted:  # as a kubelet does: the Secret may come after the pod
            try:
                environ = self._environ(container)
                break
            except KeyError:
                assert time.monotonic() < until
                time.sleep(0.05)
        while self.cluster.waits and not self.is_deleted:
            time.sleep(0.05)
        if self.is_deleted:
            self.ended_at = _now()
            return
        # No names are served here: the first pod's becomes an address of this host.
        words = [expanded(each, environ) for each in container["command"]]
        words = [re.sub(r"^[\w-]+-0\.[\w-]+:", f"{self.cluster.address}:", each) for each in words]
        assert words[0] == "python3"
        self.process = subprocess.Popen(
            [sys.executable, *words[1:]],
            env=environ,
            cwd=self.cluster.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.cluster.commands.append(words)
        with self.process:
            for line in self.process.stdout:
                self.lines.append(f"{_now()} {line.rstrip(chr(10))}")
        self.ended_at = _now()

    @property
    def code(self) -> int | None:
        code = None if not self.ended_at else -signal.SIGTERM if self.process is None else self.process.returncode
        return 128 - code if code is not None and code < 0 else code

    def shown(self) -> dict[str, Any]:
        phase, state = "Running", {"running": {"startedAt": self.meta["creationTimestamp"]}}
        if self.code is not None:
            phase = "Failed" if self.code else "Succeeded"
            state = {
                "terminated": {
                    "exitCode": self.code,
                    "reason": "Error" if self.code else "Completed",
                    "finishedAt": self.ended_at,
                }
            }
        elif self.process is None:
            phase, state = "Pending", {"waiting": self.cluster.waits or {"reason": "ContainerCreating"}}
        status = {"name": "ranks", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
        return {"metadata": self.meta, "status": {"phase": phase, "containerStatuses": [status]}}

    def kill(self, number: int = signal.SIGTERM) -> None:
        self.is_deleted = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def expanded(text: str, environ: dict[str, str]) -> str:
    """Return a word as a kubelet passes it on."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else environ.get(found[1], found[0]), text)


class FakeCluster:
    """A cluster with one namespace, whose address a kubeconfig names.

    Attributes
    ----------
    objects, pods
        What it holds.
    requests
        Each request, as its method and path.
    waits
        The state of pods that do not begin; None lets them.
    cuts
        How often the output of a pod is cut off after its first line.
    refuses
        For the kinds that are refused, the words.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.{random.randint(2, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[Pod] = []
        self.requests: list[str] = []
        self.commands: list[list[str]] = []
        self.waits: dict[str, str] | None = None
        self.cuts = 0
        self.refuses: dict[str, str] = {}
        self.lock = threading.Lock()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                cluster.answer(self, None)

            do_DELETE = do_POST = do_GET  # noqa: N815 - names of http.server

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        place = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "team"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": [place], "contexts": [context]}
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps({**config, "users": [{"name": "me", "user": {}}]}))

    def close(self) -> None:
        for pod in self.pods:
            pod.kill(signal.SIGKILL)
            pod.thread.join(10)
        self.server.shutdown()
        self.server.server_close()

    def answer(self, call: Any, _: None) -> None:
        url = urlsplit(call.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        length = int(call.headers.get("Content-Length") or 0)
        body = json.loads(call.rfile.read(length)) if length else {}
        self.requests.append(f"{call.command} {url.path}")
        namespace, kind, *rest = url.path.partition("/namespaces/")[2].split("/")
        assert namespace == "team"
        if rest[1:] == ["log"] and "log" not in self.refuses:
            self._log(call, next(pod for pod in self.pods if pod.name == rest[0]), query)
            return
        with self.lock:
            code, answer = getattr(self, f"_{call.command.lower()}")(kind, rest, query, body)
        data = json.dumps(answer).encode()
        call.send_response(code)
        call.send_header("Content-Type", "application/json")
        call.send_header("Content-Length", str(len(data)))
        call.end_headers()
        call.wfile.write(data)

    def _post(self, kind: str, rest: list[str], query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        if kind in self.refuses:
            return 403, {"message": self.refuses[kind]}
        name = body["metadata"]["name"]
        body["metadata"]["uid"] = str(uuid.uuid4())
        self.objects[kind, name] = body
        if kind in ("jobs", "jobsets"):
            spec = body["spec"] if kind == "jobs" else body["spec"]["replicatedJobs"][0]["template"]["spec"]
            prefix = name if kind == "jobs" else f"{name}-ranks-0"
            for index in range(spec["completions"]):
                self.pods.append(Pod(self, f"{prefix}-{index}-abcde", index, spec["template"], body["metadata"]["uid"]))
        return 201, body

    def _get(self, kind: str, rest: list[str], query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        if rest[1:] == ["log"]:
            return 403, {"message": self.refuses["log"]}
        if kind == "pods":
            wanted = dict(each.split("=") for each in query["labelSelector"].split(","))
            return 200, {"items": [pod.shown() for pod in self.pods if wanted.items() <= pod.meta["labels"].items()]}
        if (kind, rest[0]) not in self.objects:
            return 404, {"message": f"{kind} {rest[0]} not found"}
        found = self.objects[kind, rest[0]]
        return 200, {**found, "status": {"conditions": self._conditions(kind, found)}}

    def _conditions(self, kind: str, found: dict[str, Any]) -> list[dict[str, str]]:
        spec = found["spec"] if kind == "jobs" else found["spec"]["replicatedJobs"][0]["template"]["spec"]
        codes = [pod.code for pod in self.pods]
        if any(codes) and spec.get("backoffLimit") == 0:
            for pod in self.pods:
                pod.kill()
            return [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too many"}]
        if None in codes:
            return []
        good = {"type": "Complete" if kind == "jobs" else "Completed", "status": "True"}
        return [{"type": "Failed", "status": "True", "reason": "FailedIndexes"} if any(codes) else good]

    def _delete(self, kind: str, rest: list[str], query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        if kind == "pods":
            for pod in self.pods:
                pod.kill(signal.SIGKILL)
            return 200, {}
        owner = self.objects.pop((kind, rest[0]), None)
        if owner is None:
            return 404, {"message": f"{kind} {rest[0]} not found"}
        for key, each in list(self.objects.items()):
            if any(one["uid"] == owner["metadata"]["uid"] for one in each["metadata"].get("ownerReferences", [])):
                del self.objects[key]
        for pod in self.pods:
            pod.kill()
        return 200, {}

    def _log(self, call: Any, pod: Pod, query: dict[str, str]) -> None:
        assert query["timestamps"] == query["follow"] == "true"
        call.send_response(200)
        call.send_header("Transfer-Encoding", "chunked")
        call.end_headers()
        at, is_cut = 0, False
        while True:
            over = pod.ended_at
            for line in pod.lines[at:]:
                at += 1
                data = line.encode() + b"\n"
                if self.cuts and at > 1:
                    self.cuts, is_cut, data = self.cuts - 1, True, data[: len(data) // 2]
                call.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                call.wfile.flush()
                if is_cut:
                    call.close_connection = True
                    return
            if over:
                break
            time.sleep(0.05)
        call.wfile.write(b"0\r\n\r\n")

    def run(self, program: str, *words: str, ranks: str = "4") -> subprocess.CompletedProcess[str]:
        """Run a program to the end of its job."""
        with self.start(program, *words, ranks=ranks) as process:
            out, err = process.communicate(timeout=90)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, program: str, *words: str, ranks: str = "4") -> subprocess.Popen[str]:
        (self.folder / "program.py").write_text(program)
        command = [sys.executable, "-m", "oneaccord", "run", "--on", "kubernetes", "-n", ranks, "--per-host", "2"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
        return subprocess.Popen(
            [*command, "--option", "image=x", "--option", "name=digits", *words, "program.py"],
            env={**clean, "KUBECONFIG": str(self.kubeconfig)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    pytest.importorskip("kubernetes")
    made = FakeCluster(tmp_path)
    yield made
    made.close()
