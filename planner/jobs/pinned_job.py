"""A job with its cluster: what the rules about pinned settings read."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from planner.gpus.cluster import Cluster
from planner.jobs.job import Job


class PinnedJob(Struct, frozen=True, kw_only=True):
    """A job and its cluster: the argument of the rules about pinned settings."""

    job: Job
    cluster: Cluster

    @property
    def pinned(self) -> Mapping[str, Any]:
        """The pinned settings, by Candidate field."""
        return self.job.pinned

    @property
    def full(self) -> bool:
        """True if the job pins full fine-tuning."""
        return self.job.tuning == "full" or self.pinned.get("tuning") == "full"
