"""The exit codes of the command."""

from planner.errors import InputError, NothingFits, PlanError

EXIT_PLANNED = 0
EXIT_OTHER = 1
EXIT_WRONG_INPUT = 2
EXIT_NOTHING_FITS = 3
EXIT_PROBE_CONTRADICTS = 4

# An error that is none of these has `EXIT_OTHER`; one that is no PlanError is a bug of ours and keeps its traceback.
EXIT_CODES: dict[type[PlanError], int] = {
    InputError: EXIT_WRONG_INPUT,
    NothingFits: EXIT_NOTHING_FITS,
}


def exit_code_of(error: PlanError) -> int:
    """Return the exit code of an error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), EXIT_OTHER)
