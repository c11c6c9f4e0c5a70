"""The console of all commands: what other programs wrote is shown as it is, and cannot give orders to the terminal.

Names, reasons and error texts come from training scripts, detectors and files. A square bracket in one of them is no
markup, a colon no emoji, and an escape sequence must not move the cursor, rename the window or forge a line.
"""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..views.wording import harmless


class Terminal(Console):
    """A console that takes no text for markup, and shows no control character."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, width=width, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, and make what would be read as an order to the terminal harmless."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)
