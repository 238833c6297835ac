"""The life of a worker's process, from the fork to its end: its connection to the coordinator, its faults, its steps.
Beside it, that of its loaders.

Loads torch; only the forkserver and its children import this.
"""

import math
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from elaswave.channel.client import ControlClient
from elaswave.channel.messages.worker import KeysNow, KeysTaken, ToWorker
from elaswave.channel.slow_dial import slow_control_of
from elaswave.engine.batches import BatchMaker, say_who, serve_batches
from elaswave.faults.injection import AwayWatch, FaultProbe, NoProbe, Probe, Probes
from elaswave.job.plan import StartingPoint, sampler_of
from elaswave.launcher.forkserver.messages import ForkServerSetup
from elaswave.observability.run_folder import FAULTS_FILE
from elaswave.system.processes import hear_notices, hold_notices, offer_to_kernel
from elaswave.transport import addresses
from elaswave.transport.handshake import KeyRing, Secrets
from elaswave.worker.control import Mailbox
from elaswave.worker.links import site_links
from elaswave.worker.process import run_worker
from elaswave.worker.setup import WorkerSetup

HEARTBEAT_S = 0.25
COMPUTE_NICENESS = 5
"""Computing yields to the threads and processes that keep the job together, which need little and need it at once."""
SWITCH_INTERVAL_S = 0.001
"""How long a worker's main thread may hold the interpreter while its control thread wants it."""

FENCED_OFF_S = 10.0
"""A worker that is no member any more ends itself; if its main thread has not done so after so long, it is stuck in its
device, or in a person's code, and the process ends without it: another process may wait for its place. Longer than its
last messages may take (`elaswave.worker.process.FLUSH_TIMEOUT_S`), shorter than a place is waited for."""


def worker_main(
    setup: ForkServerSetup,
    worker: int,
    checkpoint: StartingPoint | None,
    loaders: socket.socket | None = None,
    joins: bool = False,
) -> int:
    """Runs one worker in this process.

    Args:
        setup: of the job.
        worker: its id.
        checkpoint: where it begins; None: at the seed.
        loaders: where the forkserver hands over its loaders; None: it has none.
        joins: whether it joins a job that runs, without any state.
    Returns:
        Exit status.
    """
    clients: list[ControlClient[ToWorker]] = []
    slow_control = slow_control_of(setup.job.config, worker)
    sites = site_links(setup.job.config, worker)
    parted: set[tuple[str, float]] = set()
    lock = threading.Lock()

    def silence(machine: Any, *, close_links: bool) -> None:
        """Handles the `cut` faults: from now on nothing goes in or out of this worker."""
        clients[0].silence(True)
        if close_links:
            machine.links.transport.close()
        threading.Event().wait()

    def slow(machine: Any, factor: float, *, links: bool) -> None:
        """Handles the faults `slow` and `slow-link`: this worker computes at a share of its speed, or its links do."""
        context = machine.engine.context
        (context.slow_links if links else context.slow_down)(factor)
        if links and slow_control is not None:
            slow_control.slow_down(factor)

    def part(site: str, until_s: float) -> None:
        """Handles the fault `away`: frames to and from a site stand still, and who is there is cut off from the
        coordinator."""
        assert sites is not None
        with lock:  # the one that strikes is told by the record too
            if (site, until_s) in parted or until_s <= time.monotonic():
                return
            parted.add((site, until_s))
        if not sites.part(site, until_s):
            return
        clients[0].silence(True)
        if until_s < math.inf:
            back = threading.Timer(max(0.0, until_s - time.monotonic()), clients[0].silence, [False])
            back.daemon = True
            back.start()

    ring = KeyRing(setup.keys)
    probe: Probe = setup.probe or NoProbe()
    record = setup.job.run_dir / FAULTS_FILE
    if setup.job.faults:
        seed = setup.job.config.run.seed
        faults = FaultProbe(
            setup.job.faults,
            seed=seed,
            record=record,
            silence=silence,
            slow=slow,
            part=part,
            suffix=setup.suffix,
        )
        probe = Probes(probe, faults)
    worker_setup = WorkerSetup(
        config=setup.job.config,
        worker=worker,
        run_dir=setup.job.run_dir,
        key=ring,
        listen=setup.job.network.links,
        checkpoint=None if checkpoint is None else (Path(checkpoint.folder), checkpoint.meta),
        probe=probe,
        profile=setup.job.profile,
        training=setup.training,
        loaders=loaders,
        frozen=setup.frozen,
        joins=joins,
        sites=sites,
    )

    def make_client(mailbox: Mailbox) -> ControlClient[ToWorker]:
        assert setup.job.deaths is not None
        setup.job.deaths.live(worker)
        if setup.commits is not None:
            mailbox.on_commit = setup.commits.add

        def take_keys(message: KeysNow) -> None:
            ring.now = Secrets(message.keys)
            clients[0].send(KeysTaken(worker=worker, ring=ring.now.name))

        mailbox.on_keys = take_keys
        mailbox.on_fenced_off = lambda message: end_later(worker, message.reason)
        client: ControlClient[ToWorker] = ControlClient(
            [(setup.job.network.dial, ""), *setup.job.network.others],
            ring,
            worker,
            ToWorker,
            mailbox,
            tls=setup.job.network.tls,
            dial=addresses.dial if slow_control is None else slow_control.dial,
            job_generation=setup.job.job_generation,
        )
        client.interval_s = HEARTBEAT_S
        clients.append(client)
        client.start()
        AwayWatch(setup.job.faults, record, part)

        def tell() -> None:
            client.send(mailbox.leaving_within(setup.job.config.elastic.drain_deadline_s))

        hear_notices(tell)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPUTE_NICENESS)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return client

    os.setpgid(0, 0)  # so that the launcher finds what is left when this process is killed: servers, compilers
    offer_to_kernel()
    hold_notices()
    return run_worker(worker_setup, make_client)


def end_later(worker: int, reason: str, after_s: float = FENCED_OFF_S) -> None:
    """Ends this process after a while, should it still be there then.

    Args:
        worker: its id.
        reason: why it is no member any more.
        after_s: seconds.
    """

    def end() -> None:
        print(f"worker {worker} is no member any more, and has been stuck for {after_s:g} s: {reason}", flush=True)
        os._exit(1)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


def loader_main(setup: ForkServerSetup, line: socket.socket) -> int:
    """Runs one loader in this process.

    Args:
        setup: of the job.
        line: to its worker.
    Returns:
        Exit status.
    """
    torch.set_num_threads(1)
    os.setpriority(os.PRIO_PROCESS, 0, COMPUTE_NICENESS)
    offer_to_kernel()
    say_who(line)
    samples = setup.training.open_samples(setup.job.run_dir / "data")
    sampler = sampler_of(setup.job.config, samples.num_samples("train"), samples.sources)
    return serve_batches(BatchMaker(setup.job.config, samples, sampler), line)
