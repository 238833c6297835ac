"""What a link reaches of bare sockets, and what TLS costs: its throughput, and the step of a job, in turns over
loopback.

    python benchmarks/tls.py [--pairs 9] [--size default] [--starts 2] [--rounds 5] [--json]

See README.md beside this file.
"""

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import (
    SIZES,
    Program,
    Turns,
    compare,
    configuration,
    elaswave_program,
    fork_workers,
    machine,
    print_header,
    quartiles,
    run_in_turns,
)

from elaswave.job.keys import make_keys, new_key, tls_of
from elaswave.transport.addresses import Endpoint
from elaswave.transport.interface import Tag
from elaswave.transport.stream import StreamTransport

FRAME_BYTES = 4 << 20
"""As large as a layer's activations of a middling model."""
FRAMES_PER_TURN = 64
WAIT_S = 60.0


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9, help="turns of each link")
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--starts", type=int, default=2, help="how often the jobs are started anew")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each job in each start")
    parser.add_argument("--steps-per-turn", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as folder:
        keys = Path(folder) / "keys"
        make_keys(keys, [], 1)
        link = measure_link(keys, Path(folder) / "times", options.pairs)
        job = measure_job(options.size, keys, Turns(options.starts, options.rounds, options.steps_per_turn))
    if options.json:
        print(json.dumps({"machine": where, "link": link, "job": job}, indent=2))
    else:
        print_header(where)
        low, high = link["of_sockets_quartiles"]
        print(f"bare sockets {link['sockets']:.3g} GB/s, of which a plain link reaches {link['of_sockets']:.3f} "
              f"({low:.3f} to {high:.3f})")  # fmt: skip
        print(f"{'':6} {'plain':>12} {'TLS':>12}   TLS / plain (quartiles)")
        for name, row, unit in (("link", link, "GB/s"), ("step", job, "ms")):
            low, high = row["quartiles"]
            values = f"{row['plain']:9.3g} {unit:4}{row['tls']:8.3g} {unit:4}"
            print(f"{name:6} {values} {row['ratio']:.3f} ({low:.3f} to {high:.3f})")
    return 0


def measure_link(keys: Path, times: Path, pairs: int) -> dict[str, Any]:
    """Bytes per second from one process to another in turns: by a plain link, inside TLS, and by a bare socket, which
    all stand from the beginning."""
    places = [Endpoint("tcp:127.0.0.1"), Endpoint("tcp:127.0.0.1", tls=tls_of(keys))]
    key = new_key()
    addresses_of = [os.pipe(), os.pipe()]

    def body(worker: int) -> None:
        torch.set_num_threads(1)
        transports = [StreamTransport(worker, key=key, listen=place) for place in places]
        ours, theirs = addresses_of[worker][1], addresses_of[1 - worker][0]
        listener = socket.create_server(("127.0.0.1", 0))
        mine = [*(transport.address for transport in transports), str(listener.getsockname()[1])]
        os.write(ours, " ".join(mine).encode() + b"\n")
        *addresses, port = os.read(theirs, 4096).decode().split()
        for transport, address in zip(transports, addresses, strict=True):
            transport.connect({1 - worker: address}, WAIT_S)
        bare = socket.create_connection(("127.0.0.1", int(port)), WAIT_S) if worker == 0 else listener.accept()[0]
        bare.settimeout(WAIT_S)
        tensor = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        seconds: list[list[float]] = [[], [], []]
        for pair in range(-1, pairs):  # the first is not measured
            for kind in (0, 1, 2) if pair % 2 == 0 else (2, 1, 0):
                if kind < 2:
                    taken_s = _turn(transports[kind], worker, tensor, pair + 1)
                else:
                    taken_s = _bare_turn(bare, worker, tensor)
                if pair >= 0:
                    seconds[kind].append(taken_s)
        if worker == 0:
            times.write_text(json.dumps(seconds))
        for end in (*transports, bare, listener):
            end.close()

    fork_workers(2, body)
    for end in (end for pipe in addresses_of for end in pipe):
        os.close(end)
    plain, secured, sockets = (
        [FRAMES_PER_TURN * FRAME_BYTES / taken_s / 1e9 for taken_s in kind] for kind in json.loads(times.read_text())
    )
    low, middle, high = quartiles([ours / theirs for ours, theirs in zip(plain, sockets, strict=True)])
    row = _row(plain, secured, [theirs / ours for ours, theirs in zip(plain, secured, strict=True)])
    return row | {"sockets": quartiles(sockets)[1], "of_sockets": middle, "of_sockets_quartiles": [low, high]}


def _bare_turn(bare: socket.socket, worker: int, tensor: torch.Tensor) -> float:
    """As `_turn`, without frames: the receiver fills the same memory again and again."""
    view = tensor.numpy().data
    begin_s = time.monotonic()
    for _ in range(FRAMES_PER_TURN):
        if worker == 0:
            bare.sendall(view)
            continue
        filled = 0
        while filled < FRAME_BYTES:
            filled += bare.recv_into(view[filled:])
    if worker == 0:
        bare.recv(1)
    else:
        bare.sendall(b"x")
    return time.monotonic() - begin_s


def _turn(transport: StreamTransport, worker: int, tensor: torch.Tensor, turn: int) -> float:
    """Worker 0 sends frames to worker 1, which says at the end that it has them; the seconds of it."""
    peer = 1 - worker
    tags = [Tag(1, turn, 0, number) for number in range(FRAMES_PER_TURN)]
    begin_s = time.monotonic()
    if worker == 0:
        answer = transport.recv(peer, Tag(2, turn, 0))
        transport.wait([transport.send(peer, tag, tensor) for tag in tags], WAIT_S)
        transport.wait(answer, WAIT_S)
    else:
        transport.wait([transport.recv(peer, tag, tensor) for tag in tags], WAIT_S)
        transport.wait(transport.send(peer, Tag(2, turn, 0), tensor[:1]), WAIT_S)
    return time.monotonic() - begin_s


def measure_job(size: str, keys: Path, turns: Turns) -> dict[str, Any]:
    """Milliseconds of a step of 2 stages x 1 worker."""
    settings = [*SIZES[size], "layout.widths=[1,1]", "net.transport=tcp"]
    plain = Program("plain", elaswave_program(configuration(*settings)), 2)
    secured = Program("TLS", elaswave_program(configuration(*settings, "net.tls=required", f"net.keys={keys}")), 2)
    run_in_turns([plain, secured], turns)
    compared = compare(plain, secured)  # above 1: a step inside TLS takes longer
    row = _row([1e3 * each for each in plain.wall_s], [1e3 * each for each in secured.wall_s], [compared.ratio])
    return row | {"ratio": compared.ratio, "quartiles": [compared.low, compared.high], "cpu_ratio": compared.cpu_ratio}


def _row(plain: Sequence[float], secured: Sequence[float], ratios: Sequence[float]) -> dict[str, Any]:
    low, middle, high = quartiles(ratios)
    return {
        "plain": quartiles(plain)[1],
        "tls": quartiles(secured)[1],
        "ratio": middle,
        "quartiles": [low, high],
    }


if __name__ == "__main__":
    raise SystemExit(main())
