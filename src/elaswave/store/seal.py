"""What a holder of the job's key writes to a store that others may write to as well, and what counts (H14). No IO.

A value is sealed for its place: the job's prefix, the key, the job generation. So none counts that somebody has written
who has not the job's key, nor one that was moved to another key, another job, or another job generation of this one. A
value that once stood in its place does count when it is put back; what follows from that is
`elaswave.protocol.coordinator.store_writes`'.

A store position (`elaswave.protocol.leadership.store_position`) is sealed as well, before members are told: they give
it back to later coordinators, and a person who steers the job cannot make one up.
"""

import hashlib
import hmac

import msgspec

from elaswave.protocol.coordinator.store_writes import SPEC
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.transport.handshake import derived

MAGIC = b"ELWSEAL1"
"""Of this release: what begins in another way was written by an older one, or by a stranger."""
_TAG_BYTES = 32
_HEAD = " head"
"""No key of a job."""


def proof_of_term(key: bytes, job_generation: int, term: int) -> bytes:
    """Makes the proof that who says so has the job's key, and with it a coordinator: an agent tells others'
    coordinators by this that its own one has the job. Who only takes part cannot make it.

    Args:
        key: the job's.
        job_generation: number of the job generation.
        term: of its coordinator.
    """
    return hmac.digest(derived(key, "term"), msgspec.msgpack.encode((job_generation, term)), "sha256")


class StoreSeal:
    """Seals values of one job, and opens them.

    Args:
        key: the job's.
        prefix: of its keys in the store.
    """

    def __init__(self, key: bytes, prefix: str) -> None:
        self._key = derived(key, "store")
        self._prefix = prefix

    def sealed(self, key: str, value: bytes, job_generation: int) -> bytes:
        """Makes what to write.

        Args:
            key: below the prefix.
            value: of it.
            job_generation: number of the job generation; of no account for `SPEC`, which tells it.
        """
        return MAGIC + self._tag(key, value, job_generation) + value

    def opened(self, key: str, stored: bytes, job_generation: int) -> bytes | None:
        """Finds the value that stands in a place; None: it is not genuine.

        Args:
            key, job_generation: as of `sealed`.
            stored: what was read.
        """
        at = len(MAGIC) + _TAG_BYTES
        tag, value = stored[len(MAGIC) : at], stored[at:]
        if stored[: len(MAGIC)] != MAGIC or not hmac.compare_digest(tag, self._tag(key, value, job_generation)):
            return None
        return value

    def seal_position(self, position: StorePosition) -> StorePosition:
        """Seals a store position as it is told."""
        return msgspec.structs.replace(position, seal=self._tag_of_position(position))

    def knows(self, position: StorePosition) -> bool:
        """Tells whether a coordinator of this job has told a store position."""
        return hmac.compare_digest(position.seal, self._tag_of_position(position))

    def _tag_of_position(self, position: StorePosition) -> bytes:
        return self._tag(
            _HEAD, msgspec.msgpack.encode((position.term, position.length, position.digest)), position.job_generation
        )

    def _tag(self, key: str, value: bytes, job_generation: int) -> bytes:
        mac = hashlib.blake2b(key=self._key, digest_size=_TAG_BYTES)
        mac.update(msgspec.msgpack.encode((self._prefix, key, 0 if key == SPEC else job_generation)))
        mac.update(value)  # the last part: what is before it ends where its own lengths say
        return mac.digest()
