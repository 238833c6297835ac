"""Hooks of mkdocs: pages of the project that stand outside of ``docs`` are pages of the site, and links lead to them.

On the site ``docs`` is the root. README.md becomes its first page, the others keep their paths below the project's.
Links are written for a reader of the repository; here they are turned to where the page is on the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "benchmarks/README.md": "benchmarks/README.md",
    "examples/README.md": "examples/README.md",
}
"""Path in the project -> path on the site."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that stand elsewhere, and the examples' files, to which pages link."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and path.suffix in (".py", ".toml"):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the project into links between pages."""
    places = {place: path for path, place in PAGES.items()}
    here = page.file.src_uri
    path = places.get(here, f"docs/{here}")

    def turned(found: re.Match[str]) -> str:
        before, target, anchor, after = found.groups()
        if re.match(r"[a-z]+:", target):
            return found[0]
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        place = PAGES.get(aim, aim.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return found[0]  # mkdocs warns of it
        return f"{before}{posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor or ''}{after}"

    return _LINK.sub(turned, markdown)
