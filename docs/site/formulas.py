"""Formulas as MathML, which browsers draw by themselves: the pages load nothing from any network."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

OTHER_NAMES = {r"\\dots\b": r"\\ldots", r"\\(big|Big)(?![a-zA-Z])": r"\\\1l"}  # what the converter calls them


def mathml(formula: str, as_block: bool) -> str:
    """A formula in TeX as MathML."""
    for name, other in OTHER_NAMES.items():
        formula = re.sub(name, other, formula)
    return tex2mathml(formula, as_block=as_block)  # type: ignore[no-any-return]


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
