"""Policies that come with midstep, as commented YAML files; `default.yaml` says what every key means."""
