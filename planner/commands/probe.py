"""`plan probe`: one candidate's real trainer for a few steps, beside the estimate."""

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED, EXIT_PROBE_CONTRADICTS
from planner.commands.options import ProbeOptions, ReportOptions, SavedPlan, grouped
from planner.commands.printing import live_line, print_error, print_estimate
from planner.errors import InputError
from planner.requests.options import CandidateOptions

if TYPE_CHECKING:
    from planner.training_stack import ProbeSettings


@grouped
def probe(saved: SavedPlan, options: CandidateOptions, output: ReportOptions, probing: ProbeOptions) -> int:
    """Run the real trainer of one configuration for a few steps, beside what was expected. Exit code 4: it contradicts
    that."""
    from planner.ask import probed
    from planner.files.write import refuse_unwritable
    from planner.report.sentences import sentence
    from planner.report.table import shortfall
    from planner.requests.saved_report import candidate_request
    from planner.training_stack import complete_models

    with live_line(output) as line:
        request = candidate_request(saved.saved, options, complete_models(line.say))
    refuse_unwritable(output.html, {"--out": output.out})
    with live_line(output, "probing") as line:
        found = probed(request, probe_settings(probing), line.say, line.phase)
    print_estimate(output, found.estimate, request.cluster, found.notes, None, "", {})
    if found.contradiction is not None:
        print_error(sentence(found.contradiction))
        return EXIT_PROBE_CONTRADICTS
    if found.fits:
        return EXIT_PLANNED
    print_error(shortfall(found.estimate, request.cluster, request.risk))
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
        steps=options.steps,
        ray=options.ray or "",
    )
