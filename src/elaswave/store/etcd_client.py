"""Requests to a cluster of etcd: which member is asked, and what an error means. Nothing is repeated here.

Every request of this package may be sent again with the same words: it is a transaction that compares first, or it
reads. So of an error only two things matter. A *refusal* (`StoreError`) will be said again however often one asks:
wrong credentials, no permission, a server that is no etcd. All else is `NoAnswerError`: the request may have been
carried out, or may yet be; whoever asks says it again, to the next member.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from elaswave.errors import StoreError
from elaswave.protocol.coordinator.store_writes import SPEC, KeyValue, Transaction, TransactionResult, job_generation_of
from elaswave.store.etcd_gateway import Gateway, HttpResponse
from elaswave.store.seal import StoreSeal
from elaswave.untrusted import decode_json

REQUEST_TIMEOUT_S = 1.0
"""Of one request to one member, at first."""
REQUEST_TIMEOUT_S_MAX = 8.0
"""Where no member has answered in time, they get twice as long in the next round, up to this."""
_INVALID, _DENIED, _PRECONDITION, _UNIMPLEMENTED, _DAMAGED, _UNAUTHENTICATED = 3, 7, 9, 12, 15, 16
"""Codes of gRPC."""
_NO_TOKEN = "user name is empty"


class NoAnswerError(Exception):
    """Whether a request was carried out is not known."""


class Transacted(NamedTuple):
    """What became of a transaction."""

    succeeded: bool
    """Whether all its comparisons held."""
    revision: int
    """Of the store, after it."""
    ranges: tuple[tuple[KeyValue, ...], ...]
    """What its reads have found."""


class Credentials(NamedTuple):
    """A user of etcd."""

    user: str
    password: str


class EtcdClient:
    """Asks the members of one cluster, below one prefix.

    Args:
        endpoints: HOST:PORT of members.
        prefix: of all keys.
        gateway: reaches them.
        key: the job's: all values are sealed with it.
        credentials: None: etcd asks for none.
        job_generation: number of the founding whose values count; 0: of the one that `SPEC` tells when it is first
            read.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        gateway: Gateway,
        key: bytes,
        credentials: Credentials | None = None,
        *,
        job_generation: int = 0,
    ) -> None:
        self.prefix = prefix
        self.seal = StoreSeal(key, prefix)
        self.job_generation = job_generation
        self.timeout_s_max = REQUEST_TIMEOUT_S_MAX
        """The longest that a member gets; who asks again and again takes the first one for all."""
        self._endpoints = tuple(endpoints)
        self._gateway = gateway
        self._credentials = credentials
        self._token = ""
        self._at = 0
        """The member that is asked."""
        self._num_failed = 0
        """Requests without an answer since the last one with one."""

    @property
    def name(self) -> str:
        """In messages."""
        return f"etcd://{','.join(self._endpoints)}{self.prefix}"

    def transact(
        self,
        compare: Sequence[dict[str, Any]],
        success: Sequence[dict[str, Any]],
        failure: Sequence[dict[str, Any]] = (),
    ) -> Transacted:
        """One transaction: linearizable, whole or not at all.

        Raises:
            NoAnswerError, StoreError: see the module's docstring.
        """
        response = self._ask("/v3/kv/txn", {"compare": compare, "success": success, "failure": failure})
        try:
            responses = response.get("responses", [])
            ranges = [each["response_range"].get("kvs", []) for each in responses if "response_range" in each]
            for found in (found for page in ranges for found in page if found["key"] == self._key(SPEC)):
                self.job_generation = self.job_generation or job_generation_of(self._key_value(found))
            return Transacted(
                bool(response.get("succeeded", False)),
                int(response["header"]["revision"]),
                tuple(tuple(map(self._key_value, page)) for page in ranges),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise StoreError(
                f"{self.name} answers what no etcd does ({type(error).__name__}: {error}): see who is at that address"
            ) from error

    def carry_out(self, transaction: Transaction) -> TransactionResult:
        """One transaction, in the protocol's words.

        Raises:
            NoAnswerError, StoreError: see the module's docstring.
        """
        compare = [self.unwritten_since(key, revision) for key, revision in transaction.unwritten_since]
        compare += [self.has_value(key, value) for key, value in transaction.values]
        compare += [self.exists(key) for key in transaction.exist]
        changes = [self.put(key, value) for key, value in transaction.puts]
        changes += [self.delete(key) for key in transaction.deletes]
        if transaction.clears:
            changes += self.delete_all_but([key for key, _ in transaction.puts])
        reads = [self.get(key) for key in transaction.reads]
        only_reads = not compare and not changes
        response = self.transact(compare, reads if only_reads else changes, reads)
        found = tuple(page[0] if page else None for page in response.ranges)
        return TransactionResult(response.succeeded, response.revision, found)

    def close(self) -> None:
        """Ends all connections."""
        self._gateway.close()

    # ----------------------------------------------------------------------------------------------- parts of requests

    def unwritten_since(self, key: str, revision: int) -> dict[str, Any]:
        """Compares: a key was last written at a revision; 0: it does not exist."""
        return {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}

    def has_value(self, key: str, value: bytes) -> dict[str, Any]:
        """Compares: a key exists and has a value."""
        return {"key": self._key(key), "target": "VALUE", "result": "EQUAL", "value": self._stored(key, value)}

    def exists(self, key: str) -> dict[str, Any]:
        """Compares: a key exists."""
        return {"key": self._key(key), "target": "VERSION", "result": "GREATER", "version": "0"}

    def put(self, key: str, value: bytes) -> dict[str, Any]:
        """Writes a key."""
        return {"request_put": {"key": self._key(key), "value": self._stored(key, value)}}

    def get(self, key: str) -> dict[str, Any]:
        """Reads a key."""
        return {"request_range": {"key": self._key(key)}}

    def get_from(self, first: str, folder: str, limit: int, *, keys_only: bool = False) -> dict[str, Any]:
        """Reads keys of a folder, from one on, in their order.

        Args:
            folder: such as ``rec/``.
            limit: of how many.
        """
        asked = {"key": self._key(first), "range_end": self._key(_after(folder)), "limit": str(limit)}
        return {"request_range": asked | ({"keys_only": True} if keys_only else {})}

    def delete(self, key: str) -> dict[str, Any]:
        """Removes a key."""
        return {"request_delete_range": {"key": self._key(key)}}

    def delete_all_but(self, kept: Sequence[str]) -> list[dict[str, Any]]:
        """Removes all keys of the prefix but some, which the same transaction may then write."""
        begins = [self._key(""), *(self._key(key + "\0") for key in sorted(kept))]
        ends = [*(self._key(key) for key in sorted(kept)), _encoded(_after(self.prefix))]
        return [{"request_delete_range": {"key": key, "range_end": end}} for key, end in zip(begins, ends, strict=True)]

    def _key(self, key: str) -> str:
        return _encoded(self.prefix + key)

    def _stored(self, key: str, value: bytes) -> str:
        return base64.b64encode(self.seal.sealed(key, value, self.job_generation)).decode()

    def _key_value(self, found: dict[str, str]) -> KeyValue:
        key = base64.b64decode(found["key"]).decode(errors="replace").removeprefix(self.prefix)
        value = self.seal.opened(key, base64.b64decode(found.get("value", "")), self.job_generation)
        return KeyValue(key, value or b"", int(found["mod_revision"]), value is not None)

    # --------------------------------------------------------------------------------------------------------- asking

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if self._credentials is not None and not self._token:
            user, password = self._credentials
            token = self._post("/v3/auth/authenticate", {"name": user, "password": password}).get("token", "")
            if not (isinstance(token, str) and token.isascii() and token.isprintable()):  # it goes into a header
                raise StoreError(f"{self.name} answers with a token that no etcd gives: see who is at that address")
            self._token = token
        return self._post(path, request)

    def _post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        endpoint = self._endpoints[self._at]
        rounds = self._num_failed // len(self._endpoints)
        timeout_s = min(self.timeout_s_max, REQUEST_TIMEOUT_S * 2.0 ** min(rounds, 10))
        headers = {"Authorization": self._token} if self._token else {}
        try:
            answer = self._gateway.post(endpoint, path, json.dumps(request).encode(), headers, timeout_s)
            response = self._response(endpoint, answer)
        except (OSError, NoAnswerError) as error:
            self._num_failed += 1
            self._at = (self._at + 1) % len(self._endpoints)
            text = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise NoAnswerError(f"{endpoint}: {text}") from error
        self._num_failed = 0
        return response

    def _response(self, endpoint: str, answer: HttpResponse) -> dict[str, Any]:
        try:
            response = decode_json(answer.body)
        except ValueError:
            response = None
        if not isinstance(response, dict) or (answer.status == 200 and "header" not in response):
            if answer.status in (200, 404):
                raise StoreError(
                    f"{endpoint} does not speak as etcd does (status {answer.status}): members of etcd 3.4 or newer "
                    "are needed, at their client addresses"
                )
            if answer.status == 400:  # said before the gateway has looked at the request
                text = answer.body.decode(errors="replace").strip()[:200]
                raise StoreError(f"etcd at {endpoint} refuses: {text}{_advice(text)}")
            raise NoAnswerError(f"status {answer.status}")
        if answer.status == 200:
            return response
        code, text = (
            response.get("code"),
            str(response.get("message") or response.get("error") or f"status {answer.status}"),
        )
        if code == _UNAUTHENTICATED or (code == _INVALID and _NO_TOKEN in text and self._credentials is not None):
            self._token = ""  # it has expired, or the member was started again
            raise NoAnswerError(text)
        if code in (_INVALID, _DENIED, _PRECONDITION, _UNIMPLEMENTED, _DAMAGED):
            raise StoreError(f"etcd at {endpoint} refuses: {text}{_advice(text)}")
        raise NoAnswerError(text)


def _advice(text: str) -> str:
    if "CommonName" in text:
        return "; where etcd has users, the certificate of control.store_cert must have no common name"
    if _NO_TOKEN in text or "authentication failed" in text:
        return "; set control.store_credentials to a file with USER:PASSWORD of a user of etcd"
    if "HTTPS server" in text:
        return "; set control.store_ca"
    if "not enabled" in text:
        return "; leave out control.store_credentials"
    if "permission denied" in text:
        return "; give the user read and write permission for all keys below /elaswave/"
    return ""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _after(folder: str) -> str:
    """The first key behind all that begin with a folder's name."""
    return folder[:-1] + chr(ord(folder[-1]) + 1)
