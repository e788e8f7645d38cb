"""A log of a run that ended for want of memory -> what happened, where, and what would fit."""

from planner.diagnosis.incident import Incident, Kind
from planner.diagnosis.log import incidents

__all__ = ["Incident", "Kind", "incidents"]
