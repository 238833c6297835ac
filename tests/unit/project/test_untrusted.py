"""Files are read through `elaswave.untrusted`: what is opened or decoded beside it is found, and stands here with why.

Read from the syntax tree. A place is a module and the function in it; it may do there what its reason says.
"""

import ast
from collections.abc import Iterator

import pytest
from tests.unit.project.trees import PACKAGES, dotted, functions, modules

OPENS = {"open", "os.open", "io.open", "os.fdopen", "mmap.mmap", "np.memmap", "np.load", "np.fromfile"}
DECODES = {
    "json.load", "json.loads", "msgspec.json.decode", "msgspec.json.Decoder", "tomllib.load", "tomllib.loads",
    "pickle.load", "pickle.loads", "torch.load", "zipfile.ZipFile", "zlib.decompress",
}  # fmt: skip
METHODS = {"read_text", "read_bytes"}
KERNELS = ("/proc/", "/sys/", "/dev/")
"""What the kernel writes."""

MAKES = "makes a file, under a name that it has just made free, or in a folder of this user alone"
KERNEL = "reads what the kernel writes"
OWN = "reads what this very process or its parent has written"
FOLDER = "opens a folder, not a file"
MEMORY = "maps memory without a file"
STORE = "decodes a value of the job's store"
PACKAGED = "reads a file of the package"

CHECKED = (
    "decodes what `elaswave.untrusted` has opened, or what has been authenticated, and catches all that comes of it"
)

EXCEPTED = {
    "config.presets:catalog": PACKAGED,
    "config.values:parse_toml": CHECKED,
    "launcher.forkserver.messages:CommitCount.__init__": MEMORY,
    "launcher.forkserver.loaders:_received": OWN,
    "system.processes:redirect_output": "opens /dev/null",
    "launcher.forkserver.fresh:serve_parent": OWN,
    "launcher.agent:_Lock.__init__": "opens a lock in a folder of this user alone, and follows no link",
    "launcher.resources:JobPlace._write_key": MAKES,
    "launcher.supervisors:find_outcome": STORE,
    "launcher.resources:memory_bytes": KERNEL,
    "job.script:_opened": "opens a descriptor of this process once more",
    "launcher.forkserver.module_state:_set": OWN,
    "launcher.forkserver.module_state:_set_flags": OWN,
    "launcher.agent:_ask_whether_it_runs": STORE,
    "data.samples:_map_file": CHECKED,
    "data.samples:write_python_docs": MAKES,
    "data.token_files:TokenWriter.__init__": MAKES,
    "launcher.resources:cuda_of_torch": PACKAGED,
    "models.foreign.part:ForeignPart._about": OWN,
    "models.foreign.part:ForeignPart._checked": OWN,
    "models.foreign.server:Server._answer": OWN,
    "models.foreign.server:load_factory": "loads the code of a part, which is trusted",
    "models.foreign.server:_main": OWN,
    "job.setup:write_control_file": MAKES,
    "job.keys:read_key": "opens without waiting, and looks at kind, mode and owner",
    "job.keys:_following": "opens without waiting and follows no link, and reads by read_key",
    "job.keys:_write_private": MAKES,
    "job.setup:_ipv6_addresses": KERNEL,
    "models.huggingface.model:_files": "decodes what transformers has just encoded",
    "observability.processes:clock_here": KERNEL,
    "observability.events:": CHECKED,
    "observability.processes:_mapped_by": KERNEL,
    "observability.output:_point": "opens what a person has led the output to",
    "observability.output:open_closed_streams": "opens /dev/null",
    "observability.processes:_contents": KERNEL,
    "observability.processes:facts_of": KERNEL,
    "observability.processes:ProcessorWaits._contents": KERNEL,
    "observability.run_folder:atomic_write": MAKES,
    "observability.run_folder:_as_in_files": "decodes what it has just encoded",
    "observability.run_folder:add_to_copy": CHECKED,
    "protocol.coordinator.store_writes:lease_heartbeat_of": STORE,
    "protocol.coordinator.store_writes:job_generation_of": STORE,
    "protocol.coordinator.store_writes:holder_of": STORE,
    "models.splitting.graph:OperatorGraph.from_json": "a function for scripts, which give it a text of theirs",
    "checkpoints.shards:_files": CHECKED,
    "checkpoints.shards:load_plain": CHECKED,
    "checkpoints.commit:_sync_folder": FOLDER,
    "checkpoints.shards:write_shard": MAKES,
    "system.processes:DeathWatch.__init__": MEMORY,
    "launcher.resources:JobFolder.__init__": MAKES,
    "launcher.resources:_removes": "looks with lstat first, and opens without waiting or following",
    "system.processes:offer_to_kernel": KERNEL,
    "transport.addresses:_unix_name": FOLDER,
    "verify.chaos.growth:held_by": KERNEL,
    "verify.chaos.trial:_be_job": MAKES,
    "verify.chaos.trial:run_command.start": MAKES,
    "verify.chaos.weather:Sky._begin": MAKES,
    "verify.chaos.weather:Sky._limit": KERNEL,
    "worker.frequency:_group_of": KERNEL,
    "worker.links:_describe": CHECKED,
    "engine.checks.rehearsal:_libraries_of_matrices": KERNEL,
}


def calls_beside(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions with what they call that opens a file or decodes one's content."""
    for function, node in functions(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        opened = method == "open" and node.args and isinstance(getattr(node.args[0], "value", None), str)
        if (name in OPENS | DECODES or method in METHODS or opened) and not _is_of_the_kernel(node):
            yield function, name or method


def _is_of_the_kernel(call: ast.Call) -> bool:
    """Whether a call is given a path of the kernel's, as it stands there."""
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return bool(texts) and texts[0].startswith(KERNELS)


def test_files_are_read_through_one_module() -> None:
    found: dict[str, set[str]] = {}
    for module, path in modules(*PACKAGES):
        if module != "elaswave.untrusted":
            for function, call in calls_beside(ast.parse(path.read_text())):
                found.setdefault(f"{module.removeprefix('elaswave.')}:{function}", set()).add(call)
    unknown = {place: sorted(calls) for place, calls in found.items() if place not in EXCEPTED}
    assert not unknown, "read these through elaswave.untrusted, or say here why not"
    assert not EXCEPTED.keys() - found.keys(), "these open and decode nothing any more"


@pytest.mark.parametrize(
    "call", ["open", "os.open", "json.loads", "torch.load", "msgspec.json.decode", "tomllib.loads", "pickle.loads"]
)
def test_the_search_finds_functions(call: str) -> None:
    assert list(calls_beside(ast.parse(f"def f(given):\n    {call}(given)"))) == [("f", call)]


@pytest.mark.parametrize("call", ["(folder / name).open('rb')", "path.read_text()", "Path(given).read_bytes()"])
def test_the_search_finds_methods(call: str) -> None:
    assert [place for place, _ in calls_beside(ast.parse(f"class A:\n    def f(self):\n        {call}"))] == ["A.f"]


@pytest.mark.parametrize("call", ["open('/proc/self/maps')", "Path(f'/proc/{pid}/stat').read_text()", "store.open()"])
def test_the_search_leaves_out(call: str) -> None:
    assert not list(calls_beside(ast.parse(call)))
