"""Durable checkpoints: exact through any cut, read by plain DCP, and never used when damaged."""

import math
import multiprocessing
import multiprocessing.connection
import random
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elaswave.checkpoints import format
from elaswave.checkpoints.checkpoint import (
    CheckpointRef,
    SkippedCheckpoint,
    discard_checkpoint,
    find_newest_checkpoint,
    newest_committed_step,
    prune,
    put_aside,
    read_meta,
    remove_stale,
    shard_folder,
    verify_checkpoint,
)
from elaswave.checkpoints.commit import commit_checkpoint
from elaswave.checkpoints.format import (
    CheckpointMeta,
    TensorInfo,
    WantedPiece,
    WrittenItem,
    model_name,
    optimizer_name,
)
from elaswave.checkpoints.shards import Piece, read_pieces, write_shard
from elaswave.errors import CheckpointError

SHAPES = {"embedding.weight": (7, 5), "block.0.qkv": (3, 4, 6), "block.0.bias": (11,), "scale": (), "none": (0, 3)}
LOSSES: list[float | str] = [5.545177444479562, "nan", 0.1 + 0.2, 1e-300]


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        for fqn in (model_name(name), optimizer_name("exp_avg", name), optimizer_name("exp_avg_sq", name)):
            tensors[fqn] = torch.randn(shape, generator=generator)
    tensors["grids"] = torch.tensor([2**62, -(2**63), 17], dtype=torch.int64)
    return tensors


def make_meta(tensors: dict[str, torch.Tensor], step: int) -> CheckpointMeta:
    return CheckpointMeta(
        step=step,
        losses=LOSSES,
        grids={"embedding.weight": 43, "scale": -7},
        seed=2**63 + 1,
        data_cursor=(2, 640),
        config={"format": 2, "model": {"family": "gpt", "dropout": 0.1}},
        tensors={fqn: info_of(tensor) for fqn, tensor in tensors.items()},
        elaswave_version="0.1.0",
        extra={"updates": 3},
    )


def info_of(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def cut(tensors: dict[str, torch.Tensor], num_workers: int, seed: int, max_run: int = 9) -> list[list[Piece]]:
    """Cuts every tensor into random runs and gives each to a random worker."""
    rng = random.Random(seed)
    pieces: list[list[Piece]] = [[] for _ in range(num_workers)]
    for fqn, tensor in tensors.items():
        flat = tensor.reshape(-1)
        start = 0
        while start < len(flat):
            stop = min(start + rng.randint(1, max_run), len(flat))
            pieces[rng.randrange(num_workers)].append(Piece(fqn, tuple(tensor.shape), start, flat[start:stop]))
            start = stop
    for own in pieces:
        rng.shuffle(own)
    return pieces


def save(
    run_dir: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    num_workers: int = 3,
    config: dict[str, Any] | None = None,
) -> CheckpointRef:
    folder = shard_folder(run_dir, step)
    pieces = cut(tensors, num_workers, seed=step)
    with ThreadPoolExecutor(num_workers) as pool:
        items = list(pool.map(lambda w: write_shard(folder, f"worker-{w}", pieces[w]), range(num_workers)))
    meta = make_meta(tensors, step)
    if config is not None:
        meta = msgspec.structs.replace(meta, config=config)
    return commit_checkpoint(folder, [item for own in items for item in own], meta)


def load_whole(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    wanted = [WantedPiece(fqn, tuple(tensor.shape), 0, tensor.numel()) for fqn, tensor in tensors.items()]
    found = read_pieces(folder, wanted)
    return {fqn: part.view(tensor.shape) for (fqn, tensor), part in zip(tensors.items(), found, strict=True)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert found[fqn].dtype == tensor.dtype and found[fqn].shape == tensor.shape, fqn
        assert torch.equal(found[fqn].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), fqn


def dcp_load(state: dict[str, Any], folder: Path) -> None:
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def truncate(path: Path, num_bytes: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-num_bytes])


# What is written comes back


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_plain_dcp_reads_every_tensor_bit_for_bit(tmp_path: Path, num_workers: int) -> None:
    tensors = make_tensors()
    ref = save(tmp_path, 17, tensors, num_workers)
    assert ref.folder == tmp_path / "checkpoints" / "step-00000017"

    flat: dict[str, Any] = {fqn: torch.zeros_like(tensor) for fqn, tensor in tensors.items()}
    dcp_load(flat, ref.folder)
    assert_same(flat, tensors)

    names = list(SHAPES)
    nested: dict[str, Any] = {"model": {name: torch.zeros(SHAPES[name]) for name in names}}
    dcp_load(nested, ref.folder)
    assert_same(nested["model"], {name: tensors[model_name(name)] for name in names})


def test_dcp_to_torch_save_gives_a_nested_state_dict(tmp_path: Path) -> None:
    tensors = make_tensors()
    ref = save(tmp_path, 1, tensors)
    dcp_to_torch_save(ref.folder, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded.keys() == {"model", "optimizer", "grids"} and loaded["optimizer"].keys() == {"exp_avg", "exp_avg_sq"}
    found = {"grids": loaded["grids"]}
    for name in SHAPES:
        found[model_name(name)] = loaded["model"][name]
        for slot in ("exp_avg", "exp_avg_sq"):
            found[optimizer_name(slot, name)] = loaded["optimizer"][slot][name]
    assert_same(found, tensors)


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -0x80000000, 1, 0x7F800000, -0x800000], dtype=torch.int32)
    tensors = {"model.x": bits.view(torch.float32), "model.half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)}
    ref = save(tmp_path, 1, tensors)
    assert_same(load_whole(ref.folder, tensors), tensors)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), num_readers=st.integers(1, 4))
