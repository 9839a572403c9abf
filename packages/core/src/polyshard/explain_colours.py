"""Which colour a tensor has in the picture of `explain`, on which rank. Pure.

Ten hues that the colour-blind can tell apart, each in a dark and a light tone; then they repeat.
Neighbouring shards of one tensor differ in lightness.
"""

from __future__ import annotations

#: From the palettes of Okabe and Ito, and of Tol; neighbours in the list differ most.
_HUES = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (51, 34, 136),
    (240, 228, 66),
    (136, 34, 85),
    (153, 153, 51),
)
_TONES = 2
#: Boxes of several tensors.
MERGED = "#6e7781"

Colour = tuple[int, int, int]


class Colours:
    """A colour for every label, the first that ask for one most distinct.

    A label is the name of a tensor inside its unit: those of the same name have the same colour.
    """

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    @property
    def labels(self) -> list[str]:
        """Those that have a colour, in the order in which they asked."""
        return list(self._place)

    @property
    def repeat(self) -> bool:
        """Whether some have to share a colour."""
        return len(self._place) > len(_HUES) * _TONES

    def fill(self, label: str, shard: int) -> str:
        """The colour of a tensor's part in a shard."""
        return "#" + "".join(f"{channel:02x}" for channel in self._colour(label, shard))

    def ink(self, label: str, shard: int) -> str:
        """Black or white, whichever reads better on it."""
        # Contrast is (L + 0.05) / (l + 0.05), as WCAG defines it; black and white tie at 0.18.
        return "white" if _luminance(self._colour(label, shard)) < 0.18 else "black"

    def _colour(self, label: str, shard: int) -> Colour:
        tone, place = divmod(self._place.setdefault(label, len(self._place)), len(_HUES))
        colour = _HUES[place]
        if tone % _TONES:
            colour = _mixed(colour, 0, 0.4)
        return _mixed(colour, 255, 0.35) if shard % 2 else colour


def _mixed(colour: Colour, channel: int, part: float) -> Colour:
    red, green, blue = (round(each + (channel - each) * part) for each in colour)
    return red, green, blue


def _luminance(colour: Colour) -> float:
    """The relative luminance of an sRGB colour, from 0 to 1."""
    red, green, blue = (
        each / 255 / 12.92 if each <= 10 else ((each / 255 + 0.055) / 1.055) ** 2.4
        for each in colour
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
