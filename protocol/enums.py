"""StrEnum, which Python 3.10 lacks: members are strings, and print as their values in messages and reports."""

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:
    import enum

    class StrEnum(str, enum.Enum):
        """As enum.StrEnum of Python 3.11, for members whose values are written out."""

        def __str__(self) -> str:
            return str(self.value)

        def __format__(self, format_spec: str) -> str:
            return format(str(self.value), format_spec)
