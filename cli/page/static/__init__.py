"""The files that a browser loads. They are served as they are."""
