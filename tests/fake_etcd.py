"""etcd's transactions in memory, behind a gateway that loses, delays and repeats what it is told to."""

import base64
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from elaswave.store.etcd_client import HttpResponse

KEY = b"the job's key, of tests alone..."
STRANGERS = b"another key, of a stranger alone"


class Written(NamedTuple):
    value: bytes
    revision: int
    version: int


class FakeEtcd:
    """A cluster of one mind. All requests are carried out whole, one after the other."""

    def __init__(self) -> None:
        self.keys: dict[bytes, Written] = {}
        self.revision = 1
        self.largest_request = 0

    def carry_out(self, path: str, body: bytes) -> HttpResponse:
        self.largest_request = max(self.largest_request, len(body))
        assert path == "/v3/kv/txn", path
        asked = json.loads(body)
        held = all(self._holds(each) for each in asked["compare"])
        branch = asked["success" if held else "failure"]
        assert max(len(asked["compare"]), len(branch)) <= 128, "etcd takes no more"
        assert len(body) <= 1.5 * 2**20, "etcd takes no more"
        changes = any("request_range" not in each for each in branch)
        self.revision += changes
        responses = [self._do(each) for each in branch]
        said: dict[str, Any] = {"header": {"revision": str(self.revision)}}
        if held:
            said["succeeded"] = True  # false is left out
        if responses:
            said["responses"] = responses
        return HttpResponse(200, json.dumps(said).encode())

    def _holds(self, compare: dict[str, Any]) -> bool:
        written = self.keys.get(base64.b64decode(compare["key"]), Written(b"", 0, 0))
        if compare["target"] == "MOD":
            assert compare["result"] == "EQUAL"
            return written.revision == int(compare["mod_revision"])
        if compare["target"] == "VALUE":
            assert compare["result"] == "EQUAL"
            return written.version > 0 and written.value == base64.b64decode(compare["value"])
        assert (compare["target"], compare["result"]) == ("VERSION", "GREATER")
        return written.version > int(compare["version"])

    def _do(self, operation: dict[str, Any]) -> dict[str, Any]:
        (kind, asked), *_ = operation.items()
        key = base64.b64decode(asked["key"])
        if kind == "request_put":
            version = self.keys[key].version + 1 if key in self.keys else 1
            self.keys[key] = Written(base64.b64decode(asked["value"]), self.revision, version)
            return {"response_put": {}}
        end = base64.b64decode(asked["range_end"]) if "range_end" in asked else key + b"\0"
        found = sorted(known for known in self.keys if key <= known < end)
        if kind == "request_delete_range":
            for known in found:
                del self.keys[known]
            return {"response_delete_range": {"deleted": str(len(found))}}
        kvs = []
        for known in found[: int(asked.get("limit", len(found)))]:
            written = self.keys[known]
            shown = {"key": base64.b64encode(known).decode(), "mod_revision": str(written.revision)}
            if not asked.get("keys_only"):
                shown["value"] = base64.b64encode(written.value).decode()
            kvs.append(shown)
        return {"response_range": {"kvs": kvs} if kvs else {}}


Fault = Callable[["FakeGateway", str, bytes], HttpResponse | None]
"""What happens to one request: its answer, or None for what happens without a fault."""


class FakeGateway:
    """One process's way to the cluster.

    Args:
        etcd: the cluster.
        faults: of its next requests, in order; afterwards there are none.
    """

    def __init__(self, etcd: FakeEtcd, faults: list[Fault] | None = None) -> None:
        self.etcd = etcd
        self.faults = faults if faults is not None else []
        self.late: list[tuple[str, bytes]] = []
        """Requests that are still under way."""
        self.endpoints: list[str] = []
        """That were asked."""
        self.timeouts_s: list[float] = []

    def post(self, endpoint: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> HttpResponse:
        self.endpoints.append(endpoint)
        self.timeouts_s.append(timeout_s)
        if self.faults:
            answer = self.faults.pop(0)(self, path, body)
            if answer is not None:
                return answer
        return self.etcd.carry_out(path, body)

    def arrive(self) -> None:
        """What was under way arrives; nobody hears the answers."""
        late, self.late = self.late, []
        for path, body in late:
            self.etcd.carry_out(path, body)

    def close(self) -> None:
        pass


def fine(gateway: FakeGateway, path: str, body: bytes) -> HttpResponse | None:
    """Nothing happens to the request."""
    return None


def lost(gateway: FakeGateway, path: str, body: bytes) -> HttpResponse | None:
    """The request does not arrive."""
    raise TimeoutError("timed out")


def answer_lost(gateway: FakeGateway, path: str, body: bytes) -> HttpResponse | None:
    """The request is carried out, and the answer does not arrive."""
    gateway.etcd.carry_out(path, body)
    raise ConnectionResetError("reset")


def delayed(gateway: FakeGateway, path: str, body: bytes) -> HttpResponse | None:
    """The request arrives when `FakeGateway.arrive` is called."""
    gateway.late.append((path, body))
    raise TimeoutError("timed out")


def says(status: int, code: int, text: str) -> Fault:
    """A member answers with an error."""

    def fault(gateway: FakeGateway, path: str, body: bytes) -> HttpResponse:
        return HttpResponse(status, json.dumps({"error": text, "message": text, "code": code}).encode())

    return fault
