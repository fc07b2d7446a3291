"""Whether the words of a figure stay inside it."""

import xml.etree.ElementTree as ElementTree

LETTER = 0.56
"""Of the size of a font, what a letter of the usual fonts takes on average."""


def assert_words_fit(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter("{http://www.w3.org/2000/svg}text"):
        x, long = float(one.attrib["x"]), LETTER * float(one.attrib["font-size"]) * len(one.text or "")
        left = {"start": x, "middle": x - long / 2, "end": x - long}[one.attrib["text-anchor"]]
        assert left >= -1, one.text
        assert left + long <= width + 1, one.text
        assert 0 < float(one.attrib["y"]) <= height, one.text
