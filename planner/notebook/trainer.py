"""The job of a trainer that is built: `plan(job_from_trainer(trainer), parse_cluster("1xL4"))`."""

from typing import Any

from planner.jobs.job import Job


def job_from_trainer(trainer: Any, **settings: Any) -> Job:
    """Return the job of a TRL trainer, with every setting pinned that the trainer shows.

    `settings`: what a trainer does not show, such as `prompt_length=512` of methods that generate.

    Raises:
        PlanError: a setting that memory depends on cannot be read, or the extra dryrun is not installed.
    """
    from planner.training_stack import trainer_job

    return trainer_job(trainer, settings)
