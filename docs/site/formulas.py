"""Formulas as MathML, which browsers draw by themselves: the pages load nothing from any network."""

import html
import re
import xml.etree.ElementTree as xml
from itertools import zip_longest
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

SPACE = "http://www.w3.org/1998/Math/MathML"
ACCENTS = "\u02c9\u02c6~_\u203e"  # as the converter writes bars, hats and tildes; the last is a bar that stretches
OTHER_NAMES = {  # what the converter calls them
    r"\\dots\b": r"\\ldots",
    r"\\(big|Big)(?![a-zA-Z])": r"\\\1l",
    r"\\([td]?frac)(\d)(\d)": r"\\\1{\2}{\3}",  # it would take both for one number
    r"\\operatorname\*\{(\w+)\}": r"\\mathrm{\1}",
}
APPLIED = "\u2061"  # between a function's name and what it is taken of


def mathml(formula: str, as_block: bool) -> str:
    """A formula in TeX as MathML."""
    for name, other in OTHER_NAMES.items():
        formula = re.sub(name, other, formula)
    xml.register_namespace("", SPACE)
    made = tex2mathml(formula, as_block=as_block)
    tree = xml.fromstring(re.sub(r"&(?!lt;|gt;|amp;)\w+;", lambda entity: html.unescape(entity[0]), made))
    _mend(tree)
    return xml.tostring(tree, encoding="unicode")


def _mend(parent: xml.Element) -> None:
    """Put an index beside a letter with an accent, where the converter puts it below; a long bar stretches.

    Braces and norms are as high as a letter, and a function's name stands apart from what it is taken of.
    """
    children = list(parent)
    for at, (one, following) in enumerate(zip_longest(children, children[1:])):
        _mend(one)
        if one.tag == f"{{{SPACE}}}mo" and one.text in ("{", "}", "\u2016"):
            one.set("stretchy", "false")
        if one.text == APPLIED and following is not None and following.tag != f"{{{SPACE}}}mo":
            one.set("rspace", "0.17em")
        last = one[-1] if len(one) else None
        if last is not None and last.text and last.text in ACCENTS and one.tag.startswith(f"{{{SPACE}}}m"):
            if last.text == "_":
                last.text = ACCENTS[-1]
                last.set("stretchy", "true")
            if one.tag.endswith("}munderover"):
                base, index, accent = one
                letter = xml.Element(f"{{{SPACE}}}mover", accent="true")
                letter.extend([base, accent])
                beside = xml.Element(f"{{{SPACE}}}msub")
                beside.extend([letter, index])
                beside.tail = one.tail
                parent[at] = beside


def _inline(translator: Any, node: nodes.Element) -> None:
    translator.body.append(mathml(node.astext(), False))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.Element) -> None:
    translator.body.append(f'<div class="formula">{mathml(node.astext(), True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
