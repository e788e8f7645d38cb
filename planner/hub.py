"""A model's `config.json` from the Hugging Face Hub, when it can be reached (huggingface_hub, imported only here)."""

import json
from pathlib import Path

from planner.errors import InputError

TIMEOUT_SECONDS = 1.5  # to hear from the Hub at all; a machine without network must not keep its user waiting


def hub_config(name: str) -> dict[str, object] | str:
    """The config of `org/name`, or one clause that says why there is none."""
    try:
        import huggingface_hub
    except ImportError:
        return "huggingface_hub is not installed"
    path = huggingface_hub.try_to_load_from_cache(name, "config.json")
    if isinstance(path, str):
        return _parsed(path, name)
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "the Hub is switched off (HF_HUB_OFFLINE)"
    return _download(name)


def _download(name: str) -> dict[str, object] | str:
    """First one request without retries, since `hf_hub_download` retries for 23 seconds when there is no network."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        url = huggingface_hub.hf_hub_url(name, "config.json")
        huggingface_hub.get_hf_file_metadata(url, timeout=TIMEOUT_SECONDS)
        return _parsed(huggingface_hub.hf_hub_download(name, "config.json"), name)
    except errors.GatedRepoError:
        return "its repository on the Hub is gated (log in with `hf auth login`)"
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError):
        return "the Hub has no such model"
    except errors.HFValidationError:
        return "the Hub allows no such name"
    except Exception as error:  # whichever HTTP client is installed has its own errors for "not reachable"
        return f"the Hub is not reachable ({type(error).__name__})"


def _parsed(path: str, name: str) -> dict[str, object]:
    parsed = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(parsed, dict):
        raise InputError(f"The config.json of {name} on the Hub is no JSON object.")
    return parsed
