"""A self-contained HTML page: dark text on light, pictures inside the file, nothing fetched, no script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hybridattn.core.errors import InputError

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1a1a1a; background: #fff; margin: 0; }
main { max-width: 1100px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h1.part { margin-top: 3rem; padding-top: 1.2rem; border-top: 3px solid #1a1a1a; }
p.answer { font-size: 1.1rem; background: #eef4fb; border-left: 4px solid #0072b2; padding: .7rem 1rem; }
figure { margin: 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: .9rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .7rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
table.text th, table.text td { text-align: left; overflow-wrap: break-word; }
pre { background: #f5f5f5; padding: .7rem 1rem; overflow-x: auto; font-size: .9rem; }
.bad { color: #9b1c1c; }
"""


class Page:
    """Collects the parts of a page. All text is escaped."""

    def __init__(self, title: str) -> None:
        self._title = escape(title)
        self._parts: list[str] = [f"<h1>{self._title}</h1>"]

    def part(self, title: str) -> None:
        """A further part of the page, under a heading as large as the first one."""
        self._parts.append(f'<h1 class="part">{escape(title)}</h1>')

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; ``kind`` is empty, ``answer``, ``note`` or ``bad``."""
        self._parts.append(f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def code(self, text: str, summary: str = "") -> None:
        """Preformatted text; folded away under ``summary`` where given."""
        block = f"<pre>{escape(text)}</pre>"
        self._parts.append(f"<details><summary>{escape(summary)}</summary>{block}</details>" if summary else block)

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", text: bool = False
    ) -> None:
        """A table of strings; ``text`` aligns all columns left."""
        if any(len(row) != len(header) for row in rows):
            raise InputError(f"table '{caption}' has rows that do not have {len(header)} cells")
        head = "".join(f"<th>{escape(h)}</th>" for h in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        title = f"<caption>{escape(caption)}</caption>" if caption else ""
        kind = ' class="text"' if text else ""
        table = f"<table{kind}>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._parts.append(f'<div class="wide">{table}</div>')

    def picture(self, path: Path, caption: str) -> None:
        """A PNG or SVG file, put into the page."""
        kinds = {".png": "image/png", ".svg": "image/svg+xml"}
        if path.suffix not in kinds:
            raise InputError(f"picture {path} is neither PNG nor SVG")
        data = base64.b64encode(path.read_bytes()).decode()
        image = f'<img alt="{escape(caption)}" src="data:{kinds[path.suffix]};base64,{data}">'
        self._parts.append(f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>")

    def html(self) -> str:
        head = f'<meta charset="utf-8"><title>{self._title}</title><style>{STYLE}</style>'
        head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
        body = "\n".join(self._parts)
        return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{body}\n</main></body></html>\n'
