"""A coordinator process for the tests: LISTEN KEY JOURNAL [CERTIFICATE KEYFILE AUTHORITY]. See `Town.process`.

Appends (peer, number) of every message to the journal, which survives being killed, and answers.
"""

import asyncio
import os
import struct
import sys

from tests.conformance.coordinators import FromClient, Say, Tell

from elaswave.channel.server import ControlServer
from elaswave.transport.tls import Tls


async def main() -> None:
    """Serves until killed."""
    listen, key, journal = sys.argv[1:4]
    tls = Tls(certificate=sys.argv[4], key=sys.argv[5], authority=sys.argv[6]) if len(sys.argv) > 4 else None
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    server: ControlServer[FromClient] = ControlServer()

    def on_message(peer: int, message: FromClient) -> None:
        if isinstance(message, Say):
            os.write(fd, struct.pack("<qq", peer, message.number))
            server.send(peer, Tell(message.number))

    await server.start(
        listen, bytes.fromhex(key), FromClient, on_message, lambda peer: None, lambda peer: None, tls=tls
    )
    print("listening", flush=True)
    await server.serve()


asyncio.run(main())
