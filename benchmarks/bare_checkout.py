"""Time `make demo` on a fresh clone and count lines per method: python benchmarks/bare_checkout.py

Clones this repository into a temporary folder, so only what is committed counts. Writes docs/results/bare-checkout.md.
"""

import ast
import io
import platform
import subprocess
import tempfile
import time
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "bare-checkout.md"


def code_lines(path):
    """Lines that hold code: no blank lines, comments or docstrings."""
    text = path.read_text()
    drop = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in drop for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def main():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ROOT, f"{folder}/kinfed"], check=True)
        begun = time.perf_counter()
        subprocess.run(["make", ".venv/installed"], cwd=f"{folder}/kinfed", check=True)
        installed = time.perf_counter()
        demo = subprocess.run(["make", "demo"], cwd=f"{folder}/kinfed", check=True, stdout=subprocess.PIPE, text=True)
        ended = time.perf_counter()
        files = sorted(Path(folder, "kinfed/src/kinfed/methods").glob("[!_]*.py"))
        lines = [f"| {path.stem} | {code_lines(path)} |" for path in files]
    table = demo.stdout[demo.stdout.index("Test scores") :].partition("\n\n")[0]
    PAGE.write_text(
        "\n".join(
            [
                "# From a bare checkout",
                "",
                "Written by `python benchmarks/bare_checkout.py`: a fresh clone, then `make demo`, on",
                f"{platform.processor() or platform.machine()}, Python {platform.python_version()}.",
                "",
                f"Creating `.venv` and installing (packages downloaded): {installed - begun:.0f} s. Nine methods on",
                f"rotated digits, imports, pictures and comparison included: {ended - installed:.0f} s. The end:",
                "",
                "```",
                *[line.rstrip() for line in table.splitlines()],
                "```",
                "",
                "Lines of code per method file, without blank lines, comments and docstrings:",
                "",
                "| method | lines |",
                "| --- | --- |",
                *lines,
                "",
            ]
        )
    )
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
