"""Download of a model's `config.json` from the Hugging Face Hub; the only module that imports huggingface_hub."""

import threading
from pathlib import Path

from planner.errors import InputError
from planner.files.read import read_json

ANSWER_SECONDS = 1.5  # timeout of the first answer, so that a user without network does not wait
NO_SUCH_NAME = "the Hub allows no such name"
DOWNLOAD_SECONDS = 10.0  # timeout of the download of a few kB, once the Hub has answered


def hub_config(name: str) -> dict[str, object] | str:
    """Return the config of `org/name`, or a clause with the reason why there is none."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        return "huggingface_hub is not installed"
    try:
        path = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except errors.HFValidationError:
        return NO_SUCH_NAME
    if isinstance(path, str):
        return _parsed(path)
    if constants.HF_HUB_OFFLINE:
        return "the Hub is switched off (HF_HUB_OFFLINE)"
    return _download(name)


def _download(name: str) -> dict[str, object] | str:
    """Send one request without retries before the download: `hf_hub_download` retries for 23 seconds without network.

    Runs in a thread, since the request's timeout does not cover a name server that does not answer.
    """
    outcome: list[dict[str, object] | str] = []
    connected = threading.Event()
    thread = threading.Thread(target=lambda: outcome.append(_request(name, connected)), daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if connected.is_set():
        thread.join(DOWNLOAD_SECONDS)
    return outcome[0] if outcome else "the Hub did not answer in time"


def _request(name: str, connected: threading.Event) -> dict[str, object] | str:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=ANSWER_SECONDS)
        connected.set()
        return _parsed(huggingface_hub.hf_hub_download(name, "config.json"))
    except errors.GatedRepoError:
        return "its repository on the Hub is gated (log in with `hf auth login`)"
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError):
        return "the Hub has no config.json of that name"
    except errors.HFValidationError:
        return NO_SUCH_NAME
    except Exception as error:  # "not reachable" is a different class in each HTTP client that huggingface_hub has used
        return f"the Hub is not reachable ({type(error).__name__})"


def _parsed(path: str) -> dict[str, object] | str:
    try:
        parsed = read_json(Path(path))
    except InputError as error:
        return f"its config.json is not readable ({error})"
    return parsed if isinstance(parsed, dict) else "its config.json is no JSON object"
