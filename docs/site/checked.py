"""Every link of the built pages leads to a page, a picture or a heading that is there; otherwise the build fails."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.errors import SphinxError


class Page(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.loaded: set[str] = set()  # without a click
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Called for each element."""
        named = {key: value for key, value in attributes if value}
        self.places |= {named[key] for key in ("id", "name") if key in named}
        for link in (named[key] for key in ("href", "src") if key in named):
            self.links.add(link)
            if tag != "a":
                self.loaded.add(link)


def broken(folder: Path) -> Iterator[str]:
    """What is wrong with the links and tables in a folder of pages, a line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        at = path.relative_to(folder)
        if "{csv-table}" in path.read_text(encoding="utf-8"):
            yield f"{at} shows the directive of a table in place of the table"
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{at} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{at} links to {link}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{at} links to {link}, a page without such a heading"


def _check(app: Sphinx, problem: Exception | None) -> None:
    if problem is None and app.builder.format == "html" and (found := list(broken(Path(app.outdir)))):
        raise SphinxError("\n".join(found))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", _check, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
