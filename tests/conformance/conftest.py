"""Fixtures of the conformance suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.worlds import KINDS, STREAM_KINDS, World


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world of each kind of transport."""
    yield from _world(request.param, tmp_path)


@pytest.fixture(params=(*STREAM_KINDS, "tls"))
def socket_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world of each kind of socket, inside TLS too."""
    yield from _world(request.param, tmp_path)


@pytest.fixture
def tls_world(tmp_path: Path) -> Iterator[World]:
    """A world whose links are inside TLS."""
    yield from _world("tls", tmp_path)


@pytest.fixture(params=STREAM_KINDS)
def stream_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world of each kind of socket."""
    yield from _world(request.param, tmp_path)


def _world(kind: str, tmp_path: Path) -> Iterator[World]:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    world = World(kind, folder)
    yield world
    world.close()
