"""The rendezvous by which torchrun leaves each node alone."""

from types import SimpleNamespace

from torch.distributed.elastic.rendezvous import RendezvousHandler

from elaswave.api.torchrun import handler


def test_a_node_is_a_world_of_its_own_in_which_nobody_waits() -> None:
    rendezvous = handler()(SimpleNamespace(run_id="demo"))  # type: ignore[arg-type]
    assert isinstance(rendezvous, RendezvousHandler)
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("key", "value")
    assert info.store.get("key") == b"value"
    assert (rendezvous.get_backend(), rendezvous.get_run_id(), rendezvous.num_nodes_waiting()) == (
        "elaswave",
        "demo",
        0,
    )
    assert not rendezvous.is_closed()
    rendezvous.set_closed()
    assert rendezvous.is_closed() and rendezvous.shutdown()
