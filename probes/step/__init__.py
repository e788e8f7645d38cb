"""Phases, rollouts and allocations of a running step."""
