"""One colour per phase for the picture and the terminal: Okabe and Ito's set, which colour-blind people can tell apart.

Colour is never the only sign: bars of text are letters, bars of the picture are hatched and labelled.
"""

import msgspec


class Look(msgspec.Struct, frozen=True):
    """How a phase is drawn: colour, hatching (picture), letter (text)."""

    colour: str
    hatch: str
    letter: str


RANK_LOOKS = {
    "stop": Look("#D55E00", "", "s"),
    "clean": Look("#E69F00", "///", "c"),
    "join": Look("#CC79A7", "", "j"),
    "rebuild": Look("#0072B2", "", "b"),
    "repair": Look("#009E73", "\\\\\\", "r"),
    "rollback": Look("#56B4E9", "...", "o"),
}
UNKNOWN_LOOK = Look("#999999", "xxx", "?")

# Pale, so that the controller's phases are not taken for a rank's; each is named where it is drawn or in the legend.
PHASE_COLOURS = {
    "detecting": "#DDDDDD",
    "suspecting": "#F5EE9E",
    "quiescing": "#F2CFA6",
    "rejoining": "#A9CBE8",
    "resuming": "#B5E0CF",
}
UNKNOWN_PHASE_COLOUR = "#CCCCCC"

FAULT_COLOUR = "#CC0000"
FAULT_LETTER = "X"


def rank_look(name: str) -> Look:
    """Return how a rank's phase is drawn."""
    return RANK_LOOKS.get(name, UNKNOWN_LOOK)


def phase_colour(name: str) -> str:
    """Return the colour of a controller phase."""
    return PHASE_COLOURS.get(name, UNKNOWN_PHASE_COLOUR)
