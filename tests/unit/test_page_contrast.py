"""What is written and drawn on the page stands out from what is behind it, by WCAG's ratios, in both colour schemes."""

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "cli" / "page" / "static"
CSS = (STATIC / "page.css").read_text()
TEXT_RATIO, GRAPHICS_RATIO = 4.5, 3.0
BEHIND_TEXT = ("back", "card", "good-back", "work-back", "bad-back", "start-back", "none-back")
TEXTS = ("text", "dim", "good", "bad")
Scheme = dict[str, str]


def schemes() -> dict[str, Scheme]:
    """The colours of each scheme, by name; what the dark one does not name is that of the light one."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", root)) for root in re.findall(r":root {(.*?)}", CSS, re.S)
    )
    return {"light": light, "dark": {**light, **dark}}


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> Scheme:
    """One of them."""
    return schemes()[request.param]


def channels(colour: str) -> list[float]:
    """Red, green and blue, from 0 to 1."""
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def luminance(colour: list[float]) -> float:
    """The relative luminance, as WCAG defines it."""
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(one: list[float], other: list[float]) -> float:
    """How much two colours differ in luminance: from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def too_faint(scheme: Scheme, pairs: list[tuple[str, str]], least: float) -> dict[tuple[str, str], float]:
    """The pairs of colours, by name, that do not differ enough, and by how much they do."""
    found = {(one, other): ratio(channels(scheme[one]), channels(scheme[other])) for one, other in pairs}
    return {pair: round(each, 2) for pair, each in found.items() if each < least}


def of_script(file: str, name: str) -> set[str]:
    """The names of colours in a table of a script."""
    (table,) = re.findall(rf"const {name} = {{(.*?)}};", (STATIC / file).read_text(), re.S)
    return set(re.findall(r': "(\w+)"', table))


def test_the_ratio_is_that_of_wcag() -> None:
    assert ratio(channels("#000000"), channels("#ffffff")) == pytest.approx(21.0)
    assert ratio(channels("#777777"), channels("#ffffff")) == pytest.approx(4.48, abs=0.01)


def test_each_colour_has_a_name_and_each_use_is_held_against_what_is_behind_it() -> None:
    """Or the tests below would leave one out."""
    rules = re.sub(r":root {.*?}", "", CSS, flags=re.S)
    assert not re.findall(r"#[0-9a-f]{3,8}\b(?=[^{}]*})", rules)
    assert set(re.findall(r"(?<![-\w])color: ([^;]+);", rules)) == {"inherit", *(f"var(--{each})" for each in TEXTS)}
    behind = set(re.findall(r"background: var\(--([\w-]+)\)", rules))
    assert behind - {"good", "bad", "none"} == {*BEHIND_TEXT, "track"}  # those three: the dot at the connection
    assert re.findall(r"(?<!-)opacity: ([\d.]+)", rules) == ["0.28"]  # of the bars of the time line
    assert set(schemes()["light"]) >= of_script("map.js", "STATE") | of_script("map.js", "NODE")


def test_text_stands_out_from_whatever_is_behind_it(scheme: Scheme) -> None:
    pairs = [(text, behind) for text in TEXTS for behind in BEHIND_TEXT]
    assert too_faint(scheme, [*pairs, ("text", "track")], TEXT_RATIO) == {}


def test_ranks_and_their_numbers_stand_out_on_the_map(scheme: Scheme) -> None:
    """A number is written on its rank in the colour of the card, and the squares lie on that."""
    ranks = {
        *of_script("map.js", "STATE"),
        "none",
        "good",
        "start",
        "work",
        "bad",
    }  # the latter of the other colourings
    assert too_faint(scheme, [("card", rank) for rank in ranks], TEXT_RATIO) == {}
    nodes = {*of_script("map.js", "NODE"), "text", "focus"}  # outlines
    assert too_faint(scheme, [(node, "card") for node in nodes], GRAPHICS_RATIO) == {}


def test_what_else_is_drawn_stands_out(scheme: Scheme) -> None:
    """Parts of the goodput, budgets, graphs, the edge of a sentence, the dot at the connection, what has the focus."""
    parts = of_script("page.js", "COLOURS") | {"work", "good", "bad"}
    pairs = [(part, "card") for part in parts] + [("start", "back")]
    pairs += [(mood, f"{mood}-back") for mood in ("good", "work", "bad", "start", "none")]
    moods = ("good-back", "work-back", "bad-back", "start-back", "none-back")
    pairs += [(dot, mood) for dot in ("good", "bad", "none") for mood in moods]
    pairs += [("focus", behind) for behind in (*BEHIND_TEXT, "track")]
    pairs += [(used, "track") for used in ("good", "work", "bad")]
    assert too_faint(scheme, pairs, GRAPHICS_RATIO) == {}


def test_incidents_stand_out_from_the_bars_of_the_time_line(scheme: Scheme) -> None:
    """Those are pale, so that the incidents on them are seen."""
    good, card = channels(scheme["good"]), channels(scheme["card"])
    bar = [0.28 * one + 0.72 * other for one, other in zip(good, card, strict=True)]
    outcomes = re.findall(r"\.(?:resumed|stopped|open|dismissed) { fill: var\(--(\w+)\)", CSS)
    assert len(outcomes) == 4
    assert {
        each: ratio(channels(scheme[each]), bar)
        for each in outcomes
        if ratio(channels(scheme[each]), bar) < GRAPHICS_RATIO
    } == {}
