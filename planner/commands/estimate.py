"""`plan estimate`, `plan dry-run` and `plan diff`: one candidate without a search, run, and under other releases."""

from msgspec.structs import replace

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.commands.options import AnswerOptions, DiffOptions, OutputOptions, SavedPlan, grouped
from planner.commands.printing import (
    export_texts,
    live_line,
    print_error,
    print_estimate,
    print_table,
    refuse_contradicting_output,
)
from planner.errors import InputError
from planner.requests.options import CandidateOptions


@grouped
def estimate(options: CandidateOptions, output: AnswerOptions) -> int:
    """Estimate one configuration, without a search: what you do not set has TRL's default. Exit 3: it does not fit."""
    from planner.ask import estimated, open_check
    from planner.report.table import shortfall
    from planner.requests.command_line import command_line
    from planner.requests.read_config import config_text
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    refuse_contradicting_output(output)
    with live_line(output) as line:
        request = read_options(options, complete_models(line.say))
        check = open_check(request.cluster, line.say, line.phase) if output.dry_run else None
        answer, notes = estimated(request, check)
    config = config_text(options)
    files = export_texts(output, config, answer, request.cluster) if answer.fits else {}
    print_estimate(output, answer, request.cluster, notes, config, command_line(options, "estimate"), files)
    if answer.fits:
        return EXIT_PLANNED
    print_error(shortfall(answer, request.cluster, request.job.risk))
    return EXIT_NOTHING_FITS


@grouped
def dry_run(saved: SavedPlan, options: CandidateOptions, output: OutputOptions) -> int:
    """Run one configuration's real trainer for a few steps on an emulated GPU, beside the estimate: PyTorch's CUDA
    build counts memory there and computes nothing. Needs no GPU. Exit 3: it runs out of memory."""
    from planner.ask import dry_run_of
    from planner.report.dry_run import dry_run_report, dry_run_table
    from planner.report.json import json_text
    from planner.requests.saved_report import candidate_request
    from planner.training_stack import complete_models

    with live_line(output) as line:
        request = candidate_request(saved.saved, options, complete_models(line.say))
    with live_line(output) as line:
        run = dry_run_of(request, line.say, line.phase)
    if output.json:
        print(json_text(dry_run_report(run)))
    else:
        print_table(dry_run_table(run, request.cluster))
    return EXIT_PLANNED if run.fits else EXIT_NOTHING_FITS


@grouped
def diff(releases: DiffOptions, options: CandidateOptions, output: OutputOptions) -> int:
    """Estimate one configuration under two sets of releases: what changes in memory, speed and settings, and why.

    A set is a release of TRL, such as 1.12, pins such as vllm==0.27 or trl==1.12,vllm==0.27, or a requirements file
    that pins trl and may pin torch and vllm. Exit code 3: the job does not fit under the second set.
    """
    from planner.ask import estimated
    from planner.jobs.releases import read_releases
    from planner.report.json import json_text
    from planner.report.listing import Diff, diff_report, diff_table
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    if options.trl_version is not None:
        raise InputError("--trl-version names one release of TRL, and plan diff takes two. Leave it out.")
    with live_line(output) as line:
        complete = complete_models(line.say)
        answers = []
        named = [read_releases(each) for each in (releases.old, releases.new)]
        if options.vllm_version is not None and any(each.vllm for each in named):
            raise InputError("--vllm-version names one release of vLLM, and plan diff got others. Leave it out.")
        for each in named:
            torch = {} if each.torch is None else {"torch_version": each.torch}
            vllm = each.vllm or options.vllm_version
            asked = replace(options, trl_version=each.trl, vllm_version=vllm, set={**(options.set or {}), **torch})
            request = read_options(asked, complete)
            answers.append(estimated(request)[0])
    pinned = (named[0].pinned_torch, named[1].pinned_torch)
    found = Diff(old=answers[0], new=answers[1], gpu=request.cluster.gpu, pinned_torch=pinned)
    if output.json:
        print(json_text(diff_report(found)))
    else:
        print_table(diff_table(found, releases.verbose))
    return EXIT_PLANNED if found.new.fits else EXIT_NOTHING_FITS