def test_other_cuts_read_the_same_elements(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_readers: int
) -> None:
    tensors = make_tensors(seed)
    ref = save(tmp_path_factory.mktemp("run"), 3, tensors)
    for pieces in cut(tensors, num_readers, seed, max_run=40):
        wanted = [WantedPiece(piece.fqn, piece.shape, piece.flat_start, len(piece.values)) for piece in pieces]
        for piece, found in zip(pieces, read_pieces(ref.folder, wanted), strict=True):
            assert torch.equal(found, piece.values)


def test_the_description_comes_back_exactly(tmp_path: Path) -> None:
    tensors = make_tensors()
    ref = save(tmp_path, 17, tensors)
    meta = read_meta(ref.folder)
    assert meta == ref.meta == make_meta(tensors, 17)
    assert [repr(loss) for loss in meta.losses] == [repr(loss) for loss in LOSSES]
    assert verify_checkpoint(ref.folder) == ref


def _write_in_process(folder: Path, worker: int, out: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    out.send_bytes(msgspec.msgpack.encode(write_shard(folder, f"worker-{worker}", cut(make_tensors(), 2, 5)[worker])))
    out.close()


def test_writers_in_other_processes_send_plain_data(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path, 5)
    context = multiprocessing.get_context("fork")
    items: list[WrittenItem] = []
    processes = []
    for worker in range(2):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_write_in_process, args=(folder, worker, send))
        process.start()
        send.close()
        processes.append((process, receive))
    for process, receive in processes:
        assert receive.poll(60)
        items += msgspec.msgpack.decode(receive.recv_bytes(), type=list[WrittenItem])
        process.join(60)
        assert process.exitcode == 0
        receive.close()
    tensors = make_tensors()
    ref = commit_checkpoint(folder, items, make_meta(tensors, 5))
    assert_same(load_whole(ref.folder, tensors), tensors)


def test_no_item_spans_two_pieces(tmp_path: Path) -> None:
    """So the same piece that two workers have written is the same item but for its place."""
    flat = torch.arange(48.0)
    pieces = [Piece("model.w", (6, 8), start, flat[start : start + 8]) for start in range(0, 48, 8)]
    folder = shard_folder(tmp_path, 1)
    whole = write_shard(folder, "whole", pieces[::-1])
    assert [(item.offsets, item.sizes) for item in whole] == [((row, 0), (1, 8)) for row in range(6)]
    one = write_shard(folder, "one", pieces[3:4])[0]
    place = {"relative_path": one.relative_path, "offset": one.offset}
    assert msgspec.structs.replace(whole[3], **place) == one


