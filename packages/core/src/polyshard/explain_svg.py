"""SVG for the picture of `explain`: text, boxes with tips, lines. Knows not what they mean."""

from __future__ import annotations

from html import escape

INK, FAINT, LINE = "#24292f", "#57606a", "#d0d7de"
#: A fill of hatching.
HATCHED = "url(#hatched)"


class Drawing:
    """An SVG document in the making, from the top down."""

    def __init__(self) -> None:
        self.y = 0.0
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int,
        bold: bool = False,
        anchor: str = "start",
        colour: str = INK,
        halo: str = "none",
    ) -> None:
        """A line of text that stands on ``y``, readable over lines if it has a ``halo``."""
        weight = ' font-weight="bold"' if bold else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        if halo != "none":
            place += f' stroke="{halo}" stroke-width="3" paint-order="stroke"'
        self._parts.append(
            f'<text x="{_number(x)}" y="{_number(y)}" font-size="{size}"{weight}{place} '
            f'fill="{colour}">{_clean(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        title: str,
        *,
        stroke: str = "none",
    ) -> None:
        """A rectangle with a tip."""
        edge = f' stroke="{stroke}" stroke-width="0.75"' if stroke != "none" else ""
        self._parts.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}" fill="{fill}"{edge}><title>{_clean(title)}</title></rect>'
        )

    def tick(self, x: float, y: float, height: float) -> None:
        """A vertical line downwards."""
        self._line(x, y, x, y + height, INK, 1.5)

    def rule(self, x: float, y: float, width: float) -> None:
        """A faint line to the right."""
        self._line(x, y, x + width, y, LINE, 1)

    def _line(
        self, x: float, y: float, to_x: float, to_y: float, colour: str, width: float
    ) -> None:
        self._parts.append(
            f'<line x1="{_number(x)}" y1="{_number(y)}" x2="{_number(to_x)}" y2="{_number(to_y)}" '
            f'stroke="{colour}" stroke-width="{width}"/>'
        )

    def append(self, other: Drawing) -> None:
        """Put another drawing below this one."""
        self._parts += [f'<g transform="translate(0 {_number(self.y)})">', *other._parts, "</g>"]
        self.y += other.y

    def document(self, title: str, *, width: int, margin: int) -> str:
        """All of it, on paper of its own, so that it reads on dark pages too."""
        height = _number(self.y + margin)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{_clean(title)}</title>",
            '<defs><pattern id="hatched" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="5" height="5" fill="#f6f8fa"/>'
            '<rect width="1.5" height="5" fill="#8c959f"/></pattern></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="white"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _clean(words: str) -> str:
    """Escaped, without what XML does not allow."""
    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in words))
