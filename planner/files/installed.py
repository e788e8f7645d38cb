"""The release of this package, from the metadata of its installation: pyproject.toml is the one place that names it."""

import importlib.metadata

DISTRIBUTION = "finetune-plan"
NOT_INSTALLED = "0+unknown"  # the package is imported from a checkout that pip has not installed


def installed_version() -> str:
    """Return the installed release of this package, `NOT_INSTALLED` if pip has not installed it."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