def test_pieces_that_are_written_twice_count_once(tmp_path: Path) -> None:
    """Two generations' shards of one step: of each piece one is used; files of which none is used are removed."""
    tensors = {"model.w": torch.arange(8.0).view(2, 4)}
    flat = tensors["model.w"].view(-1)
    folder = shard_folder(tmp_path, 1)
    pieces = [Piece("model.w", (2, 4), start, flat[start : start + 2]) for start in range(0, 8, 2)]
    first = write_shard(folder, "worker-0-generation-1", pieces[:3])
    second = write_shard(folder, "worker-1-generation-2", pieces[1:])
    write_shard(folder, "worker-0-generation-2", pieces[:1])
    sizes = {own[0].relative_path: own[-1].offset + own[-1].length for own in (first, second)}
    ref = commit_checkpoint(folder, [first[0], first[2], second[0], second[2]], make_meta(tensors, 1), sizes=sizes)
    assert sorted(path.name for path in ref.folder.glob("*.distcp")) == sorted(sizes)
    assert_same(load_whole(ref.folder, tensors), tensors)
    assert verify_checkpoint(ref.folder).step == 1
    flat_again: dict[str, Any] = {"model.w": torch.zeros(2, 4)}
    dcp_load(flat_again, ref.folder)
    assert_same(flat_again, tensors)


def test_a_commit_that_its_coordinator_did_not_live_to_tell_is_taken_over(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(8.0)}
    folder = shard_folder(tmp_path, 3)
    items = write_shard(folder, "worker-0", [Piece("model.w", (8,), 0, tensors["model.w"])])
    first = commit_checkpoint(folder, items, make_meta(tensors, 3))
    again = commit_checkpoint(folder, items, make_meta(tensors, 3))
    assert again == first and not folder.exists()
    write_shard(shard_folder(tmp_path, 3), "worker-0-generation-2", [Piece("model.w", (8,), 0, tensors["model.w"])])
    assert commit_checkpoint(folder, items, make_meta(tensors, 3)) == first, "survivors have begun to write once more"
    other = [msgspec.structs.replace(items[0], checksum="0" * 32)]
    with pytest.raises(CheckpointError, match="cannot read"):
        commit_checkpoint(folder, other, make_meta(tensors, 3))


def test_a_reader_opens_only_what_it_needs(tmp_path: Path) -> None:
    tensors = {"model.a": torch.arange(6.0), "model.b": torch.arange(8.0)}
    folder = shard_folder(tmp_path, 1)
    items = write_shard(folder, "a", [Piece("model.a", (6,), 0, tensors["model.a"])])
    items += write_shard(folder, "b", [Piece("model.b", (8,), 0, tensors["model.b"])])
    ref = commit_checkpoint(folder, items, make_meta(tensors, 1))
    (ref.folder / "b.distcp").unlink()
    assert read_pieces(ref.folder, [WantedPiece("model.a", (6,), 2, 3)])[0].tolist() == [2, 3, 4]
    with pytest.raises(CheckpointError, match=r"cannot read .*b\.distcp: No such file"):
        read_pieces(ref.folder, [WantedPiece("model.b", (8,), 7, 1)])


def test_an_empty_run_is_an_empty_tensor(tmp_path: Path) -> None:
    ref = save(tmp_path, 1, make_tensors())
    empty, none = read_pieces(
        ref.folder, [WantedPiece("model.scale", (), 1, 0), WantedPiece("model.none", (0, 3), 0, 0)]
    )
    assert len(empty) == len(none) == 0


def test_a_tensor_of_another_name_or_shape_is_refused(tmp_path: Path) -> None:
    ref = save(tmp_path, 1, make_tensors())
    with pytest.raises(CheckpointError, match="has no tensor 'model.other'"):
        read_pieces(ref.folder, [WantedPiece("model.other", (2,), 0, 2)])
    with pytest.raises(CheckpointError, match=r"has shape \[11\] .* not \[12\]"):
        read_pieces(ref.folder, [WantedPiece("model.block.0.bias", (12,), 0, 2)])


# A commit needs everything exactly once


def _without_first(items: list[WrittenItem]) -> list[WrittenItem]:
    return items[1:]


def _other_worker_too(items: list[WrittenItem]) -> list[WrittenItem]:
    return [*items, msgspec.structs.replace(items[0], relative_path="z.distcp", offset=0)]


