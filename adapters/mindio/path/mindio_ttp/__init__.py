"""MindIO's names over midstep, for the ranks of `midstep run --mindio`. See docs/mindio.md."""

__all__: list[str] = []
