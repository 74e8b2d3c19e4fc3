"""Tables of the pages that are written by scripts beside them."""

from __future__ import annotations


def replaced(page: str, name: str, table: str) -> str:
    """A page with what stands between `<!-- name -->` and `<!-- end of name -->` replaced by a table."""
    before, rest = page.split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- end of {name} -->\n")
    return f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->\n{after}"