def _first(**changes: Any) -> Callable[[list[WrittenItem]], list[WrittenItem]]:
    return lambda items: [msgspec.structs.replace(items[0], **changes), *items[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_first, r"do not cover 'model.w' .* exactly once: elements \[0, 4\) are missing"),
        (_other_worker_too, r"do not cover 'model.w' .* exactly once: elements \[0, 4\) occur more than once"),
        (_first(fqn="model.v"), "'model.v', which is no tensor of this run"),
        (_first(dtype="float64"), "as float64 of shape .* but it is float32"),
        (_first(shape=(4, 2)), r"as float32 of shape \[4, 2\], but it is float32 of shape \[2, 4\]"),
        (_first(sizes=(2, 3)), "that is not one: .* not one run"),
        (lambda items: [items[0], msgspec.structs.replace(items[1], relative_path=items[0].relative_path)], "overlap"),
    ],
)
def test_a_cover_that_is_not_exact_is_not_committed(
    tmp_path: Path, change: Callable[[list[WrittenItem]], list[WrittenItem]], message: str
) -> None:
    tensors = {"model.w": torch.arange(8.0).view(2, 4)}
    folder = shard_folder(tmp_path, 1)
    flat = tensors["model.w"].view(-1)
    first = write_shard(folder, "worker-0", [Piece("model.w", (2, 4), 0, flat[:4])])
    second = write_shard(folder, "worker-1", [Piece("model.w", (2, 4), 4, flat[4:])])
    with pytest.raises(CheckpointError, match=message):
        commit_checkpoint(folder, change([*first, *second]), make_meta(tensors, 1))
    assert find_newest_checkpoint(tmp_path).newest is None
    commit_checkpoint(folder, [*first, *second], make_meta(tensors, 1))
    assert find_newest_checkpoint(tmp_path).newest is not None


def test_a_shard_that_was_cut_off_before_the_commit_is_noticed(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(8.0)}
    folder = shard_folder(tmp_path, 1)
    items = write_shard(folder, "worker-0", [Piece("model.w", (8,), 0, tensors["model.w"])])
    truncate(folder / "worker-0.distcp", 1)
    with pytest.raises(CheckpointError, match="is damaged: it has"):
        commit_checkpoint(folder, items, make_meta(tensors, 1))
    (folder / "worker-0.distcp").unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        commit_checkpoint(folder, items, make_meta(tensors, 1))


@pytest.mark.parametrize("loss", [math.nan, math.inf, "inf"])
def test_losses_are_finite_or_the_word_nan(loss: float | str) -> None:
    meta = make_meta({}, 1)
    with pytest.raises(ValueError, match="loss of step 2 is .* must be a finite float or 'nan'"):
        msgspec.structs.replace(meta, losses=[1.0, loss]).__post_init__()


# Damage is found, and the previous checkpoint is used


def _files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_has_no_other_files(tmp_path: Path) -> None:
    assert _files_of(save(tmp_path, 1, make_tensors(), num_workers=1).folder) == [
        ".metadata", "manifest.json", "meta.json", "worker-0.distcp"
    ]  # fmt: skip


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "meta.json", "worker-0.distcp", "worker-1.distcp"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "missing", "longer"])
def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path: Path, name: str, damage: str) -> None:
    tensors = make_tensors()
    older = save(tmp_path, 1, tensors, num_workers=2)
    newer = save(tmp_path, 2, tensors, num_workers=2)
    path = newer.folder / name
    size = path.stat().st_size
    if damage == "flipped":
        flip_bit(path, size // 2, bit=3)
    elif damage == "truncated":
        truncate(path, 1)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        path.unlink()
    search = find_newest_checkpoint(tmp_path)
    assert search.newest == older
    assert [skipped.folder for skipped in search.skipped] == [newer.folder]
    assert name in search.skipped[0].reason
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(newer.folder)


def test_a_flip_of_any_bit_of_any_file_is_found(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(4.0)}
    ref = save(tmp_path, 1, tensors, num_workers=1)
    rng = random.Random(0)
    for name in _files_of(ref.folder):
        path = ref.folder / name
        size = path.stat().st_size
        for position in range(size) if name == "manifest.json" else rng.sample(range(size), 60):
            flip_bit(path, position, bit := rng.randrange(8))
            with pytest.raises(CheckpointError):
                verify_checkpoint(ref.folder)
            flip_bit(path, position, bit)
    assert verify_checkpoint(ref.folder) == ref


def test_elements_are_checked_before_they_are_used(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(1000.0)}
    folder = shard_folder(tmp_path, 1)
    items = write_shard(folder, "worker-0", [Piece("model.w", (1000,), 0, tensors["model.w"])])
    ref = commit_checkpoint(folder, items, make_meta(tensors, 1))
    flip_bit(ref.folder / "worker-0.distcp", 1000, bit=6)
    silently: dict[str, Any] = {"model.w": torch.zeros(1000)}
    dcp_load(silently, ref.folder)
    assert not torch.equal(silently["model.w"], tensors["model.w"])  # why there is a manifest at all
    with pytest.raises(CheckpointError, match=r"worker-0.distcp is damaged: bytes .* a part of 'model.w'"):
        load_whole(ref.folder, tensors)


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    manifest = format.Manifest(format=99, shards={}, files={}, items=())
    with pytest.raises(CheckpointError, match="has format 99"):
        format.decode_manifest(format.encode_manifest(manifest))


def test_a_description_of_another_form_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"meta.json is damaged: .*step"):
        format.decode_meta(b'{"losses": []}')


