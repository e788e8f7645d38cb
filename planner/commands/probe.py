"""`plan probe`: one candidate's real trainer for a few steps, beside the estimate."""

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from planner.commands.dry_run import saved_or_single_candidate
from planner.commands.options import ProbeOptions, ReportOptions, SavedPlan, grouped
from planner.commands.printing import live_line, print_error, print_estimate
from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED, EXIT_PROBE_CONTRADICTS, InputError
from planner.requests.options import CandidateOptions

if TYPE_CHECKING:
    from planner.training_stack import ProbeSettings


@grouped
def probe(saved: SavedPlan, options: CandidateOptions, output: ReportOptions, probing: ProbeOptions) -> int:
    """Run one candidate's real trainer for a few steps in a process of its own, beside what was expected. Exit 4: it
    contradicts that."""
    from planner.estimate import estimate
    from planner.files.write import refuse_unwritable
    from planner.measurements.corrected_estimate import correct_estimate
    from planner.measurements.corrected_plan import contradiction
    from planner.report.proof import probe_lines
    from planner.report.table import shortfall
    from planner.training_stack import compare_with_dry_run, open_device
    from planner.training_stack import probe as run_probe

    candidate, cluster = saved_or_single_candidate(saved, options, output)
    refuse_unwritable(output.out, output.html)
    expected = estimate(candidate, cluster, options.risk)
    with live_line(output, "probing") as line:
        run = open_device(cluster, probe_settings(probing), line.phase)
        measurement = run_probe(candidate, run, cluster.gpu.name, line.say)
        compared = compare_with_dry_run(expected, measurement, line.say)
    answer = correct_estimate(expected, measurement, options.risk)
    print_estimate(output, answer, cluster, (*probe_lines(expected, measurement), *compared.lines))
    if wrong := contradiction(expected, measurement) or compared.contradiction:
        print_error(wrong)
        return EXIT_PROBE_CONTRADICTS
    if (expected if measurement.device == "cpu" else answer).fits:
        return EXIT_PLANNED
    print_error(shortfall(answer, cluster, options.risk))
    return EXIT_NOTHING_FITS


def probe_settings(options: ProbeOptions) -> "ProbeSettings":
    """Convert the options of a command to the settings of its probes.

    Raises:
        InputError: the device does not exist, or the time limit is no duration.
    """
    from planner.files.cache import cache_root
    from planner.measurements.measurement import DeviceName
    from planner.training_stack import ProbeSettings
    from planner.units import parse_seconds

    names: dict[str, DeviceName] = {name: name for name in get_args(DeviceName)}
    if options.device not in names:
        raise InputError(f"--device {options.device} is none of {', '.join(names)}.")
    return ProbeSettings(
        device=names[options.device],
        seconds=parse_seconds(options.time_limit),
        logs=Path(options.logs) if options.logs else cache_root() / "logs",
        hub_weights=options.hub_weights,
        evaluate=options.evaluate,
        ray=options.ray or "",
    )
