"""Makes the corpus of `test_fuzzed_codecs.py` from a real job: python -m tests.property.record_corpus

One line of each kind of control message and of each kind of frame header, as they were sent: its name, then its bytes
as hexadecimal. Not a test; to be run again when messages have changed.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.jobs import run_job

from elaswave.channel import wire
from elaswave.channel.messages.operator import AskCheckpoint, AskStatus, Request
from elaswave.cli.operator_client import OperatorClient
from elaswave.faults.injection import NoProbe
from elaswave.transport import stream
from elaswave.transport.interface import HEADER_BYTES, decode_header

CORPUS = Path(__file__).with_name("corpus")
BYTES_MAX = 4096
"""Longer messages are left out: they hold the same things more often."""


class Recorded:
    """An encoder that also appends what it makes to a file, whole lines at a time, from any process of the job."""

    def __init__(self, encoder: Any, file: int) -> None:
        self._encoder, self._file = encoder, file

    def encode(self, message: Any) -> bytes:
        data: bytes = self._encoder.encode(message)
        if len(data) <= BYTES_MAX:
            os.write(self._file, f"{type(message).__name__} {data.hex()}\n".encode())
        return data


class Asking(NoProbe):
    """An operator within worker 0: asks for the status in step 4 and for a checkpoint in step 5."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def reached(self, phase: Any, index: int, machine: Any) -> None:
        if machine.worker == 0 and machine.step in (4, 5) and index == 0 and phase == "reduce":
            asks_status = machine.step == 4

            def make(number: int) -> Request:
                return AskStatus(request=number) if asks_status else AskCheckpoint(request=number, wait=False)

            with OperatorClient(self._run_dir) as client:
                next(iter(client.ask(make, 20.0)))


def main() -> None:
    """Runs the job and writes the two files."""
    with tempfile.TemporaryDirectory() as folder:
        control, frames = (Path(folder) / name for name in ("control", "frames"))
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in (control, frames)]
        wire._encoder = Recorded(wire._encoder, fds[0])  # type: ignore[assignment]
        make_header = stream.encode_header

        def recorded(*arguments: Any) -> bytes:
            header = make_header(*arguments)
            os.write(fds[1], f"{header.hex()}\n".encode())
            return header

        stream.encode_header = recorded
        run_dir = Path(folder) / "run"
        settings = {"layout.widths": "[1,2]", "run.checkpoint_every": 6, "run.eval_every": 6, "elastic.respawn": True}
        faults = ["kill:2@3:gather", "slow:1@8:0.5", "kill:coordinator@9"]
        run_job(run_dir, settings, faults=faults, probe=Asking(run_dir))
        messages = dict(line.split() for line in reversed(control.read_text().splitlines()))
        headers: dict[tuple[object, ...], str] = {}
        for line in frames.read_text().split():
            header = decode_header(bytes.fromhex(line), 0, 1 << 40)
            headers.setdefault((header.tag.channel, header.dtype_code, len(header.shape)), line)
    CORPUS.mkdir(exist_ok=True)
    lines = [f"{name} {messages[name]}" for name in sorted(messages)]
    (CORPUS / "control.txt").write_text("\n".join(lines) + "\n")
    assert all(len(line) == 2 * HEADER_BYTES for line in headers.values())
    lines = [f"channel-{key[0]}-dtype-{key[1]}-dims-{key[2]} {headers[key]}" for key in sorted(headers)]  # type: ignore[type-var]
    (CORPUS / "frames.txt").write_text("\n".join(lines) + "\n")
    print(f"{len(messages)} kinds of messages, {len(headers)} kinds of frames")


if __name__ == "__main__":
    main()