def test_a_description_of_before_there_was_a_format_is_refused(tmp_path: Path) -> None:
    old = {"model": {"family": "llama", "width": 48, "hidden_size": 96}, "run": {"seed": 1}}
    ref = save(tmp_path, 3, make_tensors(), config=old)
    with pytest.raises(CheckpointError, match="meta.json: format: missing"):
        read_meta(ref.folder)


# Folders


def test_half_written_checkpoints_are_skipped_and_removed_on_start(tmp_path: Path) -> None:
    older = save(tmp_path, 1, make_tensors())
    half = shard_folder(tmp_path, 2)
    write_shard(half, "worker-0", cut(make_tensors(), 1, 0)[0])
    search = find_newest_checkpoint(tmp_path)
    assert search.newest == older
    assert [(skipped.folder, "never committed" in skipped.reason) for skipped in search.skipped] == [(half, True)]
    assert remove_stale(tmp_path) == [half]
    assert not half.exists() and find_newest_checkpoint(tmp_path).newest == older
    assert remove_stale(tmp_path) == []


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert find_newest_checkpoint(tmp_path).newest is None
    assert remove_stale(tmp_path / "nowhere") == []
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert find_newest_checkpoint(tmp_path).skipped == ()


def test_checkpoints_that_cannot_be_listed_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(CheckpointError, match="cannot list the checkpoints"):
        find_newest_checkpoint(tmp_path)


def test_all_writers_get_the_same_folder(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path, 4)
    write_shard(folder, "worker-0", [])
    assert shard_folder(tmp_path, 4) == folder and _files_of(folder) == ["worker-0.distcp"]
    discard_checkpoint(folder)
    discard_checkpoint(folder)
    assert not folder.exists()


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    damaged = save(tmp_path, 1, make_tensors(0))
    flip_bit(damaged.folder / "meta.json", 5)
    again = save(tmp_path, 1, make_tensors(1))
    assert find_newest_checkpoint(tmp_path).newest == again
    assert_same(load_whole(again.folder, make_tensors(1)), make_tensors(1))
    assert _files_of(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_whole_checkpoint_that_is_not_the_runs_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(4.0)}
    older, newer = (save(tmp_path, step, tensors, num_workers=1) for step in (3, 4))
    search = find_newest_checkpoint(tmp_path, lambda meta: "run.seed is 5 there" if meta.step == 4 else "")
    assert search.newest == older
    assert search.skipped == (SkippedCheckpoint(newer.folder, "run.seed is 5 there"),)
    renamed = newer.folder.rename(tmp_path / "checkpoints" / "step-00000009")
    search = find_newest_checkpoint(tmp_path)
    assert search.newest == older
    assert search.skipped == (SkippedCheckpoint(renamed, "it is one of step 4, under another name"),)


def test_prune_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(4.0)}
    refs = [save(tmp_path, step, tensors, num_workers=1) for step in (1, 2, 3, 4, 100_000_000)]
    assert newest_committed_step(tmp_path / "empty") is None
    assert newest_committed_step(tmp_path) == 100_000_000
    truncate(refs[4].folder / "worker-0.distcp", 1)
    truncate(refs[3].folder / "worker-0.distcp", 1)
    pending = shard_folder(tmp_path, 5)
    assert newest_committed_step(tmp_path) == 3
    refs[4] = save(tmp_path, 100_000_000, tensors, num_workers=1)
    (tmp_path / "checkpoints" / "step-00000002.old.tmp").mkdir()  # a removal that was cut short
    assert prune(tmp_path, 2) == [refs[1].folder, refs[0].folder]
    left = _files_of(tmp_path / "checkpoints")
    assert left == ["step-00000003", "step-00000004", "step-00000005.tmp", "step-100000000"]
    assert pending.exists() and find_newest_checkpoint(tmp_path).newest == refs[4]
    assert prune(tmp_path, 2) == []


