"""The site's navigation is the list of pages in docs/README.md, which people read on a code host.

A page below another, in an indented list, is a chapter of it. Links that leave docs/ become the path in the sources,
but for CONTRIBUTING.md, which is a page of the site; a link that shows a page's file shows its title here. What stands
between `<!-- sources only -->` and `<!-- end of sources only -->` is for readers of the sources, and is left out.
"""

import posixpath
import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
ITEM = re.compile(r"^( *)- \[([^\]]+)\]\(([^)#\s]+)\.md\)")
OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
SOURCES_ONLY = re.compile(r"\s*<!-- sources only -->.*?<!-- end of sources only -->", re.DOTALL)
CONTRIBUTING = "contributing"
FILE = re.compile(r"[a-z/.-]+\.md")


class Listed(NamedTuple):
    """A page in the list: below which heading, below which other page, its own name without .md, and its title."""

    section: str
    above: str
    page: str
    title: str


def listed(text: str) -> list[Listed]:
    """The pages that a list of pages has, in its order."""
    found: list[Listed] = []
    section, top = "", ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        elif item := ITEM.match(line):
            top = top if item[1] else item[3]
            found.append(Listed(section, top if item[1] else "", item[3], item[2].replace("`", "")))
    return found


def toctree(pages: list[Listed], caption: str = "") -> str:
    """A table of contents that only the navigation shows."""
    named = f":caption: {caption}\n" if caption else ""
    return "\n".join(
        ["", "```{toctree}", f":hidden:\n{named}", *(f"{one.title} </{one.page}>" for one in pages), "```", ""]
    )


def chapters(name: str, pages: list[Listed]) -> str:
    """What is added to a page for the navigation."""
    if name == "README":
        sections = dict.fromkeys(one.section for one in pages if not one.above)
        return "".join(toctree([p for p in pages if p.section == s and not p.above], s) for s in sections)
    below = [one for one in pages if one.above == name]
    return toctree(below) if below else ""


def inside(name: str, text: str) -> str:
    """A page's text with no link that leaves docs/, and without what is for readers of the sources."""

    def link(match: re.Match[str]) -> str:
        label, path, anchor = match[1], match[2], match[3] or ""
        target = ((DOCS / name).parent / path).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        to_docs = "../" * name.count("/")
        if target.name == "CONTRIBUTING.md":
            return f"[{label}]({to_docs}{CONTRIBUTING}.md{anchor})"
        return f"{label} (`{target.relative_to(DOCS.parent)}` in the sources)"

    return OUTSIDE.sub(link, SOURCES_ONLY.sub("", text))


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    text = source[0]
    if name == CONTRIBUTING:
        text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    pages = listed((DOCS / "README.md").read_text(encoding="utf-8"))
    source[0] = inside(name, text) + chapters(name, pages)


def _mark(app: Sphinx, page: nodes.document) -> None:
    """Name blocks of commands alone, which may be wrapped; what a program prints may not."""
    for block in page.findall(nodes.literal_block):
        lines = [line for line in block.astext().replace("\\\n", "").splitlines() if line]
        prompts = [line.startswith("$ ") for line in lines]
        bare = block.get("language") == "console" or all(line.startswith("kinfed ") for line in lines)
        if all(prompts) or (bare and not any(prompts)):
            block["classes"].append("commands")


def titled(name: str, page: nodes.document, titles: dict[str, str]) -> None:
    """Show titles of pages in place of their files, which only readers of the sources see."""
    for link in page.findall(nodes.reference):
        target, _, _ = link.get("refuri", "").partition("#")
        title = titles.get(posixpath.normpath(posixpath.join(posixpath.dirname(name), target.removesuffix(".html"))))
        if title and FILE.fullmatch(link.astext()):
            link.children = [nodes.inline(text=title)]


def _resolved(app: Sphinx, page: nodes.document, name: str) -> None:
    titles = {one.page: one.title for one in listed((DOCS / "README.md").read_text(encoding="utf-8"))}
    if app.builder.format == "html":
        titled(name, page, titles)


def _home(app: Sphinx, problem: Exception | None) -> None:
    if problem is None and app.builder.format == "html":
        page = '<!doctype html><meta charset="utf-8"><title>kinfed</title>'
        page += '<meta http-equiv="refresh" content="0; url=README.html"><a href="README.html">kinfed</a>\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("doctree-read", _mark)
    app.connect("doctree-resolved", _resolved)
    app.connect("build-finished", _home)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
