"""Endpoints of the controller on its own machine: the sockets of operators and detectors, and the discovery files."""
