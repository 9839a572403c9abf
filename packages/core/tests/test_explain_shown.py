"""How explain draws and words what it found: exact geometry, bounded size, short names."""

from __future__ import annotations

import re
from math import prod
from xml.etree import ElementTree

import pytest
from explained_units import bars, explained_unit, texts, ticks
from hypothesis import given
from hypothesis import strategies as st

from polyshard.explain_colours import MERGED, Colours
from polyshard.explain_picture import BAR_LEFT, BAR_RIGHT, MOST_SEGMENTS, picture
from polyshard.explain_svg import HATCHED, Drawing
from polyshard.explain_table import table
from polyshard.explain_words import (
    bytes_in_words,
    joint_name,
    name_runs,
    ranks_in_words,
    shortened,
)

SHAPES = st.lists(
    st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=12
)


def elements(title: str) -> int:
    """How many elements a box says it has."""
    (number,) = re.findall(r"^([\d,]+) elements?, ", title, re.MULTILINE)
    return int(number.replace(",", ""))


class TestPicture:
    @given(shapes=SHAPES, shards=st.integers(1, 40))
    def test_boxes_tile_their_bar(self, shapes: list[tuple[int, ...]], shards: int) -> None:
        """Boxes adjoin from end to end, each as long as its elements are many."""
        unit = explained_unit(shapes, shards)
        segments = [segment for segment in unit.groups[0].segments if segment.numel]
        drawn = bars(picture("Model", [unit]))
        assert len(drawn) == len(segments)
        for boxes, segment in zip(drawn, segments, strict=True):
            assert sum(elements(box.title) for box in boxes) == segment.numel
            scale = (BAR_RIGHT - BAR_LEFT) / segment.numel
            ends = [BAR_LEFT, *(box.x + box.width for box in boxes)]
            for box, end in zip(boxes, ends, strict=False):
                assert box.x == pytest.approx(end, abs=0.02)
                assert box.width == pytest.approx(elements(box.title) * scale, abs=0.01)

    def test_rows_and_ranks(self) -> None:
        """A tensor cut by shards has a box for each, with its rows and rank; so has padding."""
        (boxes,) = bars(picture("Model", [explained_unit([(5, 2)], 2)]))
        assert [box.title for box in boxes] == [
            "p0\nrows 0:3 of 5x2\nrank 0\n6 elements, 24 bytes",
            "p0\nrows 3:5 of 5x2\nrank 1\n4 elements, 16 bytes",
            "padding\nrank 1\n2 elements, 8 bytes",
        ]
        assert boxes[0].fill != boxes[1].fill
        assert boxes[2].fill == HATCHED

    def test_shards_are_marked(self) -> None:
        """A line ends each shard but the last, and every rank is named."""
        svg = picture("Model", [explained_unit([(8, 3)], 4)])
        width = BAR_RIGHT - BAR_LEFT
        assert ticks(svg) == pytest.approx([BAR_LEFT + width * part / 4 for part in (1, 2, 3)])
        assert [text for text in texts(svg) if text.startswith("rank")] == [
            f"rank {rank}" for rank in range(4)
        ]

    def test_colours_by_name(self) -> None:
        """Tensors of one unit differ in colour; those of the same name in another have the same."""
        units = [
            explained_unit([(4, 3), (6, 2)], 1, name="left"),
            explained_unit([(4, 3), (6, 2), (9,)], 1, name="right", index=1),
        ]
        left, right = bars(picture("Model", units))
        fills = [
            {box.title.split("\n")[0].split(".")[1]: box.fill for box in boxes}
            for boxes in (left, right)
        ]
        assert len(set(fills[1].values())) == 3
        assert fills[0].items() <= fills[1].items()

    def test_alike_units_are_drawn_once(self) -> None:
        """Eighty layers that are alike take one bar, which says so."""
        units = [explained_unit([(4, 3)], 2, name=f"h.{i}", index=i) for i in range(80)]
        svg = picture("Model", units)
        (boxes,) = bars(svg)
        assert "h.{0..79}" in texts(svg)
        assert "Module, 80 units alike: zero3 over dp" in texts(svg)
        assert boxes[0].title.startswith("p0 of h.{0..79}\n")

    def test_most_bars(self) -> None:
        """Of very many units that differ, some are drawn, and how many are not is said."""
        units = [
            explained_unit([(4 + i, 3)], 2, name=f"h{i}", index=i) for i in range(MOST_SEGMENTS + 7)
        ]
        svg = picture("Model", units)
        assert len(bars(svg)) == MOST_SEGMENTS
        assert "7 further segments not drawn." in texts(svg)

    @pytest.mark.parametrize("shards", [8, 4096])
    def test_size_is_bounded(self, shards: int) -> None:
        """Ten times the tensors make no longer picture once boxes are too narrow to tell."""
        lengths = []
        for count in (4000, 40000):
            svg = picture("Model", [explained_unit([(8, 16)] * count, shards)])
            (boxes,) = bars(svg)
            assert MERGED in {box.fill for box in boxes}
            assert "several, too narrow to tell" in texts(svg)
            assert any(" more\n" in box.title for box in boxes)
            lengths.append(len(svg))
        assert lengths[1] < 1.2 * lengths[0] < 200_000

    def test_names_are_escaped(self) -> None:
        """Whatever a module is called, the document is well-formed and says it."""
        drawing = Drawing()
        drawing.text(0, 0, 'a<b>&"c\x00', size=10)
        root = ElementTree.fromstring(drawing.document("<title>", width=10, margin=1))
        assert [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")] == ['a<b>&"c?']

    def test_no_elements(self) -> None:
        """Units without elements leave a picture without bars."""
        assert bars(picture("Model", [explained_unit([(0, 3)], 2)])) == []


def luminance(colour: str) -> float:
    """Relative luminance of a colour, as WCAG defines it."""
    named = {"white": "#ffffff", "black": "#000000"}
    colour = named.get(colour, colour)
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(part * each for part, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


class TestColours:
    def test_text_is_readable(self) -> None:
        """Names in boxes have the contrast that WCAG asks of text, on every colour and tint."""
        colours = Colours()
        for label in map(str, range(20)):
            for shard in (0, 1):
                pair = [
                    luminance(each(label, shard)) + 0.05 for each in (colours.fill, colours.ink)
                ]
                assert max(pair) / min(pair) >= 4.5

    def test_twenty_are_distinct(self) -> None:
        """The first twenty labels have colours of their own; then it is said that they repeat."""
        colours = Colours()
        fills = [colours.fill(str(i), 0) for i in range(20)]
        assert len(set(fills)) == 20
        assert not colours.repeat
        assert colours.fill("20", 0) == fills[0]
        assert colours.repeat


class TestTable:
    def test_many_lines_are_left_out(self) -> None:
        """A table of thousands of tensors ends with how many are not in it."""
        text = table("Model", [explained_unit([(2, 3)] * 3000, 4)], [], [], [])
        assert text.splitlines()[-1] == "  ... and 2,940 more lines, left out here"
        assert len(text.splitlines()) < 120

    def test_the_total_is_never_left_out(self) -> None:
        """The sum of bytes is that of all units, also of those whose lines are left out."""
        units = [explained_unit([(4 + i, 256)], 1, name=f"h{i}", index=i) for i in range(70)]
        lines = table("Model", units, [], [], []).splitlines()
        total = 4 * sum(prod((4 + i, 256)) for i in range(70))
        assert f"all together  70              {bytes_in_words(total)}" in " ".join(lines)

    def test_few_shards(self) -> None:
        """Up to four shards a tensor's rows are listed by shard."""
        text = table("Model", [explained_unit([(7, 2), (2, 2)], 3)], [], [], [])
        rows = dict(re.findall(r"  (p\d)  .*  ([-\d:]+ \| [-\d:]+ \| [-\d:]+)$", text, re.M))
        assert rows == {"p0": "0:3 | 3:6 | 6:7", "p1": "- | - | 0:2"}

    def test_many_shards(self) -> None:
        """With more of them the run of shards that have rows is told, and how many each."""
        text = table("Model", [explained_unit([(20, 2), (1, 2)], 7)], [], [], [])
        assert re.search(r"p0  .*  up to 3 each on shards 0-6$", text, re.M)
        assert re.search(r"p1  .*  all on shard 6$", text, re.M)
        assert re.search(r"7/7/7  0 \| 1 \| 2 \| \.\.\. \| 6$", text, re.M)


class TestWords:
    @pytest.mark.parametrize(
        ("names", "runs"),
        [
            (["a.0", "a.1", "a.2"], ["a.{0..2}"]),
            (["a.2.b", "a.1.b", "", "a.1.b"], ["a.{2..1}.b", "(root)", "a.1.b"]),
            (["a.0", "a.2"], ["a.0", "a.2"]),
            (["a.0.0", "a.0.1", "a.1.1"], ["a.0.{0..1}", "a.1.1"]),
            (["a.1", "a.2", "a.1"], ["a.{1..2}", "a.1"]),
            (["a.9", "a.10"], ["a.{9..10}"]),
            (["a.1", "b.2"], ["a.1", "b.2"]),
            (["a", "a"], ["a", "a"]),
            ([], []),
        ],
    )
    def test_runs(self, names: list[str], runs: list[str]) -> None:
        """Names that count up or down by one, in one place, are one run."""
        assert name_runs(names) == runs

    @given(st.lists(st.sampled_from(["a.0", "a.1", "a.2", "b.1.0", "b.1.1", "b.0.1", ""])))
    def test_runs_say_the_same(self, names: list[str]) -> None:
        """Written out again, runs are the names they were made of."""
        written = []
        for run in name_runs(names):
            found = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", run)
            if found is None:
                written.append("" if run == "(root)" else run)
            else:
                head, first, last, tail = found.groups()
                step = 1 if int(last) > int(first) else -1
                numbers = range(int(first), int(last) + step, step)
                written += [f"{head}{number}{tail}" for number in numbers]
        assert written == names

    def test_joint_name(self) -> None:
        """One name where names count, else the first and the last."""
        assert joint_name(["a.0", "a.1"]) == "a.{0..1}"
        assert joint_name(["a.0", "a.2", "a.5"]) == "a.0 ... a.5"

    @given(st.text("ab_1", max_size=60), st.integers(8, 40))
    def test_shortened(self, name: str, length: int) -> None:
        """A long name keeps its ends and fits exactly; a short one stays."""
        short = shortened(name, length)
        if len(name) <= length:
            assert short == name
        else:
            head, _, tail = short.partition("...")
            assert len(short) == length
            assert abs(len(head) - len(tail)) <= 1
            assert name.startswith(head)
            assert name.endswith(tail)

    @pytest.mark.parametrize(
        ("count", "words"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10230, "9.99 KiB"),
            (10236, "10.0 KiB"),
            (102348, "99.9 KiB"),
            (1023487, "999 KiB"),
            (1023488, "0.98 MiB"),
            (5 * 2**30, "5.00 GiB"),
            (3000 * 2**40, "3000 TiB"),
        ],
    )
    def test_bytes(self, count: int, words: str) -> None:
        """Three digits and a binary unit."""
        assert bytes_in_words(count) == words

    @pytest.mark.parametrize(
        ("ranks", "words"),
        [
            ((3,), "3"),
            ((0, 1), "0-1"),
            ((0, 2, 4), "0, 2, 4"),
            ((0, 2, 4, 6), "0, 2, ..., 6"),
            ((2, 1), "2, 1"),
        ],
    )
    def test_ranks(self, ranks: tuple[int, ...], words: str) -> None:
        """Neighbours as a range, few of them all, of many the ends."""
        assert ranks_in_words(ranks) == words
