"""The release of this package, from the metadata of its installation: pyproject.toml is the one place that names it."""

import importlib.metadata

DISTRIBUTION = "finetune-plan"
NOT_INSTALLED = "0+unknown"  # the package is imported from a checkout that pip has not installed
TOP_LEVEL = ("planner", "probes")  # the names that it is imported by


def installed_version() -> str:
    """Return the installed release of this package, `NOT_INSTALLED` if pip has not installed it."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def other_owners() -> dict[str, tuple[str, ...]]:
    """Return the other distributions that installed a package of the same name, by that name.

    Of two distributions with one name pip lets the later one overwrite files of the earlier one, without a word.
    """
    owners = importlib.metadata.packages_distributions()
    others = {name: tuple(sorted(set(owners.get(name, [])) - {DISTRIBUTION})) for name in TOP_LEVEL}
    return {name: found for name, found in others.items() if found}
