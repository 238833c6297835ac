"""``elaswave agent``: takes this host into a job of several hosts."""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import click

from elaswave.api.environment import COORDINATOR_VARIABLE, given_key, prepare_to_compute, private_folder
from elaswave.config.load import load_config
from elaswave.errors import UsageError
from elaswave.job.keys import JobKey, own_key
from elaswave.observability.output import say_error
from elaswave.system.processes import end_with_parent

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""That torchrun sets for what it starts."""


def _name(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Checks a name that files, and keys of a store, may bear: what is removed below one name is not another's."""
    if value is not None and not _NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r}: give a letter or digit, then letters, digits, dots, dashes, underscores")
    return value


@click.command(
    name="agent",
    short_help="Take this host into a job of several hosts.",
    epilog="Exit codes: 0 done; 1 failed and 2 bad input, which another try would meet again; 75 worth another try (no "
    "coordinator, too few hosts, this host's workers have left); 130 Ctrl-C, 138 and 140 SIGUSR1 and 2, 143 SIGTERM.",
)
@click.option("--job", required=True, metavar="NAME", callback=_name, help="The job's name.")
@click.option(
    "--coordinator",
    required=True,
    envvar=COORDINATOR_VARIABLE,
    show_envvar=True,
    metavar="HOST:PORT[,...]",
    help="Where the coordinator is dialled. The agent on that host creates the job. With control.store=etcd://... "
    "there may be several: when a coordinator's host is lost, another of them starts one.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What is trained. Counts where the job is created; elsewhere it may be left out, and must not differ.",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Workers with which the job begins.")
@click.option("--hosts", type=click.IntRange(min=1), metavar="N", help="Hosts with which it begins: control.hosts.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set one key of the configuration; may be repeated. Those of section net count on this host only.",
)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    metavar="N",
    help="Workers that may run on this host.  [default: an even share of the first ones]",
)
@click.option("--node-name", "node", metavar="NAME", callback=_name, help="Name of this host.  [default: the system's]")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The run's folder, of this host or shared.  [default: runs/JOB; elsewhere, the path where it was created]",
)
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where checkpoints are, which all hosts must share.  [default: checkpoints in the run's folder]",
)
@click.option("--join", "joins", is_flag=True, help="Only take part: never found the job.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0.0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the coordinator.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=6.0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="From a notice (SIGTERM) until the launcher kills; workers leave 5 s sooner.",
)
@click.option(
    "--fault",
    "fault_specs",
    multiple=True,
    metavar="KIND:WORKER@STEP[:PHASE[+N]]",
    help="Inject a fault, see `elaswave train`; counts where the job is created.",
)
def agent_command(
    job: str,
    coordinator: str,
    config_file: Path | None,
    workers: int | None,
    hosts: int | None,
    overrides: tuple[str, ...],
    slots: int | None,
    node: str | None,
    run_dir: Path | None,
    checkpoints: Path | None,
    joins: bool,
    wait_s: float,
    grace_s: float,
    fault_specs: tuple[str, ...],
) -> None:
    """Take this host into a job. The same command is given on each host.

    \b
    elaswave keys keys && export ELASWAVE_KEY_FILE=$PWD/keys/job.key
    elaswave agent --job demo --config my.toml --hosts 2 \\
      --coordinator 10.77.0.1:7077 --set net.trusted=true
    """
    from elaswave.launcher.agent import AgentOptions, run_agent  # late: only this command needs it

    if hosts is not None:
        overrides = (*overrides, f"control.hosts={hosts}")
    options = AgentOptions(
        job=job,
        coordinator=coordinator,
        node=node or socket.gethostname(),
        locks=private_folder("locks", stays=True),
        config_file=config_file,
        workers=workers,
        overrides=overrides,
        slots=slots,
        run_dir=run_dir,
        checkpoints=checkpoints,
        fault_specs=fault_specs,
        joins=joins,
        wait_s=wait_s,
        leave_s=grace_s - 5.0,
    )
    run_agent(options, _key(overrides), prepare_to_compute)


def _key(overrides: tuple[str, ...]) -> JobKey:
    """Finds the key that all agents of a job are given.

    Raises:
        UsageError: none is given.
    """
    given = given_key()
    if given is not None:
        return given
    net = [override for override in overrides if override.strip().startswith("net.")]
    key = own_key(load_config(None, ("net.transport=tcp", *net), None).net)
    if key.file is None:
        raise UsageError(
            "agents of one job need one key: `elaswave keys DIR` makes it; give each of them ELASWAVE_KEY_FILE="
            "DIR/job.key (mode 0600), or net.keys=DIR with certificates"
        )
    return key


def run_module(arguments: Sequence[str]) -> int:
    """Runs the command as a launcher of modules starts it. Under torchrun, which tries again whatever is not 0, what
    another try would meet again is 0 too; that the job has failed is said, and stands in the run's folder.

    Args:
        arguments: of the command.
    Returns:
        Exit code.
    """
    from elaswave.cli.main import main  # late: it names this module's command

    if TORCHRUN_VARIABLE not in os.environ:
        return main(["agent", *arguments])
    end_with_parent(os.getppid())  # torchrun that is killed does not end what it has started
    code = main(["agent", *arguments])
    if code in (1, 2):
        say_error(f"exit code {code}; torchrun is told 0, so that it does not try again")
        return 0
    return code
