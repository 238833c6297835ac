"""What torch compiles is kept, and loaded from, where nobody else can put code of theirs."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.security.attacker import NOBODY, needs_root

from elaswave.api.environment import environment_to_compute, private_folder, use_private_cache

pytestmark = pytest.mark.security

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's home that the tests' own folders do not stand above."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(folder))
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def cache() -> Path:
    return Path(environment_to_compute()[VARIABLE])


def test_the_folder_is_the_users_and_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache()
    assert folder == home / ".cache" / "elaswave" / "compiled" == cache()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    use_private_cache()
    assert os.environ[VARIABLE] == str(folder)
    monkeypatch.setenv(VARIABLE, "/mine")
    use_private_cache()
    assert environment_to_compute()[VARIABLE] == os.environ[VARIABLE] == "/mine"


@pytest.mark.parametrize("place", ["home", ".cache", "elaswave", "compiled"])
def test_a_folder_that_others_can_write_to_is_not_used(home: Path, place: str) -> None:
    folder = cache()
    spoilt = {"home": home, ".cache": folder.parents[1], "elaswave": folder.parent, "compiled": folder}[place]
    spoilt.chmod(0o777)
    other = cache()
    assert home not in other.parents and stat.S_IMODE(other.stat().st_mode) == 0o700
    spoilt.chmod(0o700)
    assert cache() == folder


@needs_root
@pytest.mark.parametrize("place", ["elaswave", "compiled"])
def test_a_folder_of_another_user_is_not_used(home: Path, place: str) -> None:
    folder = cache()
    os.chown(folder if place == "compiled" else folder.parent, NOBODY, NOBODY)
    assert home not in cache().parents


@needs_root
def test_a_link_into_a_folder_of_another_user_is_not_followed(home: Path) -> None:
    theirs = home / "theirs"
    (theirs / "compiled").mkdir(parents=True)
    os.chown(theirs, NOBODY, NOBODY)
    (home / ".cache").mkdir()
    (home / ".cache" / "elaswave").symlink_to(theirs)
    assert home not in cache().parents


def test_without_a_home_the_folder_is_new_and_goes_with_its_process(home: Path) -> None:
    code = f"""
import os
from elaswave.api.environment import environment_to_compute
folder = environment_to_compute()["{VARIABLE}"]
if os.fork() == 0:
    raise SystemExit
os.wait()
assert os.path.isdir(folder)
print(folder)
"""
    (home / ".cache").touch()
    environment = {**os.environ, "TMPDIR": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == home and not Path(done.stdout.strip()).exists()


def test_agents_of_a_user_without_a_home_have_one_folder_for_locks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_folder("locks", stays=True) == home / ".cache" / "elaswave" / "locks"
    home.chmod(0o777)
    shared = home / "tmp"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    for safe in (False, True):
        home.chmod(0o1777 if safe else 0o777)
        shared.chmod(0o1777 if safe else 0o777)
        (home / ".cache").chmod(0o777)
        found = [private_folder("locks", stays=True) for _ in range(2)]
        assert (found == [shared / f"elaswave-locks-{os.geteuid()}"] * 2) is safe, found
        assert all(stat.S_IMODE(each.stat().st_mode) == 0o700 for each in found)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link", "open"])
def test_a_folder_for_locks_that_others_have_made_is_not_used(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    home.chmod(0o1777)
    (home / ".cache").touch()
    guessed = home / f"elaswave-locks-{os.geteuid()}"
    if kind == "link":
        (home / "elsewhere").mkdir(mode=0o700)
        guessed.symlink_to(home / "elsewhere")
    else:
        guessed.mkdir(mode=0o700)
        os.chmod(guessed, 0o777) if kind == "open" else os.chown(guessed, NOBODY, NOBODY)
    assert private_folder("locks", stays=True) != guessed
