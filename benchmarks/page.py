"""Pages of which programs write parts, between marks, and people the rest."""

import re

PART = re.compile(r"^<!-- ([^>]+) -->$.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)  # as `put` writes them


def put(page, part, text, title):
    """Write one part of a page, and leave the others as they are; a new page begins with its title."""
    whole = page.read_text() if page.exists() else f"# {title}\n"
    text = f"<!-- {part} -->\n{text.strip()}\n<!-- end of {part} -->\n"
    old = re.compile(rf"<!-- {re.escape(part)} -->.*<!-- end of {re.escape(part)} -->\n", re.DOTALL)
    page.write_text(old.sub(lambda _: text, whole) if old.search(whole) else f"{whole}\n{text}")
