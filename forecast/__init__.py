"""Forecasts of a policy over a month of faults: the real machine over a large job that is played cheaply."""