def test_a_folder_that_cannot_be_looked_at_is_no_error_of_the_coordinators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a network that is gone: exists() raises what is not about a missing file."""

    def fail(self: Path) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "exists", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 2, make_tensors())
        save(tmp_path, 2, make_tensors())


def test_damaged_checkpoints_are_put_aside(tmp_path: Path) -> None:
    refs = [save(tmp_path, step, {"model.w": torch.arange(4.0)}, num_workers=1) for step in (1, 2, 3)]
    for _again in range(2):
        flip_bit(refs[1].folder / "worker-0.distcp", 0)
        flip_bit(refs[2].folder / "worker-0.distcp", 0)
        pending = shard_folder(tmp_path, 4)
        put_aside(find_newest_checkpoint(tmp_path))
        names = ["step-00000001", "step-00000002.damaged", "step-00000003.damaged", "step-00000004.tmp"]
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
        pending.rmdir()
        refs[1:] = [save(tmp_path, step, {"model.w": torch.arange(4.0)}, num_workers=1) for step in (2, 3)]
    assert prune(tmp_path, 1) == [refs[1].folder, refs[0].folder]


def test_prune_must_keep_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, 0)


def test_prune_says_what_it_cannot_remove(tmp_path: Path) -> None:
    refs = [save(tmp_path, step, {"model.w": torch.arange(4.0)}) for step in (1, 2)]
    (tmp_path / "checkpoints" / "step-00000001.old.tmp").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot remove the old checkpoint"):
        prune(tmp_path, 1)
    assert find_newest_checkpoint(tmp_path).newest == refs[1]


# A disk that does not take it


def test_every_worker_needs_a_shard_of_its_own(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path, 1)
    write_shard(folder, "worker-0", [])
    with pytest.raises(CheckpointError, match="exists already"):
        write_shard(folder, "worker-0", [])


def test_folders_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write .*: Not a directory; the checkpoint is given up"):
        shard_folder(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="cannot write .*worker-0.distcp: No such file or directory"):
        write_shard(tmp_path / "gone", "worker-0", [])


def test_a_commit_that_cannot_be_written_leaves_the_previous_one(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(4.0)}
    older = save(tmp_path, 1, tensors)
    folder = shard_folder(tmp_path, 2)
    items = write_shard(folder, "worker-0", [Piece("model.w", (4,), 0, tensors["model.w"])])
    (folder / ".metadata").mkdir()
    with pytest.raises(CheckpointError, match="cannot write .*Is a directory"):
        commit_checkpoint(folder, items, make_meta(tensors, 2))
    assert find_newest_checkpoint(tmp_path).newest == older


def _write_with_little_space(folder: Path, out: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        write_shard(folder, "worker-0", [Piece("model.w", (10_000,), 0, torch.zeros(10_000))])
        out.send("written")
    except CheckpointError as error:
        out.send(str(error))


def test_a_file_that_grows_too_large_is_an_error(tmp_path: Path) -> None:
    folder = shard_folder(tmp_path, 1)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_write_with_little_space, args=(folder, send))
    process.start()
    send.close()
    assert receive.poll(60)
    assert "cannot write" in (message := receive.recv()) and "free some space" in message
    process.join(60)
    receive.close()
    assert find_newest_checkpoint(tmp_path).newest is None


def test_checkpoints_that_may_hold_what_was_found_wrong_do_not_count(tmp_path: Path) -> None:
    refs = [save(tmp_path, step, {"model.w": torch.arange(4.0)}, num_workers=1) for step in (1, 2, 3)]
    search = find_newest_checkpoint(tmp_path, newest_step=2)
    assert search.newest == refs[1]
    assert [skipped.folder for skipped in search.skipped] == [refs[2].folder]
    put_aside(search)
    assert find_newest_checkpoint(tmp_path).newest == refs[1]
    assert find_newest_checkpoint(tmp_path, newest_step=0).newest is None
